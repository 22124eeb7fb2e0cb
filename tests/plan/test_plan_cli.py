"""`takifugu plan`, in-process: what goes where, and with which exit code."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from takifugu.cli import Exit, main
from takifugu.plan import pareto
from takifugu.plan.problem import Problem
from takifugu.plan.solve import Solver
from takifugu.plan.sweep import Sweep


def test_plan_and_verify(example: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plan.json"
    assert main(["plan", str(example), "-o", str(out)]) == Exit.OK
    said = capsys.readouterr()
    for part in (
        "status: within_tolerance",
        "gap:",
        "why it switches",
        "one more minute",
        "baselines",
        "FedAvg-like",
    ):
        assert part in said.out
    assert "wrote" in said.err
    assert main(["plan", str(example), "--verify", str(out)]) == Exit.OK
    assert capsys.readouterr().out.startswith("yes")
    plan = json.loads(out.read_text())
    plan["rounds"][0]["nodes"] = dict(list(plan["rounds"][0]["nodes"].items())[:1])
    out.write_text(json.dumps(plan))
    assert main(["plan", str(example), "--verify", str(out)]) == Exit.FAILED
    assert capsys.readouterr().out.startswith("no")


def test_json_is_the_plan_file(example: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plan.json"
    assert main(["plan", str(example), "--json", "-o", str(out)]) == Exit.OK
    text = capsys.readouterr().out
    assert text == out.read_text()
    plan = json.loads(text)
    assert plan["format"] == "takifugu.plan/1"
    assert plan["gap"] == pytest.approx(1 - plan["lower_bound_j"] / plan["energy_j"])
    assert main(["plan", str(example), "--json"]) == Exit.OK
    assert capsys.readouterr().out == text  # byte for byte


def test_a_reserve_is_an_earlier_deadline(
    example: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, early = tmp_path / "whole.json", tmp_path / "early.json"
    assert main(["plan", str(example), "--brief", "-o", str(whole)]) == Exit.OK
    capsys.readouterr()
    assert main(["plan", str(example), "--brief", "--reserve", "0.2", "-o", str(early)]) == Exit.OK
    assert "planning for 4320 s instead of 5400 s" in capsys.readouterr().err
    free, tight = (json.loads(path.read_text()) for path in (whole, early))
    assert tight["problem"]["target"]["deadline_s"] == 4320.0
    assert tight["time_s"] <= 4320.0
    assert tight["energy_j"] >= free["lower_bound_j"]
    # What is proven is proven of the file's own problem, which any evaluator finds inside.
    assert main(["plan", str(early), "--verify", str(early)]) == Exit.OK
    for wrong in ("1", "-0.1", "nan"):
        assert main(["plan", str(example), "--reserve", wrong]) == Exit.USAGE
        assert "not a share of the time" in capsys.readouterr().err


def test_a_reserve_is_of_the_time_that_is_left(example: Path) -> None:
    problem = replace(Problem.load(example), start_time_s=1400.0)  # of 5400
    assert problem.with_reserve(0.25).deadline_s == 4400.0
    late = replace(problem, start_time_s=6000.0)
    assert late.with_reserve(0.25).deadline_s == 5400.0


def test_infeasible_is_exit_3(example: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short = tmp_path / "short.toml"
    short.write_text(example.read_text().replace("deadline_s = 5400.0", "deadline_s = 900.0"))
    assert main(["plan", str(short)]) == Exit.INFEASIBLE
    said = capsys.readouterr().out
    assert "status: infeasible" in said
    assert "feasible with deadline +" in said
    assert main(["plan", str(short), "--json"]) == Exit.INFEASIBLE
    plan = json.loads(capsys.readouterr().out)
    assert plan["best_loss_by_deadline"] > 0.55
    assert plan["reasons"]


def test_time_out_without_plan_is_exit_1(example: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(example), "--time-limit", "0.000001"]) == Exit.FAILED
    assert "status: unknown" in capsys.readouterr().out


def test_bad_files_and_usage_are_exit_2(
    example: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = tmp_path / "bad.toml"
    bad.write_text(
        example.read_text().replace("loss = 2.30", 'loss = "high"').replace("parts = 1", "parts = 0")
    )
    assert main(["plan", str(bad)]) == Exit.USAGE
    said = capsys.readouterr()
    assert said.out == ""
    assert "start.loss: must be a number, got 'high'" in said.err
    assert "data.parts: must be greater than or equal to 1, got 0" in said.err
    assert main(["plan"]) == Exit.USAGE
    assert "no problem file given" in capsys.readouterr().err
    assert main(["plan", str(example), "--verify", str(example)]) == Exit.USAGE
    assert main(["plan", str(example), "--time-limit", "-1"]) == Exit.USAGE
    assert main(["plan", str(example), "--nonsense"]) == Exit.USAGE


def test_interrupted_is_exit_130_with_the_plan_saved(
    example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(self: Solver, max_labels: int) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(Solver, "_exact", stop)
    monkeypatch.chdir(tmp_path)
    assert main(["plan", str(example), "--tolerance", "0"]) == Exit.INTERRUPTED
    saved = tmp_path / "plan.interrupted.json"
    assert main(["plan", str(example), "--verify", str(saved)]) == Exit.OK


def test_an_interrupted_front_keeps_what_it_has(
    example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    swept, real = [], Sweep.run

    def twice(sweep: Sweep) -> None:
        if swept:
            raise KeyboardInterrupt
        swept.append(sweep)
        real(sweep)

    monkeypatch.setattr(Sweep, "run", twice)
    monkeypatch.setattr(pareto, "MOST_LABELS", 1)
    out = tmp_path / "front.json"
    assert main(["plan", str(example), "--pareto", "-o", str(out)]) == Exit.INTERRUPTED
    points = json.loads(out.read_text())["points"]
    assert len(points) > 3
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + len(points)
    assert lines[-1].startswith("a subset of the front; not every plan was considered")


def test_interrupted_while_it_explains_the_plan_is_saved_too(
    example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    begun, ladder = 0, Solver._ladder

    def stop(self: Solver) -> None:
        nonlocal begun
        begun += 1
        if begun > 1:
            raise KeyboardInterrupt
        ladder(self)

    monkeypatch.setattr(Solver, "_ladder", stop)
    monkeypatch.chdir(tmp_path)
    assert main(["plan", str(example)]) == Exit.INTERRUPTED
    assert begun == 2  # the first looser limit; no other is tried after it
    assert "baselines" not in capsys.readouterr().out
    assert main(["plan", str(example), "--verify", str(tmp_path / "plan.interrupted.json")]) == Exit.OK


def test_front_schema_and_confidence(example: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--schema"]) == Exit.OK
    assert "properties" in json.loads(capsys.readouterr().out)
    assert main(["plan", str(example), "--pareto", "--json", "--time-limit", "5"]) == Exit.OK
    points = json.loads(capsys.readouterr().out)["points"]
    assert len(points) >= 10
    assert main(["plan", str(example), "--confidence", "1.0", "--tolerance", "0.05", "--brief"]) == Exit.OK
    assert "reaches the target in 4 of 4 samples of the fitted curves (asked: 4)" in capsys.readouterr().out


def test_the_verdict_as_json(example: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plan.json"
    assert main(["plan", str(example), "--brief", "-o", str(out)]) == Exit.OK
    plan = json.loads(out.read_text())
    capsys.readouterr()
    assert main(["plan", str(example), "--verify", str(out), "--json"]) == Exit.OK
    verdict = json.loads(capsys.readouterr().out)
    assert verdict["ok"] is True
    assert verdict["energy_j"] == pytest.approx(plan["energy_j"])
    for change in ({"energy_j": 1.0}, {"status": "infeasible"}):
        out.write_text(json.dumps({**plan, **change}))
        assert main(["plan", str(example), "--verify", str(out), "--json"]) == Exit.FAILED
        verdict = json.loads(capsys.readouterr().out)
        assert verdict["ok"] is False
        assert verdict["complaints"]


def test_an_output_that_cannot_be_is_told_before_planning(
    example: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Solver, "run", lambda *_: pytest.fail("it planned first"))
    for output in (tmp_path, tmp_path / "absent" / "plan.json"):
        assert main(["plan", str(example), "-o", str(output)]) == Exit.USAGE
        assert "choose another -o" in capsys.readouterr().err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_under_stdout_is_told() -> None:
    code = "from takifugu.cli import entry; entry()"
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-c", code, "plan", "--schema"],
            check=False,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert done.returncode == Exit.FAILED
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr
