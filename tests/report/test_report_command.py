from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from takifugu.cli.report import report
from takifugu.errors import UsageError

app = typer.Typer()
app.command()(report)


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def test_the_page_goes_into_the_folder_unless_told_otherwise(folder: Path, tmp_path: Path) -> None:
    assert run(folder).strip() == str(folder / "report.html")
    assert (folder / "report.html").read_text().startswith("<!doctype html>")
    run(folder / "plan.json", "-o", tmp_path / "plan-page.html")
    assert "Plan report" in (tmp_path / "plan-page.html").read_text()


def test_json_says_what_the_page_says_and_writes_none(folder: Path) -> None:
    data = json.loads(run(folder, "--json"))
    result = json.loads((folder / "result.json").read_text())
    assert data["format"] == "takifugu.report/1"
    assert data["policies"][0]["energy_j"] == result["energy_j"]
    assert len(data["policies"]) == 4
    assert data["best_baseline"] in {p["policy"] for p in data["policies"][1:]}
    assert data["certificate"]["gap"] == pytest.approx(0.008)
    assert not (folder / "report.html").exists()


def test_a_place_that_cannot_be_written(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="choose another -o"):
        run(folder, "-o", tmp_path / "absent" / "page.html")
