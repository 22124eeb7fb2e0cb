"""Loops over losses: what is left to pay, and the best way on."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from takifugu.plan.compiled import compiled
from takifugu.plan.curves import Floats

Ints = NDArray[np.int64]


Landings = tuple[Ints, Floats, NDArray[np.bool_]]
"""[point, share]: the grid point below the loss after a round, how far above it, target met or not."""


@compiled
def landings(grid: Floats, after: Floats) -> Landings:
    """Where losses lie on a grid; quick where neighbours in a row lie near each other."""
    points, shares = after.shape
    cell, above = np.empty((points, shares), np.int64), np.empty((points, shares))
    done = np.empty((points, shares), np.bool_)
    for i in range(points):
        at = point_below(grid, after[i, 0])
        for k in range(shares):
            loss = after[i, k]
            while at > 0 and grid[at] > loss:
                at -= 1
            while at < len(grid) - 2 and grid[at + 1] <= loss:
                at += 1
            cell[i, k] = at
            done[i, k] = loss <= grid[0]
            above[i, k] = 0.0 if done[i, k] else loss - grid[at]
    return cell, above, done


@compiled
def walk_up(
    cell: Ints, part: Floats, unfinished: Ints, costs: Floats, ceiling: Floats, value: Floats
) -> None:
    """Fills `value[price, point]` from the second point on: the least of `ceiling` and of (round + what is
    left after it); `cell`, `part`: where rounds lead, by point and share."""
    for p in range(len(costs)):
        row, cost = value[p], costs[p]
        for i in range(1, len(row)):
            best, far = ceiling[p, i], 0
            while far < unfinished[i] and cell[i, far] >= i - 1:
                # Landing between this point and the one below: the same round again and again.
                room = 0.0 if cell[i, far] >= i else 1.0 - part[i, far]
                best = min(best, row[i - 1] + cost[far] / max(room, 1e-12))
                far += 1  # larger shares lead further
            row[i] = max(min(best, _least(cell[i], part[i], far, unfinished[i], cost, row)), row[i - 1])


@compiled
def walk_up_rounds_first(
    cell: Ints, part: Floats, unfinished: Ints, costs: Floats, ceiling: Floats, value: Floats
) -> Floats:
    """The same, and of each point what a round that must come first costs with what is left after it; never
    less at a higher point."""
    least = np.empty_like(value)
    for p in range(len(costs)):
        row, cost = value[p], costs[p]
        finishing = cost.copy()  # the cheapest round with this share or a larger one
        for k in range(len(cost) - 2, -1, -1):
            finishing[k] = min(finishing[k], finishing[k + 1])
        highest = least[p, 0] = finishing[0] if unfinished[0] == 0 else np.inf
        for i in range(len(row)):
            best, far = ceiling[p, i], 0
            while i > 0 and far < unfinished[i] and cell[i, far] >= i - 1:
                room = 0.0 if cell[i, far] >= i else 1.0 - part[i, far]
                best = min(best, row[i - 1] + cost[far] / max(room, 1e-12))
                far += 1
            first = _least(cell[i], part[i], far, unfinished[i], cost, row)
            if i > 0:
                row[i] = max(min(best, first), row[i - 1])
            first = min(first, _least(cell[i], part[i], 0, far, cost, row))
            if unfinished[i] < len(cost):
                first = min(first, finishing[unfinished[i]])
            highest = max(highest, first) if i > 0 else first
            least[p, i] = highest
    return least


@compiled
def _least(cell: Ints, part: Floats, begin: int, end: int, cost: Floats, row: Floats) -> float:
    """Of some rounds from one point: the least of (round + what is left after it)."""
    best = np.inf
    for k in range(begin, end):
        at = cell[k]
        best = min(best, cost[k] + row[at] + part[k] * (row[at + 1] - row[at]))
    return best


@compiled
def point_below(grid: Floats, x: float) -> int:
    """The last point of the grid at or below x, but never its very last; the first one where x lies below."""
    low, high = 0, len(grid) - 1
    while high - low > 1:
        middle = (low + high) // 2
        if grid[middle] <= x:
            low = middle
        else:
            high = middle
    return low


@compiled
def best_for_its_gain(
    after: Floats, cost: Floats, fee: float, here: float, grid: Floats, value: Floats
) -> tuple[int, float]:
    """The round that costs least for what it takes off `here`, what is left to pay, and that ratio; -1 if
    none takes anything off. `value` is linear between the points of `grid`, and 0 at or below the first."""
    best, least = -1, np.inf
    for k in range(len(after)):
        left = 0.0
        if after[k] > grid[0]:
            at = point_below(grid, after[k])
            part = min((after[k] - grid[at]) / (grid[at + 1] - grid[at]), 1.0)
            left = value[at] + part * (value[at + 1] - value[at])
        if here > left:
            ratio = (cost[k] + fee) / (here - left)
            if ratio < least:
                best, least = k, ratio
    return best, least


@compiled
def highest(
    loss: Floats,
    seconds: Floats,
    rounds: Floats,
    grid: Floats,
    value: Floats,
    per_second: Floats,
    per_round: Floats,
) -> Floats:
    """[state]: the highest of 0 and, by price, what is left to pay less the price of what is left of time
    and rounds. `value[:, price]` is linear between the points of `grid`, and constant beyond them."""
    best = np.zeros(len(loss))
    for j in range(len(loss)):
        at = point_below(grid, loss[j])
        part = min(max((loss[j] - grid[at]) / (grid[at + 1] - grid[at]), 0.0), 1.0)
        for p in range(len(per_second)):
            bound = value[at, p] + part * (value[at + 1, p] - value[at, p]) - per_second[p] * seconds[j]
            if per_round[p]:  # where rounds are free there may be endlessly many
                bound -= per_round[p] * rounds[j]
            best[j] = max(best[j], bound)
    return best
