"""Solving: statuses, certificates, limits, determinism, and what relaxing a limit does."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.plan_instances import instance
from generator import small_problem

import takifugu
from takifugu.errors import UsageError
from takifugu.plan import pareto
from takifugu.plan.baselines import BASELINES, run_baselines
from takifugu.plan.curves import Exponential
from takifugu.plan.explanation import ends_of_rounds, timeline
from takifugu.plan.pareto import front
from takifugu.plan.plan import Plan
from takifugu.plan.problem import Problem
from takifugu.plan.robust import share_reached, solve_robust, worlds
from takifugu.plan.solve import Solver, solve
from takifugu.plan.verify import verify


@pytest.fixture(scope="module")
def feasible() -> list[Problem]:
    found = []
    for seed in range(300, 400):
        problem = Problem.from_dict(small_problem(seed))
        result = solve(problem, 0.0, explain_infeasible=False)
        if result.plan is not None and result.plan.rounds:
            found.append(problem)
    assert len(found) >= 30
    return found


def test_public_names() -> None:
    assert takifugu.Problem is Problem
    assert takifugu.solve is solve


def test_relaxing_a_limit_never_costs_more(feasible: list[Problem]) -> None:
    for problem in feasible[:25]:
        base = solve(problem, 0.0).energy_j
        assert base is not None
        for looser in (
            replace(problem, deadline_s=problem.deadline_s * 1.2),
            replace(problem, target_loss=problem.target_loss * 1.05),
            replace(problem, start_loss=problem.start_loss * 0.97),
        ):
            energy = solve(looser, 0.0).energy_j
            assert energy is not None
            assert energy <= base * (1 + 1e-9)


def test_same_input_same_bytes(feasible: list[Problem], example: Path) -> None:
    for problem in [*feasible[:8], Problem.load(example)]:
        again = Problem.from_dict(json.loads(json.dumps(problem.to_dict())))
        texts = {json.dumps(solve(p, 0.01).to_dict()) for p in (problem, again)}
        assert len(texts) == 1


@pytest.mark.parametrize("part", [slice(0, None, 4), pytest.param(slice(None), marks=pytest.mark.slow)])
def test_sweep_alone_is_sound(feasible: list[Problem], part: slice) -> None:
    """Without enumeration: bounds hold, plans verify, and what is found is close to the optimum."""
    ratios = []
    for problem in feasible[part]:
        best = solve(problem, 0.0).energy_j
        assert best is not None
        solver = Solver(problem, 0.0, None, lambda _: None)
        solver.__dict__["complete"] = False  # as if the fleet were too large to enumerate
        result = solver.run(explain_infeasible=False)
        assert result.status != "infeasible"
        if result.plan is None:
            continue
        assert result.lower_bound_j is not None
        assert result.energy_j is not None
        assert result.lower_bound_j <= best * (1 + 1e-9)
        assert result.energy_j >= best * (1 - 1e-9)
        assert verify(problem.to_dict(), result.to_dict()).ok
        ratios.append(result.energy_j / best)
    assert len(ratios) >= 0.8 * len(feasible[part])
    assert np.median(ratios) < 1.1


def test_met_at_start() -> None:
    problem = Problem.from_dict(small_problem(1, force=("met",)))
    result = solve(replace(problem, target_loss=problem.start_loss))
    assert result.status == "optimal"
    assert result.energy_j == 0.0
    assert result.gap == 0.0
    assert result.to_dict()["rounds"] == []


def test_time_limit_gives_what_there_is(example: Path) -> None:
    result = solve(Problem.load(example), 0.0, time_limit_s=1e-6)
    assert result.status == "unknown"
    assert result.gap is None


def test_interruption_keeps_the_best_plan(example: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(self: Solver, max_labels: int) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(Solver, "_exact", stop)
    result = solve(Problem.load(example), 0.0)
    assert result.stats["interrupted"]
    assert result.status in ("feasible", "within_tolerance")
    assert verify(result.problem.to_dict(), result.to_dict()).ok


def test_waiting_is_not_shown_as_training() -> None:
    """Nodes that are away from 100 s to 900 s of 1000: the timeline has a hole there, and the table an end."""
    windows = ((0.0, 100.0), (900.0, 1000.0))
    problem = replace(_two_speeds(), deadline_s=1000.0, max_rounds=None)
    (node, _), (version,) = problem.nodes, problem.versions
    slow = replace(node, flops_per_s=1.2e9, available=windows)  # a round takes 83 s
    again = replace(problem, nodes=(slow,), versions=(replace(version, curve=Exponential(0.1, 0, 0, 0.8)),))
    plan = solve(again).plan
    assert plan is not None
    assert [row.start_s for row in plan.rounds] == [0.0, 900.0]
    first, _ = timeline(again, plan, width=10)
    assert first == "dense |=        =|"
    assert ends_of_rounds(again, plan) == pytest.approx([100 / 1.2, 900 + 100 / 1.2], rel=1e-4)


def test_wrong_tolerance(example: Path) -> None:
    with pytest.raises(UsageError, match="tolerance 2 is not between 0 and 1"):
        solve(Problem.load(example), 2.0)


def test_infeasible_says_what_would_help(example: Path) -> None:
    problem = replace(Problem.load(example), deadline_s=900.0)
    result = solve(problem)
    assert result.status == "infeasible"
    assert result.earliest_time_to_loss_s is not None
    assert result.earliest_time_to_loss_s > 900
    assert result.best_loss_by_deadline is not None
    assert result.best_loss_by_deadline > problem.target_loss
    text = "\n".join(result.reasons)
    assert "the deadline binds" in text
    assert "feasible with deadline +" in text
    # The changes that are named do help.
    later = replace(problem, deadline_s=result.earliest_time_to_loss_s)
    assert solve(later, 0.5).plan is not None
    easier = replace(problem, target_loss=result.best_loss_by_deadline)
    assert solve(easier, 0.5).plan is not None


def test_infeasible_by_rounds_and_by_loss(example: Path) -> None:
    capped = solve(replace(Problem.load(example), max_rounds=3))
    assert capped.status == "infeasible"
    assert any("the round cap binds" in r for r in capped.reasons)
    hopeless = solve(replace(Problem.load(example), target_loss=0.01))
    assert hopeless.status == "infeasible"
    assert any("the loss binds" in r for r in hopeless.reasons)


def _advised(reasons: tuple[str, ...], pattern: str) -> float:
    found = [re.search(pattern, reason) for reason in reasons]
    return next(float(m[1]) for m in found if m)


@pytest.mark.parametrize("deadline_s", [500.0, 700.0])
def test_advice_is_enough_as_it_is_printed(example: Path, deadline_s: float) -> None:
    problem = replace(Problem.load(example), deadline_s=deadline_s)
    reasons = solve(problem).reasons
    later = _advised(reasons, r"feasible with deadline .*\(([\d.]+) s\)")
    more = _advised(reasons, r"feasible with deadline \+([\d.]+) min")
    for enough in (later, deadline_s + 60 * more):
        assert solve(replace(problem, deadline_s=enough), 0.5).plan is not None
    loss = _advised(reasons, r"feasible with loss ([\d.]+)")
    assert solve(replace(problem, target_loss=loss), 0.5).plan is not None


def _two_speeds() -> Problem:
    """Many quick rounds of one node are sooner there than a few rounds of both."""
    node = {
        "joules_per_flop": 1e-11,
        "up_bytes_per_s": 1e9,
        "down_bytes_per_s": 1e9,
        "latency_s": 0.0,
        "joules_per_byte": 0.0,
    }
    return Problem.from_dict(
        {
            "format": 1,
            "target": {"loss": 0.5, "deadline_s": 1e6, "max_rounds": 2},
            "start": {"version": "dense", "loss": 2.0},
            "versions": [
                {
                    "name": "dense",
                    "train_flops_per_sample": 1e9,
                    "payload_bytes": 1e3,
                    "curve": {"kind": "exponential", "floor": 0.1, "rate": 0.5},
                }
            ],
            "nodes": [
                {"name": "quick", "flops_per_s": 1e12, "samples": 100, **node},
                {"name": "slow", "flops_per_s": 1e9, "samples": 100, **node},
            ],
        }
    )


def test_the_advised_round_cap_is_the_smallest() -> None:
    problem = _two_speeds()
    result = solve(problem)
    assert result.status == "infeasible"
    cap = int(_advised(result.reasons, r"feasible with max_rounds = (\d+)"))
    assert solve(replace(problem, max_rounds=cap)).plan is not None
    assert solve(replace(problem, max_rounds=cap - 1)).status == "infeasible"


@pytest.mark.parametrize(
    ("change", "binds"),
    [
        ({"available": ((0.0, 0.01),)}, "the windows bind"),
        ({"available": ()}, "the windows bind"),
        ({"memory_bytes": 5.0}, "the memory binds"),
    ],
)
def test_what_keeps_nodes_away_is_named(change: dict[str, Any], binds: str) -> None:
    free = replace(_two_speeds(), max_rounds=None)
    versions = tuple(replace(v, memory_bytes=10.0) for v in free.versions)
    nodes = tuple(replace(node, **change) for node in free.nodes)
    result = solve(replace(free, versions=versions, nodes=nodes))
    assert result.status == "infeasible"
    assert result.reasons[0].startswith(binds), result.reasons
    assert result.reasons[1].startswith("feasible with nodes")


def test_who_is_never_there_is_not_counted_on(example: Path) -> None:
    """Also where the fleet is too large to list its node sets."""
    problem = Problem.load(example)
    copies = tuple(
        replace(node, name=f"{node.name} {k}", available=() if k % 2 else None)
        for k in range(4)
        for node in problem.nodes
    )
    result = solve(replace(problem, nodes=copies), 0.05)
    assert result.plan is not None
    assert verify(result.problem.to_dict(), result.to_dict()).ok
    nobody = replace(problem, nodes=tuple(replace(node, available=()) for node in copies))
    assert solve(nobody).status == "infeasible"


def test_of_plans_within_the_tolerance_the_one_with_fewer_teams(monkeypatch: pytest.MonkeyPatch) -> None:
    def teams(plan: Plan | None) -> int:
        assert plan is not None
        return len({(r.version, tuple(sorted(r.nodes.items()))) for r in plan.rounds})

    simpler = 0
    for seed in (4, 13, 32):
        problem = instance(seed, nodes=8, rounds=8)
        ours = solve(problem, 0.03)
        with monkeypatch.context() as patched:
            patched.setattr(Solver, "_simplify", lambda self: None)
            cheapest = solve(problem, 0.03)
        assert ours.gap is not None
        assert ours.gap <= 0.03
        assert ours.lower_bound_j == cheapest.lower_bound_j
        assert teams(ours.plan) <= teams(cheapest.plan)
        energies = [plan.energy_j for plan in run_baselines(problem).values() if plan is not None]
        assert ours.energy_j <= min(energies) * (1 + 1e-9)
        assert verify(problem.to_dict(), ours.to_dict()).ok
        simpler += teams(ours.plan) < teams(cheapest.plan)
    assert simpler >= 2


def test_baselines_are_never_better(feasible: list[Problem], example: Path) -> None:
    seen = 0
    for problem in [*feasible[:15], Problem.load(example)]:
        best = solve(problem, 0.0 if problem.max_rounds != 120 else 0.012).energy_j
        assert best is not None
        found = run_baselines(problem)
        assert list(found) == list(BASELINES)
        for plan in found.values():
            if plan is not None:
                seen += 1
                assert plan.energy_j >= best * (1 - 1e-9)
    assert seen >= 20


def test_front_holds_the_optimum(feasible: list[Problem]) -> None:
    for problem in feasible[:10]:
        points = front(problem).points
        reached = [p for p in points if p.loss <= problem.loss_limit and p.time_s <= problem.time_limit]
        assert reached
        best = solve(problem, 0.0).energy_j
        assert best is not None
        assert min(p.energy_j for p in reached) >= best * (1 - 1e-9)
        for p in points:  # no point beats another
            assert not any(
                q is not p and q.energy_j <= p.energy_j and q.time_s <= p.time_s and q.loss <= p.loss
                for q in points
            )


def test_front_gets_to_the_target_where_the_search_gives_up(
    feasible: list[Problem], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pareto, "MOST_LABELS", 1)
    problem = next(p for p in feasible if len((solve(p).plan or Plan((), 0, 0, 0)).rounds) >= 3)
    assert any(p.loss <= problem.loss_limit and p.time_s <= problem.time_limit for p in front(problem).points)


def test_front_without_time_is_empty(example: Path) -> None:
    nodes = [replace(n, name=f"{n.name} {k}") for n in Problem.load(example).nodes for k in range(8)]
    assert front(replace(Problem.load(example), nodes=tuple(nodes)), time_limit_s=1e-6).points == ()


def test_interruption_ends_a_robust_solve(example: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = 0

    def stop(self: Solver) -> None:
        nonlocal begun
        begun += 1
        raise KeyboardInterrupt

    monkeypatch.setattr(Solver, "_ladder", stop)
    result = solve_robust(Problem.load(example), 0.9)
    assert begun == 1
    assert result.stats["interrupted"]
    assert result.status == "unknown"


def test_robust_plan_holds_on_the_curves_themselves_too(example: Path) -> None:
    problem = Problem.load(example)
    easy = [
        replace(v, curve_samples=tuple(replace(v.curve, floor=0.9 * v.curve.floor) for _ in range(4)))
        for v in problem.versions
    ]
    hopeful = replace(problem, versions=tuple(easy))
    result = solve_robust(hopeful, 0.9, 0.05)
    assert verify(hopeful.to_dict(), result.to_dict()).ok
    plain = solve(hopeful, 0.05)
    assert result.energy_j is not None
    assert plain.lower_bound_j is not None
    assert result.energy_j >= plain.lower_bound_j
    assert result.lower_bound_j == pytest.approx(plain.lower_bound_j, rel=0.05)


def test_robust_plan_holds_in_enough_samples(example: Path) -> None:
    problem = Problem.load(example)
    nominal = solve(problem, 0.02)
    assert nominal.plan is not None
    for confidence in (0.75, 1.0):
        result = solve_robust(problem, confidence, 0.05)
        assert result.plan is not None
        assert result.energy_j is not None
        assert result.lower_bound_j is not None
        assert share_reached(result.plan, worlds(problem)) >= confidence
        assert result.lower_bound_j <= result.energy_j
    assert share_reached(nominal.plan, worlds(problem)) < 1.0
    assert result.energy_j > nominal.plan.energy_j
