"""The report reads a folder that the engine has written, not only the made-up one of run_folder.py."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import small_fleet
from run_folder import write_run

from takifugu.cli import Exit, main
from takifugu.engine.policies import slugs
from takifugu.report import units
from takifugu.report.page import page
from takifugu.report.read import read, read_run
from takifugu.report.records import PlanFile, Run
from takifugu.report.words import headline

BASELINE = next(iter(slugs()))
FAULTS = ("--dropout", "0.2", "--slowdown", "0.2", "--seed", "3")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny real run: planned, trained on the digits in a simulated fleet with faults, and one baseline."""
    folder = tmp_path_factory.mktemp("engine")
    data = small_fleet.problem_dict(target={"loss": 2.0, "max_rounds": 8})
    problem = str(small_fleet.write_problem(folder, data))
    out = folder / "run"
    assert main(["run", problem, "--out", str(out), *FAULTS]) == Exit.OK
    # Where `run --baselines`, which would run all nine, puts it.
    aside = out / "baselines" / BASELINE
    assert main(["run", problem, "--only", BASELINE, "--out", str(folder / "b"), *FAULTS]) == Exit.OK
    shutil.move(folder / "b" / "baselines" / BASELINE, aside)
    return out


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_every_figure_of_the_files_is_read(written: Path) -> None:
    run = read(written)
    assert isinstance(run, Run)
    rows, members = lines(written / "rounds.jsonl"), lines(written / "nodes.jsonl")
    result = json.loads((written / "result.json").read_text())
    assert [r.loss for r in run.rounds] == [row["loss"] for row in rows]
    assert [r.total_energy_j for r in run.rounds] == [row["total"]["energy_j"] for row in rows]
    assert [m.node for m in run.members] == [row["node"] for row in members]
    assert run.outcome is not None
    assert (run.outcome.energy_j, run.outcome.reached) == (result["energy_j"], result["reached"])
    assert run.energy_j == pytest.approx(rows[-1]["total"]["energy_j"])
    assert run.problem.sha256 == json.loads((written / "plan.json").read_text())["problem_sha256"]
    assert [baseline.name for baseline in run.baselines] == [slugs()[BASELINE]]
    assert small_fleet.structure().id in run.structures
    plan = read(written / "plan.json")
    assert isinstance(plan, PlanFile)
    assert plan.problem.sha256 == run.problem.sha256


def test_the_page_shows_them(written: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = read_run(written)
    found = page(run)
    words = headline(run)
    assert units.energy(run.energy_j) in words.title
    assert words.title in found
    for node in {row["node"] for row in lines(written / "nodes.jsonl")}:
        assert node in found
    assert slugs()[BASELINE] in found
    assert page(read(written / "plan.json")).startswith("<!doctype html>")
    assert main(["report", str(written), "--json"]) == Exit.OK
    told = json.loads(capsys.readouterr().out)
    assert told["policies"][0]["energy_j"] == json.loads((written / "result.json").read_text())["energy_j"]
    assert len(told["policies"]) == 2


def test_a_run_that_was_stopped_is_in_progress(
    written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from takifugu.train import cooperative
    from takifugu.train.round import train_round

    calls = 0

    def stopping(*arguments: Any, **more: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == sum(row["round"] == 1 for row in lines(written / "nodes.jsonl")) + 1:
            raise KeyboardInterrupt
        return train_round(*arguments, **more)

    monkeypatch.setattr(cooperative, "train_round", stopping)
    problem, out = written.parent / "problem.json", tmp_path / "run"
    assert main(["run", str(problem), "--out", str(out), *FAULTS]) == Exit.INTERRUPTED
    run = read_run(out)
    assert run.outcome is None
    assert len(run.rounds) >= 1
    assert [r.loss for r in run.rounds] == [r.loss for r in read_run(written).rounds][: len(run.rounds)]
    assert "in progress" in page(run)


@pytest.mark.parametrize("name", ["run.json", "result.json", "rounds.jsonl", "nodes.jsonl"])
def test_the_made_up_folder_has_no_field_that_the_engine_does_not_write(
    name: str, written: Path, tmp_path: Path
) -> None:
    made = write_run(tmp_path / "made", nodes=4, rounds=6, baselines=0)

    def fields(value: Any, path: str = "") -> set[str]:
        if isinstance(value, list):
            return set().union(*(fields(item, path) for item in value)) if value else set()
        if not isinstance(value, dict):
            return {path}
        if path in ("versions", "structures"):  # keyed by the versions' names
            return {path}
        return {path}.union(*(fields(item, f"{path}.{key}".lstrip(".")) for key, item in value.items()))

    ours, theirs = (
        lines(f / name) if name.endswith("l") else json.loads((f / name).read_text()) for f in (made, written)
    )
    assert fields(ours) <= fields(theirs)
