"""Run folders and plan files in (docs/decisions/201), records out."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from takifugu.errors import ReportError, StructureError, near_misses
from takifugu.report.fields import Fields, read_json, read_lines
from takifugu.report.records import (
    Expected,
    Member,
    Outcome,
    Plan,
    PlanFile,
    PlannedRound,
    Problem,
    Round,
    Run,
)
from takifugu.structure import Structure

RUN_FORMAT = "takifugu.run/1"
PLAN_FORMAT = "takifugu.plan/1"


def read(path: str | Path) -> Run | PlanFile:
    """A folder is a run, a file is a plan."""
    path = Path(path)
    return read_run(path) if path.is_dir() else read_plan_file(path)


def read_run(folder: Path, with_members: bool = True) -> Run:
    if not (folder / "run.json").exists():
        raise ReportError(
            f"{folder}: there is no run.json in it; give a folder that `takifugu run` wrote, or a plan file"
        )
    header = _checked(read_json(folder / "run.json"), RUN_FORMAT, "give the folder of a run")
    problem = _by_its_own_deadline(_problem(read_json(folder / "problem.json")), header)
    done = (folder / "result.json").exists()
    plan_path, events_path = folder / "plan.json", folder / "events.jsonl"
    rounds = tuple(_round(row, problem) for row in _rows(folder / "rounds.jsonl", done))
    # A page looks at members in the run itself only, and there are a hundred times more of them than rounds.
    members = tuple(_member(row) for row in _rows(folder / "nodes.jsonl", done)) if with_members else ()
    _check_order(folder / "rounds.jsonl", rounds)
    # A round counts once its own line is there; its members may have been written a moment before.
    members = tuple(m for m in members if 1 <= m.round <= len(rounds))
    return Run(
        name=_policy(header) or folder.name,
        header=header.data,
        problem=problem,
        plan=_plan(read_json(plan_path), problem) if plan_path.exists() else None,
        rounds=rounds,
        members=members,
        events=tuple(row.data for row in read_lines(events_path, done)) if events_path.exists() else (),
        outcome=_outcome(read_json(folder / "result.json")) if done else None,
        structures=_structures(folder / "structures"),
        baselines=_baselines(folder / "baselines"),
    )


def read_plan_file(path: Path) -> PlanFile:
    data = _checked(
        read_json(path), PLAN_FORMAT, "give a file that `takifugu plan -o` wrote, or a run folder"
    )
    problem = _problem(data.table("problem"))
    if (reserve := data.table_or_none("reserve")) is not None:
        real_s = reserve.number("deadline_s")
        problem = replace(problem, deadline_s=real_s, planned_for_s=problem.deadline_s)
    return PlanFile(path.name, _plan(data, problem), problem)


def _checked(fields: Fields, wanted: str, advice: str) -> Fields:
    if fields.data.get("format") != wanted:
        raise ReportError(
            f"{fields.where}: format is {fields.data.get('format')!r}, not {wanted!r}; {advice}"
        )
    return fields


def _baselines(folder: Path) -> tuple[Run, ...]:
    if not folder.is_dir():
        return ()
    # One that has not begun yet is an empty folder.
    return tuple(
        read_run(f, with_members=False) for f in sorted(folder.iterdir()) if f.is_dir() and any(f.iterdir())
    )


def _rows(path: Path, complete: bool) -> list[Fields]:
    if not complete and not path.exists():
        return []
    return list(read_lines(path, complete))


def _check_order(path: Path, rounds: tuple[Round, ...]) -> None:
    for line, row in enumerate(rounds, start=1):
        if row.number != line:
            raise ReportError(
                f"{path}, line {line}: 'round' is {row.number}, expected {line}; "
                "the file is damaged, resume the run to mend it"
            )


def _policy(header: Fields) -> str | None:
    policy = header.data.get("policy")
    if isinstance(policy, Mapping):
        policy = policy.get("name")
    return policy if isinstance(policy, str) and policy else None


def _problem(fields: Fields) -> Problem:
    target, start = fields.table("target"), fields.table("start")
    if (labels := fields.table_or_none("data")) is not None:
        labels.number_or_none("label_weight")
    for switch in fields.tables("switches") if "switches" in fields.data else ():
        switch.text("from"), switch.text("to")
        switch.number_or_none("time_s"), switch.number_or_none("loss_jump")
    return Problem(
        data=fields.data,
        sha256=_sha256(fields.data),
        target_loss=target.number("loss"),
        deadline_s=target.number("deadline_s"),
        start_version=start.text("version"),
        start_loss=start.number("loss"),
        start_time_s=start.number_or_none("time_s") or 0.0,
        versions={row.text("name"): _version(row) for row in fields.tables("versions")},
        nodes={row.text("name"): _node(row) for row in fields.tables("nodes")},
    )


def _by_its_own_deadline(problem: Problem, header: Fields) -> Problem:
    target = header.table_or_none("target")
    until_s = None if target is None else target.number_or_none("deadline_s")
    if until_s is None or until_s == problem.deadline_s:
        return problem
    return replace(problem, deadline_s=until_s, planned_for_s=problem.deadline_s)


def _version(row: Fields) -> Mapping[str, Any]:
    """As it is, once everything the forecast needs is known to be there."""
    for name in ("train_flops_per_sample", "payload_bytes"):
        row.number(name)
    curve = row.table("curve")
    if curve.data.get("samples"):
        needed = ("floor", "rate") if curve.text("kind") == "exponential" else ("floor", "scale", "exponent")
        for sample in (curve, *curve.tables("samples")):
            for name in needed:
                sample.number(name)
    return row.data


def _node(row: Fields) -> Mapping[str, Any]:
    for name in ("flops_per_s", "up_bytes_per_s", "down_bytes_per_s", "samples"):
        row.above_zero(name)
    for name in ("joules_per_flop", "latency_s", "joules_per_byte"):
        row.number(name)
    row.number_or_none("idle_watts")
    row.numbers_or_none("labels")
    for name in ("samples_per_s", "joules_per_sample"):
        if (measured := row.table_or_none(name)) is not None:
            for version in measured.data:
                measured.number(version)
    return row.data


def _known(name: str, names: Iterable[str], kind: str, where: Fields) -> str:
    if name not in names:
        raise ReportError(
            f"{where.where}: the problem has no {kind} {name!r}{near_misses(name, names)}; "
            "the files are not of one run"
        )
    return name


def _sha256(problem: Mapping[str, Any]) -> str:
    """As the planner does it: canonical problem, sorted, no spaces."""
    text = json.dumps(problem, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _plan(fields: Fields, problem: Problem) -> Plan:
    reasons = fields.data.get("reasons") or []
    return Plan(
        status=fields.text("status"),
        energy_j=fields.number_or_none("energy_j"),
        lower_bound_j=fields.number_or_none("lower_bound_j"),
        gap=fields.number_or_none("gap"),
        time_s=fields.number_or_none("time_s"),
        loss=fields.number_or_none("loss"),
        solver=str(fields.data.get("solver", "")),
        rounds=tuple(_planned(row, problem) for row in fields.tables("rounds")),
        problem_sha256=fields.text_or_none("problem_sha256"),
        reasons=tuple(str(reason) for reason in reasons) if isinstance(reasons, list) else (str(reasons),),
        best_loss_by_deadline=fields.number_or_none("best_loss_by_deadline"),
        earliest_time_to_loss_s=fields.number_or_none("earliest_time_to_loss_s"),
        samples=_reached(fields.table_or_none("samples")),
    )


def _reached(fields: Fields | None) -> tuple[int, int] | None:
    return None if fields is None else (int(fields.number("reached")), int(fields.number("count")))


def _planned(row: Fields, problem: Problem) -> PlannedRound:
    nodes = row.table("nodes")
    if not nodes.data:
        raise ReportError(f"{nodes.where}: no node takes part; plan again")
    for name in nodes.data:
        _known(name, problem.nodes, "node", nodes)
        nodes.above_zero(name)
    return PlannedRound(
        version=_known(row.text("version"), problem.versions, "version", row),
        nodes={name: nodes.whole(name) for name in nodes.data},
        start_s=row.number("start_s"),
        time_s=row.number("time_s"),
        energy_j=row.number("energy_j"),
        loss=row.number("loss"),
    )


def _expected(fields: Fields) -> Expected:
    return Expected(*(fields.number_or_none(name) for name in ("energy_j", "time_s", "loss")))


def _round(row: Fields, problem: Problem) -> Round:
    predicted, total = row.table_or_none("predicted"), row.table("total")
    return Round(
        number=row.whole("round"),
        version=_known(row.text("version"), problem.versions, "version", row),
        structure=row.text_or_none("structure"),
        switched=row.flag("switched"),
        start_s=row.number("start_s"),
        end_s=row.number("end_s"),
        time_s=row.number("time_s"),
        energy_j=row.number("energy_j"),
        loss=row.number("loss"),
        accuracy=row.number_or_none("accuracy"),
        bytes=row.number("bytes"),
        samples=row.whole("samples"),
        truncation=row.number_or_none("truncation"),
        predicted=None if predicted is None else _expected(predicted),
        total_energy_j=total.number("energy_j"),
        total_bytes=total.number("bytes"),
    )


def _member(row: Fields) -> Member:
    return Member(
        round=row.whole("round"),
        node=row.text("node"),
        samples=row.whole("samples"),
        time_s=row.number("time_s"),
        energy_j=row.number("energy_j"),
        bytes=row.number("bytes"),
        status=row.text("status"),
    )


def _outcome(fields: Fields) -> Outcome:
    predicted = fields.table_or_none("predicted")
    return Outcome(
        reached=fields.flag("reached"),
        loss=fields.number("loss"),
        accuracy=fields.number_or_none("accuracy"),
        time_s=fields.number("time_s"),
        energy_j=fields.number("energy_j"),
        bytes=fields.number("bytes"),
        rounds=fields.whole("rounds"),
        planned_rounds=fields.whole_or_none("planned_rounds"),
        deadline_met=None if fields.data.get("deadline_met") is None else fields.flag("deadline_met"),
        reason=fields.text_or_none("reason") or "",
        predicted=Expected(None, None, None) if predicted is None else _expected(predicted),
        start_loss=fields.number_or_none("start_loss"),
    )


def _structures(folder: Path) -> dict[str, Structure]:
    found = {}
    for path in sorted(folder.glob("*.json")):
        try:
            found[path.stem] = Structure.load(path)
        except StructureError as error:
            raise ReportError(f"{path}: {error}") from error
    return found
