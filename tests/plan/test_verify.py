"""The independent evaluator: it agrees with honest plans and catches every kind of lie."""

import copy
import inspect
from typing import Any

import pytest
from generator import small_problem
from sampled import sampled_problem

import takifugu.plan.verify as verify_module
from takifugu.plan.problem import Problem
from takifugu.plan.robust import solve_robust
from takifugu.plan.solve import solve
from takifugu.plan.verify import verify


@pytest.fixture(scope="module")
def solved() -> tuple[dict[str, Any], dict[str, Any]]:
    for seed in range(50, 200):
        data = small_problem(seed, force=("parts",))
        result = solve(Problem.from_dict(data), tolerance=0.0, explain_infeasible=False)
        if result.plan is not None and len(result.plan.rounds) >= 2:
            return data, result.to_dict()
    raise AssertionError("no problem with a plan of two rounds")


def test_honest_plan(solved: tuple[dict[str, Any], dict[str, Any]]) -> None:
    verdict = verify(*solved)
    assert verdict.ok
    assert verdict.energy_j == pytest.approx(solved[1]["energy_j"])


def lies() -> dict[str, Any]:
    def first(plan: dict[str, Any]) -> Any:
        return plan["rounds"][0]

    return {
        "energy_j is given": lambda p: p.update(energy_j=p["energy_j"] * 0.99),
        "round 1: energy_j": lambda p: first(p).update(energy_j=first(p)["energy_j"] + 1),
        "round 1: loss": lambda p: first(p).update(loss=first(p)["loss"] - 0.01),
        "round 1: start_s": lambda p: first(p).update(start_s=first(p)["start_s"] - 0.5),
        "the target is": lambda p: p["rounds"].pop(),
        "there is no version 'zz'": lambda p: first(p).update(version="zz"),
        "there is no node 'zz'": lambda p: first(p).update(nodes={"zz": 1}),
        "no node takes part": lambda p: first(p).update(nodes={}),
        "cannot use": lambda p: first(p).update(nodes={next(iter(first(p)["nodes"])): 10**6}),
        "lower_bound_j": lambda p: p.update(lower_bound_j=p["energy_j"] * 2),
        "gap is given": lambda p: p.update(gap=0.5),
        "status is optimal": lambda p: p.update(status="optimal", lower_bound_j=0.9 * p["energy_j"], gap=0.1),
        "status is optimal, and the gap is 1e-07": lambda p: p.update(
            status="optimal", lower_bound_j=(1 - 1e-7) * p["energy_j"], gap=1e-7
        ),
        "is above the energy": lambda p: p.update(lower_bound_j=(1 + 1e-8) * p["energy_j"], gap=-1e-8),
        "status is within_tolerance, but": lambda p: p.update(status="within_tolerance", lower_bound_j=None),
        "status is optimal, but": lambda p: p.update(status="optimal", lower_bound_j=None, gap=None),
        "gap is given as 0.0, but": lambda p: p.update(status="feasible", lower_bound_j=None, gap=0.0),
        "status 'best' is not one of": lambda p: p.update(status="best"),
        "curves have 0 samples": lambda p: p.update(samples={"count": 4, "reached": 4}),
    }


@pytest.mark.parametrize("complaint", lies())
def test_lies_are_caught(solved: tuple[dict[str, Any], dict[str, Any]], complaint: str) -> None:
    plan = copy.deepcopy(solved[1])
    lies()[complaint](plan)
    verdict = verify(solved[0], plan)
    assert not verdict.ok
    assert any(complaint in c for c in verdict.complaints), verdict.complaints


def _first_nodes(amount: Any) -> Any:
    def change(plan: dict[str, Any]) -> None:
        row = plan["rounds"][0]
        row["nodes"] = dict.fromkeys(row["nodes"], amount)

    return change


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda p: p.update(rounds=[1]), "round 1: is 1, not a table"),
        (lambda p: p.update(rounds=[None]), "round 1: is None, not a table"),
        (lambda p: p["rounds"][0].update(version=["v0"]), "there is no version ['v0']"),
        *((_first_nodes(a), f"cannot use {a!r} of its") for a in ("1", None, [1], 0, -1, True, 10**400)),
        (lambda p: p.update(energy_j=10**400), "energy_j is given"),
        (lambda p: p.update(lower_bound_j=10**400), "lower_bound_j"),
        (lambda p: p.update(gap=10**400), "gap is given"),
    ],
)
def test_damaged_plans_are_refused_not_crashed_on(
    solved: tuple[dict[str, Any], dict[str, Any]], change: Any, complaint: str
) -> None:
    plan = copy.deepcopy(solved[1])
    change(plan)
    verdict = verify(solved[0], plan)
    assert not verdict.ok
    assert any(complaint in c for c in verdict.complaints), verdict.complaints


def test_samples_are_replayed() -> None:
    data = sampled_problem()
    plan = solve_robust(Problem.from_dict(data), 0.75, 0.05).to_dict()
    verdict = verify(data, plan)
    assert verdict.ok
    assert verdict.samples_reached == 3
    for change, complaint in (
        ({"reached": 4}, "samples.reached is given as 4, replayed 3"),
        ({"count": 3}, "samples.count is given as 3, replayed 4"),
        ({"confidence": 0.9}, "reaches the target in 3 of 4 samples, samples.confidence is given as 0.9"),
        ({"confidence": "all"}, "samples.confidence is given as 'all'"),
    ):
        verdict = verify(data, {**plan, "samples": {**plan["samples"], **change}})
        assert verdict.complaints == (complaint,) or complaint in verdict.complaints[0]
        assert not verdict.ok


def test_shares_no_code_with_the_solver() -> None:
    assert "takifugu" not in inspect.getsource(verify_module)
