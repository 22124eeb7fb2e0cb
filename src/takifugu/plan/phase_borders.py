"""From one phase to the next: what W may be at most, by what is proven of the next phase (decision 105)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from takifugu.plan.certificate import Later
from takifugu.plan.curves import Floats, SmoothCurve
from takifugu.plan.phase_cuts import Phases
from takifugu.plan.potentials import Prices
from takifugu.plan.relaxation import Offers
from takifugu.plan.values import Terrain, Values

Range = tuple[float, float]
"""Of losses, from and to"""
Spot = tuple[int, float]
"""A version and a loss"""

_NEVER = 1e100
_PLACES, _CLOSER = 8, 2
"""So many losses are tried as the one where prices may change; and so often two beside the best."""
_NEXT = 1e-8
"""Where a bound begins or ends there are two points, this close together."""


@dataclass(frozen=True)
class Focus:
    """What matters when a phase begins."""

    prices: tuple[int, ...]
    losses: Range
    spots: tuple[Spot, ...] = ()
    """Where a plan is then, or may be"""


@dataclass(frozen=True)
class Proven:
    """W of one phase at one price, and what it is worth less when the phase begins."""

    values: Values
    held_j: float


@dataclass(frozen=True)
class Border:
    """The end of a phase, at one of its prices."""

    phases: Phases
    phase: int
    terrain: Terrain
    """Of the phase"""
    prices: Sequence[Prices]
    price: int
    lost: Floats
    """[price after the border]: what a change costs at most, whoever a round across it belongs to"""
    later: Mapping[int, Proven]

    @property
    def rate(self) -> float:
        return self.prices[self.price].per_second

    def rises(self, price: int) -> bool:
        return self.prices[price].per_second > self.rate

    @cached_property
    def grids(self) -> list[Floats]:
        """[version]: losses on which `left` is linear"""
        rows = [p.values.grids for p in self._known.values()] or [(self.terrain.grid,) * len(self.versions)]
        return [np.unique(np.concatenate([row[v] for row in rows])) for v in self.versions]

    @cached_property
    def left(self) -> list[dict[int, Floats]]:
        """[version][price]: what is left to pay when the next phase begins"""
        return [
            {
                k: np.interp(self.grids[v], p.values.grids[v], p.values.value[v][0]) - p.held_j
                for k, p in self._known.items()
            }
            for v in self.versions
        ]

    @property
    def versions(self) -> range:
        return range(len(self.phases.problem.versions))

    @cached_property
    def _known(self) -> dict[int, Proven]:
        return {k: p for k, p in self.later.items() if np.isfinite(self.lost[k])}

    def taxed(self) -> Later:
        """What W of the price may be at most, whoever a round across the border belongs to."""
        over_j, points, bounds = self.rate * self.phases.longest_s, [], []
        for grid, row in zip(self.grids, self.left, strict=True):
            rows = [left_j - self.lost[k] + over_j for k, left_j in row.items()]
            more, found = _with_crossings(grid, np.array([np.zeros(len(grid)), *rows]))
            points.append(more)
            bounds.append(found)
        return Later(tuple(points), tuple(bounds))

    def free(self, here: Focus, matter: Range) -> Later:
        """The same, better: up to some loss only prices that are no higher count, and rounds across the
        border belong to the next phase; from one whole round above it only higher ones, and they belong to
        this one; between the two just this price (and lower ones for what the round may reach over). Any
        loss will do above which this price leaves something to pay; of a few the one that the estimate
        likes."""
        if not any(self.rises(k) for k in self._known):
            return self._free_from(np.inf)
        problem = self.phases.problem
        spots = here.spots or ((problem.version_index[problem.start_version], here.losses[1]),)
        tried = [self._tried(low, spots) for low in (np.inf, *np.linspace(*matter, _PLACES).tolist())]
        step = (matter[1] - matter[0]) / (_PLACES - 1)
        for _ in range(_CLOSER):
            best = max(tried, key=lambda row: row[0])[1]
            if np.isinf(best):
                break
            step *= 0.5
            tried += [self._tried(best - step, spots), self._tried(best + step, spots)]
        return self._free_from(max(tried, key=lambda row: row[0])[1])

    def _tried(self, wanted: float, spots: Sequence[Spot]) -> tuple[float, float]:
        """About how high W would be where it matters, and the loss."""
        points, rows = self.terrain.grid, []
        for v, (low, high) in enumerate(self._changes(wanted)):
            bound = self._changing(points <= low, points > high, self._left_roughly[v])
            rows.append(np.maximum(np.maximum.reduce(bound), 0.0)[None, :])
        values = self.terrain.estimate([self.prices[self.price]], rows)
        return sum(float(values.at(v, np.array([loss]))[0]) for v, loss in spots), wanted

    @cached_property
    def _left_roughly(self) -> list[dict[int, Floats]]:
        """`left` at the points of the estimate"""
        points = self.terrain.grid
        return [
            {k: np.interp(points, grid, left_j) for k, left_j in row.items()}
            for grid, row in zip(self.grids, self.left, strict=True)
        ]

    def _changes(self, wanted: float) -> list[Range]:
        """[version]: up to which loss lower prices count, this one or the first that will do; and from which
        loss on higher ones do."""
        rows = zip(self.grids, self.left, strict=True)
        lows = [max(wanted, _above(grid, row[self.price] < 0.0)) for grid, row in rows]
        return list(zip(lows, self._one_round_above(lows), strict=True))

    def _changing(
        self, below: NDArray[np.bool_], above: NDArray[np.bool_], left: Mapping[int, Floats]
    ) -> list[Floats]:
        """What W may be at most, by any of these, at losses below and above where prices change."""
        bound = [np.where(below, 0.0, -_NEVER)]
        for k, here in left.items():
            if self.rises(k):
                here = np.where(above, here - self.lost[k], -_NEVER)
            elif self.prices[k].per_second < self.rate:
                here = np.where(below, here, here - self.lost[k])
            bound.append(here)
        return bound

    def _free_from(self, wanted: float) -> Later:
        """Lower prices count up to this loss, or up to the first that will do."""
        points, bounds = [], []
        for v, (low, high) in enumerate(self._changes(wanted)):
            grid = self.grids[v]
            step = _NEXT * (grid[-1] - grid[0])
            more = np.array([low - step, low, high, high + step])
            more = np.union1d(grid, more[(more > grid[0]) & (more < grid[-1])])
            left = {k: np.interp(more, grid, left_j) for k, left_j in self.left[v].items()}
            bound = self._changing(more <= low - 0.5 * step, more > high + 0.5 * step, left)
            more, found = _with_crossings(more, np.array(bound))
            points.append(more)
            bounds.append(found)
        return Later(tuple(points), tuple(bounds))

    def _one_round_above(self, low: Sequence[float]) -> list[float]:
        """[version]: no round from above this loss that reaches over the border, with or without a switch
        before it, leads down to the other one of the version that it trains."""
        problem = self.phases.problem
        index, found = problem.version_index, []
        for loss, version, share in zip(low, problem.versions, self._strongest, strict=True):
            assert isinstance(version.curve, SmoothCurve)
            if share > 0.0:  # else nobody trains it then
                loss = float(version.curve.before(np.array([loss]), np.array([share]))[0])
            found.append(loss)
        above = list(found)
        for switch in problem.switches:
            source, target = index[switch.source], index[switch.target]
            above[source] = max(above[source], found[target] - switch.loss_jump)
        return [loss + 1e-9 * abs(loss) for loss in above]

    @cached_property
    def _strongest(self) -> list[float]:
        """[version]: at least the share of any round that begins in the phase and ends in the next one: who
        takes part is there in both."""
        both = zip(*self.phases.offers[self.phase : self.phase + 2], strict=True)
        return [min(_largest(one), _largest(other)) for one, other in both]


def _largest(offers: Offers | None) -> float:
    """The largest share of any round; none: nobody can train it."""
    if offers is None:
        return 0.0
    if offers.exact:
        return float(offers.share.max())
    return float(offers.share[np.isfinite(offers.tangent_j).any(axis=0)].max())


def _above(grid: Floats, where: NDArray[np.bool_]) -> float:
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
