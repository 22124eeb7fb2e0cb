"""Time in phases, for fleets whose nodes come and go: what is left to pay depends on the phase as well.

In each phase a second has a price, one of a few. W_kp(l) is what is left to pay from loss l on in phase k at
price p, if a plan could stay there for as long as it pays. At time t of a phase that ends at b, a plan needs
at least W_kp(l) - p (b - t), whatever p: so at the border to a phase its best price counts, and that is
where W of the phase before ends. Prices may change along a plan, and with how far it has come by then.
docs/decisions/105-phases.md has the proof; names follow it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import numpy as np

from takifugu.plan.bounds import Guide, PhasedGuide
from takifugu.plan.certificate import LOST, certify
from takifugu.plan.curves import Floats
from takifugu.plan.phase_borders import Border, Focus, Proven, Range
from takifugu.plan.phase_cuts import Phases
from takifugu.plan.potentials import Prices
from takifugu.plan.problem import at_most
from takifugu.plan.relaxation import Offers
from takifugu.plan.values import Terrain, Values

_THREADS = min(2, os.cpu_count() or 1)
"""Prices of one phase are proven side by side: half of the work is in compiled loops."""


class PhasedTerrain:
    """The problem as a path over losses and phases, at several prices at once."""

    def __init__(
        self,
        phases: Phases,
        offers: Sequence[Offers | None],
        prices: Sequence[Prices],
        cells: int,
        check: Callable[[], None] = lambda: None,
        taxed: bool = True,
    ) -> None:
        """`offers`: of everybody together, for the grid of losses that all phases share. Not `taxed`: for
        estimates alone, as if no round reached over the end of its phase."""
        self.taxed = taxed
        self.phases, self.problem, self.prices = phases, phases.problem, tuple(prices)
        ground = Terrain(self.problem, offers, cells)
        self.grid = ground.grid
        self.terrains = [
            Terrain(self.problem, row, cells, check, self.grid).on_the_ground_of(ground)
            for row in phases.offers
        ]
        self.rates = np.array([p.per_second for p in prices])
        self._alike = np.array([[p.per_round == q.per_round for q in prices] for p in prices])
        self._switch_s = max((s.time_s for s in self.problem.switches), default=0.0)

    def roomy(self, phase: int) -> bool:
        """Whether no round that began before a phase ends after it."""
        return not self.taxed or bool(self.phases.lengths_s[phase] >= self.phases.longest_s)

    def over_s(self, phase: int) -> float:
        """How many seconds W charges in a phase on top of its own, so that nothing is left to pay when the
        target is met: a round that meets it may reach over the end of the phase."""
        last = phase + 1 == len(self.phases)
        return 0.0 if last or self.roomy(phase) else self.phases.longest_s

    def _lost(self, free: bool) -> Floats:
        """[price, price after the border]: what a change costs at most. A switch may begin before a border,
        and a round may end after it: seconds of the one phase that the other one charges."""
        fall = self.rates[:, None] - self.rates[None, :]
        lost = np.where(fall > 0.0, fall * (0.0 if free else self.phases.longest_s), -fall * self._switch_s)
        return np.where(self._alike, lost, np.inf)

    # Estimates.

    def estimate(self) -> tuple[Values, ...]:
        """[phase]: W at all prices, on the rough grid."""
        found: tuple[Values, ...] = ()
        for phase in reversed(range(len(self.phases))):
            limit = self._limits(phase, found[0]) if found else None
            found = (self.terrains[phase].estimate(self.prices, limit), *found)
        return found

    def held(self, phase: int) -> Floats:
        """[price]: what W of a phase is worth less when the phase begins."""
        return np.asarray(self.rates * (self.phases.lengths_s[phase] + self.over_s(phase)))

    def _limits(self, phase: int, later: Values) -> list[Floats]:
        """[version][price, point]: about what W may be at most, by that of the next phase."""
        held, over, found = self.held(phase + 1), self.rates * self.over_s(phase), []
        for rows in later.value:
            left, best = rows - held[:, None], []
            for alike, lost in zip(self._alike, self._lost(self.roomy(phase)), strict=True):
                best.append((left[alike] - lost[alike, None]).max(axis=0))
            found.append(np.maximum(np.array(best) + over[:, None], 0.0))
        return found

    def posts(self, values: Sequence[Values]) -> list[tuple[float, float, Values]]:
        """What plans need to follow them (`rollout.py`)."""
        ends = self.phases.bounds[1:]
        return [(float(ends[k]), self.over_s(k), row) for k, row in enumerate(values)]

    def guide(self, values: Sequence[Values], limits: Guide) -> PhasedGuide:
        """What sweeps need."""
        rows = [
            (end, over_s, replace(limits, potentials=row.potentials()))
            for end, over_s, row in self.posts(values)
        ]
        least = (limits.least_time, limits.least_rounds)
        return PhasedGuide((), *least, limits.time_limit, limits.rounds_limit, tuple(rows))

    # Certificates.

    def certified(
        self,
        values: Sequence[Values],
        focus: Sequence[Focus],
        cells: int,
        most_j: float,
        lost: float = LOST,
    ) -> list[Mapping[int, Proven]]:
        """[phase][price]: W, proven. `focus`, by phase: where it should be good; any would be valid. Values
        that are worth more than `most_j` when their phase begins are of no interest. `lost`: the part of a
        value that a certificate may lose."""
        found: list[Mapping[int, Proven]] = []
        later: Mapping[int, Proven] = {}
        prices = [self._priced(phase, focus) for phase in range(len(self.phases))]
        # Where a value is capped, waiting through the phases before takes their time off it.
        waited = np.cumsum([0.0, *(self.held(k)[max(row)] for k, row in enumerate(prices))])
        with ThreadPoolExecutor(_THREADS) as pool:
            for phase in reversed(range(len(self.phases))):
                matter = focus[phase + 1].losses if later else None
                cap_j = most_j + float(waited[phase])
                how = (cells, cap_j, lost)
                prove = partial(self._proven, values[phase], phase, later, focus[phase], matter, how)
                later = dict(zip(prices[phase], pool.map(prove, prices[phase]), strict=True))
                found.insert(0, later)
        return found

    def _proven(
        self,
        values: Values,
        phase: int,
        later: Mapping[int, Proven],
        here: Focus,
        matter: Range | None,
        how: tuple[int, float, float],
        price: int,
    ) -> Proven:
        """W of one phase at one price, from the proven ones of the next phase. `how`: cells, the value above
        which nothing is of interest, and the part of it that may be lost."""
        cells, most_j, lost_part = how
        free = self.roomy(phase) and price in later
        over_s = 0.0 if free or matter is None else self.phases.longest_s
        rate, limit = float(self.rates[price]), None
        held_j = rate * (float(self.phases.lengths_s[phase]) + over_s)
        guess = _raised(values, price, rate * (over_s - self.over_s(phase)))
        if matter is not None:
            lost = self._lost(free=False)[price]
            border = Border(self.phases, phase, self.terrains[phase], self.prices, price, lost, later)
            limit = border.free(here, matter) if free else border.taxed()
        fine = [cells] * len(self.problem.versions)
        found = certify(self.terrains[phase], guess, 0, most_j + held_j, fine, limit, lost_part)
        return Proven(found, held_j)

    def _priced(self, phase: int, focus: Sequence[Focus]) -> list[int]:
        """Prices to prove in a phase. Also the lowest of those before: it can then go on as it is, which
        costs nothing. And those of the phase before that are higher than all: where a price falls, rounds
        across the border may then belong to the later phase."""
        found = {*focus[phase].prices, min(k for row in focus[: phase + 1] for k in row.prices)}
        if phase and self.roomy(phase - 1):
            found |= {k for k in focus[phase - 1].prices if k > max(focus[phase].prices)}
        return sorted(found)

    def left(
        self, proven: Sequence[Mapping[int, Proven]], version: int, loss: Floats, clock: Floats
    ) -> Floats:
        """[state]: a bound on what is left to pay, rounds at their price."""
        begins = self.phases.bounds[:-1]
        phase = np.clip(np.searchsorted(begins, clock, side="right") - 1, 0, len(proven) - 1)
        since_s, found = clock - begins[phase], np.full(len(loss), -np.inf)
        for k in np.unique(phase):
            here = phase == k
            for price, p in proven[k].items():
                left = p.values.at(version, loss[here]) - p.held_j + float(self.rates[price]) * since_s[here]
                found[here] = np.maximum(found[here], left)
        return found

    def per_round(self, proven: Sequence[Mapping[int, Proven]]) -> float:
        """The price of a round, the same in all phases."""
        per_round = {self.prices[k].per_round for row in proven for k in row}
        assert len(per_round) == 1, "rounds have one price in all phases"
        return per_round.pop()

    @property
    def slack_j(self) -> float:
        """A round may end after its phase by what limits have of slack: one per phase then pays that much too
        little."""
        slack_s = float(sum(at_most(b) - b for b in self.phases.bounds[1:-1]))
        return float(self.rates.max()) * slack_s

    def bound_j(self, proven: Sequence[Mapping[int, Proven]]) -> float:
        """A bound on the whole plan's energy."""
        problem = self.problem
        start, here = problem.version_index[problem.start_version], np.array([problem.start_loss])
        whole = float(self.left(proven, start, here, np.array([problem.start_time_s]))[0])
        whole -= self.slack_j + self.per_round(proven) * (problem.max_rounds or 0)
        return max(whole, 0.0)

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


def _raised(values: Values, price: int, by_j: float) -> Values:
    """One price's values, all higher by this."""
    value = tuple(row[price : price + 1] + by_j for row in values.value)
    after = tuple(row[price : price + 1] + by_j for row in values.after_switch)
    return Values((values.prices[price],), values.grids, value, after)
