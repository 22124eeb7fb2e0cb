"""What the rungs of a solve share, each made when it is first needed: node sets, offers, prices, limits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from takifugu.plan import families, relaxation, whole_nodes
from takifugu.plan.attendance import Attendance
from takifugu.plan.bounds import Dual, Guide, best_dual
from takifugu.plan.curves import Floats
from takifugu.plan.dominance import undominated
from takifugu.plan.fleet import Fleet
from takifugu.plan.label_prices import cheapest_rounds
from takifugu.plan.options import Options, enumerable, enumerate_options, joined, listed_options
from takifugu.plan.plan import Plan
from takifugu.plan.potentials import Ground, Landscape
from takifugu.plan.prices import around, at, search
from takifugu.plan.problem import Problem
from takifugu.plan.rounds import Prices
from takifugu.plan.values import Terrain

_CUTS, _NEAR = 2, 1.02
"""So often multipliers are made for the rounds that are cheapest so far; of the others those are kept that
matter to rounds nearly as cheap."""
_RAISES, _MANY = 2, 2000
"""So often lines below rounds of whole nodes are looked for; up to so many nodes (in a larger fleet, a part
of one is little)."""
_ALONE = 1.1
"""A node's round counts if it costs no more than this many times the least, per share."""
_HARDLY = 1e-4
"""A price of time counts if it raises the estimate by this part of it."""
_SHARPENED = 16
_CELLS = 300
_NEARLY = 8
"""So many round times per share are worth looking at."""


class Parts:
    def __init__(self, problem: Problem, check: Callable[[], None] = lambda: None) -> None:
        self.problem = problem
        self.check = check
        """Raises when time is up."""
        self.points = relaxation.SHARES
        self.lines: dict[int, list[whole_nodes.Line]] = {}
        """[version]: what no round of whole nodes lies below"""
        self.marks = np.zeros(0)
        """Shares where such lines meet, for the grid"""
        self._losses: Floats | None = None
        self.teams: dict[int, set[whole_nodes.Team]] = {}
        """[version]: real rounds on such lines"""
        self.slopes: dict[int, whole_nodes.Span] = {}
        """[version]: where they were looked for last"""

    @cached_property
    def fleet(self) -> Fleet:
        return Fleet.of(self.problem)

    @cached_property
    def versions(self) -> range:
        return range(len(self.problem.versions))

    @cached_property
    def complete(self) -> bool:
        """Whether all node sets of all versions can be listed."""
        return all(enumerable(self.fleet, v) for v in self.versions)

    @cached_property
    def all_options(self) -> list[Options | None]:
        options = [enumerate_options(self.fleet, v) for v in self.versions]
        return [o if len(o) else None for o in options]

    @cached_property
    def multipliers(self) -> Floats:
        """Prices of labels; good ones depend on the price of time, so that is looked for first, roughly."""
        picked = sorted({0, len(self.versions) // 2, len(self.versions) - 1})
        first = relaxation.label_multipliers(self.fleet, picked)
        if self.fleet.mix is None or self.complete:
            return first
        rough = self.relaxed(first)
        self.prices = search(Terrain(self.problem, rough, 100, self.check), roughly=True)
        found = relaxation.priced_multipliers(
            self.fleet, first, rough, self.prices.per_second, self.versions[::2]
        )
        for number in range(_CUTS):
            self.offers = self.relaxed(found)
            terrain = self._rough()
            self.prices = search(terrain, roughly=number + 1 < _CUTS)
            rounds = cheapest_rounds(self.problem, self.offers, around(terrain, self.prices))
            few = found
            if number == 0:  # prices settle after that: what is dropped later may be missed
                needed = [o.needed(self.prices.per_second, _NEAR) for o in self.offers if o is not None]
                few = found[np.unique(np.concatenate(needed))]
            found = relaxation.round_multipliers(self.fleet, few, rounds)
            if len(found) == len(few):
                break
        else:
            self.offers = self.relaxed(found)
        self._raise_(found)
        return found

    def _raise_(self, multipliers: Floats) -> None:
        """Offers of whole nodes for the rounds that are cheapest so far, and prices anew."""
        terrain = self._rough()
        for number in range(_RAISES if len(self.problem.nodes) <= _MANY else 0):
            marks = set[float]()
            self.slopes = whole_nodes.slopes_that_matter(terrain, at(terrain, self.prices))
            for v, span in self.slopes.items():
                self.check()
                offers = self.offers[v]
                assert offers is not None
                whole = whole_nodes.lines_below(self.fleet, v, offers, multipliers, span)
                self.lines.setdefault(v, []).extend(whole.lines)
                marks |= whole.shares
                self.teams.setdefault(v, set()).update(whole.teams)
            self.marks = np.array(sorted(marks))
            self.offers = self.relaxed(multipliers)
            terrain = self._rough()
            self.prices = self._prices_now(terrain, anew=number == 0)

    def _rough(self) -> Terrain:
        """For prices; offers change, and the losses that are looked at may stay as they are."""
        terrain = Terrain(self.problem, self.offers, 200, self.check, self._losses)
        self._losses = terrain.grid
        return terrain

    def _prices_now(self, terrain: Terrain, anew: bool) -> Prices:
        """The best prices after offers have changed: near those there were, or any. Where the cap binds, the
        top is a ridge: a search from nothing may miss what was known before."""
        near = around(terrain, self.prices)
        tops = [near.values.prices[near.best], *([search(terrain)] if anew else [])]
        free = [replace(p, per_second=0.0) for p in tops]
        heights = terrain.estimate(free + tops).from_start(self.problem)
        without, most = heights[: len(free)], float(heights.max())
        # Plans look around the price of time, at multiples of it: one that hardly counts is none.
        if without.max() >= most - _HARDLY * abs(most):
            return free[int(without.argmax())]
        return tops[int(heights[len(free) :].argmax())]

    @cached_property
    def prices(self) -> Prices:
        """The best prices of time and rounds (where labels count, their multipliers find them)."""
        found = search(self._rough())
        if self.fleet.mix is None and not self.complete and len(self.problem.nodes) <= _MANY:
            self.marks = self._alone(found)
            if len(self.marks):
                self.offers = self.relaxed(self.multipliers)
        return found

    def _alone(self, prices: Prices) -> Floats:
        """Shares of rounds of one node that are nearly as good as any: up to there, what the slowest of a
        round costs is all, and beyond it more: a bend that the grid of shares must not miss."""
        found, over = [np.zeros(0)], self.problem
        for v, offers in enumerate(self.offers):
            if offers is None:
                continue
            weights = (prices.per_second, prices.per_round, prices.energy)
            cost, share = offers.priced(*weights, convex=True)
            _, crowd = self.fleet.crowd(v)
            alone = crowd.fixed_j[:, None] + crowd.sample_j[:, None] * crowd.levels + over.overhead_j
            alone = alone + prices.per_second * (crowd.level_s + over.overhead_s) + prices.per_round
            own = crowd.levels / self.fleet.total
            found.append(own[alone / own <= _ALONE * (cost / share).min()])
        return np.unique(np.concatenate(found))

    @cached_property
    def offers(self) -> list[relaxation.Offers | None]:
        if self.complete:
            return [None if o is None else relaxation.exact_offers(o) for o in self.all_options]
        multipliers = self.multipliers  # where labels count they bring their offers with them
        known: list[relaxation.Offers | None] | None = self.__dict__.get("offers")
        return self.relaxed(multipliers) if known is None else known

    def sharpen_(self, plan: Plan | None, points: int = relaxation.SHARES) -> None:
        """Offers anew, on a grid of so many shares, round times that matter on their own, and with label
        prices that suit the plan's own rounds (those there are most of)."""
        if self.complete:
            return
        if self.fleet.mix is not None and plan is not None:
            count = Counter((d.version, tuple(sorted(d.used.items()))) for d in plan.decisions)
            rounds = [(version, dict(used)) for (version, used), _ in count.most_common(_SHARPENED)]
            self.multipliers = relaxation.used_multipliers(self.fleet, self.multipliers, rounds)
        favoured_s = self.favoured_s  # by the offers there are so far: prices need no finer ones
        self.points = points
        self.offers = self.relaxed(self.multipliers, favoured_s=favoured_s)

    def split_(self, pieces: int) -> None:
        """Offers anew where round times are merged and it matters."""
        per_second, found = self.prices.per_second, []
        for v, offers in enumerate(self.offers):
            self.check()
            if offers is not None and not offers.exact:
                offers = relaxation.split_offers(self.fleet, v, self.multipliers, offers, per_second, pieces)
            found.append(offers)
        self.offers = found

    def relaxed(
        self,
        multipliers: Floats,
        present: NDArray[np.bool_] | None = None,
        favoured_s: Sequence[Floats | None] | None = None,
        points: int | None = None,
    ) -> list[relaxation.Offers | None]:
        """[version]: relaxed rounds of everybody, or of those who are present."""
        grid, found = relaxation.share_grid(self.fleet, points or self.points, self.marks), []
        for v in self.versions:
            self.check()
            times = None if favoured_s is None else favoured_s[v]
            offers = relaxation.relaxed_offers(self.fleet, v, multipliers, grid, present, times)
            offers = whole_nodes.raised(offers, self.lines.get(v, ()))
            if offers is not None and present is not None and v in self.slopes:
                whole = whole_nodes.lines_below(self.fleet, v, offers, multipliers, self.slopes[v], present)
                offers = whole_nodes.raised(offers, whole.lines)
                self.teams.setdefault(v, set()).update(whole.teams)
            found.append(offers)
        return found

    def listed(self, version: int, present: NDArray[np.bool_]) -> Options | None:
        """Where all node sets can be listed: those of nodes that are present, without those that another
        beats. (What was dropped before fell to a set with the same windows, so that one is present, too.)"""
        options = self.all_options[version]
        if options is None:
            return None
        there = np.flatnonzero((self._members[version] <= present).all(axis=1))
        if not len(there):
            return None
        rows = (options.time_s[there], options.energy_j[there], -options.share[there])
        return options.take(there[undominated(*rows)])

    @cached_property
    def _members(self) -> list[NDArray[np.bool_]]:
        """[version][node set, node]: who is in it."""
        found = []
        for options in self.all_options:
            member = np.zeros((0 if options is None else len(options), len(self.problem.nodes)), dtype=bool)
            for row in range(len(member)):
                assert options is not None
                member[row, list(options.used(row))] = True
            found.append(member)
        return found

    @cached_property
    def ground(self) -> Ground:
        """Losses at which bounds are proven."""
        some = [o and o.sketch() for o in self.offers]
        return Ground(self.problem, Landscape.of(self.problem, some, _CELLS).grid)

    @cached_property
    def land(self) -> Landscape:
        return Landscape(self.problem, tuple(self.offers), self.ground)

    @cached_property
    def limits(self) -> Guide:
        """The least time and the fewest rounds from any state: what cannot be done at all."""
        return Guide(
            (),
            self.land.potential(Prices(per_second=1.0, energy=0.0)),
            self.land.potential(Prices(per_round=1.0, energy=0.0)),
            self.problem.time_limit,
            float(self.problem.rounds_limit),
        )

    @cached_property
    def fewest_rounds(self) -> float:
        """No plan has fewer rounds than this."""
        problem = self.problem
        start = problem.version_index[problem.start_version]
        return float(self.limits.least_rounds.at(start, np.array([problem.start_loss]))[0])

    @cached_property
    def dual(self) -> Dual:
        coarse = Landscape.of(self.problem, [o and o.sketch() for o in self.offers], 120)
        return best_dual(coarse, self.land)

    @cached_property
    def attendance(self) -> Attendance | None:
        """Who is there when; nothing if everybody always is."""
        if self.fleet.always_available:
            return None
        listed = self.listed if self.complete else None
        return Attendance(self.fleet, self.multipliers, self.favoured_s, listed)

    @cached_property
    def families(self) -> list[families.Family | None]:
        return [
            families.prefixes(self.fleet, v, self.multipliers, favoured_s=self.favoured_s[v])
            for v in self.versions
        ]

    @cached_property
    def favoured_s(self) -> list[Floats | None]:
        """[version]: round times at which some share is cheapest, or nearly so; the best ones first."""
        found: list[Floats | None] = []
        for offers in self.offers:
            if offers is None or offers.exact:
                found.append(None)
                continue
            cost = offers.tangent_j[:, ::4] + self.prices.per_second * offers.time_s[:, None]
            best = np.argsort(cost, axis=0, kind="stable")[:_NEARLY]
            # Row by row: for every share its best time, then for every share its second best, and so on.
            rows = best[np.isfinite(np.take_along_axis(cost, best, axis=0))]
            _, first = np.unique(rows, return_index=True)
            assert offers.slowest_s is not None
            found.append(offers.slowest_s[rows[np.sort(first)]])
        return found

    def family_options(self, bins: int) -> list[Options | None]:
        """A thinned family: the more bins, the more node sets. With windows, also of those who are there at
        some moments. Remembered as long as prices stay as they are."""
        prices, teams = self.prices, sum(len(x) for x in self.teams.values())
        key = (bins, prices, teams)
        if key in self._family_options:
            return self._family_options[key]
        options: list[Options | None] = []
        for version, family in enumerate(self.families):
            found = [] if family is None else [family]
            if self.attendance is not None and family is not None:
                found += self.attendance.crowds(version)
            parts = []
            for one in found:
                self.check()
                # Where time has no price, also one at which it weighs as much as energy.
                even = float(one.energy_j.mean() / max(one.time_s.mean(), 1e-12))
                times = (
                    [f * prices.per_second for f in (0.7, 1.0, 1.4, 8.0)]
                    if prices.per_second
                    else [0.0, even]
                )
                rows = families.thin(one, times, prices.per_round, bins)
                parts.append(families.family_options(self.fleet, one, rows))
            if version in self.teams and parts:
                used = np.zeros((len(self.teams[version]), len(self.problem.nodes)))
                for row, team in enumerate(sorted(self.teams[version])):
                    used[row, [node for node, _ in team]] = [samples for _, samples in team]
                parts.append(listed_options(self.fleet, version, used))
            options.append(joined(parts) if parts else None)
        self._family_options[key] = options
        return options

    @cached_property
    def _family_options(self) -> dict[tuple[int, Prices, int], list[Options | None]]:
        return {}

    def quick_options(self) -> list[Options | None]:
        """For speed alone: at each round time the sets with the most effective data."""
        found: list[Options | None] = []
        for family in self.families:
            if family is None:
                found.append(None)
                continue
            order = np.lexsort((-family.share, family.time_s))
            before = np.maximum.accumulate(np.concatenate([[-1.0], family.share[order][:-1]]))
            rows = order[family.share[order] > before]
            if not self.fleet.always_available:
                rows = np.unique(np.concatenate([rows, families.thin(family, [0.0, 1e9], 0.0, 20)]))
            found.append(families.family_options(self.fleet, family, rows))
        return found
