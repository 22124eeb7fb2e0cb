"""A problem on the bench: what baselines share. Teams and what their rounds cost, decisions that are followed
until the target is met, the best of several ways."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property

import numpy as np

from takifugu.plan import families
from takifugu.plan.curves import Floats, step_one
from takifugu.plan.fleet import Fleet, RoundCost, Used
from takifugu.plan.plan import Decision, Plan, meets_limits, replay
from takifugu.plan.problem import Problem
from takifugu.plan.turnout import AtOnce, Muster, Turnout

MOST_ROUNDS = 2000
"""Baselines are followed for so many rounds: each of them is walked along step by step, many times."""
_SLACK = 1 + 1e-9
"""Sums of energies may differ by less than this."""
MOST_COHORTS, _WHOLE_TURNS = 4, 12
"""Nodes may take turns in so many cohorts; rounds in which two, three or four have had as many turns each."""

Way = Callable[[float], Plan | None]
"""A plan, or nothing if it takes more energy than this"""


@dataclass(frozen=True)
class Bench:
    problem: Problem
    fleet: Fleet
    best_effort: bool = False
    within_j: float = math.inf
    """Plans that take more energy than this do not count"""
    _known: dict[tuple[int, int], tuple[Used, RoundCost]] = field(default_factory=dict, repr=False)
    _all: dict[int, dict[int, int]] = field(default_factory=dict, repr=False)
    _families: dict[int, families.Family | None] = field(default_factory=dict, repr=False)
    _there: dict[tuple[int, int, int], tuple[Teams, AtOnce | None]] = field(default_factory=dict, repr=False)

    def cost(self, version: int, used: Used) -> RoundCost:
        """Of one round; the same team is rated once."""
        key = (version, id(used))
        if key not in self._known:
            self._known[key] = (used, self.fleet.round_cost(version, used))
        return self._known[key][1]

    @cached_property
    def turnout(self) -> Turnout | None:
        """Who comes; nothing if everybody always does."""
        return None if self.fleet.always_available else Turnout(self.fleet)

    def muster(self, version: int, used: Used, ready_s: float) -> Muster | None:
        """The next round of a team, as it can be held; nothing if it never can."""
        if self.turnout is not None:
            return self.turnout.of(version, used, ready_s)
        return Muster(ready_s, used, self.cost(version, used))

    @cached_property
    def rounds(self) -> int:
        return min(self.problem.rounds_limit, MOST_ROUNDS)

    def everyone(self, version: int) -> dict[int, int]:
        if version not in self._all:
            who = np.flatnonzero(self.fleet.by_version[version].can_join)
            self._all[version] = dict(zip(who.tolist(), self.fleet.samples[who].tolist(), strict=True))
        return self._all[version]

    def teams(self, version: int, most: int = 24) -> Teams | None:
        """Fixed teams to choose from: good prefixes of the fleet, and everyone."""
        if version not in self._families:
            multipliers = np.zeros((1, self._labels))
            self._families[version] = families.prefixes(self.fleet, version, multipliers)
        if (family := self._families[version]) is None:
            return None
        unit = float(family.energy_j.mean() / max(family.time_s.mean(), 1e-12))
        rows = families.thin(family, [0.0, unit, 10 * unit], 0.0, most // 3)
        if self.turnout is not None:  # each has to be followed on its own
            rows = rows[np.argsort(family.share[rows], kind="stable")]
            rows = rows[np.unique(np.linspace(0, len(rows) - 1, 5 * most).round().astype(int))]
        everyone = self.everyone(version)
        cost = self.cost(version, everyone)
        return Teams(
            np.append(family.time_s[rows], cost.time_s),
            np.append(family.energy_j[rows], cost.energy_j),
            np.append(family.share[rows], cost.share),
            cache(lambda place: family.used(int(rows[place])) if place < len(rows) else everyone),
        )

    def there(self, version: int, teams: Teams, clock_s: float) -> tuple[Floats, Floats]:
        """Shares and energies of the teams with those who are there; waiting costs infinitely much."""
        assert self.turnout is not None
        key = (version, id(teams), self.turnout.moments_over(clock_s))
        if key not in self._there:  # (this keeps the teams, so their id stays their own)
            amount = teams.amount(len(self.fleet.samples))
            self._there[key] = (teams, self.turnout.at_once(version, amount, clock_s))
        at_once = self._there[key][1]
        leaving = None if at_once is None else clock_s + at_once.time_s > at_once.until_s
        if at_once is not None and leaving is not None and not leaving.all():  # some can begin
            share, energy_j = at_once.share.copy(), at_once.energy_j.copy()
            for place in np.flatnonzero(leaving).tolist():
                held = self.muster(version, teams.used(place), clock_s)
                if held is None or held.start_s > clock_s:
                    share[place], energy_j[place] = teams.share[place], np.inf
                else:
                    share[place], energy_j[place] = held.cost.share, held.cost.energy_j
            return share, energy_j
        musters = [self.muster(version, team, clock_s) for team in teams.all()]
        first = min((m.start_s for m in musters if m is not None), default=math.inf)
        share, energy_j = teams.share.copy(), np.full(len(musters), np.inf)
        for place, muster in enumerate(musters):
            if muster is not None and muster.start_s == first:
                share[place], energy_j[place] = muster.cost.share, muster.cost.energy_j
        return share, energy_j

    @cached_property
    def _labels(self) -> int:
        return 1 if self.fleet.mix is None else self.fleet.mix.shape[1]

    def until_done(
        self, choose: Callable[[int, Walk], Decision | None], within_j: float = math.inf
    ) -> Plan | None:
        """Rounds as `choose(round, where it stands)` says until the target is met; nothing if a limit is
        broken, or if it takes more energy than what counts."""
        problem = self.problem
        state = Walk(self)
        for number in range(self.rounds):
            decision = choose(number, state)
            if decision is None or not decision.used or not state.do(decision):
                break
            if state.energy_j > within_j and not self.best_effort:
                return None
            if state.loss <= problem.loss_limit:
                plan = replay(problem, state.decisions, self.fleet)
                if plan is not None and meets_limits(problem, plan):
                    return plan
                break
            if state.stuck and (not self.best_effort or (number + 1) % _WHOLE_TURNS == 0):
                break
        return self._as_far_as_it_goes(state.decisions) if self.best_effort else None

    def best(self, ways: Iterable[Way], within_j: float = math.inf) -> Plan | None:
        """Each is followed only as long as it takes no more energy than the best so far."""
        best: Plan | None = None
        for way in ways:
            plan = way(within_j if best is None else min(within_j, best.energy_j * _SLACK))
            if plan is not None and (best is None or self.rank(plan) < self.rank(best)):
                best = plan
        return best

    def rank(self, plan: Plan) -> tuple[bool, float, float]:
        """What makes a plan better than another: least energy, or least loss where limits are missed."""
        missed = self.best_effort and not meets_limits(self.problem, plan)
        return missed, plan.loss if missed else plan.energy_j, plan.energy_j

    def _as_far_as_it_goes(self, decisions: Sequence[Decision]) -> Plan | None:
        """The longest beginning that can be carried out by the deadline (more rounds never end earlier)."""
        best, least, most = None, 1, len(decisions)
        while least <= most:
            middle = (least + most) // 2
            plan = replay(self.problem, decisions[:middle], self.fleet)
            if plan is not None and plan.time_s <= self.problem.time_limit:
                best, least = plan, middle + 1
            else:
                most = middle - 1
        return best


@dataclass(frozen=True)
class Teams:
    """What a round of each costs and gives. Who is in one is written down when it is asked for: of ten
    thousand nodes there are thousands of teams with thousands of members."""

    time_s: Floats
    energy_j: Floats
    share: Floats
    used: Callable[[int], dict[int, int]]
    _known: dict[str, Floats] = field(default_factory=dict, repr=False, compare=False)

    def all(self) -> Iterator[dict[int, int]]:
        return map(self.used, range(len(self.share)))

    def amount(self, nodes: int) -> Floats:
        """[team, node]: samples used"""
        if "amount" not in self._known:
            rows = np.zeros((len(self.share), nodes))
            for place, team in enumerate(self.all()):
                rows[place, list(team)] = list(team.values())
            self._known["amount"] = rows
        return self._known["amount"]


class Walk:
    """Loss and clock along decisions; the final replay is the judge."""

    def __init__(self, bench: Bench) -> None:
        problem = bench.problem
        self.problem, self.bench = problem, bench
        self.version, self.loss = problem.version_index[problem.start_version], problem.start_loss
        self.clock, self.energy_j, self.stuck = problem.start_time_s, 0.0, False
        self.decisions: list[Decision] = []
        self._switches = {
            (problem.version_index[s.source], problem.version_index[s.target]): s for s in problem.switches
        }

    def switch_to(self, version: int) -> bool:
        if version == self.version:
            return True
        switch = self._switches.get((self.version, version))
        if switch is None:
            return False
        self.loss += switch.loss_jump
        self.clock += switch.time_s
        self.energy_j += switch.energy_j
        self.version = version
        return True

    def do(self, decision: Decision) -> bool:
        before = self.loss
        if not self.switch_to(decision.version):
            return False
        muster = self.bench.muster(decision.version, decision.used, self.clock)
        if muster is None:
            return False
        self.clock = muster.start_s + muster.cost.time_s
        self.energy_j += muster.cost.energy_j
        curve = self.problem.versions[decision.version].curve
        self.loss = step_one(curve, self.loss, muster.cost.share)
        self.decisions.append(Decision(decision.version, muster.used))
        self.stuck = self.loss >= before and len(self.decisions) > 1 and not self._others_come(muster.start_s)
        return self.clock <= self.problem.time_limit

    def _others_come(self, since_s: float) -> bool:
        turnout = self.bench.turnout
        return turnout is not None and turnout.more_to_come(since_s)
