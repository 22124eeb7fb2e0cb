"""Prices of time by phase, and of rounds, at which the bound is highest.

The bound is concave in the prices, and how much time the cheapest path spends in each phase, less what there
is, is its slope. A few such slopes, and a linear program over them, say where to look next.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import linprog

from takifugu.plan.curves import Floats
from takifugu.plan.phases import PhasedTerrain, PhasePrices
from takifugu.plan.potentials import Prices
from takifugu.plan.problem import Switch
from takifugu.plan.values import Values

_MOST_ROUNDS = 600
_TIE = 1e-3
"""Where two phases are as good as each other but for this, the clock decides."""
_DEARER = (0.02, 0.1, 0.4)
"""How much more, in parts, time may be worth in good phases than it is in all of them together."""
_ABOVE = 0.01
"""How much above what a phase's best round is worth its price is set."""
_IN_VAIN = 8
"""After so many steps that gained nothing there is nothing to gain."""
_FIRST_STEP, _LAST_STEP = 0.4, 0.01
"""How far prices may move at once, relative to what they are."""


@dataclass(frozen=True)
class _Slope:
    height_j: float
    at: Floats
    slope: Floats

    def row(self) -> tuple[Floats, float]:
        """height <= this one's + slope * (prices - its prices), as a row of a linear program."""
        return np.append(-self.slope, 1.0), self.height_j - float(self.slope @ self.at)


def best_prices(terrain: PhasedTerrain, first: Prices, energy_j: float) -> tuple[PhasePrices, float]:
    """The best prices found, beginning with the best single one for all phases, and by how much they raise
    its estimate. `energy_j`: about what a plan needs."""
    span_s = float(terrain.phases.lengths_s.sum())
    unit_s = max(first.per_second, 0.05 * energy_j / max(span_s, 1e-12))
    tried = [PhasePrices(np.full(len(terrain.phases), first.per_second), first.per_round)]
    tried += [equalised(terrain, Prices(first.per_second + f * unit_s, first.per_round)) for f in _DEARER]
    heights = terrain.from_start(terrain.estimate(tried), tried)
    best, height = climb(terrain, tried[int(heights.argmax())], energy_j)
    return best, height / max(float(heights[0]), 1e-300)


def equalised(terrain: PhasedTerrain, good: Prices) -> PhasePrices:
    """A price for phases in which everything goes well, and for others as much less as makes up for what is
    missing in them: walking along, the price at which the best round of the moment is just worth its time. (A
    little above it costs little; a little below, and everything would be done in that phase.)"""
    phases, problem = terrain.phases, terrain.problem
    prices = PhasePrices(np.full(len(phases), good.per_second), good.per_round)
    values = terrain.estimate([prices])
    menu = _Menu(terrain, prices)
    version, loss, clock = problem.version_index[problem.start_version], problem.start_loss, phases.bounds[0]
    worth: list[list[float]] = [[] for _ in range(len(phases))]
    for _ in range(_MOST_ROUNDS):
        phase = int(np.searchsorted(phases.bounds, clock, side="right")) - 1
        if loss <= problem.loss_limit or phase >= len(phases):
            break
        found = menu.most_worth(values[phase], phase, version, loss)
        if found is None:
            worth[phase].append(0.0)
            clock = phases.bounds[phase + 1]
            continue
        per_second, version, loss, took = found
        worth[phase].append(per_second)
        clock += took
    seen = np.array([max(row, default=np.inf) * (1.0 + _ABOVE) for row in worth])
    seen = np.where(seen > (1.0 - 3 * _ABOVE) * good.per_second, good.per_second, seen)
    return PhasePrices(seen, good.per_round)


def climb(
    terrain: PhasedTerrain, first: PhasePrices, energy_j: float, steps: int = 24
) -> tuple[PhasePrices, float]:
    """The best prices found in so many steps from the first ones, and the estimate there."""
    phases, cap = terrain.phases, terrain.problem.max_rounds or 0
    span_s = float(phases.lengths_s.sum())
    unit_s = max(float(first.per_second.max()), 0.05 * energy_j / max(span_s, 1e-12))
    unit_r = max(first.per_round, 0.02 * energy_j / max(cap, 1))
    units = np.append(np.full(len(phases), unit_s), unit_r)
    at = np.append(first.per_second, first.per_round) / units
    best, highest, reach, known = at, -np.inf, _FIRST_STEP, list[_Slope]()
    for number in range(steps):
        prices = PhasePrices(at[:-1] * unit_s, float(at[-1] * unit_r))
        values = terrain.estimate([prices])
        height = float(terrain.from_start(values, [prices])[0])
        path = cheapest_path(terrain, values, prices)
        used = np.append(path.seconds - phases.lengths_s, path.rounds - cap)
        known.append(_Slope(height, at, used * units))
        if height > highest:
            best, highest = at, height
        else:
            reach *= 0.75
        if reach < _LAST_STEP or (number == _IN_VAIN and highest == known[0].height_j):
            break
        low = np.maximum(best * (1 - reach) - 0.1 * reach, 0.0)
        high = best * (1 + reach) + 0.2 * reach
        if not cap:
            high[-1] = 0.0
        rows, limits = zip(*(s.row() for s in known), strict=True)
        answer = linprog(
            np.append(np.zeros(len(at)), -1.0),
            A_ub=np.array(rows),
            b_ub=np.array(limits),
            bounds=[*zip(low, high, strict=True), (None, None)],
        )
        if answer.status != 0:
            break
        at = np.asarray(answer.x[:-1])
    return PhasePrices(best[:-1] * unit_s, float(best[-1] * unit_r)), highest


@dataclass(frozen=True)
class Path:
    seconds: Floats
    """[phase]: spent by rounds that begin in it"""
    rounds: int


def cheapest_path(terrain: PhasedTerrain, values: Sequence[Values], prices: PhasePrices) -> Path:
    """What the values lead to, on relaxed rounds: no plan, but a slope of the bound."""
    phases, problem = terrain.phases, terrain.problem
    menu = _Menu(terrain, prices)
    version, loss = problem.version_index[problem.start_version], problem.start_loss
    phase, clock, rounds, seconds = 0, problem.start_time_s, 0, np.zeros(len(phases))
    while loss > problem.loss_limit and rounds < _MOST_ROUNDS:
        here = _left(values[phase], version, loss)
        while phase + 1 < len(phases) and clock >= phases.bounds[phase + 1]:
            later = _left(values[phase + 1], version, loss)
            if later > here * (1 + _TIE):
                break
            phase, here = phase + 1, later
        best = None
        for k in range(phase, len(phases)):
            if k > phase and _left(values[k], version, loss) > here * (1 + 1e-6):
                break
            found = menu.best(values[k], k, version, loss, here)
            if found is not None and (best is None or found[0] < best[0] - _TIE):
                best = (*found, k)
        if best is None:
            break
        _, version, loss, took, phase = best
        seconds[phase] += took
        clock = max(clock, float(phases.bounds[phase])) + took
        rounds += 1
    return Path(seconds, rounds)


def _left(values: Values, version: int, loss: float) -> float:
    return float(values.at(version, np.array([loss]))[0])


class _Menu:
    """The cheapest relaxed round of each share, by phase and version."""

    def __init__(self, terrain: PhasedTerrain, prices: PhasePrices) -> None:
        self.terrain = terrain
        self.rows = [prices.of(k) for k in range(len(terrain.phases))]
        self._known: dict[tuple[int, int], tuple[Floats, Floats, Floats]] = {}

    def best(
        self, values: Values, phase: int, version: int, loss: float, here: float
    ) -> tuple[float, int, float, float] | None:
        """Its cost per gain, version, loss after it, and time."""
        best = None
        for target, switch in self._ways(phase, version):
            fee = 0.0 if switch is None else self.rows[phase].fee(switch)
            time_s, jump = (0.0, 0.0) if switch is None else (switch.time_s, switch.loss_jump)
            share, cost, took = self._rounds(phase, target)
            after = self.terrain.problem.versions[target].curve.step(np.asarray(loss + jump), share)
            gain = here - values.at(target, after)
            with np.errstate(divide="ignore", invalid="ignore"):
                ratio = np.where(gain > 0.0, (cost + fee) / gain, np.inf)
            k = int(ratio.argmin())
            if np.isfinite(ratio[k]) and (best is None or ratio[k] < best[0]):
                best = (float(ratio[k]), target, float(after[k]), float(took[k]) + time_s)
        return best

    def most_worth(
        self, values: Values, phase: int, version: int, loss: float
    ) -> tuple[float, int, float, float] | None:
        """The round that is worth the most per second: that worth, its version, loss after it, and time."""
        here, best = _left(values, version, loss), None
        for target, switch in self._ways(phase, version):
            energy_j, time_s, jump = (
                (0.0, 0.0, 0.0) if switch is None else (switch.energy_j, switch.time_s, switch.loss_jump)
            )
            share, cost, took = self._rounds(phase, target)
            after = self.terrain.problem.versions[target].curve.step(np.asarray(loss + jump), share)
            # The menu's cost has its time in it, at the phase's price.
            joules = cost - self.rows[phase].per_second * took + energy_j
            worth = (here - values.at(target, after) - joules) / (took + time_s)
            worth = np.where(np.isfinite(worth) & (after < loss + jump), worth, -np.inf)
            k = int(worth.argmax())
            if worth[k] > (0.0 if best is None else best[0]):
                best = (float(worth[k]), target, float(after[k]), float(took[k]) + time_s)
        return best

    def _ways(self, phase: int, version: int) -> Iterator[tuple[int, Switch | None]]:
        """To stay, and to switch."""
        terrain = self.terrain.terrains[phase]
        if terrain.usable[version]:
            yield version, None
        for source, target, switch in terrain.switches:
            if source == version and terrain.usable[target]:
                yield target, switch

    def _rounds(self, phase: int, version: int) -> tuple[Floats, Floats, Floats]:
        if (phase, version) not in self._known:
            offers, prices = self.terrain.terrains[phase].offers[version], self.rows[phase]
            assert offers is not None
            cost = offers.tangent_j + prices.per_second * offers.time_s[:, None]
            which = cost.argmin(axis=0)
            self._known[phase, version] = (
                offers.share,
                cost.min(axis=0) + prices.per_round,
                offers.time_s[which],
            )
        return self._known[phase, version]
