"""Loops over rows of a table: which of them are beaten."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from takifugu.plan.compiled import compiled
from takifugu.plan.curves import Floats

Ints = NDArray[np.int64]


@compiled
def settle_ties(a: Floats, b: Floats, c: Floats, order: Ints) -> bool:
    """Puts rows that are equal in a, by which they are sorted, in order of b, c and place. Gives up where
    more than a few are equal."""
    first = 0
    for k in range(1, len(order)):
        if a[order[k]] != a[order[first]]:
            first = k
            continue
        if k - first > 50:
            return False
        row, at = order[k], k
        while at > first:
            other = order[at - 1]
            before = b[other] < b[row]
            if b[other] == b[row]:
                before = c[other] < c[row] or (c[other] == c[row] and other < row)
            if before:
                break
            order[at] = other
            at -= 1
        order[at] = row
    return True


@compiled
def unbeaten(b: Floats, c: Floats) -> NDArray[np.bool_]:
    """For each row whether no earlier row is as small in both columns. A staircase of rows holds what has
    been seen: b rises, c falls."""
    kept = np.zeros(len(b), np.bool_)
    stair_b, stair_c, steps = np.empty(len(b)), np.empty(len(b)), 0
    for row in range(len(b)):
        low, high = 0, steps  # the first step with a larger b
        while low < high:
            middle = (low + high) // 2
            if stair_b[middle] <= b[row]:
                low = middle + 1
            else:
                high = middle
        if low and stair_c[low - 1] <= c[row]:
            continue
        kept[row] = True
        first = low - 1 if low and stair_b[low - 1] == b[row] else low
        last = first
        while last < steps and stair_c[last] >= c[row]:
            last += 1
        # Steps from `first` to `last` give way to one.
        shift = first + 1 - last
        if shift > 0:
            for k in range(steps - 1, last - 1, -1):
                stair_b[k + 1], stair_c[k + 1] = stair_b[k], stair_c[k]
        elif shift < 0:
            for k in range(last, steps):
                stair_b[k + shift], stair_c[k + shift] = stair_b[k], stair_c[k]
        stair_b[first], stair_c[first] = b[row], c[row]
        steps += shift
    return kept
