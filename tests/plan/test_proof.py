"""`--verify --proof`: a bound is confirmed only if it can be proven again, and refuted by a cheaper plan."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sampled import sampled_problem

import takifugu.plan.proof as proof_module
from takifugu.cli import Exit, main
from takifugu.plan.baselines import run_baselines
from takifugu.plan.problem import Problem
from takifugu.plan.proof import prove, prove_infeasible
from takifugu.plan.result import Result
from takifugu.plan.robust import solve_robust
from takifugu.plan.solve import solve
from takifugu.plan.verify import verify

CASES = Path(__file__).parent / "cases"


@pytest.fixture(scope="module")
def problem() -> Problem:
    return Problem.from_dict(sampled_problem())


def forged(problem: Problem) -> dict[str, Any]:
    """A plan that meets the limits and is not the best, which claims that it is."""
    plans = [p for p in run_baselines(problem).values() if p is not None]
    worst = max(plans, key=lambda p: p.energy_j)
    return Result("optimal", worst, worst.energy_j, problem, "forged").to_dict()


def test_honest_bounds_are_proven_again(problem: Problem) -> None:
    for tolerance in (0.0, 0.05):
        file = solve(problem, tolerance).to_dict()
        proof = prove(problem, file, file["energy_j"])
        assert proof.ok, proof.message
        assert proof.lower_bound_j is not None
        assert proof.lower_bound_j >= file["lower_bound_j"] * (1 - 1e-9)


def test_a_forged_optimum_is_refuted(problem: Problem) -> None:
    file = forged(problem)
    assert verify(problem.to_dict(), file).ok  # replaying alone cannot tell
    proof = prove(problem, file, file["energy_j"])
    assert not proof.ok
    assert "is false: a plan with" in proof.message
    assert proof.energy_j is not None
    assert proof.energy_j < file["energy_j"]


def test_a_bound_above_what_is_proven_is_not_confirmed(problem: Problem) -> None:
    best = solve(problem, 0.0)
    file = {**forged(problem), "status": "within_tolerance"}
    assert best.energy_j is not None
    file["lower_bound_j"] = best.energy_j * (1 + 1e-6)  # just above the optimum
    assert not prove(problem, file, file["energy_j"]).ok
    file["lower_bound_j"] = best.energy_j * (1 - 1e-6)
    assert prove(problem, file, file["energy_j"]).ok
    late = prove(problem, file, file["energy_j"], time_limit_s=1e-9)
    assert not late.ok
    assert "could not be proven; what could: no plan needs less than 0 J" in late.message


def test_a_weaker_bound_confirms_nothing(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    file = solve(problem, 0.0).to_dict()
    weak = replace(solve(problem, 0.0), lower_bound_j=0.96 * file["energy_j"])
    monkeypatch.setattr(proof_module, "solve", lambda *_, **__: weak)
    proof = prove(problem, file, file["energy_j"])
    assert not proof.ok
    assert "could not be proven; what could: no plan needs less than" in proof.message
    assert proof.lower_bound_j == weak.lower_bound_j


def test_a_bound_above_a_plan_that_verifies_is_the_solvers_mistake(
    problem: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = solve(problem, 0.0).to_dict()
    wrong = replace(solve(problem, 0.0), lower_bound_j=1.01 * file["energy_j"])
    monkeypatch.setattr(proof_module, "solve", lambda *_, **__: wrong)
    proof = prove(problem, file, file["energy_j"])
    assert not proof.ok
    assert "this is a bug in the solver" in proof.message


def test_a_bound_for_a_confidence_is_proven_for_it(problem: Problem) -> None:
    file = solve_robust(problem, 0.75, 0.05).to_dict()
    assert file["samples"] == {"count": 4, "reached": 3, "confidence": 0.75}
    assert prove(problem, file, file["energy_j"]).ok
    del file["samples"]["confidence"]  # a claim about all plans, which is false
    proof = prove(problem, file, file["energy_j"])
    assert not proof.ok
    assert "is false" in proof.message


def test_infeasible_is_proven_again_or_refuted(problem: Problem) -> None:
    assert not prove_infeasible(problem).ok
    data = sampled_problem()
    data["target"]["deadline_s"] = 3.0
    assert prove_infeasible(Problem.from_dict(data)).ok


def test_the_command_says_what_it_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = tmp_path / "problem.json", tmp_path / "plan.json"
    source.write_text(json.dumps(sampled_problem()))
    assert main(["plan", str(source), "--tolerance", "0", "--brief", "-o", str(out)]) == Exit.OK
    capsys.readouterr()
    assert main(["plan", str(source), "--verify", str(out)]) == Exit.OK
    said = capsys.readouterr().out
    assert "checked by replay: each round" in said
    assert "not checked: that no plan needs less than lower_bound_j" in said
    assert main(["plan", str(source), "--verify", str(out), "--proof"]) == Exit.OK
    said = capsys.readouterr().out
    assert "proven again: no plan needs less than" in said
    assert "not checked" not in said
    out.write_text(json.dumps(forged(Problem.load(source))))
    assert main(["plan", str(source), "--verify", str(out)]) == Exit.OK
    capsys.readouterr()
    assert main(["plan", str(source), "--verify", str(out), "--proof", "--json"]) == Exit.FAILED
    verdict = json.loads(capsys.readouterr().out)
    assert (verdict["ok"], verdict["proof"]["ok"]) == (False, False)
    assert "is false: a plan with" in verdict["complaints"][-1]
    assert main(["plan", str(source), "--proof"]) == Exit.USAGE
    assert main(["plan", str(source), "--verify", str(out), "--confidence", "0.9"]) == Exit.USAGE


def test_an_infeasible_file_needs_a_proof(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = sampled_problem()
    data["target"]["deadline_s"] = 3.0
    source, out = tmp_path / "problem.json", tmp_path / "plan.json"
    source.write_text(json.dumps(data))
    assert main(["plan", str(source), "-o", str(out)]) == Exit.INFEASIBLE
    assert main(["plan", str(source), "--verify", str(out)]) == Exit.FAILED
    capsys.readouterr()
    assert main(["plan", str(source), "--verify", str(out), "--proof"]) == Exit.OK
    assert "yes: proven again: no plan meets the limits" in capsys.readouterr().out


def test_another_problem_inside_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = tmp_path / "problem.json", tmp_path / "plan.json"
    source.write_text(json.dumps(sampled_problem()))
    assert main(["plan", str(source), "--brief", "-o", str(out)]) == Exit.OK
    plan = json.loads(out.read_text())
    plan["problem"]["target"]["loss"] = 0.3
    out.write_text(json.dumps(plan))
    capsys.readouterr()
    assert main(["plan", str(source), "--verify", str(out)]) == Exit.FAILED
    assert "problem_sha256 is not that of the problem inside" in capsys.readouterr().out


def test_the_false_optimum_of_large_overheads_is_refuted(capsys: pytest.CaptureFixture[str]) -> None:
    """A solver with an invalid bound wrote this file; another plan needs 6 % less."""
    problem = str(CASES / "hourly_35.toml")
    claimed, better = CASES / "hourly_35_false_optimum.json", CASES / "hourly_35_better_plan.json"
    for path in (claimed, better):
        assert main(["plan", problem, "--verify", str(path)]) == Exit.OK
    capsys.readouterr()
    assert main(["plan", problem, "--verify", str(claimed), "--proof"]) == Exit.FAILED
    assert "is false: a plan with 0.245" in capsys.readouterr().out
    code = main(["plan", problem, "--verify", str(better), "--proof"])
    said = capsys.readouterr().out  # nothing better is known, but whether it is proven depends on the effort
    assert ("proven again" if code == Exit.OK else "could not be proven; what could") in said
