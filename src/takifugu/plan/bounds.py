"""The best lower bound over prices of time and rounds, and the bundle of potentials that guides a search."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from takifugu.plan.curves import Floats
from takifugu.plan.potentials import Landscape, Potential
from takifugu.plan.rounds import Prices

if TYPE_CHECKING:
    from takifugu.plan.compiled import sweeps

Ints = NDArray[np.int64]

_GOLDEN = 0.6180339887498949


@dataclass(frozen=True)
class Guide:
    """Lower bounds on the energy that is still needed from a state: the largest over several prices."""

    potentials: tuple[Potential, ...]
    least_time: Potential
    least_rounds: Potential
    time_limit: float
    rounds_limit: float

    def energy_to_go(
        self, version: int, loss: Floats, clock: Floats, rounds_done: int | Ints, caution: float = 0.0
    ) -> Floats:
        """With `caution` it is no bound but an estimate: a part of the time and rounds left is held back."""
        from takifugu.plan.compiled import paths

        if not self.potentials:
            return np.zeros(np.broadcast(loss, clock).shape)
        left_s = (self.time_limit - clock) * (1.0 - caution)
        left = (self.rounds_limit - rounds_done) * (1.0 - caution)
        states = [np.array(x, dtype=np.float64) for x in np.broadcast_arrays(loss, left_s, left)]
        where, seconds, rounds = (x.ravel() for x in states)
        grid, value = self._stacked[version]
        best = paths.highest(where, seconds, rounds, grid, value, self._per_second, self._per_round)
        return best.reshape(states[0].shape)

    @cached_property
    def _stacked(self) -> list[tuple[Floats, Floats]]:
        """[version]: the grid that all potentials share, and their values on it, [point, potential]."""
        grid = self.potentials[0].grid
        assert all(np.array_equal(p.grid, grid) for p in self.potentials)
        versions = range(len(self.potentials[0].value))
        return [(grid, np.stack([p.value[v] for p in self.potentials], axis=1)) for v in versions]

    @property
    def laid_out(self) -> sweeps.Ranks:
        """As sweeps read it: one phase, all the time there is."""
        value = np.stack([np.ascontiguousarray(value) for _, value in self._stacked])[None]
        prices = (self._per_second, self._per_round, self.rounds_limit)
        return np.array([self.time_limit]), self._stacked[0][0], value, *prices

    @cached_property
    def _per_second(self) -> Floats:
        return np.array([p.prices.per_second for p in self.potentials])

    @cached_property
    def _per_round(self) -> Floats:
        return np.array([p.prices.per_round for p in self.potentials])

    def hopeless(
        self, version: int, loss: Floats, clock: Floats, rounds_done: int | Ints
    ) -> NDArray[np.bool_]:
        """True where even the least time, or the fewest rounds, would be too many."""
        late = clock + self.least_time.at(version, loss) * (1 - 1e-9) > self.time_limit
        if np.isfinite(self.rounds_limit):
            fewest = np.ceil(self.least_rounds.at(version, loss) * (1 - 1e-9) - 1e-9)
            late = late | (rounds_done + fewest > self.rounds_limit)
        return np.asarray(late)


@dataclass(frozen=True)
class PhasedGuide(Guide):
    """The same where nodes come and go: potentials by phase, of which only its own time is left."""

    phases: tuple[tuple[float, Guide], ...] = ()
    """When each ends, and its potentials"""

    def energy_to_go(
        self, version: int, loss: Floats, clock: Floats, rounds_done: int | Ints, caution: float = 0.0
    ) -> Floats:
        loss, clock, rounds = np.broadcast_arrays(loss, clock, rounds_done)
        ends = np.array([end for end, _ in self.phases])
        which = np.minimum(np.searchsorted(ends, clock, side="right"), len(ends) - 1)
        found = np.zeros(loss.shape)
        for k in np.unique(which):
            end, guide = self.phases[int(k)]
            here = which == k
            # What is held back of a phase is not handed on to the next one.
            at_end = replace(guide, time_limit=end)
            found[here] = at_end.energy_to_go(version, loss[here], clock[here], rounds[here], caution)
        return found

    @property
    def laid_out(self) -> sweeps.Ranks:
        rows = [guide.laid_out for _, guide in self.phases]
        ends = np.array([end for end, _ in self.phases])
        return ends, rows[0][1], np.concatenate([row[2] for row in rows]), *rows[0][3:]


@dataclass(frozen=True)
class Dual:
    bound_j: float
    prices: Prices
    guide: Guide


def start_bound(land: Landscape, potential: Potential) -> float:
    """The bound from the start: potential, less what the deadline and the round cap are worth."""
    problem, prices = land.problem, potential.prices
    start = problem.version_index[problem.start_version]
    bound = float(potential.at(start, np.array([problem.start_loss]))[0])
    bound -= prices.per_second * max(problem.time_limit - problem.start_time_s, 0.0)
    if prices.per_round and problem.max_rounds is not None:
        bound -= prices.per_round * problem.max_rounds
    return bound


def best_dual(coarse: Landscape, fine: Landscape) -> Dual:
    """Climbs the concave dual on a coarse grid, then takes the bound on the fine one."""
    problem = coarse.problem
    typical = start_bound(coarse, coarse.potential(Prices()))
    span = max(problem.deadline_s - problem.start_time_s, 1e-9)
    rounds = problem.max_rounds

    def value(per_second: float, per_round: float) -> float:
        return start_bound(coarse, coarse.potential(Prices(per_second, per_round), passes=2))

    unit_s = max(typical, 1e-12) / span
    per_second = _climb_price(lambda p: value(p, 0.0), unit_s)
    per_round = 0.0
    if rounds is not None:
        unit_r = max(typical, 1e-12) / rounds
        for _ in range(3):
            before = (per_second, per_round)
            per_round = _climb_price(lambda p, s=per_second: value(s, p), unit_r)  # type: ignore[misc]
            per_second = _climb_price(lambda p, r=per_round: value(p, r), unit_s)  # type: ignore[misc]
            if (per_second, per_round) == before:
                break
    best = Prices(per_second, per_round)
    factors = (0.0, 0.5, 0.8, 1.0, 1.25, 2.0, 8.0) if per_second > 0 else (0.0,)
    bundle = [Prices(per_second * f, per_round) for f in factors]
    if per_second == 0.0:
        bundle += [Prices(unit_s * f, per_round) for f in (0.1, 0.5, 4.0)]
    if per_round > 0:
        bundle += [Prices(per_second, per_round * f) for f in (0.0, 0.5, 2.0, 8.0)]
    potentials = tuple(fine.potential(p) for p in bundle)
    limit = np.inf if rounds is None else float(rounds)
    guide = Guide(
        potentials,
        fine.potential(Prices(per_second=1.0, energy=0.0)),
        fine.potential(Prices(per_round=1.0, energy=0.0)),
        problem.time_limit,
        limit,
    )
    bound = max(0.0, *(start_bound(fine, p) for p in potentials))
    return Dual(bound, best, guide)


def _climb_price(value: Callable[[float], float], unit: float, rounds: int = 14) -> float:
    """The price with the largest value of a concave function; zero if it falls from the start."""
    base = value(0.0)
    low, best, best_value = 0.0, 0.0, base
    price = unit * 0.05
    for _ in range(40):
        now = value(price)
        if now <= best_value:
            break
        low, best, best_value = best, price, now
        price *= 3.0
    if best == 0.0:
        # The top may lie below the first probe.
        now = value(unit * 1e-3)
        if now <= base:
            return 0.0
        best, best_value = unit * 1e-3, now
        price = unit * 0.05
    high = price
    for _ in range(rounds):
        if best - low > high - best:
            probe = best - (best - low) * (1 - _GOLDEN)
        else:
            probe = best + (high - best) * (1 - _GOLDEN)
        now = value(probe)
        if now > best_value:
            low, high = (low, best) if probe < best else (best, high)
            best, best_value = probe, now
        elif probe < best:
            low = probe
        else:
            high = probe
        if high - low < 2e-3 * best:
            break
    return best
