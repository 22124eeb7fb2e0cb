"""Lines below all real rounds: nodes take part as a whole, or not at all.

Relaxed rounds (`relaxation.py`) balance labels by fractions of nodes. The least of (energy - slope * share)
over sets of whole nodes, found by branch and bound, is the start of a line with that slope that no real round
lies below, whatever its share. Slopes are those that rounds of good plans have. Decision 102 has the proof.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from takifugu.plan.curves import Floats
from takifugu.plan.fleet import Crowd, Fleet
from takifugu.plan.prices import Priced
from takifugu.plan.relaxation import Offers
from takifugu.plan.rounds import charges
from takifugu.plan.values import Terrain

Ints = NDArray[np.int64]

BRANCHES, _LARGE = 100, 30_000
"""Branches that are looked at for one round time and slope (mostly five will do), and times nodes: of a large
fleet's many slopes each gets a little."""
WORK = 2_000_000
"""Branches times nodes that are looked at in all for one version: about a quarter of a second."""
_RATES = (1.0, 0.75, 1.3)
"""Round times matter that are the best ones at some of these parts of the price of time."""
_HARDLY = 0.02
"""A switch matters if it raises what is left to pay by no more than this, somewhere."""
_AROUND = 1.1
"""Slopes reach a little beyond those that rounds worth while have now."""
_CLOSE, _STRAIGHT = 1e-5, 5e-4
"""Where to stop, as a part of a round's cost: below a set that was found, and between two slopes."""


Team = tuple[tuple[int, int], ...]
"""Nodes, and the samples that each uses"""


class Line(NamedTuple):
    """A round whose slowest node takes `slowest_s` to `until_s` costs at least `start_j` and `slope` times
    its share."""

    slowest_s: float
    until_s: float
    slope: float
    start_j: float


def raised(offers: Offers | None, lines: Sequence[Line]) -> Offers | None:
    """On every interval of shares the line that starts highest: its own, or one of these. Lines of the whole
    fleet hold for a part of it, too."""
    if offers is None or not lines:
        return offers
    assert offers.slowest_s is not None
    assert offers.until_s is not None
    table = np.array(lines)
    before = np.concatenate([[0.0], offers.share[:-1]])
    left, tangent = offers.left_j.copy(), offers.tangent_j.copy()
    for row, (slowest_s, until_s) in enumerate(zip(offers.slowest_s, offers.until_s, strict=True)):
        mine = table[(table[:, 0] <= slowest_s) & (table[:, 1] >= until_s)]
        if len(mine):
            starts = mine[:, 3:] + mine[:, 2:3] * before
            best = starts.argmax(axis=0)
            start = starts[best, np.arange(len(before))]
            higher = start > left[row]
            left[row, higher] = start[higher]
            tangent[row, higher] = (mine[best, 3] + mine[best, 2] * offers.share)[higher]
    return replace(offers, left_j=left, tangent_j=tangent)


def that_matter(terrain: Terrain, priced: Priced) -> set[int]:
    """Versions that a good plan might use: from the start, by switches that cost hardly more than staying."""
    problem, estimate, price = terrain.problem, priced.values, priced.best
    found, new = set[int](), {problem.version_index[problem.start_version]}
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


class Span(NamedTuple):
    """Slopes of lines, and the price of time at which they matter."""

    low: float
    high: float
    per_second: float


def slopes_that_matter(terrain: Terrain, priced: Priced) -> dict[int, Span]:
    """[version]: the least and the most that more share is worth in rounds that a good plan might have."""
    found, grid, prices = {}, terrain.grid, priced.values.prices[priced.best]
    highest = np.searchsorted(grid, terrain.problem.start_loss * (1 + 1e-9))
    for v in sorted(that_matter(terrain, priced)):
        offers = terrain.offers[v]
        if offers is None or offers.exact or not terrain.usable[v]:
            continue
        some = charges(offers, prices)
        value, there = priced.values.value[v][priced.best], terrain.arrivals(v, some.high)
        ahead = there.ahead(value)
        with np.errstate(divide="ignore", invalid="ignore"):
            best = ((value[:, None] - ahead) / some.right)[1:highest].argmax(axis=1)
        below = np.searchsorted(some.high, 0.95 * some.high[best])
        above = np.minimum(np.searchsorted(some.high, 1.05 * some.high[best]), len(some.high) - 1)
        loss = np.arange(1, len(best) + 1)
        more = some.high[above] - some.high[below]
        worth = ahead[loss, below] - ahead[loss, above]
        clear = ~there.done[loss, above] & (more > 0.0) & (worth > 0.0)  # in the last round more is no use
        if clear.any():
            slope = worth[clear] / more[clear]
            low, high = float(slope.min()) / _AROUND, float(slope.max()) * _AROUND
            found[v] = Span(low, high, prices.per_second)
    return found


class Point(NamedTuple):
    """A real round; its cost has time priced in."""

    share: float
    cost: float


@dataclass
class WholeNodes:
    """Branch and bound for the rounds of one version."""

    fleet: Fleet
    version: int
    offers: Offers
    multipliers: Floats
    present: NDArray[np.bool_] | None = None
    branches: int = BRANCHES
    work: int = WORK
    lines: list[Line] = field(default_factory=list)
    """What was found so far"""
    shares: set[float] = field(default_factory=set)
    """Of the real rounds that lie on them"""
    teams: set[Team] = field(default_factory=set)
    """Who takes part in those"""
    _rows: dict[int, tuple[Floats, Floats, Floats, Ints, Ints]] = field(default_factory=dict, repr=False)

    @cached_property
    def crowd(self) -> tuple[Ints, Crowd]:
        return self.fleet.crowd(self.version, self.present)

    def between(self, low: float, high: float, per_second: float) -> None:
        """Lines with all the slopes between two that matter at a price of time: those of the lower hull of
        real rounds."""
        ends = [self.at(slope, per_second) for slope in (low, high)]
        spans = [(ends[0], ends[1])]
        while spans and self.work > 0:
            one, two = spans.pop()
            if two.share <= one.share or two.cost <= one.cost:
                continue
            slope = (two.cost - one.cost) / (two.share - one.share)
            third = self.at(slope, per_second)
            under = (one.cost - slope * one.share) - (third.cost - slope * third.share)
            if under > _STRAIGHT * one.cost:
                spans += [(one, third), (third, two)]

    def at(self, slope: float, per_second: float) -> Point:
        """Lines with one slope, for all round times whose rounds could be the best ones at this price of
        time; and the best round."""
        from takifugu.plan.compiled import whole_nodes

        offers, before = self.offers, np.concatenate([[0.0], self.offers.share[:-1]])
        ends = np.minimum(offers.left_j - slope * before, offers.tangent_j - slope * offers.share)
        relaxed, timed = ends.min(axis=1), per_second * offers.time_s
        best, least = Point(0.0, np.inf), np.inf
        most = min(self.branches, max(_LARGE // len(self.crowd[0]), 10))
        for row in np.argsort(relaxed + timed, kind="stable"):
            if relaxed[row] + timed[row] >= least or self.work <= 0:
                break
            cost, size, lean, slow, last = self._row(int(row))
            over_j = self.fleet.problem.overhead_j + timed[row]
            close = _CLOSE * slope * float(offers.share[ends[row].argmin()])
            start_j, found, pick, looks = whole_nodes.least_of_whole_nodes(
                cost, size, lean, slow, last, slope, self.multipliers, least - over_j, close, most
            )
            # Multipliers to start from take a twelfth of a branch each.
            self.work -= (looks + len(self.multipliers) // 12) * len(cost)
            self.lines.append(
                Line(
                    float(offers.slowest_s[row]),  # type: ignore[index]
                    float(offers.until_s[row]),  # type: ignore[index]
                    slope,
                    start_j + self.fleet.problem.overhead_j,
                )
            )
            if found + over_j < least:
                joules = float(cost[np.arange(len(cost)), pick].sum())
                least, best = found + over_j, Point((joules - found) / slope, joules + over_j)
                team = self._team(int(row), pick)
        self.shares.add(best.share)
        if np.isfinite(least):
            self.teams.add(team)
        return best

    def _team(self, row: int, pick: Ints) -> Team:
        """Who takes part in a round time, with how many samples."""
        (who, crowd), there = self.crowd, np.flatnonzero(self._last(row))
        members = np.flatnonzero(pick)
        samples = crowd.levels[there[members], pick[members] - 1]
        return tuple(zip(who[there[members]].tolist(), samples.astype(int).tolist(), strict=True))

    def _last(self, row: int) -> Ints:
        """[node]: how many of its parts it can do in a round time."""
        assert self.offers.until_s is not None
        return np.asarray((self.crowd[1].level_s <= self.offers.until_s[row]).sum(axis=1))

    def _row(self, row: int) -> tuple[Floats, Floats, Floats, Ints, Ints]:
        """Of who is done in a round time: what each choice costs and gives (the first: not to take part), how
        labels lean, the first choice that makes a node the slowest of the round, and the last there is."""
        if row not in self._rows:
            (who, crowd), problem = self.crowd, self.fleet.problem
            assert self.offers.slowest_s is not None
            assert self.fleet.mix is not None
            low_s = self.offers.slowest_s[row]
            last = self._last(row)
            slow = 1 + (crowd.level_s < low_s).sum(axis=1)
            there = np.flatnonzero(last)
            idle_j = crowd.idle_w[:, None] * np.maximum(low_s - crowd.level_s, 0.0)
            joules = crowd.fixed_j[:, None] + crowd.sample_j[:, None] * crowd.levels + idle_j
            lean = 0.5 * problem.label_weight * (self.fleet.mix - self.fleet.fleet_mix)[who]
            nothing = np.zeros((len(there), 1))
            self._rows[row] = (
                np.hstack([nothing, joules[there]]),
                np.hstack([nothing, crowd.levels[there] / self.fleet.total]),
                lean[there],
                slow[there],
                last[there],
            )
        return self._rows[row]


def lines_below(
    fleet: Fleet,
    version: int,
    offers: Offers,
    multipliers: Floats,
    span: Span,
    present: NDArray[np.bool_] | None = None,
) -> WholeNodes:
    """Lines with such slopes for round times that are best at the price of time, or near it."""
    whole = WholeNodes(fleet, version, offers, multipliers, present)
    for part in _RATES if span.per_second else (1.0,):
        whole.between(span.low, span.high, part * span.per_second)
    return whole
