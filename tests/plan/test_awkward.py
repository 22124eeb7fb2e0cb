"""Problems that planners get wrong, against complete enumeration, with listed and with relaxed node sets."""

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from awkward import KINDS, awkward_problem, identical_fleet
from oracle import enumerate_plans, least_energy_of_groups

from takifugu.errors import InternalError
from takifugu.plan import options
from takifugu.plan import solve as module
from takifugu.plan.fleet import Fleet
from takifugu.plan.plan import read_plan
from takifugu.plan.problem import MOST_ROUNDS, Problem
from takifugu.plan.result import Result
from takifugu.plan.solve import solve
from takifugu.plan.verify import verify

CASES = Path(__file__).parent / "cases"


def check(data: dict[str, Any], result: Result, truth: float) -> str:
    """Nothing that a result claims may contradict the least energy there is."""
    if result.status in ("infeasible", "unknown"):
        assert result.plan is None
        assert result.status == "unknown" or math.isinf(truth), f"a plan of {truth} J exists"
        return result.status
    assert result.energy_j is not None
    assert result.lower_bound_j is not None
    assert result.energy_j >= truth * (1 - 1e-9)
    assert result.lower_bound_j <= truth * (1 + 1e-9) + 1e-300
    verdict = verify(data, result.to_dict())
    assert verdict.ok, verdict.complaints
    return result.status


def check_both_ways(data: dict[str, Any], truth: float, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Solve with all node sets listed, then as if the fleet were too large for that."""
    problem, found = Problem.from_dict(data), []
    exact = solve(problem, 0.0, explain_infeasible=False)
    found.append(check(data, exact, truth))
    assert exact.status == ("infeasible" if math.isinf(truth) else "optimal")
    with monkeypatch.context() as patch:
        patch.setattr(options, "ENUMERATION_LIMIT", 0)
        found.append(check(data, solve(problem, 0.01, 20.0, explain_infeasible=False), truth))
    return found


def compare_awkward(kind: str, seeds: range, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    seen = Counter[str]()
    for seed in seeds:
        data = awkward_problem(seed, kind)
        seen.update(check_both_ways(data, enumerate_plans(data).energy, monkeypatch))
    return seen


@pytest.mark.parametrize("kind", KINDS)
def test_awkward_problems(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = compare_awkward(kind, range(8), monkeypatch)
    assert seen["optimal"] >= 4  # otherwise the generator tests nothing


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kind", KINDS)
def test_a_thousand_awkward_problems(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compare_awkward(kind, range(1000, 1200), monkeypatch)


def compare_identical(seeds: range, monkeypatch: pytest.MonkeyPatch, relaxed_too: bool) -> None:
    for seed in seeds:
        data = identical_fleet(seed)
        truth, problem = least_energy_of_groups(data), Problem.from_dict(data)
        result = solve(problem, 0.01, 60.0, explain_infeasible=False)
        check(data, result, truth)
        assert result.status != "unknown"
        if result.gap is not None:
            assert result.gap <= 0.01 + 1e-9
        if relaxed_too:
            with monkeypatch.context() as patch:
                patch.setattr(options, "ENUMERATION_LIMIT", 0)
                check(data, solve(problem, 0.01, 20.0, explain_infeasible=False), truth)


def test_fleets_of_identical_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    compare_identical(range(20), monkeypatch, relaxed_too=False)
    compare_identical(range(20, 24), monkeypatch, relaxed_too=True)


@pytest.mark.slow
@pytest.mark.timeout(14_400)
@pytest.mark.parametrize("block", range(10))
def test_a_thousand_fleets_of_identical_devices(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    compare_identical(range(1000 + 100 * block, 1100 + 100 * block), monkeypatch, relaxed_too=True)


def test_identical_nodes_are_listed_once() -> None:
    problem = Problem.from_dict(identical_fleet(2))
    fleet = Fleet.of(problem)
    groups = options.identical_nodes(fleet, 0)
    assert sum(map(len, groups)) == len(problem.nodes)
    assert len(groups) <= 3
    assert options.enumerable(fleet, 0)


@pytest.mark.parametrize("relaxed", [False, True], ids=["listed", "relaxed"])
@pytest.mark.parametrize("name", ["pis", "hourly_35", "free_energy"])
def test_cases_that_went_wrong(name: str, relaxed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if relaxed:
        monkeypatch.setattr(options, "ENUMERATION_LIMIT", 0)
    problem = Problem.load(CASES / f"{name}.toml")
    result = solve(problem, 0.01, 60.0)
    assert result.energy_j is not None
    assert result.lower_bound_j is not None
    assert verify(problem.to_dict(), result.to_dict()).ok
    if name == "hourly_35":
        known = read_plan(CASES / "hourly_35_better_plan.json")
        assert verify(problem.to_dict(), known).ok
        assert result.lower_bound_j <= known["energy_j"] * (1 + 1e-9)
        assert result.energy_j <= known["energy_j"] * (1 + 1e-9)
    if name == "free_energy":
        assert (result.status, result.energy_j) == ("optimal", 0.0)


def test_a_bound_above_a_plan_raises_and_names_the_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "ENUMERATION_LIMIT", 0)
    monkeypatch.setattr(module, "start_bound", lambda *_: 1e6)
    problem = Problem.load(CASES / "pis.toml")
    with pytest.raises(InternalError, match=problem.sha256):
        solve(problem, 0.01, 60.0)


def slow_learner(rate: float, deadline_s: float) -> Problem:
    version = {
        "name": "v",
        "train_flops_per_sample": 1.0,
        "payload_bytes": 1.0,
        "curve": {"kind": "exponential", "floor": 0.1, "rate": rate},
    }
    node = {
        "name": "n",
        "flops_per_s": 100.0,
        "joules_per_flop": 1.0,
        "up_bytes_per_s": 1.0,
        "down_bytes_per_s": 1.0,
        "latency_s": 0.0,
        "joules_per_byte": 0.0,
        "samples": 100,
    }
    target = {"loss": 1.0, "deadline_s": deadline_s}
    start = {"version": "v", "loss": 2.0}
    return Problem.from_dict(
        {"format": 1, "target": target, "start": start, "versions": [version], "nodes": [node]}
    )


def test_tens_of_thousands_of_rounds_are_planned() -> None:
    problem = slow_learner(1e-5, 1e6)
    result = solve(problem, 0.01, 60.0)
    assert result.plan is not None
    assert len(result.plan.rounds) == math.ceil(math.log(1.9 / 0.9) / 1e-5)
    assert result.gap is not None
    assert result.gap <= 1e-4
    assert verify(problem.to_dict(), result.to_dict()).ok


def test_a_deadline_for_too_few_of_many_rounds_is_said_to_bind() -> None:
    result = solve(slow_learner(1e-5, 1e5), 0.01, 60.0)
    assert result.status == "infeasible"
    assert "the deadline binds" in result.reasons[0]
    assert result.earliest_time_to_loss_s == pytest.approx(3 * 74722, rel=1e-9)
    assert result.best_loss_by_deadline == pytest.approx(0.1 + 1.9 * math.exp(-1e-5 * 33333), rel=1e-9)


def test_too_slow_a_curve_is_not_said_to_be_impossible_however_long() -> None:
    for deadline_s in (1000.0, 1e12):
        result = solve(slow_learner(1e-9, deadline_s), 0.01, 60.0)
        assert result.status == "infeasible"
        assert not any("however long" in reason for reason in result.reasons)
        assert f"at most {MOST_ROUNDS:,}" in result.reasons[0]
    below_the_floor = slow_learner(1e-9, 1000.0).to_dict()
    below_the_floor["target"]["loss"] = 0.05
    result = solve(Problem.from_dict(below_the_floor), 0.01, 60.0)
    assert "however long" in result.reasons[0]
