"""Baselines as one would run them: as planned where they can meet the limits, as far as they go where not."""

from __future__ import annotations

import pytest
from generator import small_problem

from takifugu.plan.baselines import BASELINES, _best_fixed, _fixed, best_effort, run_baselines
from takifugu.plan.bench import Bench
from takifugu.plan.fleet import Fleet
from takifugu.plan.problem import Problem
from takifugu.plan.verify import verify


def test_they_are_the_baselines_or_miss_the_target_and_nothing_else() -> None:
    met = missed = 0
    for seed in range(60):
        data = small_problem(seed)
        problem = Problem.from_dict(data)
        planned = run_baselines(problem)
        for name in BASELINES:
            plan = best_effort(problem, name)
            if planned[name] is not None:
                assert plan == planned[name]
                met += 1
                continue
            if plan is None:
                continue
            missed += 1
            rows = [r.to_dict() for r in plan.rounds]
            assert rows
            figures = {"energy_j": plan.energy_j, "time_s": plan.time_s, "loss": plan.loss}
            verdict = verify(problem.to_dict(), {"rounds": rows, **figures})
            # The independent replay agrees with every figure, window, switch and limit but the loss.
            assert all("loss" in c and "target" in c for c in verdict.complaints), verdict.complaints
    assert met > 100
    assert missed > 50


def test_among_ways_that_miss_the_lowest_loss_is_taken() -> None:
    """Two versions, neither reaches the target; the one with the lower floor gets further."""
    node = {"name": "n", "flops_per_s": 1e6, "joules_per_flop": 1e-6, "latency_s": 0.1, "samples": 10}
    link = {"up_bytes_per_s": 1e6, "down_bytes_per_s": 1e6, "joules_per_byte": 1e-6}
    versions = [
        {
            "name": name,
            "train_flops_per_sample": 1e5,
            "payload_bytes": 10.0,
            "curve": {"kind": "exponential", "floor": floor, "rate": 0.5},
        }
        for name, floor in (("dense", 1.0), ("cheap", 1.4), ("good", 1.2))
    ]
    versions[1]["train_flops_per_sample"] = 1e4
    problem = Problem.from_dict(
        {
            "format": 1,
            "target": {"loss": 0.5, "deadline_s": 100.0},
            "start": {"version": "dense", "loss": 2.0},
            "versions": versions,
            "switches": [{"from": "dense", "to": name} for name in ("cheap", "good")],
            "nodes": [{**node, **link}],
        }
    )
    plan = best_effort(problem, "compressed from the start, all nodes")
    assert plan is not None
    assert {r.version for r in plan.rounds} == {"good"}
    assert plan.time_s <= 100.0


def test_teams_followed_at_once_end_where_each_alone_does() -> None:
    """Labels, windows, caps, idle power and switches included: see the generator."""
    found = 0
    for seed in range(150):
        problem = Problem.from_dict(small_problem(seed))
        bench = Bench(problem, Fleet.of(problem))
        for version in range(len(problem.versions)):
            teams = bench.teams(version)
            each = [_fixed(bench, version, team) for team in (teams.all() if teams else ())]
            alone = min((p for p in each if p is not None), key=bench.rank, default=None)
            together = _best_fixed(bench, version, teams)
            assert (alone is None) == (together is None)
            if alone is not None and together is not None and alone.rounds:
                assert together.energy_j == pytest.approx(alone.energy_j, rel=1e-12)
                found += 1
    assert found > 100


def test_baselines_that_stop_at_a_limit_are_those_that_keep_it() -> None:
    kept = dropped = 0
    for seed in range(60):
        problem = Problem.from_dict(small_problem(seed))
        whole = run_baselines(problem)
        energies = sorted(p.energy_j for p in whole.values() if p is not None)
        if not energies:
            continue
        limit_j = energies[len(energies) // 2] * (1 + 1e-6)
        for name, plan in run_baselines(problem, limit_j).items():
            before = whole[name]
            if before is not None and before.energy_j <= limit_j:
                assert plan is not None
                assert plan.decisions == before.decisions
                kept += 1
            else:
                assert plan is None
                dropped += before is not None
    assert min(kept, dropped) > 20


def test_teams_cost_what_a_round_of_theirs_does() -> None:
    for seed in range(40):
        problem = Problem.from_dict(small_problem(seed))
        fleet = Fleet.of(problem)
        for version in range(len(problem.versions)):
            teams = Bench(problem, fleet).teams(version)
            if teams is None:
                continue
            for place, team in enumerate(teams.all()):
                one = fleet.round_cost(version, team)
                assert teams.used(place) == team
                assert teams.time_s[place] == pytest.approx(one.time_s, rel=1e-9)
                assert teams.energy_j[place] == pytest.approx(one.energy_j, rel=1e-9)
                assert teams.share[place] == pytest.approx(one.share, rel=1e-9, abs=1e-12)
