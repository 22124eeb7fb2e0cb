"""What one would do without a planner. These are our own choice of baselines, named by what they do.

Each is a function from a `Bench` (the problem with its fleet and node sets) to decisions, or nothing if it
cannot meet the limits. A new baseline is one function and one line in `BASELINES`.

Whoever runs a baseline for real wants to know what it does even where it is bound to miss: on a bench with
`best_effort` it goes on until the target or the deadline, and among ways that all miss takes the lowest loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from takifugu.plan import families
from takifugu.plan.curves import step_one
from takifugu.plan.fleet import Fleet, RoundCost, Used
from takifugu.plan.plan import Decision, Plan, meets_limits, replay
from takifugu.plan.problem import Problem

_MOST_ROUNDS = 2000
_WHOLE_TURNS = 12
"""Rounds in which two, three or four cohorts have all had the same number of turns."""


@dataclass(frozen=True)
class Bench:
    problem: Problem
    fleet: Fleet
    best_effort: bool = False
    _known: dict[tuple[int, int], tuple[Used, RoundCost]] = field(default_factory=dict, repr=False)
    _all: dict[int, dict[int, int]] = field(default_factory=dict, repr=False)

    def cost(self, version: int, used: Used) -> RoundCost:
        """Of one round; the same team is rated once."""
        key = (version, id(used))
        if key not in self._known:
            self._known[key] = (used, self.fleet.round_cost(version, used))
        return self._known[key][1]

    @cached_property
    def rounds(self) -> int:
        return min(self.problem.max_rounds or _MOST_ROUNDS, _MOST_ROUNDS)

    def everyone(self, version: int) -> dict[int, int]:
        if version not in self._all:
            who = np.flatnonzero(self.fleet.by_version[version].can_join)
            self._all[version] = dict(zip(who.tolist(), self.fleet.samples[who].tolist(), strict=True))
        return self._all[version]

    def teams(self, version: int, most: int = 24) -> list[dict[int, int]]:
        """Fixed teams to choose from: everyone, and good prefixes of the fleet."""
        family = families.prefixes(self.fleet, version, np.zeros((1, self._labels)))
        if family is None:
            return []
        unit = float(family.energy_j.mean() / max(family.time_s.mean(), 1e-12))
        rows = families.thin(family, [0.0, unit, 10 * unit], 0.0, most // 3)
        return [family.used(int(r)) for r in rows] + [self.everyone(version)]

    @cached_property
    def _labels(self) -> int:
        return 1 if self.fleet.mix is None else self.fleet.mix.shape[1]

    def until_done(self, choose: Callable[[int, float], Decision | None]) -> Plan | None:
        """Rounds as `choose(round, loss)` says until the target is met; nothing if a limit is broken."""
        problem = self.problem
        state = _Walk(self)
        for number in range(self.rounds):
            decision = choose(number, state.loss)
            if decision is None or not decision.used or not state.do(decision):
                break
            if state.loss <= problem.loss_limit:
                plan = replay(problem, state.decisions, self.fleet)
                if plan is not None and meets_limits(problem, plan):
                    return plan
                break
            if state.stuck and (not self.best_effort or (number + 1) % _WHOLE_TURNS == 0):
                break
        return self._as_far_as_it_goes(state.decisions) if self.best_effort else None

    def best(self, plans: Iterable[Plan | None]) -> Plan | None:
        return min((p for p in plans if p is not None), key=self.rank, default=None)

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


class _Walk:
    """Loss and a lower estimate of the clock along decisions; the final replay is the judge."""

    def __init__(self, bench: Bench) -> None:
        problem = bench.problem
        self.problem, self.cost = problem, bench.cost
        self.version, self.loss = problem.version_index[problem.start_version], problem.start_loss
        self.clock, self.stuck = problem.start_time_s, False
        self.decisions: list[Decision] = []
        self._switches = {
            (problem.version_index[s.source], problem.version_index[s.target]): s for s in problem.switches
        }

    def do(self, decision: Decision) -> bool:
        before = self.loss
        if decision.version != self.version:
            switch = self._switches.get((self.version, decision.version))
            if switch is None:
                return False
            self.loss += switch.loss_jump
            self.clock += switch.time_s
            self.version = decision.version
        cost = self.cost(decision.version, decision.used)
        self.clock += cost.time_s
        curve = self.problem.versions[decision.version].curve
        self.loss = step_one(curve, self.loss, cost.share)
        self.decisions.append(decision)
        self.stuck = self.loss >= before and len(self.decisions) > 1
        return self.clock <= self.problem.time_limit


def _fixed(bench: Bench, version: int, team: Used) -> Plan | None:
    return bench.until_done(lambda *_: Decision(version, team))


def _start(bench: Bench) -> int:
    return bench.problem.version_index[bench.problem.start_version]


def no_compression_all_nodes(bench: Bench) -> Plan | None:
    return _fixed(bench, _start(bench), bench.everyone(_start(bench)))


def compressed_from_the_start(bench: Bench) -> Plan | None:
    versions = range(len(bench.problem.versions))
    return bench.best(_fixed(bench, v, bench.everyone(v)) for v in versions if v != _start(bench))


def fixed_warm_up(bench: Bench, rounds: int = 10) -> Plan | None:
    """A fixed number of dense rounds, then one compressed version to the end; all nodes."""
    start = _start(bench)

    def plan(version: int) -> Plan | None:
        return bench.until_done(
            lambda number, _: Decision(
                start if number < rounds else version, bench.everyone(start if number < rounds else version)
            )
        )

    return bench.best(plan(v) for v in range(len(bench.problem.versions)) if v != start)


def best_single_switch(bench: Bench) -> Plan | None:
    """The best version and moment for one switch, all nodes throughout."""
    start = _start(bench)
    longest = min(bench.rounds, 60)
    moments = sorted({*range(8), *range(8, longest, max(1, longest // 12))})

    def plan(version: int, moment: int) -> Plan | None:
        return bench.until_done(
            lambda number, _: Decision(
                start if number < moment else version, bench.everyone(start if number < moment else version)
            )
        )

    return bench.best(plan(v, m) for v in range(len(bench.problem.versions)) for m in moments)


def nodes_first(bench: Bench) -> Plan | None:
    """Nodes and data chosen for the starting version alone; then the best version for that team."""
    start = _start(bench)
    plans = [(p, t) for t in bench.teams(start) if (p := _fixed(bench, start, t)) is not None]
    if not plans:
        return None
    team = min(plans, key=lambda pair: bench.rank(pair[0]))[1]
    fits = bench.fleet.by_version

    def fitting(version: int) -> dict[int, int]:
        return {i: n for i, n in team.items() if fits[version].can_join[i]}

    teams = {v: fitting(v) for v in range(len(bench.problem.versions))}
    return bench.best(_fixed(bench, v, found) for v, found in teams.items() if found)


def versions_first(bench: Bench) -> Plan | None:
    """The version chosen with all nodes; then the best fixed team for it."""
    versions = range(len(bench.problem.versions))
    plans = [(p, v) for v in versions if (p := _fixed(bench, v, bench.everyone(v))) is not None]
    if not plans:
        return None
    version = min(plans, key=lambda pair: bench.rank(pair[0]))[1]
    return bench.best(_fixed(bench, version, team) for team in bench.teams(version))


def greedy_loss_per_joule(bench: Bench) -> Plan | None:
    """Each round what lowers the loss most per joule, staying with one version."""

    def plan(version: int) -> Plan | None:
        teams = bench.teams(version, 12)
        if not teams:
            return None
        costs = [bench.fleet.round_cost(version, t) for t in teams]
        share = np.array([c.share for c in costs])
        energy = np.array([c.energy_j for c in costs])
        curve = bench.problem.versions[version].curve

        def choose(_: int, loss: float) -> Decision:
            drop = loss - curve.step(np.full(len(share), loss), share)
            return Decision(version, teams[int(np.argmax(drop / np.maximum(energy, 1e-300)))])

        return bench.until_done(choose)

    return bench.best(plan(v) for v in range(len(bench.problem.versions)))


def least_energy_for_the_data(bench: Bench) -> Plan | None:
    """FedZero-like: a fixed model; each round the least energy for a fixed amount of data."""
    start = _start(bench)
    teams = bench.teams(start)
    costs = [bench.fleet.round_cost(start, t) for t in teams]

    def plan(need: float) -> Plan | None:
        able = [k for k, c in enumerate(costs) if c.share >= need]
        return _fixed(bench, start, teams[min(able, key=lambda k: costs[k].energy_j)]) if able else None

    return bench.best(plan(need) for need in (0.25, 0.5, 0.75, 0.9))


def rotating_cohorts(bench: Bench) -> Plan | None:
    """Cohorts of equal size that take turns, on the starting version."""
    start = _start(bench)
    who = sorted(bench.everyone(start))

    def plan(cohorts: int) -> Plan | None:
        turns = [{i: int(bench.fleet.samples[i]) for i in who[k::cohorts]} for k in range(cohorts)]
        return bench.until_done(lambda number, _: Decision(start, turns[number % cohorts]))

    return bench.best(plan(n) for n in (2, 3, 4) if n <= len(who))


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


def run_baselines(problem: Problem) -> dict[str, Plan | None]:
    """Every baseline on the problem; nothing where it misses a limit."""
    bench = Bench(problem, Fleet.of(problem))
    return {name: make(bench) for name, make in BASELINES.items()}


def best_effort(problem: Problem, name: str) -> Plan | None:
    """A baseline as one would run it; nothing only where it has no way to begin."""
    fleet = Fleet.of(problem)
    plan = BASELINES[name](Bench(problem, fleet))
    return plan if plan is not None else BASELINES[name](Bench(problem, fleet, best_effort=True))
