"""Time in phases, for fleets whose nodes come and go: what is left to pay depends on the phase as well.

In each phase a second has a price, one of a few. W_kp(l) is what is left to pay from loss l on in phase k at
price p, if a plan could stay there for as long as it pays. At time t of a phase that ends at b, a plan needs
at least W_kp(l) - p (b - t), whatever p: so at the border to a phase its best price counts, and that is
where W of the phase before ends. Prices may change along a plan, and with how far it has come by then.
docs/decisions/105-phases.md has the proof; names follow it.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from takifugu.plan.bounds import Guide, PhasedGuide
from takifugu.plan.certificate import Later, certify
from takifugu.plan.curves import Floats, SmoothCurve
from takifugu.plan.potentials import Prices
from takifugu.plan.problem import Problem, at_most
from takifugu.plan.relaxation import Offers
from takifugu.plan.values import Terrain, Values

Mask = NDArray[np.bool_]
Range = tuple[float, float]
"""Of losses, from and to"""

_THREADS = min(2, os.cpu_count() or 1)
"""Prices of one phase are proven side by side: half of the work is in compiled loops."""
_NEVER = 1e100
_NEXT = 1e-8
"""Where a bound begins or ends there are two points, this close together."""


@dataclass(frozen=True)
class Phases:
    """Stretches of time from the start to the deadline, and the rounds there can be in each."""

    problem: Problem
    bounds: Floats
    """When phases begin, and when the last one ends."""
    offers: tuple[tuple[Offers | None, ...], ...]
    """[phase][version]: relaxed rounds of those who are there at some time of the phase"""
    longest_s: float
    """Rounds count as no longer than this; so they reach over the end of a phase by no more than this."""

    @classmethod
    def of(
        cls,
        problem: Problem,
        rounds: Callable[[Mask], Sequence[Offers | None]],
        most: int,
        longest_s: float = np.inf,
        least_s: float = 0.0,
    ) -> Phases:
        """They begin when somebody comes or goes; at most so many, and none that is shorter than `least_s`.
        `rounds`: relaxed ones, by version, of some of the nodes."""
        windows = [node.windows for node in problem.nodes]
        moments = np.unique([moment for row in windows for pair in row for moment in pair])
        inside = moments[(moments > problem.start_time_s) & (moments < problem.time_limit)]
        bounds = [problem.start_time_s, *inside.tolist(), problem.time_limit]
        there = [
            np.array([any(a < end and b > begin for a, b in row) for row in windows])
            for begin, end in itertools.pairwise(bounds)
        ]
        everybody = [o for o in rounds(np.ones(len(windows), dtype=bool)) if o is not None]
        longest_s = min(longest_s, max((float(o.time_s.max()) for o in everybody), default=0.0))
        size = np.array([float(node.samples) for node in problem.nodes])
        _merge(bounds, there, size, most, least_s)
        known = {mask.tobytes(): rounds(mask) for mask in there}
        offers = [known[mask.tobytes()] for mask in there]
        short = tuple(tuple(_shortened(o, longest_s) for o in row) for row in offers)
        return cls(problem, np.array(bounds), short, longest_s)

    def __len__(self) -> int:
        return len(self.offers)

    @property
    def lengths_s(self) -> Floats:
        return np.diff(self.bounds)


def _merge(bounds: list[float], there: list[Mask], size: Floats, most: int, least_s: float) -> None:
    """Takes borders away, those first that matter least: who comes or goes there, and for how long they then
    seem to be there although they are not."""
    while len(there) > 1:
        lengths = np.diff(bounds)
        short = lengths < least_s
        if len(there) <= most and not short.any():
            return
        harm = []
        for k in range(len(there) - 1):
            before, after = size[there[k + 1] & ~there[k]].sum(), size[there[k] & ~there[k + 1]].sum()
            wanted = len(there) > most or short[k] or short[k + 1]
            harm.append(before * lengths[k] + after * lengths[k + 1] if wanted else np.inf)
        k = int(np.argmin(harm))
        there[k : k + 2] = [there[k] | there[k + 1]]
        del bounds[k + 1]


def _shortened(offers: Offers | None, longest_s: float) -> Offers | None:
    return offers and replace(offers, time_s=np.minimum(offers.time_s, longest_s))


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
        self.grid = Terrain(self.problem, offers, cells).grid
        self.terrains = [Terrain(self.problem, row, cells, check, self.grid) for row in phases.offers]
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
            left = rows - held[:, None]
            best = [(left - lost[:, None]).max(axis=0) for lost in self._lost(self.roomy(phase))]
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
    ) -> list[Mapping[int, Proven]]:
        """[phase][price]: W, proven. `focus`, by phase: where it should be good; any would be valid. Values
        that are worth more than `most_j` when their phase begins are of no interest."""
        found: list[Mapping[int, Proven]] = []
        later: Mapping[int, Proven] = {}
        prices = [self._with_higher(phase, focus) for phase in range(len(self.phases))]
        # Where a value is capped, waiting through the phases before takes their time off it.
        waited = np.cumsum([0.0, *(self.held(k)[max(row)] for k, row in enumerate(prices))])
        with ThreadPoolExecutor(_THREADS) as pool:
            for phase in reversed(range(len(self.phases))):
                matter = focus[phase + 1].losses if later else None
                cap_j = most_j + float(waited[phase])
                prove = partial(self._proven, values[phase], phase, later, matter, cells, cap_j)
                later = dict(zip(prices[phase], pool.map(prove, prices[phase]), strict=True))
                found.insert(0, later)
        return found

    def _proven(
        self,
        values: Values,
        phase: int,
        later: Mapping[int, Proven],
        matter: Range | None,
        cells: int,
        most_j: float,
        price: int,
    ) -> Proven:
        """W of one phase at one price, from the proven ones of the next phase."""
        over_s, limit = self.over_s(phase), None
        if matter is not None:
            free = self.roomy(phase) and price in later
            over_s = 0.0 if free else self.phases.longest_s
            limit = self._later(price, later, free, over_s, matter)
        rate = float(self.rates[price])
        held_j = rate * (float(self.phases.lengths_s[phase]) + over_s)
        guess = _raised(values, price, rate * (over_s - self.over_s(phase)))
        fine = [cells] * len(self.problem.versions)
        return Proven(certify(self.terrains[phase], guess, 0, most_j + held_j, fine, limit), held_j)

    def _with_higher(self, phase: int, focus: Sequence[Focus]) -> list[int]:
        """Also those of the phase before that are higher than all: where a price falls, rounds across the
        border may then belong to the later phase."""
        found = set(focus[phase].prices)
        if phase and self.roomy(phase - 1):
            found |= {k for k in focus[phase - 1].prices if k > max(focus[phase].prices)}
        return sorted(found)

    def _later(
        self, price: int, later: Mapping[int, Proven], free: bool, over_s: float, matter: Range
    ) -> Later:
        """What W of a price may be at most, by the proven ones of the next phase.

        Free: up to some loss only prices that are no higher count, and rounds across the border belong to the
        next phase; from one whole round above it only higher ones, and they belong to this one; between the
        two just this price (and lower ones for what the round may reach over).
        """
        count = len(self.problem.versions)
        known = {k: p for k, p in later.items() if self._alike[price, k]}
        if not known:  # nothing is known of what is left
            return Later((self.grid,) * count, ((np.zeros(len(self.grid)),),) * count)
        grids = [np.unique(np.concatenate([p.values.grids[v] for p in known.values()])) for v in range(count)]
        left = [
            {
                k: np.interp(grids[v], p.values.grids[v], p.values.value[v][0]) - p.held_j
                for k, p in known.items()
            }
            for v in range(count)
        ]
        lost = self._lost(free=False)[price]
        rate, over = float(self.rates[price]), float(self.rates[price]) * over_s
        bounds = []
        if not free:
            for v in range(count):
                rows = [row - lost[k] + over for k, row in left[v].items()]
                grids[v], found = _with_crossings(grids[v], np.array([np.zeros(len(grids[v])), *rows]))
                bounds.append(found)
            return Later(tuple(grids), tuple(bounds))
        low = [self._border(v, price, grids[v], left[v], matter) for v in range(count)]
        high = self._one_round_above(low)
        for v in range(count):
            grid = grids[v]
            step = _NEXT * (grid[-1] - grid[0])
            more = np.array([low[v] - step, low[v], high[v], high[v] + step])
            more = np.union1d(grid, more[(more > grid[0]) & (more < grid[-1])])
            below, above = more <= low[v] - 0.5 * step, more > high[v] + 0.5 * step
            rows = [np.where(below, 0.0, -_NEVER)]
            for k, row in left[v].items():
                row = np.interp(more, grid, row)
                if self.rates[k] > rate:
                    row = np.where(above, row - lost[k], -_NEVER)
                elif self.rates[k] < rate:
                    row = np.where(below, row, row - lost[k])
                rows.append(row)
            grids[v], found = _with_crossings(more, np.array(rows))
            bounds.append(found)
        return Later(tuple(grids), tuple(bounds))

    def _border(
        self, version: int, price: int, grid: Floats, left: Mapping[int, Floats], matter: Range
    ) -> float:
        """A loss up to which lower prices count. Any would do above which this price leaves something to pay;
        this one makes least of what is lost on its two sides, among losses that matter."""
        curve, rate = self.problem.versions[version].curve, float(self.rates[price])
        assert isinstance(curve, SmoothCurve)
        lower = [row for k, row in left.items() if self.rates[k] < rate]
        higher = [row for k, row in left.items() if self.rates[k] > rate]
        if not higher:
            return np.inf
        own, inside = left[price], (grid >= matter[0]) & (grid <= matter[1])
        missed_above = np.where(inside, np.maximum.reduce([np.zeros(len(grid)), own, *lower]) - own, 0.0)
        missed_above = np.append(np.maximum.accumulate(missed_above[:0:-1])[::-1], 0.0)
        missed_below = np.where(inside, np.maximum.reduce([own, *higher]) - own, 0.0)
        missed_below = np.maximum.accumulate(missed_below)
        above = np.minimum(curve.before(grid, np.ones(len(grid))), grid[-1])
        first = int(np.searchsorted(grid, _above(grid, own < 0.0)))
        worst = np.maximum(missed_above, np.interp(above, grid, missed_below))
        return float(grid[first + int(worst[first:].argmin())])

    def _one_round_above(self, low: Sequence[float]) -> list[float]:
        """[version]: no round from above this loss, with or without a switch before it, leads down to the
        other one of the version that it trains."""
        index, found = self.problem.version_index, []
        for loss, version in zip(low, self.problem.versions, strict=True):
            assert isinstance(version.curve, SmoothCurve)
            found.append(float(version.curve.before(np.array([loss]), np.array([1.0]))[0]))
        above = list(found)
        for switch in self.problem.switches:
            source, target = index[switch.source], index[switch.target]
            above[source] = max(above[source], found[target] - switch.loss_jump)
        return [loss + 1e-9 * abs(loss) for loss in above]

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

    def estimate_j(self, values: Sequence[Values]) -> float:
        """The same by the estimate, at the best price."""
        problem = self.problem
        start, loss = problem.version_index[problem.start_version], np.array([problem.start_loss])
        whole = [float(values[0].at(start, loss, k)[0]) for k in range(len(self.prices))]
        rounds = np.array([p.per_round for p in self.prices]) * (problem.max_rounds or 0)
        return max(float((np.array(whole) - self.held(0) - rounds).max()), 0.0)


@dataclass(frozen=True)
class Focus:
    """What matters when a phase begins."""

    prices: tuple[int, ...]
    losses: Range


@dataclass(frozen=True)
class Proven:
    """W of one phase at one price, and what it is worth less when the phase begins."""

    values: Values
    held_j: float


def _raised(values: Values, price: int, by_j: float) -> Values:
    """One price's values, all higher by this."""
    value = tuple(row[price : price + 1] + by_j for row in values.value)
    after = tuple(row[price : price + 1] + by_j for row in values.after_switch)
    return Values((values.prices[price],), values.grids, value, after)


def _above(grid: Floats, where: Mask) -> float:
    """The first point above all of these."""
    last = np.flatnonzero(where)
    return float(grid[min(int(last[-1]) + 1, len(grid) - 1)]) if len(last) else float(grid[0])


def _with_crossings(grid: Floats, rows: Floats) -> tuple[Floats, tuple[Floats, ...]]:
    """Points where the highest row changes are added: between points one row is the highest."""
    first = rows.argmax(axis=0)
    cell = np.flatnonzero(first[:-1] != first[1:])
    a, b = first[cell], first[cell + 1]
    left, right = rows[a, cell] - rows[b, cell], rows[b, cell + 1] - rows[a, cell + 1]
    part = left / np.maximum(left + right, 1e-300)
    more = np.union1d(grid, grid[cell] + part * (grid[cell + 1] - grid[cell]))
    return more, tuple(np.interp(more, grid, row) for row in rows)
