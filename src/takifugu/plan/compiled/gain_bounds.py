"""Loops of the certificate: what rounds gain for what they cost (docs/decisions/104)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from takifugu.plan.compiled import compiled
from takifugu.plan.compiled.paths import point_below
from takifugu.plan.compiled.trails import after_round
from takifugu.plan.curves import Floats

Ints = NDArray[np.int64]


@compiled
def between(table: Floats, first: int, last: int, least: bool) -> float:
    """The least (or the greatest) of a row from one place to another; `table[level]` has it for stretches of
    1, 2, 4, ... places (`certificate._Range`)."""
    level, length = 0, last - first + 1
    if length <= 2:  # most are: no loop, no second place
        short: float = table[length - 1, first]
        return short
    while length > 1:
        length >>= 1
        level += 1
    one: float = table[level, first]
    two: float = table[level, last - (1 << level) + 1]
    return min(one, two) if least else max(one, two)


Landings = tuple[Ints, Floats, NDArray[np.bool_]]
"""[point, interval]: the grid point below the loss after a round, how far above it, target met or not."""


@compiled
def ahead(
    grid: Floats,
    value: Floats,
    floor: Floats,
    roof: Floats,
    far_at: Landings,
    near_at: Landings,
    weak: Floats,
    strong: Floats,
    span: Floats,
) -> tuple[Floats, Floats, Floats, Floats, Floats, Floats]:
    """What `certificate._Ahead` holds. `floor`, `roof`: tables of the value's slopes; `weak`, `strong`: the
    pull on each interval of shares, `span`: its length."""
    cell_far, above_far, done_far = far_at
    cell_near, above_near, done_near = near_at
    points, intervals = cell_far.shape
    near, far, across = (
        np.empty((points, intervals)),
        np.empty((points, intervals)),
        np.empty((points, intervals)),
    )
    along_far, along, steepest = (
        np.empty((points - 1, intervals)),
        np.empty((points - 1, intervals)),
        np.empty((points - 1, intervals)),
    )
    slope = roof[0]
    for i in range(points):
        for k in range(intervals):
            bottom, top = cell_far[i, k], cell_near[i, k]
            far[i, k] = near[i, k] = 0.0
            if not done_far[i, k]:
                far[i, k] = value[bottom] + slope[bottom] * above_far[i, k]
            if not done_near[i, k]:
                near[i, k] = value[top] + slope[top] * above_near[i, k]
            # Slope in the share is slope in the loss times pull.
            bottom = 0 if done_far[i, k] else bottom
            top = max(0 if done_near[i, k] else top, bottom)
            low = 0.0 if done_far[i, k] else between(floor, bottom, top, True)
            dip = (between(roof, bottom, top, False) * strong[i, k] - low * weak[i, k]) * span[k] * 0.25
            dip = np.inf if np.isnan(dip) else max(dip, 0.0)
            across[i, k] = min(dip, max(near[i, k] - far[i, k], 0.0))
    for i in range(points - 1):
        quarter = 0.25 * (grid[i + 1] - grid[i])
        for k in range(intervals):
            done = done_far[i, k]
            bottom = 0 if done else cell_far[i, k]
            # V after the round is at least its chord, less a quarter of (range of slopes x width);
            # below the target the slope is 0.
            last = max(0 if done_far[i + 1, k] else cell_far[i + 1, k], bottom)
            low = 0.0 if done else between(floor, bottom, last, True)
            dip = (between(roof, bottom, last, False) - low) * quarter
            along_far[i, k] = min(dip, max(far[i + 1, k] - far[i, k], 0.0))
            last = max(0 if done_near[i + 1, k] else cell_near[i + 1, k], bottom)
            low = 0.0 if done else between(floor, bottom, last, True)
            dip = (between(roof, bottom, last, False) - low) * quarter
            along[i, k] = min(dip, max(near[i + 1, k] - far[i, k], 0.0))
            steepest[i, k] = between(roof, bottom, max(i, bottom), False)
    return near, far, across, along_far, along, steepest


@compiled
def gain_ratios(
    value: Floats,
    near: Floats,
    far: Floats,
    across: Floats,
    along_far: Floats,
    along: Floats,
    steepest: Floats,
    left: Floats,
    right: Floats,
    speed: Floats,
    exact: bool,
) -> Floats:
    """[cell, interval]: the smallest of several bounds on gain per cost (`certificate.gains`)."""
    ratio = np.empty_like(steepest)
    for i in range(steepest.shape[0]):
        for k in range(steepest.shape[1]):
            gain_far = max(value[i + 1] - far[i + 1, k], value[i] - far[i, k])
            # More data gains more: the interval's largest share at its least cost.
            best = min(gain_far + along_far[i, k], value[i + 1] - far[i, k]) / left[k]
            if not exact:
                gain_near = max(value[i + 1] - near[i + 1, k], value[i] - near[i, k])
                dip = along[i, k] + np.maximum(across[i + 1, k], across[i, k])
                # What is not a number is no bound: `maximum` passes it on, `fmin` passes it over.
                line = np.maximum((gain_near + dip) / left[k], (gain_far + dip) / right[k])
                best = np.fmin(best, line)
            # A round is a flow: it gains at most (steepest slope on its way) x (speed at its start).
            best = np.fmin(best, steepest[i, k] * speed[i, k])
            ratio[i, k] = np.inf if np.isnan(best) else best
    return ratio


@compiled
def split_ratios(
    shape: tuple[bool, float, float],
    grid: Floats,
    value: Floats,
    floor: Floats,
    roof: Floats,
    cell: Ints,
    interval: Ints,
    share: Floats,
    asymptote: Floats,
    cost: Floats,
) -> Floats:
    """[pair of cell and interval]: at least the largest gain per cost, both cut in pieces; of each interval
    and piece the largest share (with its asymptote) and the least cost (`certificate._split_gains`)."""
    power, pace, exponent = shape
    pieces, last = share.shape[1], len(grid) - 2
    ratio = np.zeros(len(cell))
    left, place = np.empty(pieces + 1), np.empty(pieces + 1, np.int64)
    below, here = np.empty(pieces + 1, np.bool_), np.empty(pieces + 1)
    for j in range(len(cell)):
        i, k = cell[j], interval[j]
        width, rise = grid[i + 1] - grid[i], value[i + 1] - value[i]
        for s in range(pieces):
            for n in range(pieces + 1):
                part = n / pieces
                loss, here[n] = grid[i] + width * part, value[i] + rise * part
                after = after_round(power, pace, exponent, loss, share[k, s], asymptote[k, s])
                below[n] = after < grid[0]
                at = place[n] = min(point_below(grid, after), last)
                left[n] = 0.0
                if after > grid[0]:
                    slope = (value[at + 1] - value[at]) / (grid[at + 1] - grid[at])
                    left[n] = value[at] + slope * (after - grid[at])
            for n in range(pieces):
                first = place[n]
                final = max(place[n + 1], first)
                least = 0.0 if below[n] else between(floor, first, final, True)
                dip = (between(roof, first, final, False) - least) * (width / pieces) * 0.25
                dip = min(dip, max(left[n + 1] - left[n], 0.0))
                gain = max(here[n + 1] - left[n + 1], here[n] - left[n]) + dip
                gain = min(gain, here[n + 1] - left[n])
                if gain > 0.0:
                    ratio[j] = max(ratio[j], gain / cost[k, s])
    return ratio


@compiled
def worst_on_the_way(ratio: Floats, cell: Ints, done: NDArray[np.bool_], least: float) -> Floats:
    """[cell]: the largest ratio (at least `least`) of all rounds that pass over it, from where they start
    down to where they land: `cell`, or the first one if the target is met."""
    count, levels = ratio.shape[0], 1
    while 1 << levels <= count:
        levels += 1
    table = np.full((levels, count), least)
    for i in range(count):
        for k in range(ratio.shape[1]):
            if ratio[i, k] > least:
                # Two stretches of 1, 2, 4, ... cells that cover the way.
                first = 0 if done[i, k] else cell[i, k]
                level, length = 0, i - first + 1
                while length > 1:
                    length >>= 1
                    level += 1
                last = i - (1 << level) + 1
                table[level, first] = max(table[level, first], ratio[i, k])
                table[level, last] = max(table[level, last], ratio[i, k])
    for level in range(levels - 1, 0, -1):
        half = 1 << (level - 1)
        for i in range(count):
            table[level - 1, i] = max(table[level - 1, i], table[level, i])
            if i + half < count:
                table[level - 1, i + half] = max(table[level - 1, i + half], table[level, i])
    worst: Floats = table[0]
    return worst


@compiled
def round_bounds(
    near: Floats,
    far: Floats,
    across: Floats,
    dip: Floats,
    left: Floats,
    right: Floats,
    exact: bool,
) -> tuple[Floats, Floats]:
    """[point]: at most what a round from there and then the rest cost; at the point itself, and by chords to
    the points beside it (`certificate._round_first`)."""
    points, intervals = far.shape
    low, chord = np.full(points, np.inf), np.full(points, np.inf)
    for i in range(points):
        for k in range(intervals):
            here = left[k] + far[i, k]
            low[i] = min(low[i], here)
            if not exact:
                line = min(left[k] + near[i, k], right[k] + far[i, k]) - across[i, k]
                here = max(here, line)
            deepest = 0.0
            if i > 0:
                deepest = max(deepest, dip[i - 1, k])
            if i < points - 1:
                deepest = max(deepest, dip[i, k])
            chord[i] = min(chord[i], here - deepest)
    return low, chord
