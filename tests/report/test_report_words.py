"""Predicted and proven beside what happened: a run below the bound is not a contradiction, and the page says so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from takifugu.report.page import page
from takifugu.report.read import read
from takifugu.report.words import headline


def change(path: Path, **values: object) -> dict[str, object]:
    data = {**json.loads(path.read_text()), **values}
    path.write_text(json.dumps(data))
    return data


@pytest.mark.parametrize("below", [True, False])
def test_a_run_is_set_against_prediction_and_bound(folder: Path, below: bool) -> None:
    plan = json.loads((folder / "plan.json").read_text())
    change(folder / "result.json", energy_j=(0.9 if below else 1.1) * plan["lower_bound_j"])
    sentences = headline(read(folder)).sentences
    predicted = next(i for i, s in enumerate(sentences) if s.startswith("Predicted, from the fitted curves"))
    proven = next(
        i for i, s in enumerate(sentences) if s.startswith("Proven, for the same predicted figures")
    )
    assert predicted < proven
    explained = [s for s in sentences if "the bound is on predicted energy" in s.lower()]
    assert len(explained) == 1
    assert ("is below that bound. This is no contradiction" in explained[0]) == below
    assert sentences.index(explained[0]) > proven


def test_a_plan_says_in_how_many_samples_it_holds_and_what_is_reserved(folder: Path) -> None:
    path = folder / "plan.json"
    before = read(path)
    assert before.problem.planned_for_s is None
    planned_s = json.loads(path.read_text())["problem"]["target"]["deadline_s"]
    reserve = {"share": 0.1, "deadline_s": 1000.0, "available": {}}
    change(path, samples={"count": 20, "reached": 7}, reserve=reserve)
    source = read(path)
    assert any(s.endswith("the plan reaches the target in 7 of 20.") for s in headline(source).sentences)
    assert (source.problem.deadline_s, source.problem.planned_for_s) == (1000.0, planned_s)
    assert "the rest is a reserve" in page(source)
