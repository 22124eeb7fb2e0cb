"""What `takifugu plan` prints: true of the plan that was asked for, also under uncertain curves."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from sampled import sampled_problem

from takifugu.cli import Exit, main
from takifugu.plan.plan import Plan, meets_limits
from takifugu.plan.problem import Problem
from takifugu.plan.report import explanation, summary
from takifugu.plan.robust import continued, robust_baselines, solve_robust
from takifugu.plan.samples import final_losses, reached
from takifugu.plan.sensitivity import savings
from takifugu.plan.solve import solve


@pytest.fixture(scope="module")
def problem() -> Problem:
    return Problem.from_dict(sampled_problem())


def test_a_plan_says_in_how_many_samples_it_holds(problem: Problem) -> None:
    plain, robust = solve(problem), solve_robust(problem, 1.0)
    assert plain.to_dict()["samples"] == {"count": 4, "reached": 2}
    lines = list(summary(plain))
    assert (
        "samples: the plan reaches the target in 2 of 4 samples of the fitted curves; "
        "--confidence 0.9 plans for nine in ten"
    ) in lines
    assert robust.to_dict()["samples"] == {"count": 4, "reached": 4, "confidence": 1.0}
    assert any(line.endswith("in 4 of 4 samples of the fitted curves (asked: 4)") for line in summary(robust))
    data = sampled_problem()
    for version in data["versions"]:
        del version["curve"]["samples"]
    bare = solve(Problem.from_dict(data))
    assert "samples" not in bare.to_dict()
    assert not any(line.startswith("samples") for line in summary(bare))


def test_losses_in_samples_are_those_of_the_worlds(problem: Problem) -> None:
    from takifugu.plan.plan import replay
    from takifugu.plan.robust import worlds

    plan = solve(problem).plan
    assert plan is not None
    worked = [replay(world, plan.decisions) for world in worlds(problem)]
    assert final_losses(problem, plan.decisions).tolist() == pytest.approx([w.loss for w in worked if w])


def test_sensitivity_and_baselines_share_the_confidence(problem: Problem) -> None:
    plain, robust = solve(problem), solve_robust(problem, 1.0)
    assert plain.energy_j is not None
    assert robust.energy_j is not None
    assert robust.energy_j > 1.05 * plain.energy_j
    text = list(explanation(robust))
    assert robust.plan is not None
    assert robust.plan.time_s < problem.deadline_s - 60.0
    # Neither limit binds; solved without the confidence both would seem to save the whole difference.
    assert "  one more minute: 0 J (0.00%)" in text
    assert "  one more round: 0 J (0.00%)" in text
    assert any("each repeats its last round until it reaches the loss in 4 of 4 samples" in x for x in text)
    ratios = [float(x.rsplit(" ", 1)[1][:-1]) for x in text if re.search(r" J  [0-9.]+x$", x)]
    assert len(ratios) >= 3
    assert min(ratios) >= 1.0


def test_a_cheaper_plan_within_the_limits_is_not_a_saving(problem: Problem) -> None:
    plan = solve(problem).plan
    assert plan is not None

    def holds(other: Plan) -> bool:
        return meets_limits(problem, other)

    rows = savings(problem, 2.0 * plan.energy_j, lambda _: plan, holds)
    assert [row.saved_j for row in rows] == [0.0, 0.0, 0.0]


def test_continued_baselines_hold_in_enough_samples(problem: Problem) -> None:
    found = [p for p in robust_baselines(problem, 0.75).values() if p is not None]
    assert len(found) >= 3
    for plan in found:
        assert meets_limits(problem, plan)
        assert reached(problem, plan) >= 3
    nominal = solve(problem).plan
    assert nominal is not None
    longer = continued(problem, nominal, 1.0)
    assert longer is not None
    assert longer.decisions[: len(nominal.decisions)] == nominal.decisions
    assert reached(problem, longer) == 4
    data = sampled_problem(floors=(0.19, 0.2, 0.21, 0.9))  # out of reach in one
    assert continued(Problem.from_dict(data), nominal, 1.0) is None


def test_brief_keeps_the_table_of_rounds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "problem.json"
    source.write_text(json.dumps(sampled_problem()))
    assert main(["plan", str(source), "--brief"]) == Exit.OK
    said = capsys.readouterr().out
    assert re.search(r"^rounds +version +nodes +samples +from s +to s +energy J +loss$", said, re.MULTILINE)
    assert "2 of 4 samples" in said
    assert "baselines" not in said
    assert "one more minute" not in said
