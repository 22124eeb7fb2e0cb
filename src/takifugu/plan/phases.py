"""Time in phases, for fleets whose nodes come and go: what is left to pay depends on the phase as well.

In each phase a second has a price, one of a few. W_kp(l) is what is left to pay from loss l on in phase k at
price p, if a plan could stay there for as long as it pays. At time t of a phase that ends at b, a plan needs
at least W_kp(l) - p (b - t), whatever p: so at the border to a phase its best price counts, and that is
where W of the phase before ends. Prices may change along a plan, and with how far it has come by then.
docs/decisions/105-phases.md has the proof; names follow it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from takifugu.plan.bounds import Guide, PhasedGuide
from takifugu.plan.curves import Floats
from takifugu.plan.phase_cuts import Phases
from takifugu.plan.potentials import Exit, Ground, Landscape, Potential
from takifugu.plan.problem import at_most
from takifugu.plan.relaxation import Offers
from takifugu.plan.rounds import Prices
from takifugu.plan.values import Terrain, Values

_THREADS = min(2, os.cpu_count() or 1)
"""Prices of one phase are proven side by side: half of the work is in compiled loops."""


@dataclass(frozen=True)
class Proven:
    """W of one phase at one price, and what it is worth less when the phase begins."""

    values: Potential
    held_j: float


class PhasedTerrain:
    """The problem as a path over losses and phases, at several prices at once."""

    def __init__(
        self,
        phases: Phases,
        offers: Sequence[Offers | None],
        prices: Sequence[Prices],
        cells: int,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """`offers`: of everybody together, for the grid of losses that all phases share."""
        self.phases, self.problem, self.prices, self.check = phases, phases.problem, tuple(prices), check
        ground = Terrain(self.problem, offers, cells)
        self.grid = ground.grid
        self.terrains = [
            Terrain(self.problem, row, cells, check, self.grid).on_the_ground_of(ground)
            for row in phases.offers
        ]
        self.rates = np.array([p.per_second for p in prices])
        self._alike = np.array([[p.per_round == q.per_round for q in prices] for p in prices])

    def held(self, phase: int) -> Floats:
        """[price]: what W of a phase is worth less when the phase begins."""
        return np.asarray(self.rates * self.phases.lengths_s[phase])

    # Estimates.

    def estimate(self) -> tuple[Values, ...]:
        """[phase]: W at all prices, on the rough grid."""
        found: tuple[Values, ...] = ()
        for phase in reversed(range(len(self.phases))):
            limit = self._limits(phase, found[0]) if found else None
            found = (self.terrains[phase].estimate(self.prices, limit), *found)
        return found

    def _limits(self, phase: int, later: Values) -> list[Floats]:
        """[version][price, point]: about what W may be at most, by that of the next phase."""
        found = []
        for rows in later.value:
            left = np.maximum(rows - self.held(phase + 1)[:, None], 0.0)
            found.append(np.array([left[alike].max(axis=0) for alike in self._alike]))
        return found

    def posts(self, values: Sequence[Values]) -> list[tuple[float, Values]]:
        """What plans need to follow them (`rollout.py`)."""
        return list(zip(self.phases.bounds[1:].tolist(), values, strict=True))

    def guide(self, values: Sequence[Values], limits: Guide) -> PhasedGuide:
        """What sweeps need."""
        rows = [(end, replace(limits, potentials=row.potentials())) for end, row in self.posts(values)]
        least = (limits.least_time, limits.least_rounds)
        return PhasedGuide((), *least, limits.time_limit, limits.rounds_limit, tuple(rows))

    def without_phases_j(self, offers: Sequence[Offers | None]) -> float:
        """The least energy by an estimate that is as rough, if everybody were always there."""
        values = Terrain(self.problem, offers, points=self.grid).estimate(self.prices)
        return max(float(values.from_start(self.problem).max()), 0.0)

    def estimate_j(self, values: Sequence[Values]) -> float:
        """The same by the estimate, at the best price."""
        problem = self.problem
        start, loss = problem.version_index[problem.start_version], np.array([problem.start_loss])
        whole = [float(values[0].at(start, loss, k)[0]) for k in range(len(self.prices))]
        rounds = np.array([p.per_round for p in self.prices]) * (problem.max_rounds or 0)
        return max(float((np.array(whole) - self.held(0) - rounds).max()), 0.0)

    # Bounds.

    def certified(
        self, ground: Ground, prices: Sequence[Sequence[Prices]], most_j: float
    ) -> list[list[Proven]]:
        """[phase]: W, proven at the losses of the ground, at some prices of each phase. Values that are worth
        more than `most_j` when their phase begins are of no interest."""
        found: list[list[Proven]] = []
        # Where a value is capped, waiting through the phases before takes their time off it.
        dearest = np.array([max(p.per_second for p in row) for row in prices])
        waited = np.cumsum(np.concatenate([[0.0], dearest * self.phases.lengths_s]))
        with ThreadPoolExecutor(_THREADS) as pool:
            for phase in reversed(range(len(self.phases))):
                land = Landscape(self.problem, self.phases.offers[phase], ground, self.check)
                later = self._later(found[0]) if found else None
                length_s, cap_j = float(self.phases.lengths_s[phase]), most_j + float(waited[phase])

                def prove(
                    price: Prices,
                    land: Landscape = land,
                    later: list[list[Exit]] | None = later,
                    length_s: float = length_s,
                    cap_j: float = cap_j,
                ) -> Proven:
                    held_j = price.per_second * length_s
                    return Proven(land.potential(price, later=later, most_j=cap_j + held_j), held_j)

                found.insert(0, list(pool.map(prove, prices[phase])))
        return found

    def _later(self, proven: Sequence[Proven]) -> list[list[Exit]]:
        """[version]: ways into the next phase, at its best price: first by waiting, then by each switch that
        is under way at the border (its time counts for nothing, in neither phase)."""
        index, grid, found = self.problem.version_index, proven[0].values.grid, []
        for v in range(len(self.problem.versions)):
            rows = [p.values.value[v] - p.held_j for p in proven]
            found.append([Exit(0.0, 0.0, *_highest(grid, rows))])
        first: dict[int, tuple[Floats, Floats]] = {}
        for switch in self.problem.switches:
            target = index[switch.target]
            if target not in first:
                first[target] = _highest(grid, [p.values.first[target] - p.held_j for p in proven])
            found[index[switch.source]].append(Exit(switch.energy_j, switch.loss_jump, *first[target]))
        return found

    def left(self, proven: Sequence[Sequence[Proven]], version: int, loss: Floats, clock: Floats) -> Floats:
        """[state]: a bound on what is left to pay, rounds at their price."""
        begins = self.phases.bounds[:-1]
        phase = np.clip(np.searchsorted(begins, clock, side="right") - 1, 0, len(proven) - 1)
        since_s, found = clock - begins[phase], np.full(len(loss), -np.inf)
        for k in np.unique(phase):
            here = phase == k
            for p in proven[k]:
                left = p.values.at(version, loss[here]) - p.held_j
                found[here] = np.maximum(found[here], left + p.values.prices.per_second * since_s[here])
        return found

    def per_round(self, proven: Sequence[Sequence[Proven]]) -> float:
        """The price of a round, the same in all phases."""
        per_round = {p.values.prices.per_round for row in proven for p in row}
        assert len(per_round) == 1, "rounds have one price in all phases"
        return per_round.pop()

    def slack_j(self, proven: Sequence[Sequence[Proven]]) -> float:
        """A round may end after its phase by what limits have of slack: those seconds are not paid for."""
        slack_s = float(sum(at_most(b) - b for b in self.phases.bounds[1:-1]))
        return slack_s * max(p.values.prices.per_second for row in proven for p in row)

    def bound_j(self, proven: Sequence[Sequence[Proven]]) -> float:
        """A bound on the whole plan's energy."""
        problem = self.problem
        start, here = problem.version_index[problem.start_version], np.array([problem.start_loss])
        whole = float(self.left(proven, start, here, np.array([problem.start_time_s]))[0])
        whole -= self.slack_j(proven) + self.per_round(proven) * (problem.max_rounds or 0)
        return max(whole, 0.0)


def _highest(grid: Floats, rows: Sequence[Floats]) -> tuple[Floats, Floats]:
    """The highest of rows that are lines between points (and of nothing at all); points where that changes
    are added, so that it is a line between points, too. It never falls with the loss."""
    table = np.array([np.zeros(len(grid)), *rows])
    first = table.argmax(axis=0)
    cell = np.flatnonzero(first[:-1] != first[1:])
    a, b = first[cell], first[cell + 1]
    left, right = table[a, cell] - table[b, cell], table[b, cell + 1] - table[a, cell + 1]
    part = left / np.maximum(left + right, 1e-300)
    more = np.union1d(grid, grid[cell] + part * (grid[cell + 1] - grid[cell]))
    highest = np.maximum.reduce([np.interp(more, grid, row) for row in table])
    return more, np.minimum.accumulate(highest[::-1])[::-1]
