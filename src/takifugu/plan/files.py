"""Problem files in, canonical dictionaries out. The only place of the planner that uses pydantic.

Every mistake is reported at once, one message each: where, what is wrong, what to do.
"""

from __future__ import annotations

import csv
import json
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from takifugu.errors import ProblemError
from takifugu.plan import curves
from takifugu.plan.problem import MOST_ROUNDS, Node, Problem, Switch, Version

LARGEST = 1e50
"""Figures beyond it, and divisors below one over it, are mistakes; what follows from them overflows."""


def _in_range(value: float) -> float:
    if abs(value) > LARGEST:
        raise ValueError
    return value


def _divides(value: float) -> float:
    if not 1.0 / LARGEST <= value <= LARGEST:
        raise ValueError
    return value


Instant = Annotated[float, Field(allow_inf_nan=False)]
Finite = Annotated[float, Field(allow_inf_nan=False), AfterValidator(_in_range)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False), AfterValidator(_divides)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False), AfterValidator(_in_range)]
Source = Literal["measured", "estimated", "simulated"]


class _Table(BaseModel):
    # strict: "3" is not a number and true is not 1.
    model_config = ConfigDict(extra="forbid", strict=True)


class TargetTable(_Table):
    loss: Finite = Field(description="the loss to reach")
    deadline_s: Annotated[Instant, Field(gt=0)] = Field(description="seconds, counted from time 0")
    max_rounds: Annotated[int, Field(ge=1, le=MOST_ROUNDS)] | None = Field(
        None, description=f"a whole number of rounds, at most {MOST_ROUNDS:,}; that many if absent"
    )


class StartTable(_Table):
    version: str = Field(description="the name of a version")
    loss: Finite = Field(description="the loss before the first round")
    time_s: NotNegative = Field(0.0, description="seconds")


class RoundTable(_Table):
    overhead_s: NotNegative = Field(0.0, description="seconds added to every round")
    overhead_j: NotNegative = Field(0.0, description="joules added to every round")


class DataTable(_Table):
    parts: Annotated[int, Field(ge=1, le=1000)] = Field(1, description="a whole number from 1 to 1000")
    label_weight: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = Field(
        0.0, description="between 0 (only amounts count) and 1 (label balance counts fully)"
    )


class _CurveParameters(_Table):
    floor: Finite = Field(description="the loss that training on all data tends to")
    data_gain: NotNegative = Field(0.0, description="how far the floor rises with less data")
    data_exponent: NotNegative = Field(0.5, description="0 or more")


class ExponentialParameters(_CurveParameters):
    rate: Positive = Field(description="above 0, or the loss would not fall")


class PowerParameters(_CurveParameters):
    scale: Positive = Field(description="above 0, or the loss would not fall")
    exponent: Annotated[float, Field(ge=0.05, le=20, allow_inf_nan=False)] = Field(
        description="between 0.05 and 20"
    )


class ExponentialCurve(ExponentialParameters):
    kind: Literal["exponential"]
    samples: list[ExponentialParameters] = Field(default=[], description="a list of parameter tables")


class PowerCurve(PowerParameters):
    kind: Literal["power"]
    samples: list[PowerParameters] = Field(default=[], description="a list of parameter tables")


class VersionTable(_Table):
    name: Annotated[str, Field(min_length=1)] = Field(description="a name of its own")
    structure: str | None = Field(None, description="the path of a structure file")
    train_flops_per_sample: NotNegative = Field(description="FLOPs of one training step per sample")
    payload_bytes: NotNegative = Field(description="bytes sent each way, each round")
    memory_bytes: NotNegative | None = Field(None, description="bytes a node needs")
    source: Source | None = Field(None, description="measured, estimated or simulated")
    curve: Annotated[ExponentialCurve | PowerCurve, Field(discriminator="kind")] = Field(
        description="a table [versions.curve] with kind = 'exponential' or 'power'"
    )


class SwitchTable(_Table):
    model_config = ConfigDict(extra="forbid", strict=True, validate_by_alias=True, serialize_by_alias=True)
    source: str = Field(alias="from", description="the name of a version")
    target: str = Field(alias="to", description="the name of a version")
    time_s: NotNegative = Field(0.0, description="seconds")
    energy_j: NotNegative = Field(0.0, description="joules")
    loss_jump: NotNegative = Field(0.0, description="what is added to the loss, 0 or more")


class NodeTable(_Table):
    name: Annotated[str, Field(min_length=1)] = Field(description="a name of its own")
    flops_per_s: Positive = Field(description="FLOPs per second, above 0")
    joules_per_flop: NotNegative = Field(description="joules per FLOP")
    up_bytes_per_s: Positive = Field(description="bytes per second, above 0")
    down_bytes_per_s: Positive = Field(description="bytes per second, above 0")
    latency_s: NotNegative = Field(description="seconds, one way")
    joules_per_byte: NotNegative = Field(description="joules per byte sent or received")
    idle_watts: NotNegative = Field(0.0, description="watts while waiting for the slowest")
    memory_bytes: NotNegative | None = Field(None, description="bytes")
    samples: Annotated[int, Field(ge=1, le=10**12)] = Field(description="a whole number from 1 to 1e12")
    samples_per_s: dict[str, Positive] = Field(default={}, description="measured, by version name")
    joules_per_sample: dict[str, NotNegative] = Field(default={}, description="measured, by version name")
    labels: list[Annotated[int, Field(ge=0)]] | None = Field(None, description="samples of each label")
    available: list[Annotated[list[Instant], Field(min_length=2, max_length=2)]] | None = Field(
        None, description="windows [from, to] in seconds"
    )
    source: Source | None = Field(None, description="measured, estimated or simulated")


class ProblemTable(_Table):
    format: Literal[1] = Field(description="the number 1")
    nodes_file: str | None = Field(None, description="a CSV file with one node per line")
    target: TargetTable = Field(description="a table [target] with loss and deadline_s")
    start: StartTable = Field(description="a table [start] with version and loss")
    round: RoundTable = Field(
        default_factory=lambda: RoundTable.model_validate({}), description="a table [round]"
    )
    data: DataTable = Field(
        default_factory=lambda: DataTable.model_validate({}), description="a table [data]"
    )
    workload: dict[str, Any] | None = Field(None, description="a table; the planner ignores it")
    versions: list[VersionTable] = Field(description="at least one [[versions]]")
    switches: list[SwitchTable] = Field(default=[], description="[[switches]] with from and to")
    nodes: list[NodeTable] = Field(description="at least one [[nodes]], or nodes_file")


def schema() -> dict[str, Any]:
    """The JSON schema of the problem file."""
    table = ProblemTable.model_json_schema(by_alias=True)
    table["required"] = [name for name in table["required"] if name != "nodes"]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "takifugu problem", **table}


def load(path: str | Path) -> Problem:
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")  # editors on Windows put a mark in front
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ProblemError([f"{path}: cannot be read ({reason}); give the path of a problem file"]) from None
    try:
        is_json = path.suffix == ".json"
        data = json.loads(text, object_pairs_hook=_without_twins) if is_json else tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        kind = "JSON" if path.suffix == ".json" else "TOML"
        raise ProblemError([f"{path}: is not valid {kind} ({error}); mend the syntax there"]) from None
    if not isinstance(data, dict):
        raise ProblemError([f"{path}: is not a table; see `takifugu plan --schema`"])
    if isinstance(data.get("problem"), dict) and str(data.get("format", "")).startswith("takifugu.plan/"):
        return from_plan(data, str(path), base=path.parent)
    return from_dict(data, base=path.parent)


class ReserveTable(_Table):
    """`reserve` of a plan file: the limits before `--reserve` tightened them."""

    share: Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]
    deadline_s: Annotated[Instant, Field(gt=0)]
    available: dict[str, list[Annotated[list[Instant], Field(min_length=2, max_length=2)]]] = {}


def from_plan(data: Mapping[str, Any], where: str, base: Path | None = None) -> Problem:
    """Return the problem that a plan file holds, with its reserve."""
    from takifugu.plan.problem import Reserve

    problem = from_dict(data["problem"], base)
    if data.get("reserve") is None:
        return problem
    try:
        table = ReserveTable.model_validate(data["reserve"])
    except ValidationError as error:
        found = error.errors(include_url=False)[0]
        path = ".".join(map(str, ("reserve", *found["loc"])))
        raise ProblemError([f"{where}: {path}: {found['msg']}; plan again with --reserve"]) from None
    available = {name: tuple((a, b) for a, b in rows) for name, rows in table.available.items()}
    reserve = Reserve(table.share, table.deadline_s, available)
    real = replace(problem, reserve=reserve).without_reserve()
    if real.with_reserve(reserve.share).sha256 != problem.sha256:
        raise ProblemError(
            [
                f"{where}: reserve: its deadline, windows and share do not give the problem inside; "
                "plan again with --reserve"
            ]
        )
    return replace(problem, reserve=reserve)


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON table. Where a key is there twice, Python would silently keep the last; TOML refuses it."""
    table = dict(pairs)
    if len(table) < len(pairs):
        twin = next(key for key in table if sum(key == other for other, _ in pairs) > 1)
        raise ValueError(f"the key {twin!r} is there twice in one table")
    return table


def from_dict(data: Mapping[str, Any], base: Path | None = None) -> Problem:
    """Validates and converts; raises one `ProblemError` with every mistake."""
    from takifugu.plan.mistakes import cross_checks, says

    data = dict(data)
    mistakes: list[str] = []
    origins: list[str] | None = None
    if isinstance(data.get("nodes_file"), str):
        if "nodes" in data:
            mistakes.append("nodes_file: given together with [[nodes]]; keep one of the two")
        else:
            data["nodes"], origins = read_fleet((base or Path()) / data["nodes_file"], mistakes)
    table: ProblemTable | None = None
    try:
        table = ProblemTable.model_validate(data)
    except ValidationError as error:
        mistakes.extend(says(error, data, origins))
    mistakes.extend(cross_checks(data, origins))
    if mistakes or table is None:
        raise ProblemError(dict.fromkeys(mistakes))
    problem = _convert(table)
    if silent := list(_without_time(problem)):
        raise ProblemError(silent)
    return problem


def _without_time(problem: Problem) -> Iterator[str]:
    for version in problem.versions:
        for node in problem.nodes:
            if node.transfer_s(version) + node.sample_s(version) <= 0.0:
                yield (
                    f"nodes '{node.name}': a round of '{version.name}' would take no time; "
                    "give latency_s, payload_bytes or train_flops_per_sample a value above 0"
                )


def read_fleet(path: Path, mistakes: list[str]) -> tuple[list[dict[str, Any]], list[str]]:
    """Rows of a CSV fleet as node tables; empty cells are absent, tables and lists are JSON."""
    rows: list[dict[str, Any]] = []
    origins: list[str] = []
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            for column, count in Counter(reader.fieldnames or ()).items():
                if count > 1:
                    mistakes.append(f"{path.name}: has {count} columns '{column}'; keep one of them")
            for row in reader:
                origin = f"{path.name} line {reader.line_num}"
                if None in row:
                    mistakes.append(f"{origin}: has more cells than the header; quote cells with commas")
                    row.pop(None)
                rows.append({k: _cell(k, v) for k, v in row.items() if v is not None and v.strip() != ""})
                origins.append(origin)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        mistakes.append(f"nodes_file: {path.name} cannot be read ({reason}); give a path beside the problem")
    return rows, origins


_TEXT_COLUMNS = ("name", "source")
_WHOLE_COLUMNS = ("samples",)


def _cell(column: str, text: str) -> Any:
    if column in _TEXT_COLUMNS:
        return text.strip()
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    if column in _WHOLE_COLUMNS and isinstance(value, float) and value.is_integer():
        return int(value)  # spreadsheets write 6000.0
    return value


def _convert(table: ProblemTable) -> Problem:
    def version(row: VersionTable) -> Version:
        parameters = row.curve.model_dump(exclude={"kind", "samples"})
        return Version(
            name=row.name,
            train_flops_per_sample=row.train_flops_per_sample,
            payload_bytes=row.payload_bytes,
            memory_bytes=row.memory_bytes,
            structure=row.structure,
            source=row.source,
            curve=curves.make(row.curve.kind, parameters),
            curve_samples=tuple(curves.make(row.curve.kind, s.model_dump()) for s in row.curve.samples),
        )

    def node(row: NodeTable) -> Node:
        fields = {name: getattr(row, name) for name in NodeTable.model_fields}
        fields["labels"] = None if row.labels is None else tuple(row.labels)
        fields["available"] = None if row.available is None else tuple((a, b) for a, b in row.available)
        return Node(**fields)

    return Problem(
        target_loss=table.target.loss,
        deadline_s=table.target.deadline_s,
        max_rounds=table.target.max_rounds,
        start_version=table.start.version,
        start_loss=table.start.loss,
        start_time_s=table.start.time_s,
        overhead_s=table.round.overhead_s,
        overhead_j=table.round.overhead_j,
        parts=table.data.parts,
        label_weight=table.data.label_weight,
        workload=table.workload,
        versions=tuple(version(row) for row in table.versions),
        switches=tuple(Switch(**row.model_dump(by_alias=False)) for row in table.switches),
        nodes=tuple(node(row) for row in table.nodes),
    )


def _present(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None and value != {}}


def to_dict(problem: Problem) -> dict[str, Any]:
    """The canonical form: defaults written out, nodes inline, what is absent left out."""

    def curve(version: Version) -> dict[str, Any]:
        if not isinstance(version.curve, (curves.Exponential, curves.Power)):
            return {"kind": type(version.curve).__name__}  # a curve given from Python has no file form
        row: dict[str, Any] = {"kind": version.curve.kind, **version.curve.parameters()}
        drawn = [c.parameters() for c in version.curve_samples if isinstance(c, type(version.curve))]
        return {**row, "samples": drawn} if drawn else row

    def node(row: Node) -> dict[str, Any]:
        fields = {name: getattr(row, name) for name in NodeTable.model_fields}
        fields["samples_per_s"] = dict(row.samples_per_s)
        fields["joules_per_sample"] = dict(row.joules_per_sample)
        fields["labels"] = None if row.labels is None else list(row.labels)
        fields["available"] = None if row.available is None else [list(w) for w in row.available]
        return _present(**fields)

    return _present(
        format=1,
        target=_present(
            loss=problem.target_loss, deadline_s=problem.deadline_s, max_rounds=problem.max_rounds
        ),
        start={
            "version": problem.start_version,
            "loss": problem.start_loss,
            "time_s": problem.start_time_s,
        },
        round={"overhead_s": problem.overhead_s, "overhead_j": problem.overhead_j},
        data={"parts": problem.parts, "label_weight": problem.label_weight},
        workload=None if problem.workload is None else dict(problem.workload),
        versions=[
            _present(
                name=v.name,
                structure=v.structure,
                train_flops_per_sample=v.train_flops_per_sample,
                payload_bytes=v.payload_bytes,
                memory_bytes=v.memory_bytes,
                source=v.source,
                curve=curve(v),
            )
            for v in problem.versions
        ],
        switches=[
            {
                "from": s.source,
                "to": s.target,
                "time_s": s.time_s,
                "energy_j": s.energy_j,
                "loss_jump": s.loss_jump,
            }
            for s in problem.switches
        ],
        nodes=[node(n) for n in problem.nodes],
    )
