"""The prices of time and rounds at which the bound is highest, and values around them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from takifugu.plan.curves import Floats
from takifugu.plan.rounds import Prices
from takifugu.plan.values import Terrain, Values

_AROUND = (0.0, 0.3, 0.6, 0.8, 0.9, 0.95, 0.98, 1.0, 1.02, 1.05, 1.1, 1.2, 1.5, 2.5, 6.0, 20.0)
_NEAR = np.array([0.85, 0.9, 0.95, 1.05, 1.1, 1.15])
_CLEARLY = 1e-4
"""A price of rounds has to raise the estimate by this part of it."""
_SIDE, _ZOOMS = 7, 3
"""Prices of time and of rounds that are tried together, and how often more closely."""


@dataclass(frozen=True)
class Priced:
    """Values at prices around the best ones."""

    values: Values
    best: int
    energy_j: float
    """The estimate of the least energy (no bound)"""


def search(terrain: Terrain, roughly: bool = False) -> Prices:
    """The top of the concave dual, climbed by batches of prices."""
    problem = terrain.problem
    free = float(terrain.estimate([Prices()]).from_start(problem)[0])
    unit_s = max(free, 1e-12) / max(problem.time_limit - problem.start_time_s, 1e-9)
    per_second = _peak(terrain, unit_s, 0.0, seconds=True)
    if problem.max_rounds is not None:
        unit_r = max(free, 1e-12) / problem.max_rounds
        slightly = terrain.estimate([Prices(per_second, 0.0), Prices(per_second, unit_r * 1e-3)])
        if np.diff(slightly.from_start(problem))[0] > 0:  # the cap binds
            return _both(terrain, per_second, unit_s, unit_r, roughly)
    return Prices(per_second)


def _both(terrain: Terrain, alone: float, unit_s: float, unit_r: float, roughly: bool) -> Prices:
    """The best prices where the cap binds, be it a little; `alone`: that of time while rounds are free."""
    per_second, per_round = alone, 0.0
    for _ in range(2):
        per_round = _peak(terrain, unit_r, per_second, seconds=False)
        per_second = _peak(terrain, unit_s, per_round, seconds=True)
    free = _settled(terrain, Prices(alone))
    heights = terrain.estimate([free, Prices(per_second, per_round)]).from_start(terrain.problem)
    if heights[1] <= heights[0] + _CLEARLY * abs(heights[0]):
        return free  # what else it is worth may be the grid's doing
    if not per_second or roughly:
        return Prices(per_second, per_round)
    most_r = max(per_round, _peak(terrain, unit_r, 0.0, seconds=False))
    return _zoomed(terrain, Prices(per_second, per_round), max(per_second, alone), most_r)


def _zoomed(terrain: Terrain, known: Prices, most_s: float, most_r: float) -> Prices:
    """The best of both prices together. Where rounds take about as long as each other, one price does what
    the other does: the top is a ridge across both, and climbing along one at a time ends anywhere on it."""
    problem, best = terrain.problem, known
    highest = float(terrain.estimate([best]).from_start(problem)[0])
    low, high = np.zeros(2), 1.5 * np.array([most_s, most_r])
    for _ in range(_ZOOMS):
        rows = [np.linspace(low[k], high[k], _SIDE) for k in (0, 1)]
        prices = [Prices(float(s), float(r)) for s in rows[0] for r in rows[1]]
        heights = terrain.estimate(prices).from_start(problem)
        if heights.max() > highest:
            best, highest = prices[int(heights.argmax())], float(heights.max())
        middle, reach = np.array([best.per_second, best.per_round]), 0.2 * (high - low)
        low, high = np.maximum(middle - reach, 0.0), middle + reach
    return best


def at(terrain: Terrain, prices: Prices) -> Priced:
    """Values at one price only."""
    values = terrain.estimate([prices])
    return Priced(values, 0, float(values.from_start(terrain.problem)[0]))


def around(terrain: Terrain, top: Prices) -> Priced:
    """Values at many prices around the top. (That of two prices lies elsewhere on another grid.)"""
    problem, top = terrain.problem, _settled(terrain, top) if top.per_round else top
    per_second, per_round = top.per_second, top.per_round
    prices = [Prices(per_second * f, per_round) for f in (_AROUND if per_second else (0.0,))]
    if not per_second:
        free = float(terrain.estimate([Prices()]).from_start(problem)[0])
        unit_s = max(free, 1e-12) / max(problem.time_limit - problem.start_time_s, 1e-9)
        prices += [Prices(unit_s * f, per_round) for f in (0.01, 0.05, 0.2, 1.0, 5.0)]
    if per_round:
        pairs = [(f, g) for g in (0.7, 0.9, 1.1, 1.4, 3.0) for f in (0.95, 1.0, 1.1)]
        prices += [Prices(per_second * f, per_round * g) for f, g in pairs]
    elif problem.max_rounds is not None:
        # For plans that dawdle: when few rounds are left, they have a price after all.
        free = float(terrain.estimate([top]).from_start(problem)[0])
        unit_r = max(free, 1e-12) / problem.max_rounds
        prices += [Prices(per_second * f, unit_r * g) for g in (0.002, 0.02, 0.2) for f in (1.0, 1.3)]
    values = terrain.estimate(prices)
    heights = values.from_start(problem)
    best = int(heights.argmax())
    return Priced(values, best, float(heights[best]))


def _settled(terrain: Terrain, top: Prices) -> Prices:
    """The best of the prices near by."""
    for factors in (_NEAR, 1.0 + 0.25 * (_NEAR - 1.0)):
        row = [top] + [Prices(top.per_second * f, top.per_round) for f in factors if top.per_second]
        row += [Prices(top.per_second, top.per_round * f) for f in factors if top.per_round]
        if len(row) > 1:
            top = row[int(terrain.estimate(row).from_start(terrain.problem).argmax())]
    return top


def _peak(terrain: Terrain, unit: float, other: float, seconds: bool) -> float:
    """The best price of one kind, the other one fixed; zero if every price lowers the bound."""

    def heights(row: Floats) -> Floats:
        prices = [Prices(p, other) if seconds else Prices(other, p) for p in row]
        return terrain.estimate(prices).from_start(terrain.problem)

    row = np.concatenate([[0.0], unit * np.geomspace(0.003, 100.0, 13)])
    for final in (False, True):
        top = int(heights(row).argmax())
        low, high = row[max(top - 1, 0)], row[min(top + 1, len(row) - 1)]
        if final:
            return float(row[top])
        inner = np.geomspace(max(low, high * 1e-2), high, 14)
        row = np.concatenate([[low], inner[1:-1] if low > 0 else inner[:-1]])
    return 0.0
