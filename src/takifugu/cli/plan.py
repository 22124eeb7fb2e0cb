"""`takifugu plan`: from a problem file to a plan with a certificate, or the proof that there is none."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from takifugu.plan.pareto import Front
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
    proof: Annotated[
        bool, typer.Option("--proof", help="With --verify: also recompute the lower bound by solving.")
    ] = False,
    pareto: Annotated[bool, typer.Option(help="The front of energy, time and loss.")] = False,
    points: Annotated[int, typer.Option(help="With --pareto: list at most so many points; 0: all.")] = 60,
    confidence: Annotated[
        float | None, typer.Option(help="Reach the loss in this share of the curves' samples.")
    ] = None,
    reserve: Annotated[
        float, typer.Option(help="Plan for earlier limits: this share of the time is kept back.")
    ] = 0.0,
    schema: Annotated[bool, typer.Option("--schema", help="Print the problem file's JSON schema.")] = False,
    brief: Annotated[
        bool, typer.Option("--brief", help="Print the summary and the table of rounds only.")
    ] = False,
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
    if proof and verify is None:
        raise UsageError("--proof needs --verify PLAN; without it every plan is solved with its bound anyway")
    if verify is not None and confidence is not None:
        raise UsageError("--verify takes the confidence from the plan file; remove --confidence")
    if points < 0:
        raise UsageError(f"--points {points} is below 0; give a number of points, or 0 for all")
    loaded = Problem.load(problem)
    if reserve:
        loaded = _with_reserve(loaded, reserve)
    if output is not None and (output.is_dir() or not output.parent.is_dir()):
        # Told before the planning, which may take long.
        raise UsageError(f"{output}: is a folder, or lies in none; choose another -o")
    if verify is not None:
        return _verify(loaded, verify, as_json, proof, time_limit)
    if pareto:
        return _pareto(loaded, time_limit, as_json, output, points or None, confidence)
    return _solve(loaded, tolerance, time_limit, as_json, output, confidence, brief)


def _with_reserve(problem: Problem, share: float) -> Problem:
    """Return the problem with earlier limits, of which the bound is proven; it remembers the real ones."""
    from takifugu.errors import UsageError

    try:
        earlier = problem.with_reserve(share)
    except UsageError as error:
        raise UsageError(f"--reserve: {error}") from None
    real = problem.without_reserve()
    windows = ", and for windows that end earlier" if any(node.available for node in real.nodes) else ""
    _say(
        f"planning for {earlier.deadline_s:g} s instead of {real.deadline_s:g} s{windows}; "
        "`takifugu run PLAN` uses the reserve"
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
    from takifugu.plan.report import explanation, summary, table
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
        if brief and result.plan is not None and result.plan.rounds:
            for line in ("", *table(result)):
                typer.echo(line)
        if not interrupted and not brief and result.plan is not None:
            try:
                for line in explanation(result, time_limit):
                    typer.echo(line)
            except KeyboardInterrupt:
                interrupted = True
                if output is None:
                    keep(INTERRUPTED)
    if interrupted:
        return Exit.INTERRUPTED
    codes = {"infeasible": Exit.INFEASIBLE, "unknown": Exit.FAILED}
    return codes.get(result.status, Exit.OK)


def _verify(problem: Problem, path: Path, as_json: bool, proof: bool, time_limit: float | None) -> int:
    from takifugu.cli import Exit
    from takifugu.plan.plan import read_plan
    from takifugu.plan.proof import Proof, prove, prove_infeasible
    from takifugu.plan.verify import verify

    data = read_plan(path)
    problem, note = _as_planned(problem, data)
    if note:
        _say(f"note: {note}")
    status = data.get("status")
    again: Proof | None = None
    if status in ("infeasible", "unknown"):
        if status == "infeasible" and proof:
            again = prove_infeasible(problem, time_limit, _say)
        found: dict[str, Any] = {
            "ok": again is not None and again.ok,
            "complaints": []
            if again is not None and again.ok
            else [f"the file holds no plan, its status is {status}"],
        }
    else:
        verdict = verify(problem.to_dict(), data)
        found = asdict(verdict)
        if not _is_of(data.get("problem"), data.get("problem_sha256")):
            found["ok"] = False
            found["complaints"] = [*verdict.complaints, "problem_sha256 is not that of the problem inside"]
        if proof and found["ok"]:
            again = prove(problem, data, verdict.energy_j, time_limit, _say)
            found["checked"] = [*verdict.checked, *(verdict.not_checked if again.ok else ())]
            found["not_checked"] = []
    if again is not None:
        found["proof"] = asdict(again)
        found["ok"] = again.ok
        if not again.ok:
            found["complaints"] = [*found["complaints"], again.message]
    if as_json:
        typer.echo(_text(found), nl=False)
    else:
        for line in _verdict_lines(found, data):
            typer.echo(line)
    return Exit.OK if found["ok"] else Exit.FAILED


def _is_of(inside: Any, sha256: Any) -> bool:
    """Return whether the problem in a plan file is the one that its checksum names."""
    if not isinstance(inside, dict) or sha256 is None:
        return True
    text = json.dumps(inside, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return bool(hashlib.sha256(text.encode()).hexdigest() == sha256)


def _as_planned(problem: Problem, data: dict[str, Any]) -> tuple[Problem, str | None]:
    """Return the problem by which a plan is judged: with its reserve, if it was made with one."""
    sha = data.get("problem_sha256")
    if sha is None or sha == problem.sha256:
        return problem, None
    kept = data.get("reserve")
    share = kept.get("share") if isinstance(kept, dict) else None
    if isinstance(share, float) and 0.0 <= share < 1.0:
        earlier = problem.with_reserve(share)
        if earlier.sha256 == sha:
            return earlier, f"the plan keeps {share:.4g} of the time in reserve; it is checked with that"
    return problem, "the plan was made for another problem (problem_sha256 differs)"


def _verdict_lines(found: dict[str, Any], data: dict[str, Any]) -> Iterator[str]:
    if not found["ok"]:
        yield "no"
        yield from (f"  - {complaint}" for complaint in found["complaints"][:20])
        return
    again = found.get("proof") or {}
    if "energy_j" not in found:  # proven infeasible
        yield f"yes: {again.get('message')}"
        return
    yield f"yes: {found['energy_j']:,.6g} J, loss {found['loss']:.6g} at {found['time_s']:,.6g} s, as it says"
    yield "checked by replay: " + "; ".join(c for c in found["checked"] if "lower_bound_j =" not in c)
    if again:
        yield again["message"]
    for claim in found["not_checked"]:
        yield f"not checked: {claim} (status {data.get('status')!r} rests on it); --proof recomputes it"


def _pareto(
    problem: Problem,
    time_limit: float | None,
    as_json: bool,
    output: Path | None,
    most: int | None,
    confidence: float | None,
) -> int:
    from takifugu.cli import Exit
    from takifugu.plan.pareto import front

    found = front(problem, time_limit, most, confidence)
    if output is not None or as_json:
        data = found.to_dict()
        if output is not None:
            _write(output, data)
            _say(f"wrote {output}")
        if as_json:
            typer.echo(_text(data), nl=False)
    if not as_json:
        typer.echo(f"{'energy J':>14}  {'time s':>12}  {'loss':>9}  rounds")
        for p in found.points:
            typer.echo(f"{p.energy_j:>14,.6g}  {p.time_s:>12,.6g}  {p.loss:>9.5f}  {p.rounds:>6}")
        typer.echo(_about(found))
    if found.interrupted:
        return Exit.INTERRUPTED
    return Exit.OK if found.points else Exit.FAILED


def _about(found: Front) -> str:
    """Return what a front is: all of it, or a part."""
    if found.complete:
        line = "complete: every plan was considered, and all points of the front are listed"
    else:
        line = "a subset of the front"
        if not found.exhaustive:
            line += "; not every plan was considered"
        if found.left_out:
            total = len(found.points) + found.left_out
            line += (
                f"; {len(found.points)} of {total} points that were found, --points 0 lists as many as fit"
            )
    if found.confidence is not None:
        line += f". Losses hold in {found.confidence:.4g} of the curves' samples"
    return line


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
