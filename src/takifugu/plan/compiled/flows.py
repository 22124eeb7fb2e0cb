"""Loops of the bound over a grid of losses: what is left to pay if rounds could be cut short, and what
a round costs that must come first (docs/decisions/101)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from takifugu.plan.compiled import compiled
from takifugu.plan.compiled.paths import point_below
from takifugu.plan.compiled.trails import after_round
from takifugu.plan.curves import Floats

Ints = NDArray[np.int64]

_BLOCK = 8
"""So many intervals of shares are looked at together, first."""
Landings = tuple[Ints, Floats, NDArray[np.bool_]]
"""[point, interval]: the grid point below the loss after a round, how far above it, target met or not."""
Lines = tuple[Ints, Floats, Floats, Floats, Floats]
"""Exits: where the points of each begin (and one more); its fee, its jump; losses, and what is left there: a
line between two of them, the last one also above it."""


@compiled
def climb(grid: Floats, cost: Floats, slope: Floats, lines: Lines, most: float) -> Floats:
    """[point]: at most what is left to pay, nothing at the first one. `cost[cell]`: of flowing through it;
    `slope[cell]`: at most what a flow costs per loss anywhere in it."""
    begin, fee, jump, point, _ = lines
    count, value = len(fee), np.zeros(len(grid))
    at = begin[:-1].copy()
    for i in range(len(grid) - 1):
        width, start = grid[i + 1] - grid[i], value[i]
        best = min(start + cost[i], most)
        for e in range(count):
            # The exit is a line from point to point: it is enough to look at those, and at the ends.
            loss = grid[i]
            left = fee[e] + _left(e, loss + jump[e], lines, at)
            while loss < grid[i + 1]:
                # What flows down to it and leaves there must not cost less,
                best = min(best, left + slope[i] * (grid[i + 1] - loss))
                k = at[e] if loss + jump[e] < point[at[e]] else at[e] + 1
                next_loss = point[k] - jump[e] if k < begin[e + 1] else np.inf
                loss = next_loss if loss < next_loss < grid[i + 1] else grid[i + 1]
                left = fee[e] + _left(e, loss + jump[e], lines, at)
                # nor may a line up to the next point lie above it.
                best = min(best, start + max(left - start, 0.0) * width / (loss - grid[i]))
        value[i + 1] = max(best, start)
    return value


@compiled
def _left(e: int, loss: float, lines: Lines, at: Ints) -> float:
    """What is left where an exit leads; the point below it is kept in `at`, which only goes up."""
    begin, _, _, point, left = lines
    while at[e] + 1 < begin[e + 1] and point[at[e] + 1] <= loss:
        at[e] += 1
    k = at[e]
    if k + 1 == begin[e + 1]:
        above: float = left[k]
        return above
    part = max(loss - point[k], 0.0) / (point[k + 1] - point[k])
    here: float = left[k] + (left[k + 1] - left[k]) * part
    return here


@compiled
def rounds_first(
    grid: Floats,
    value: Floats,
    far_at: Landings,
    left: Floats,
    right: Floats,
    shape: tuple[bool, float, float],
    share: Floats,
    asymptote: Floats,
    pieces: int,
) -> tuple[Floats, Floats]:
    """[point]: a bound on a round from there and then the rest; at the point itself, and less what lines
    between such points may lie too high. `left`, `right`: the cost at both ends of an interval of shares;
    `share[interval, piece]`: the largest of each piece, if intervals are cut at all."""
    cell, above, done = far_at
    points, intervals = cell.shape[0], len(left)
    slope = (value[1:] - value[:-1]) / (grid[1:] - grid[:-1])
    risen = np.empty(len(slope))  # by how much slopes have risen on the way up: lines may dip below chords
    total, before = 0.0, 0.0
    for i in range(len(slope)):
        total += max(slope[i] - before, 0.0)
        before = slope[i]
        risen[i] = total
    low, chord = np.full(points, np.inf), np.full(points, np.inf)
    blocks = (intervals + _BLOCK - 1) // _BLOCK
    far = np.empty(blocks)
    for i in range(points):
        likely = np.inf
        for b in range(blocks):
            k = min(_BLOCK * (b + 1), intervals) - 1
            far[b] = 0.0 if done[i, k] else value[cell[i, k]] + slope[cell[i, k]] * above[i, k]
            likely = min(likely, right[k] + far[b])
        for b in range(blocks):
            first, last = _BLOCK * b, min(_BLOCK * (b + 1), intervals) - 1
            least = left[first] + far[b]  # in the whole block
            dip = _dip(grid, cell, done, risen, i, first, last)
            if least >= likely and least - dip >= chord[i]:
                low[i] = min(low[i], least)
                continue
            for k in range(first, last + 1):
                after = 0.0 if done[i, k] else value[cell[i, k]] + slope[cell[i, k]] * above[i, k]
                here = left[k] + after
                if here < likely and pieces > 1:
                    here = max(
                        here, _in_pieces(grid, value, slope, left, right, shape, share, asymptote, i, k)
                    )
                low[i] = min(low[i], here)
                if here < chord[i]:
                    chord[i] = min(chord[i], here - _dip(grid, cell, done, risen, i, k, k))
    return low, chord


@compiled
def _dip(
    grid: Floats, cell: Ints, done: NDArray[np.bool_], risen: Floats, i: int, first: int, last: int
) -> float:
    """How far what is left after a round, with any share of some intervals, may dip below its chord between
    this loss and the next one, or the one before: from where the largest share leads from the lower loss up
    to where the smallest (the largest of the interval before) leads from the higher one."""
    dip = 0.0
    for j in range(max(i - 1, 0), min(i + 1, len(grid) - 1)):
        bottom = 0.0 if done[j, last] else risen[cell[j, last]]
        top = j + 1 if first == 0 else cell[j + 1, first - 1]
        up = risen[min(top, len(risen) - 1)] - bottom
        dip = max(dip, up * (grid[j + 1] - grid[j]) * 0.25)
    return dip


@compiled
def _in_pieces(
    grid: Floats,
    value: Floats,
    slope: Floats,
    left: Floats,
    right: Floats,
    shape: tuple[bool, float, float],
    share: Floats,
    asymptote: Floats,
    i: int,
    k: int,
) -> float:
    """A round with a share of one interval and then the rest: the least cost of each piece, and what is left
    after its largest share."""
    power, pace, exponent = shape
    pieces, least = share.shape[1], np.inf
    for s in range(pieces):
        loss = after_round(power, pace, exponent, grid[i], share[k, s], asymptote[k, s])
        after = 0.0
        if loss > grid[0]:
            at = min(point_below(grid, loss), len(slope) - 1)
            after = value[at] + slope[at] * (loss - grid[at])
        least = min(least, left[k] + (right[k] - left[k]) * s / pieces + after)
    return least
