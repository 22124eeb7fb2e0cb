"""A reserve: earlier limits to plan for, and the real ones in the plan file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from sampled import sampled_problem

from takifugu.cli import Exit, main
from takifugu.plan.plan import Decision, replay
from takifugu.plan.problem import Problem
from takifugu.plan.solve import solve


def windowed() -> Problem:
    """The first node leaves at 30 s, the second comes twice, the third is always there."""
    problem = Problem.from_dict(sampled_problem())
    windows = (((0.0, 30.0),), ((10.0, 60.0), (100.0, 200.0)), None)
    nodes = (replace(n, available=w) for n, w in zip(problem.nodes, windows, strict=True))
    return replace(problem, nodes=tuple(nodes))


def test_windows_end_earlier_by_the_share_of_their_length() -> None:
    early = windowed().with_reserve(0.2)
    assert early.deadline_s == pytest.approx(320.0)
    assert [n.available for n in early.nodes] == [((0.0, 24.0),), ((10.0, 50.0), (100.0, 180.0)), None]
    later = replace(windowed(), start_time_s=20.0).with_reserve(0.2)  # of what is left of each
    assert [n.available for n in later.nodes] == [((0.0, 28.0),), ((10.0, 52.0), (100.0, 180.0)), None]
    over = replace(windowed(), start_time_s=70.0).with_reserve(0.2)
    assert over.nodes[0].available == ((0.0, 30.0),)


def test_a_round_at_the_end_of_a_window_has_slack() -> None:
    problem = windowed()
    plan = solve(problem.with_reserve(0.2), explain_infeasible=False).plan
    assert plan is not None
    alone = Decision(0, {0: problem.nodes[0].samples})
    once = replay(problem, [alone])
    assert once is not None
    many = int(30.0 / once.time_s)
    full = replay(problem, [alone] * many)
    assert full is not None
    assert full.time_s > 24.0  # it fits, but ends right before the node leaves
    assert replay(problem.with_reserve(0.2), [alone] * many) is None


def test_the_real_limits_come_back() -> None:
    problem = windowed()
    early = problem.with_reserve(0.2)
    assert early.without_reserve() == problem
    assert early.without_reserve().sha256 == problem.sha256
    assert early.with_reserve(0.5) == problem.with_reserve(0.5)  # not a share of what was left
    assert problem.without_reserve() is problem


def test_a_plan_file_keeps_the_real_limits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = tmp_path / "problem.json", tmp_path / "plan.json"
    source.write_text(json.dumps(windowed().to_dict()))
    assert main(["plan", str(source), "--reserve", "0.2", "--brief", "-o", str(out)]) == Exit.OK
    said = capsys.readouterr().err
    assert "planning for 320 s instead of 400 s, and for windows that end earlier" in said
    data = json.loads(out.read_text())
    assert data["reserve"] == {
        "share": 0.2,
        "deadline_s": 400.0,
        "available": {"n0": [[0.0, 30.0]], "n1": [[10.0, 60.0], [100.0, 200.0]]},
    }
    early = windowed().with_reserve(0.2)
    assert data["problem_sha256"] == early.sha256
    loaded = Problem.load(out)
    assert (loaded, loaded.reserve) == (early, early.reserve)
    # It is checked by the problem that it was made for, wherever that comes from.
    for problem in (source, out):
        assert main(["plan", str(problem), "--verify", str(out), "--proof"]) == Exit.OK
        said = capsys.readouterr()
        assert "another problem" not in said.err
    data["reserve"]["deadline_s"] = 4000.0
    out.write_text(json.dumps(data))
    assert main(["plan", str(out), "--verify", str(out)]) == Exit.USAGE
    assert "do not give the problem inside" in capsys.readouterr().err
    data["reserve"] = {"share": 2}
    out.write_text(json.dumps(data))
    assert main(["plan", str(out), "--verify", str(out)]) == Exit.USAGE
    assert "reserve.share" in capsys.readouterr().err
