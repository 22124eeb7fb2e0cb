"""Where the certificate looks: losses on which the value climbs evenly, and its steps.

In the last rounds before the target the value is a staircase: just above a step one more round is needed, or
a dearer one. A line across a step lies above the value on the step's near side, and rounds from there seem to
gain more than they cost. With two points at the step, the second just above it, the line is steep and lies on
the far side, where the value is high anyway. Any grid is valid (decision 104); these lose little.
"""

from __future__ import annotations

import numpy as np

from takifugu.plan.curves import Floats, SmoothCurve
from takifugu.plan.values import Charges, Terrain, Values

_STEPS = 25
"""How many rounds before the target the steps of the strongest round are given points of their own."""
_HARDLY = 0.02
"""A switch matters if it raises what is left to pay by no more than this, somewhere."""
_NARROW = 1e-6
"""Pairs of points are this close together, as a part of all losses."""
_BENDS, _BENT = 6, 1e-6
"""Lines may lie above another phase's values by this part of them; points are added so often."""
_TOO_MUCH = 1.003
"""Cells from which a round gains this much more than it costs have a step in them."""


def that_matter(terrain: Terrain, estimate: Values, price: int) -> set[int]:
    """Versions that a good plan might use: from the start, by switches that cost hardly more than staying."""
    found, new = set[int](), {terrain.problem.version_index[terrain.problem.start_version]}
    while new:
        found |= new
        new = set()
        for source, target, switch in terrain.switches:
            if source not in found or target in found or not terrain.usable[target]:
                continue
            here, grid = estimate.value[source][price], estimate.grids[target]
            land = estimate.grids[source] + switch.loss_jump
            there = np.interp(land, grid, estimate.after_switch[target][price])
            if (estimate.prices[price].fee(switch) + there <= here * (1 + _HARDLY))[1:].any():
                new.add(target)
    return found


def fine_grid(terrain: Terrain, curve: SmoothCurve, rough: Floats, close: Charges, cells: int) -> Floats:
    """Points on which the value climbs evenly, twice as dense in the last few rounds, where it has
    steps; the steps of the strongest round get points of their own."""
    grid = terrain.grid
    climb = np.diff(rough)
    climb = np.minimum(climb, max(float(climb.sum()), 1e-300) * 0.03)
    last = rough[:-1] <= min(6.0 * float(close.at_high.max()), 0.5 * float(rough[-1]))
    climb = np.where(last, 2.0 * climb, climb)
    climb = climb + 0.05 * climb.sum() * (1.0 / len(climb) + np.diff(grid) / (grid[-1] - grid[0])) + 1e-300
    place = np.concatenate([[0.0], np.cumsum(climb)])
    even = np.interp(np.linspace(0.0, place[-1], cells + 1), place, grid)
    problem = terrain.problem
    wanted = [grid[0], grid[1], grid[-1], problem.start_loss]
    step = grid[:2]
    strongest = close.high[-1:]
    for _ in range(_STEPS):
        step = np.minimum(curve.before(step, strongest), grid[-1])
        if not step[0] < step[1] < grid[-1]:
            break
        wanted += list(step)
    points = np.unique(np.concatenate([even, wanted]))
    return np.asarray(points[(points >= grid[0]) & (points <= grid[-1])])


def step_points(curve: SmoothCurve, grid: Floats, value: Floats, ratio: Floats, close: Charges) -> Floats:
    """Pairs of points for steps that the grid misses. `ratio[cell, interval]`: gain per cost of rounds.

    From a cell with a step in it, the round that gains too much passes over another step further down: the
    step above lies where that round lands just on the one below. Going up, each is found from an exact one.
    """
    slope = np.diff(value) / np.diff(grid)
    cells = np.flatnonzero(ratio.max(axis=1) > _TOO_MUCH)
    interval = ratio[cells].argmax(axis=1)
    share = close.high[interval]
    weakest = np.where(close.low[interval] > 0.0, close.low[interval], share)
    ends = (curve.step(grid[cells], share), curve.step(grid[cells + 1], weakest))
    first, last = (np.clip(np.searchsorted(grid, x, side="right") - 1, 0, cells) for x in ends)
    steps = {0: grid[:2]}
    for k, cell in enumerate(cells.tolist()):
        below = int(first[k]) + int(slope[first[k] : last[k] + 1].argmax())
        if below >= cell:
            continue
        pair = curve.before(steps.get(below, grid[below : below + 2]), share[k : k + 1])
        if pair[0] < pair[1] <= grid[-1]:
            steps[cell] = pair
    return np.concatenate([pair for cell, pair in steps.items() if cell] or [np.zeros(0)])


def steps_in(grid: Floats, value: Floats, least_j: float) -> Floats:
    """The pairs of points of all steps of at least this height."""
    step = (np.diff(grid) < _NARROW * (grid[-1] - grid[0])) & (np.diff(value) >= least_j)
    low = np.flatnonzero(step)
    return np.concatenate([grid[low], grid[low + 1]])


def bends(points: Floats, value: Floats, grid: Floats) -> Floats:
    """Points of a function (of another phase) without which lines between those of the grid would lie above
    it: the worst of each cell, again and again."""
    known = grid
    for _ in range(_BENDS):
        over = np.interp(points, known, np.interp(known, points, value)) - value
        cell = np.searchsorted(known, points, side="right")
        worst = np.zeros(len(known) + 1)
        np.maximum.at(worst, cell, over)
        more = points[(over > _BENT * float(value[-1])) & (over >= worst[cell])]
        if not len(more):
            break
        known = np.union1d(known, more)
    return np.setdiff1d(known, grid)
