from __future__ import annotations

import json
from pathlib import Path

import pytest
from run_folder import problem_data, write_run

from takifugu.plan.plan import Decision, replay
from takifugu.plan.problem import Problem
from takifugu.report.forecast import SERVER, energy_by_node, loss_band, round_seconds
from takifugu.report.read import read_plan_file


def test_energy_of_nodes_and_server_is_the_plan_s(folder: Path) -> None:
    found = read_plan_file(folder / "plan.json")
    spent = energy_by_node(found.problem, found.plan.rounds)
    total = sum(sum(nodes.values()) for nodes in spent.values())
    assert total == pytest.approx(found.plan.energy_j, rel=1e-9)
    server = sum(nodes.get(SERVER, 0.0) for nodes in spent.values())
    assert server == pytest.approx(3.0 * len(found.plan.rounds) + 2 * 40.0)  # overheads and two switches


def test_the_slowest_member_makes_the_round(folder: Path) -> None:
    found = read_plan_file(folder / "plan.json")
    first = found.plan.rounds[0]
    assert max(round_seconds(found.problem, first).values()) + 0.5 == pytest.approx(first.time_s)


@pytest.mark.parametrize("power", [False, True])
def test_the_band_is_what_the_planner_replays_with_each_sample(tmp_path: Path, power: bool) -> None:
    """Five samples: the 5% quantile lies a fifth of the way from the least to the second."""
    data = problem_data(3, 6, samples=5)
    for version in data["versions"]:
        if power:
            drawn = [
                {"floor": 0.1 + 0.01 * i, "scale": 2.0 + i, "exponent": 0.8, "data_gain": 0.02}
                for i in range(5)
            ]
            version["curve"] = {"kind": "power", **drawn[2], "samples": drawn}
    problem = Problem.from_dict(data)
    sizes = {i: n.samples for i, n in enumerate(problem.nodes)}
    first = {i: sizes[i] for i in (0, 2)}
    decisions = [Decision(0, sizes), Decision(0, first), Decision(1, first), Decision(2, sizes)]
    paths = []
    for index in range(5):
        one = json.loads(json.dumps(data))
        for version in one["versions"]:
            drawn = version["curve"].pop("samples")
            version["curve"] = {"kind": version["curve"]["kind"], **drawn[index]}
        plan = replay(Problem.from_dict(one), decisions)
        assert plan is not None
        paths.append([2.30, *(r.loss for r in plan.rounds)])
    columns = [sorted(column) for column in zip(*paths, strict=True)]

    plan = replay(problem, decisions)
    assert plan is not None
    path = tmp_path / "plan.json"
    rounds = [r.to_dict() for r in plan.rounds]
    whole = {
        "format": "takifugu.plan/1",
        "status": "feasible",
        "rounds": rounds,
        "problem": problem.to_dict(),
    }
    path.write_text(json.dumps(whole))
    found = read_plan_file(path)
    band = loss_band(found.problem, found.plan.rounds)
    assert band is not None
    assert band.samples == 5
    assert band.low == pytest.approx([c[0] + 0.2 * (c[1] - c[0]) for c in columns], rel=1e-12)
    assert band.high == pytest.approx([c[4] - 0.2 * (c[4] - c[3]) for c in columns], rel=1e-12)


def test_without_samples_there_is_no_band(tmp_path: Path) -> None:
    found = read_plan_file(write_run(tmp_path / "run", samples=0, baselines=0) / "plan.json")
    assert loss_band(found.problem, found.plan.rounds) is None
