"""The exact solver against complete enumeration, on random problems with every feature on and off."""

import math
from collections import Counter
from typing import Any

import pytest
from generator import FEATURES, small_problem
from oracle import enumerate_plans

from takifugu.plan.problem import Problem
from takifugu.plan.solve import solve
from takifugu.plan.verify import verify


def agree(data: dict[str, Any]) -> str:
    """Solves exactly and approximately, compares with the truth, and returns the status."""
    truth = enumerate_plans(data)
    problem = Problem.from_dict(data)
    exact = solve(problem, tolerance=0.0, explain_infeasible=False)
    loose = solve(problem, tolerance=0.05, explain_infeasible=False)
    if math.isinf(truth.energy):
        assert exact.status == loose.status == "infeasible"
        assert exact.plan is None
        return exact.status
    assert exact.status == "optimal"
    assert exact.energy_j == pytest.approx(truth.energy, rel=1e-9)
    for result in (exact, loose):
        assert result.lower_bound_j is not None
        assert result.energy_j is not None
        assert result.gap is not None
        assert result.lower_bound_j <= truth.energy * (1 + 1e-9)
        assert truth.energy <= result.energy_j * (1 + 1e-9)
        verdict = verify(data, result.to_dict())
        assert verdict.ok, verdict.complaints
    assert loose.gap <= 0.05 + 1e-9
    return exact.status


@pytest.mark.parametrize("block", range(10))
def test_small_problems(block: int) -> None:
    seen = Counter(agree(small_problem(seed)) for seed in range(30 * block, 30 * block + 30))
    assert seen["optimal"] >= 8  # otherwise the generator tests nothing
    assert seen["infeasible"] >= 2


@pytest.mark.parametrize("feature", FEATURES)
def test_each_feature_alone_and_forced(feature: str) -> None:
    seen = Counter(agree(small_problem(seed, force=(feature,))) for seed in range(5000, 5008))
    assert seen["optimal"] >= 1


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("block", range(10))
def test_a_thousand_problems_up_to_ten_million_plans(block: int) -> None:
    for seed in range(100 * block, 100 * block + 100):
        agree(small_problem(100_000 + seed, most_plans=1e7))


def test_a_dominated_node_may_be_the_only_one_open() -> None:
    node = {
        "flops_per_s": 10.0,
        "joules_per_flop": 0.1,
        "up_bytes_per_s": 5.0,
        "down_bytes_per_s": 5.0,
        "latency_s": 0.1,
        "joules_per_byte": 0.1,
        "samples": 20,
    }
    worse = {**node, "name": "open", "flops_per_s": 8.0, "joules_per_flop": 0.3, "samples": 18}
    data = {
        "format": 1,
        "target": {"loss": 1.6, "deadline_s": 20.0, "max_rounds": 2},
        "start": {"version": "v0", "loss": 2.0},
        "round": {},
        "data": {},
        "versions": [
            {
                "name": "v0",
                "train_flops_per_sample": 2.0,
                "payload_bytes": 1.0,
                "curve": {"kind": "exponential", "floor": 0.2, "rate": 0.8},
            }
        ],
        "switches": [],
        "nodes": [{**node, "name": "late", "available": [[17.0, 40.0]]}, worse],
    }
    assert agree(data) == "optimal"
    plan = solve(Problem.from_dict(data), 0.0).plan
    assert plan is not None
    assert set(plan.rounds[0].nodes) == {"open"}
