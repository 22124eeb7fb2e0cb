"""What one would do without a planner. These are our own choice of baselines, named by what they do.

Each is a function from a `Bench` (the problem with its fleet and node sets) to decisions, or nothing if it
cannot meet the limits. A new baseline is one function and one line in `BASELINES`.

Where nodes come and go, a team is whoever of it is there (`turnout.py`); nobody waits for those who are not.

Whoever runs a baseline for real wants to know what it does even where it is bound to miss: on a bench with
`best_effort` it goes on until the target or the deadline, and among ways that all miss takes the lowest loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, partial

import numpy as np
from numpy.typing import NDArray

from takifugu.plan import families
from takifugu.plan.curves import Floats, step_one
from takifugu.plan.fleet import Fleet, RoundCost, Used
from takifugu.plan.plan import Decision, Plan, meets_limits, replay
from takifugu.plan.problem import Problem
from takifugu.plan.turnout import AtOnce, Muster, Turnout

_MOST_ROUNDS = 2000
MOST_COHORTS = 4
_WHOLE_TURNS = 12
"""Rounds in which two, three or four cohorts have all had the same number of turns."""
_SLACK = 1 + 1e-9
"""Sums of energies may differ by less than this."""


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
        return min(self.problem.max_rounds or _MOST_ROUNDS, _MOST_ROUNDS)

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
        self, choose: Callable[[int, _Walk], Decision | None], within_j: float = math.inf
    ) -> Plan | None:
        """Rounds as `choose(round, where it stands)` says until the target is met; nothing if a limit is
        broken, or if it takes more energy than what counts."""
        problem = self.problem
        state = _Walk(self)
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


class _Walk:
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


def _fixed(bench: Bench, version: int, team: Used, within_j: float = math.inf) -> Plan | None:
    return bench.until_done(lambda *_: Decision(version, team), within_j)


def _best_fixed(bench: Bench, version: int, teams: Teams | None, within_j: float = math.inf) -> Plan | None:
    """The best of the teams, each with this version to the end; all of them are followed at once, unless
    they change as nodes come and go."""
    begin = _Walk(bench)
    if teams is None or not begin.switch_to(version):
        return None
    if bench.best_effort or bench.turnout is not None:
        return bench.best((partial(_fixed, bench, version, team) for team in teams.all()), within_j)
    problem = bench.problem
    rounds = _rounds_until(problem, version, begin.loss, teams.share, bench.rounds)
    ends_s, energy_j = begin.clock + rounds * teams.time_s, begin.energy_j + rounds * teams.energy_j
    in_time = (rounds > 0) & (ends_s <= problem.time_limit * (1 + 1e-9))
    for place in np.flatnonzero(in_time)[np.argsort(energy_j[in_time], kind="stable")]:
        plan = replay(problem, [Decision(version, teams.used(int(place)))] * int(rounds[place]), bench.fleet)
        if plan is not None and meets_limits(problem, plan):
            return plan if plan.energy_j <= within_j else None
    return None


def _rounds_until(problem: Problem, version: int, loss: float, share: Floats, most: int) -> NDArray[np.int64]:
    """How many rounds of each share it takes from this loss to the target; 0: more than `most`, or never."""
    curve, losses = problem.versions[version].curve, np.full(len(share), loss)
    needed = np.zeros(len(share), dtype=np.int64)
    for number in range(1, most + 1):
        before, losses = losses, curve.step(losses, share)
        needed[(needed == 0) & (losses <= problem.loss_limit)] = number
        if np.all((needed > 0) | (losses >= before)):  # there, or stuck
            break
    return needed


def _start(bench: Bench) -> int:
    return bench.problem.version_index[bench.problem.start_version]


def no_compression_all_nodes(bench: Bench) -> Plan | None:
    return _fixed(bench, _start(bench), bench.everyone(_start(bench)), bench.within_j)


def compressed_from_the_start(bench: Bench) -> Plan | None:
    versions = [v for v in range(len(bench.problem.versions)) if v != _start(bench)]
    return bench.best((partial(_fixed, bench, v, bench.everyone(v)) for v in versions), bench.within_j)


def fixed_warm_up(bench: Bench, rounds: int = 10) -> Plan | None:
    """A fixed number of dense rounds, then one compressed version to the end; all nodes."""
    start = _start(bench)

    def plan(version: int, within_j: float) -> Plan | None:
        return bench.until_done(
            lambda number, _: Decision(
                start if number < rounds else version, bench.everyone(start if number < rounds else version)
            ),
            within_j,
        )

    versions = [v for v in range(len(bench.problem.versions)) if v != start]
    return bench.best((partial(plan, v) for v in versions), bench.within_j)


def best_single_switch(bench: Bench) -> Plan | None:
    """The best version and moment for one switch, all nodes throughout."""
    start = _start(bench)
    longest = min(bench.rounds, 60)
    moments = sorted({*range(8), *range(8, longest, max(1, longest // 12))})

    def plan(version: int, moment: int, within_j: float) -> Plan | None:
        return bench.until_done(
            lambda number, _: Decision(
                start if number < moment else version, bench.everyone(start if number < moment else version)
            ),
            within_j,
        )

    versions = range(len(bench.problem.versions))
    return bench.best((partial(plan, v, m) for v in versions for m in moments), bench.within_j)


def nodes_first(bench: Bench) -> Plan | None:
    """Nodes and data chosen for the starting version alone; then the best version for that team."""
    start = _start(bench)
    first = _best_fixed(bench, start, bench.teams(start))
    if first is None or not first.decisions:
        return None
    team = {i: n for decision in first.decisions for i, n in decision.used.items()}
    fits = bench.fleet.by_version

    def fitting(version: int) -> dict[int, int]:
        return {i: n for i, n in team.items() if fits[version].can_join[i]}

    teams = {v: fitting(v) for v in range(len(bench.problem.versions))}
    ways = (partial(_fixed, bench, v, found) for v, found in teams.items() if found)
    return bench.best(ways, bench.within_j)


def versions_first(bench: Bench) -> Plan | None:
    """The version chosen with all nodes; then the best fixed team for it."""
    versions = range(len(bench.problem.versions))
    chosen = bench.best(partial(_fixed, bench, v, bench.everyone(v)) for v in versions)
    if chosen is None:
        return None
    version = chosen.decisions[-1].version if chosen.decisions else _start(bench)
    return _best_fixed(bench, version, bench.teams(version), bench.within_j)


def greedy_loss_per_joule(bench: Bench) -> Plan | None:
    """Each round what lowers the loss most per joule, staying with one version."""

    def plan(version: int, within_j: float) -> Plan | None:
        teams = bench.teams(version, 12)
        if teams is None:
            return None
        curve = bench.problem.versions[version].curve

        def choose(_: int, now: _Walk) -> Decision:
            share, energy_j = teams.share, teams.energy_j
            if bench.turnout is not None:  # what the teams are worth with those who are there
                share, energy_j = bench.there(version, teams, now.clock)
            drop = now.loss - curve.step(np.full(len(share), now.loss), share)
            return Decision(version, teams.used(int(np.argmax(drop / np.maximum(energy_j, 1e-300)))))

        return bench.until_done(choose, within_j)

    versions = range(len(bench.problem.versions))
    return bench.best((partial(plan, v) for v in versions), bench.within_j)


def least_energy_for_the_data(bench: Bench) -> Plan | None:
    """FedZero-like: a fixed model; each round the least energy for a fixed amount of data."""
    start = _start(bench)
    teams = bench.teams(start)
    if teams is None:
        return None

    def plan(need: float, within_j: float) -> Plan | None:
        able = np.flatnonzero(teams.share >= need)
        if not len(able):
            return None
        return _fixed(bench, start, teams.used(int(able[np.argmin(teams.energy_j[able])])), within_j)

    return bench.best((partial(plan, need) for need in (0.25, 0.5, 0.75, 0.9)), bench.within_j)


def rotating_cohorts(bench: Bench) -> Plan | None:
    """Cohorts of equal size that take turns, on the starting version."""
    start = _start(bench)
    who = sorted(bench.everyone(start))

    def plan(cohorts: int, within_j: float) -> Plan | None:
        turns = [{i: int(bench.fleet.samples[i]) for i in who[k::cohorts]} for k in range(cohorts)]
        return bench.until_done(lambda number, _: Decision(start, turns[number % cohorts]), within_j)

    counts = [n for n in range(2, MOST_COHORTS + 1) if n <= len(who)]
    return bench.best((partial(plan, n) for n in counts), bench.within_j)


BASELINES: dict[str, Callable[[Bench], Plan | None]] = {
    "no compression, all nodes (FedAvg-like)": no_compression_all_nodes,
    "compressed from the start, all nodes": compressed_from_the_start,
    "fixed warm-up of 10 rounds, all nodes (Pufferfish-like)": fixed_warm_up,
    "best single switch, all nodes": best_single_switch,
    "nodes and data first, then version": nodes_first,
    "version first, then nodes and data": versions_first,
    "greedy loss drop per joule": greedy_loss_per_joule,
    "least energy for the data each round (FedZero-like)": least_energy_for_the_data,
    "rotating cohorts of equal size": rotating_cohorts,
}


def run_baselines(problem: Problem, within_j: float = math.inf) -> dict[str, Plan | None]:
    """Every baseline on the problem; nothing where it misses a limit, or takes more energy than this."""
    bench = Bench(problem, Fleet.of(problem), within_j=within_j)
    return {name: make(bench) for name, make in BASELINES.items()}


def best_effort(problem: Problem, name: str) -> Plan | None:
    """A baseline as one would run it; nothing only where it has no way to begin."""
    fleet = Fleet.of(problem)
    plan = BASELINES[name](Bench(problem, fleet))
    return plan if plan is not None else BASELINES[name](Bench(problem, fleet, best_effort=True))
