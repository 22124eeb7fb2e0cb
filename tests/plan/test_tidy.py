"""Plans in an order that is easier to read: the same rounds, no limit broken, no more energy."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

from generator import small_problem

from takifugu.plan.fleet import Fleet
from takifugu.plan.plan import Decision, Plan, meets_limits, replay
from takifugu.plan.problem import Problem
from takifugu.plan.solve import solve
from takifugu.plan.tidy import _blocks, _team, tidied
from takifugu.plan.verify import verify


def back_and_forth(problem: Problem, seed: int) -> Plan | None:
    """A dozen rounds of two or three teams, in any order; nothing where windows or switches do not let them."""
    draw = random.Random(seed)
    fits = [v for v, version in enumerate(problem.versions) if version.name == problem.start_version]
    fits += [problem.version_index[s.target] for s in problem.switches if s.source == problem.start_version]
    version = draw.choice(fits)
    able = [i for i, node in enumerate(problem.nodes) if node.can_hold(problem.versions[version])]
    if not able:
        return None
    teams = [draw.sample(able, draw.randint(1, len(able))) for _ in range(draw.randint(2, 3))]
    turns = [{i: problem.nodes[i].samples for i in draw.choice(teams)} for _ in range(12)]
    return replay(problem, [Decision(version, used) for used in turns])


def test_whatever_order_a_plan_has_it_gets_no_worse() -> None:
    """Labels, windows, idle power, parts; the limits are met exactly, so that there is no room at all."""
    seen = fewer = 0
    for seed in range(400):
        problem = Problem.from_dict(small_problem(seed))
        mixed = back_and_forth(problem, seed)
        if mixed is None or not mixed.loss < problem.start_loss:
            continue
        problem = replace(problem, target_loss=mixed.loss, deadline_s=mixed.time_s, max_rounds=12)
        fleet = Fleet.of(problem)
        plan = tidied(problem, fleet, mixed, lambda: None)
        assert meets_limits(problem, plan)
        assert plan.energy_j <= mixed.energy_j * (1 + 1e-9)
        assert len(_blocks(plan.decisions)) <= len(_blocks(mixed.decisions))
        assert Counter(map(_team, plan.decisions)) <= Counter(map(_team, mixed.decisions))  # nothing new
        rows = {"rounds": [row.to_dict() for row in plan.rounds]}
        figures = {"energy_j": plan.energy_j, "time_s": plan.time_s, "loss": plan.loss}
        assert verify(problem.to_dict(), {**rows, **figures}).ok
        seen += 1
        fewer += len(_blocks(plan.decisions)) < len(_blocks(mixed.decisions))
    assert seen > 100
    assert fewer > seen / 4


def test_back_and_forth_becomes_one_after_the_other(example: Path) -> None:
    problem = replace(Problem.load(example), deadline_s=1e6, max_rounds=None)
    plan = solve(problem).plan
    assert plan is not None
    version = plan.decisions[-1].version
    fleet = Fleet.of(problem)
    everyone = {
        i: node.samples for i, node in enumerate(problem.nodes) if node.can_hold(problem.versions[version])
    }
    some = dict(list(everyone.items())[: len(everyone) // 2])
    before = [d for d in plan.decisions if d.version != version]
    mixed, rounds = None, 2
    while mixed is None or not meets_limits(problem, mixed):
        turns = [Decision(version, (everyone, some)[k % 2]) for k in range(rounds)]
        mixed, rounds = replay(problem, [*before, *turns], fleet), rounds + 1
    plan = tidied(problem, fleet, mixed, lambda: None)
    assert len(_blocks(mixed.decisions)) > 6
    assert len(_blocks(plan.decisions)) == len({_team(d) for d in mixed.decisions})
    assert plan.energy_j <= mixed.energy_j * (1 + 1e-12)
    assert len(plan.decisions[-1].used) == len(everyone)  # the most data last


def test_a_plan_that_is_in_order_stays_as_it_is(example: Path) -> None:
    problem = Problem.load(example)
    plan = solve(problem).plan
    assert plan is not None
    assert tidied(problem, Fleet.of(problem), plan, lambda: None) is plan
