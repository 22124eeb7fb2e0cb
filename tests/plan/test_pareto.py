"""The front: complete on small problems, honest about what it leaves out, and made of plans that can be run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from front_oracle import all_ends, unbeaten
from generator import small_problem
from sampled import sampled_problem

from takifugu.cli import Exit, main
from takifugu.errors import UsageError
from takifugu.plan import pareto
from takifugu.plan.pareto import front
from takifugu.plan.problem import Problem
from takifugu.plan.robust import share_reached, worlds
from takifugu.plan.verify import verify


def table(found: pareto.Front) -> np.ndarray:
    return np.array([(p.energy_j, p.time_s, p.loss) for p in found.points]).reshape(-1, 3)


def test_small_fronts_are_complete() -> None:
    many = sampled_problem()
    many["target"]["max_rounds"] = 4
    cases = {seed: small_problem(seed, most_plans=2e4) for seed in range(400, 425)} | {-1: many}
    for seed, data in cases.items():
        problem = Problem.from_dict(data)
        truth = unbeaten(all_ends(data))
        truth = truth[truth[:, 2] < problem.start_loss * (1 - 1e-12)]
        found = front(problem, most=None)
        assert found.complete
        points = table(found)
        for row in truth:  # each is there, or something that is as good
            assert (points <= row + 1e-9 * np.abs(row)).all(axis=1).any(), (seed, row)
        for row in points:
            assert not (truth < row * (1 - 1e-9)).all(axis=1).any(), (seed, row)
    assert len(points) > 60


def test_points_beyond_a_target_that_is_met_at_the_start() -> None:
    data = sampled_problem()
    data["target"] |= {"loss": 2.5, "max_rounds": 3}
    truth = unbeaten(all_ends(data))
    found = front(Problem.from_dict(data), most=None)
    assert found.complete
    assert found.points[0].rounds == 0
    assert found.points[-1].loss == pytest.approx(truth[:, 2].min())


def test_what_is_not_listed_is_counted() -> None:
    problem = Problem.from_dict(sampled_problem())
    whole, some = front(problem, most=None), front(problem, most=5)
    assert whole.complete
    assert len(whole.points) > 60
    assert not some.complete
    assert some.exhaustive
    assert len(some.points) == 5
    assert some.left_out == len(whole.points) - 5
    reached = [p for p in whole.points if p.loss <= problem.loss_limit]
    listed = table(some).tolist()
    for best in (min(reached, key=lambda p: p.energy_j), min(reached, key=lambda p: p.time_s)):
        assert [best.energy_j, best.time_s, best.loss] in listed
    assert not front(problem).complete  # by default some are left out


def test_a_large_front_keeps_within_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem.from_dict(sampled_problem())
    whole = front(problem, most=None)
    monkeypatch.setattr(pareto, "MOST_MEMBERS", 100)
    small = front(problem, most=None)
    assert sum(len(d.used) for p in small.points for d in p.decisions) <= 150
    assert small.left_out == len(whole.points) - len(small.points)
    assert not small.complete


def test_where_the_search_gives_up_quick_plans_and_lower_losses_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = Problem.from_dict(sampled_problem())
    whole = front(problem, most=None)
    monkeypatch.setattr(pareto, "MOST_LABELS", 1)
    part = front(problem, most=None)
    assert not part.exhaustive
    assert not part.complete

    def quickest(found: pareto.Front) -> float:
        return min(p.time_s for p in found.points if p.loss <= problem.loss_limit)

    assert quickest(part) <= 1.3 * quickest(whole)
    least = min(p.energy_j for p in part.points if p.loss <= problem.loss_limit)
    assert quickest(part) < 0.8 * min(p.time_s for p in part.points if p.energy_j == least)
    assert part.points[-1].loss < problem.target_loss - 0.2


def test_each_point_is_a_plan_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = tmp_path / "problem.json", tmp_path / "front.json"
    source.write_text(json.dumps(sampled_problem()))
    assert main(["plan", str(source), "--pareto", "--points", "8", "-o", str(out)]) == Exit.OK
    said = capsys.readouterr().out
    data = json.loads(out.read_text())
    assert data["format"] == "takifugu.front/1"
    assert (data["complete"], data["exhaustive"], len(data["points"])) == (False, True, 8)
    assert f"a subset of the front; 8 of {8 + data['left_out']} points that were found" in said
    for point in data["points"]:
        plan = point["plan"]
        assert verify(plan["problem"], plan).ok
        assert plan["problem"]["target"]["loss"] == point["loss"]
        assert [plan[key] for key in ("energy_j", "time_s")] == [point[key] for key in ("energy_j", "time_s")]
    path = tmp_path / "one.json"
    path.write_text(json.dumps(data["points"][3]["plan"]))
    assert main(["plan", str(path), "--verify", str(path)]) == Exit.OK
    assert main(["plan", str(source), "--pareto", "--points", "-1"]) == Exit.USAGE
    capsys.readouterr()
    assert main(["plan", str(source), "--pareto", "--points", "0"]) == Exit.OK
    assert "complete: every plan was considered" in capsys.readouterr().out


@pytest.mark.parametrize("labels", [60_000, 1])
def test_points_hold_in_the_asked_share_of_the_samples(labels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pareto, "MOST_LABELS", labels)
    data = sampled_problem()
    data["target"]["max_rounds"] = 6
    problem = Problem.from_dict(data)
    plain, found = front(problem, most=None), front(problem, most=None, confidence=0.75)
    assert not found.complete  # labels are compared on one set of curves at a time
    assert len(found.points) > 10
    lower = 0
    for point in found.points:
        wanted = replace(problem, target_loss=point.loss)
        assert share_reached(point.plan, worlds(wanted)) >= 0.75
        assert point.plan.loss <= wanted.loss_limit
        lower += point.plan.loss < point.loss * (1 - 1e-9)
        file = found.plan_file(point)
        assert verify(file["problem"], file).ok
        assert file["samples"]["confidence"] == 0.75
    assert lower > 5  # the loss of a point is not the one on the curves themselves
    # What holds in three of four samples cannot beat what the curves promise.
    both = table(plain)
    for row in table(found):
        assert (both <= row + 1e-9 * np.abs(row)).all(axis=1).any()


def test_confidence_needs_samples_and_a_share() -> None:
    data = sampled_problem()
    problem = Problem.from_dict(data)
    with pytest.raises(UsageError, match="not in"):
        front(problem, confidence=1.5)
    for version in data["versions"]:
        del version["curve"]["samples"]
    with pytest.raises(UsageError, match="needs curve samples"):
        front(Problem.from_dict(data), confidence=0.9)
