from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from run_folder import dump, write_run

from takifugu.errors import ReportError
from takifugu.report.read import read, read_run
from takifugu.report.records import PlanFile, Run


def change(path: Path, **fields: Any) -> None:
    dump(path, {**json.loads(path.read_text()), **fields})


def test_a_run_holds_what_its_files_say(folder: Path) -> None:
    run = read(folder)
    assert isinstance(run, Run)
    lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    assert [r.loss for r in run.rounds] == [line["loss"] for line in lines]
    assert [r.total_energy_j for r in run.rounds] == [line["total"]["energy_j"] for line in lines]
    assert len(run.members) == len((folder / "nodes.jsonl").read_text().splitlines())
    assert run.outcome is not None
    assert run.outcome.energy_j == json.loads((folder / "result.json").read_text())["energy_j"]
    assert run.problem.sha256 == json.loads((folder / "plan.json").read_text())["problem_sha256"]
    assert len(run.baselines) == 3
    assert len(run.structures) == 3


def test_the_best_baseline_is_the_cheapest_that_reached(folder: Path) -> None:
    run = read_run(folder)
    cheapest = min(run.baselines, key=lambda b: b.energy_j)
    assert run.best_baseline is cheapest
    path = next(p for p in (folder / "baselines").iterdir() if read_run(p).name == cheapest.name)
    change(path / "result.json", reached=False)
    again = read_run(folder).best_baseline
    assert again is not None
    assert again.name != cheapest.name


def test_a_plan_file_alone(folder: Path) -> None:
    found = read(folder / "plan.json")
    assert isinstance(found, PlanFile)
    assert found.plan.gap == pytest.approx(0.008)
    assert found.problem.target_loss == 0.42


def test_a_run_in_progress_has_no_outcome_and_may_end_in_half_a_line(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", finished=False, baselines=0)
    whole = read_run(folder)
    assert whole.outcome is None
    with (folder / "rounds.jsonl").open("a") as file:
        file.write('{"round": 5, "versi')
    with (folder / "nodes.jsonl").open("a") as file:  # members come before their round's line
        file.write(json.dumps({**member_of(folder), "round": len(whole.rounds) + 1}) + "\n")
    again = read_run(folder)
    assert again.rounds == whole.rounds
    assert again.members == whole.members


def member_of(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "nodes.jsonl").read_text().splitlines()[0]))


def test_a_run_that_has_just_begun(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", finished=False, baselines=0)
    (folder / "rounds.jsonl").unlink()
    (folder / "nodes.jsonl").unlink()
    assert read_run(folder).rounds == ()


def test_half_a_line_in_a_finished_run_is_damage(folder: Path) -> None:
    lines = (folder / "rounds.jsonl").read_text()
    (folder / "rounds.jsonl").write_text(lines + '{"round": 99, "vers')
    count = len(lines.splitlines())
    with pytest.raises(ReportError, match=rf"rounds\.jsonl, line {count + 1}: is not valid JSON"):
        read(folder)


@pytest.mark.parametrize(
    ("name", "old", "new", "says"),
    [
        ("rounds.jsonl", '"loss": ', '"lost": ', r"rounds\.jsonl, line 1: 'loss' is missing"),
        ("rounds.jsonl", '"loss": ', '"loss": "x", "l": ', r"line 1: 'loss' must be a number, is 'x'"),
        ("rounds.jsonl", '"loss": ', '"loss": NaN, "l": ', r"line 1: is not valid JSON \(NaN"),
        ("rounds.jsonl", '"round": 1,', '"round": 2,', r"line 1: 'round' is 2, expected 1"),
        (
            "rounds.jsonl",
            '"version": "dense"',
            '"version": "dens"',
            r"no version 'dens'; did you mean 'dense'",
        ),
        ("nodes.jsonl", '"energy_j": ', '"energy_j": true, "e": ', r"nodes\.jsonl, line 1: 'energy_j' must"),
        ("nodes.jsonl", "{", "[{", r"nodes\.jsonl, line 1: is not valid JSON"),
        ("result.json", '"reached": true', '"reached": 1', r"result\.json: 'reached' must be true or false"),
        ("result.json", "{", "", r"result\.json: is not valid JSON"),
        ("run.json", "takifugu.run/1", "takifugu.run/9", r"format is 'takifugu.run/9', not 'takifugu.run/1'"),
        ("problem.json", '"deadline_s"', '"dead"', r"problem\.json, 'target': 'deadline_s' is missing"),
        ("problem.json", '"flops_per_s"', '"flops"', r"nodes\[0\]: 'flops_per_s' is missing"),
        (
            "problem.json",
            '"flops_per_s": ',
            '"flops_per_s": 0, "f": ',
            r"'flops_per_s' must be above 0, is 0",
        ),
        (
            "problem.json",
            '"idle_watts": ',
            '"idle_watts": "x", "i": ',
            r"'idle_watts' must be a number",
        ),
        (
            "problem.json",
            '"flops_per_s": ',
            '"samples_per_s": 3, "flops_per_s": ',
            r"'samples_per_s' must be",
        ),
        ("problem.json", '"switches": ', '"switches": 3, "s": ', r"problem\.json: 'switches' must be a list"),
        ("plan.json", '"nodes": {', '"nodes": {}, "n": {', r"rounds\[0\], 'nodes': no node takes part"),
        ("plan.json", '"energy_j": ', f'"energy_j": {10**400}, "e": ', r"'energy_j' must be a number"),
        ("plan.json", '"start_s"', '"starts"', r"plan\.json, rounds\[0\]: 'start_s' is missing"),
    ],
)
def test_damage_is_named_by_file_and_line(folder: Path, name: str, old: str, new: str, says: str) -> None:
    path = folder / name
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(ReportError, match=says):
        read(folder)


def test_a_damaged_structure_is_named(folder: Path) -> None:
    path = sorted((folder / "structures").iterdir())[0]
    path.write_text("{}")
    with pytest.raises(ReportError, match=re.escape(path.name)):
        read(folder)


def test_what_is_neither_run_nor_plan(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match=r"there is no run\.json in it; give a folder"):
        read(tmp_path)
    with pytest.raises(ReportError, match="cannot be read"):
        read(tmp_path / "absent.json")
    dump(tmp_path / "x.json", {"format": "takifugu.front/1"})
    with pytest.raises(ReportError, match=r"format is 'takifugu\.front/1'.*takifugu plan -o"):
        read(tmp_path / "x.json")
    (tmp_path / "y.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ReportError, match="not UTF-8"):
        read(tmp_path / "y.json")


def test_an_empty_baseline_folder_has_not_begun(folder: Path) -> None:
    (folder / "baselines" / "later").mkdir()
    assert len(read_run(folder).baselines) == 3
