"""What one would do without a planner. These are our own choice of baselines, named by what they do.

Each is a function from a `Bench` (the problem with its fleet and node sets) to decisions, or nothing if it
cannot meet the limits. A new baseline is one function and one line in `BASELINES`.

A team trains with those of its members that are available (`turnout.py`) and does not wait for the others.

Whoever runs a baseline for real wants to know what it does even where it is bound to miss: on a bench with
`best_effort` it goes on until the target or the deadline, and among ways that all miss takes the lowest loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from takifugu.plan.bench import MOST_COHORTS, Bench, Teams, Walk
from takifugu.plan.curves import Floats
from takifugu.plan.fleet import Fleet, Used
from takifugu.plan.plan import Decision, Plan, meets_limits, replay
from takifugu.plan.problem import Problem


def _fixed(bench: Bench, version: int, team: Used, within_j: float = math.inf) -> Plan | None:
    return bench.until_done(lambda *_: Decision(version, team), within_j)


def _best_fixed(bench: Bench, version: int, teams: Teams | None, within_j: float = math.inf) -> Plan | None:
    """The best of the teams, each with this version to the end; all of them are followed at once, unless
    they change as nodes come and go."""
    begin = Walk(bench)
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

        def choose(_: int, now: Walk) -> Decision:
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
