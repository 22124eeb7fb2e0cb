"""Baselines as one would run them: as planned where they can meet the limits, as far as they go where not."""

from __future__ import annotations

from generator import small_problem

from takifugu.plan.baselines import BASELINES, best_effort, run_baselines
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
