"""`takifugu plan`: from a problem file to a plan with a certificate, or the proof that there is none."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from takifugu.plan.problem import Problem


INTERRUPTED = Path("plan.interrupted.json")
"""Where a plan is kept that was interrupted and has no file of its own."""


def plan(
    problem: Annotated[Path | None, typer.Argument(help="A problem file (TOML).")] = None,
    tolerance: Annotated[float, typer.Option(help="Stop when the gap is proven to be below this.")] = 0.01,
    time_limit: Annotated[float | None, typer.Option(help="Seconds; the best plan so far is kept.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the plan file (the front, the verdict) as JSON.")
    ] = False,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the plan file here.")] = None,
    verify: Annotated[Path | None, typer.Option(help="Replay this plan and say yes or no.")] = None,
    pareto: Annotated[bool, typer.Option(help="The whole front of energy, time and loss.")] = False,
    confidence: Annotated[
        float | None, typer.Option(help="Reach the loss in this share of the curves' samples.")
    ] = None,
    reserve: Annotated[
        float, typer.Option(help="Plan for an earlier deadline: this share of the time is kept back.")
    ] = 0.0,
    schema: Annotated[bool, typer.Option("--schema", help="Print the problem file's JSON schema.")] = False,
    brief: Annotated[bool, typer.Option("--brief", help="Leave sensitivity and baselines out.")] = False,
) -> int:
    """Plan how much and when to compress, and where and on which data to train, for the least energy."""
    from takifugu.errors import UsageError
    from takifugu.plan.problem import Problem

    if schema:
        from takifugu.plan.files import schema as problem_schema

        typer.echo(json.dumps(problem_schema(), indent=2))
        return 0
    if problem is None:
        raise UsageError("no problem file given; try `takifugu plan PROBLEM` or `takifugu plan --schema`")
    if time_limit is not None and not time_limit > 0:
        raise UsageError(f"--time-limit {time_limit:g} is not above 0; give seconds, or leave it out")
    loaded = Problem.load(problem)
    if reserve:
        loaded = _with_reserve(loaded, reserve)
    if output is not None and (output.is_dir() or not output.parent.is_dir()):
        # Told before the planning, which may take long.
        raise UsageError(f"{output}: is a folder, or lies in none; choose another -o")
    if verify is not None:
        return _verify(loaded, verify, as_json)
    if pareto:
        return _pareto(loaded, time_limit, as_json, output)
    return _solve(loaded, tolerance, time_limit, as_json, output, confidence, brief)


def _with_reserve(problem: Problem, share: float) -> Problem:
    """What is planned and proven is the problem with the earlier deadline; so is what the plan file holds."""
    from takifugu.errors import UsageError

    try:
        earlier = problem.with_reserve(share)
    except UsageError as error:
        raise UsageError(f"--reserve: {error}") from None
    _say(
        f"planning for {earlier.deadline_s:g} s instead of {problem.deadline_s:g} s; "
        f"`takifugu run PLAN --deadline {problem.deadline_s:g}` uses the reserve"
    )
    return earlier


def _solve(
    problem: Problem,
    tolerance: float,
    time_limit: float | None,
    as_json: bool,
    output: Path | None,
    confidence: float | None,
    brief: bool,
) -> int:
    from takifugu.cli import Exit
    from takifugu.plan.report import explanation, summary
    from takifugu.plan.robust import solve_robust
    from takifugu.plan.solve import solve

    if confidence is None:
        result = solve(problem, tolerance, time_limit, progress=_say)
    else:
        result = solve_robust(problem, confidence, tolerance, time_limit, progress=_say)
    interrupted = bool(result.stats.get("interrupted"))

    def keep(path: Path) -> None:
        _write(path, result.to_dict())
        _say(f"wrote {path}")

    if output is not None:
        keep(output)
    elif interrupted and result.plan is not None:
        keep(INTERRUPTED)
    if as_json:
        typer.echo(_text(result.to_dict()), nl=False)
    else:
        for line in summary(result):
            typer.echo(line)
        if not interrupted and result.plan is not None:
            if "share" in result.stats:
                typer.echo(f"reaches the loss in {result.stats['share'] * 100:.4g}% of the samples")
            try:
                for line in explanation(result, time_limit) if not brief else ():
                    typer.echo(line)
            except KeyboardInterrupt:
                interrupted = True
                if output is None:
                    keep(INTERRUPTED)
    if interrupted:
        return Exit.INTERRUPTED
    codes = {"infeasible": Exit.INFEASIBLE, "unknown": Exit.FAILED}
    return codes.get(result.status, Exit.OK)


def _verify(problem: Problem, path: Path, as_json: bool) -> int:
    from takifugu.cli import Exit
    from takifugu.plan.plan import read_plan
    from takifugu.plan.verify import verify

    data = read_plan(path)
    sha = data.get("problem_sha256")
    if sha is not None and sha != problem.sha256:
        _say("note: the plan was made for another problem (problem_sha256 differs)")
    if data.get("status") in ("infeasible", "unknown"):
        missing = f"the file holds no plan, its status is {data['status']}"
        typer.echo(json.dumps({"ok": False, "complaints": [missing]}) if as_json else f"no: {missing}")
        return Exit.FAILED
    verdict = verify(problem.to_dict(), data)
    if as_json:
        typer.echo(_text(asdict(verdict)), nl=False)
        return Exit.OK if verdict.ok else Exit.FAILED
    if verdict.ok:
        typer.echo(
            f"yes: {verdict.energy_j:,.6g} J, loss {verdict.loss:.6g} at {verdict.time_s:,.6g} s, as it says"
        )
        return Exit.OK
    typer.echo("no")
    for complaint in verdict.complaints[:20]:
        typer.echo(f"  - {complaint}")
    return Exit.FAILED


def _pareto(problem: Problem, time_limit: float | None, as_json: bool, output: Path | None) -> int:
    from takifugu.cli import Exit
    from takifugu.plan.pareto import front

    found = front(problem, time_limit)
    points = found.points
    data = {
        "format": "takifugu.front/1",
        "points": [p.to_dict() for p in points],
        "problem_sha256": problem.sha256,
    }
    if output is not None:
        _write(output, data)
        _say(f"wrote {output}")
    if as_json:
        typer.echo(_text(data), nl=False)
    else:
        typer.echo(f"{'energy J':>14}  {'time s':>12}  {'loss':>9}  rounds")
        for p in points:
            typer.echo(f"{p.energy_j:>14,.6g}  {p.time_s:>12,.6g}  {p.loss:>9.5f}  {p.rounds:>6}")
    if found.interrupted:
        return Exit.INTERRUPTED
    return Exit.OK if points else Exit.FAILED


def _text(data: dict[str, Any]) -> str:
    return json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def _write(path: Path, data: dict[str, Any]) -> None:
    from takifugu.errors import UsageError

    try:
        path.write_text(_text(data), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path}: cannot be written ({error.strerror}); choose another -o") from None


def _say(message: str) -> None:
    sys.stderr.write(f"{message}\n")
