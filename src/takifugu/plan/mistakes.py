"""What is wrong with a problem file, in words: one message per mistake, with its path and its fix."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from pydantic import BaseModel, ValidationError

from takifugu.errors import near_misses
from takifugu.numbers import is_number


def says(error: ValidationError, data: Mapping[str, Any], origins: Sequence[str] | None) -> Iterator[str]:
    """Pydantic's findings in our words."""
    for found in error.errors(include_url=False):
        parts = [part for part in found["loc"] if part not in ("exponential", "power")]
        where, table = path_of(parts, origins), _table_at(parts)
        kind, given = found["type"], _short(found.get("input"))
        fix = _description(table, parts[-1] if parts else "")
        if kind == "missing":
            yield f"{where}: is missing; add {fix}"
        elif kind == "extra_forbidden":
            known = list(_names(table))
            hint = near_misses(str(parts[-1]), known) or f"; known here: {', '.join(known)}"
            yield f"{where}: is not a field of the format{hint}"
        elif kind in ("union_tag_invalid", "union_tag_not_found"):
            yield f"{where}.kind: must be 'exponential' or 'power'; choose one of the two"
        elif kind == "finite_number":
            yield f"{where}: {given} is not a finite number; give {fix}"
        elif kind == "value_error":
            yield f"{where}: {given} is out of all proportion; check its unit, give {fix}"
        else:
            rule = found["msg"].removeprefix("Input should be ").replace("a valid ", "a ")
            yield f"{where}: must be {rule}, got {given}; give {fix}"


def path_of(parts: Sequence[int | str], origins: Sequence[str] | None) -> str:
    """`nodes[3].samples`, or `fleet.csv line 5: samples` when the fleet is a CSV file."""
    parts = list(parts)
    prefix = ""
    if origins and len(parts) >= 2 and parts[0] == "nodes" and isinstance(parts[1], int):
        prefix, parts = f"{origins[parts[1]]}: ", parts[2:]
    text = ""
    for part in parts:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return (prefix + text).removesuffix(": ") or "problem"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _table_at(parts: Sequence[int | str]) -> type[BaseModel]:
    """The pydantic table that holds the last part of a path."""
    from takifugu.plan import files

    homes: dict[str, type[BaseModel]] = {
        "target": files.TargetTable,
        "start": files.StartTable,
        "round": files.RoundTable,
        "data": files.DataTable,
        "switches": files.SwitchTable,
        "nodes": files.NodeTable,
    }
    names = [part for part in parts if isinstance(part, str)]
    if len(names) <= 1 and len(parts) <= 1:
        return files.ProblemTable
    if names[0] == "versions":
        return files.PowerCurve if "curve" in names[1:-1] else files.VersionTable
    return homes.get(names[0], files.ProblemTable)


def _names(table: type[BaseModel]) -> Iterator[str]:
    for name, field in table.model_fields.items():
        yield field.alias or name


def _description(table: type[BaseModel], name: int | str) -> str:
    from takifugu.plan import files

    for home in (table, files.ExponentialCurve if table is files.PowerCurve else table):
        for field_name, field in home.model_fields.items():
            if name in (field_name, field.alias) and field.description:
                return field.description
    return "a value as in the schema (`takifugu plan --schema`)"


def cross_checks(data: Mapping[str, Any], origins: Sequence[str] | None) -> Iterator[str]:
    """What no single field shows. Reads the raw data, so that it reports beside pydantic's findings."""
    versions, nodes = _rows(data, "versions"), _rows(data, "nodes")
    if data.get("versions") == []:
        yield "versions: is empty; add at least one [[versions]]"
    if data.get("nodes") == []:
        yield "nodes: the fleet is empty; add at least one [[nodes]] or a line to nodes_file"
    yield from _duplicates("versions", versions, None)
    yield from _duplicates("nodes", nodes, origins)
    names = [v["name"] for v in versions if isinstance(v.get("name"), str)]
    yield from _switches(data, names)
    yield from _curve_samples(versions)
    start = data.get("start")
    if isinstance(start, dict) and isinstance(start.get("version"), str) and start["version"] not in names:
        yield f"start.version: there is no version '{start['version']}'{_choose(start['version'], names)}"
    table = data.get("data")
    weight = table.get("label_weight", 0.0) if isinstance(table, dict) else 0.0
    weighted = isinstance(weight, (int, float)) and weight > 0
    yield from _nodes(nodes, names, weighted, origins)
    yield from _not_plain(data.get("workload"), "workload")


def _not_plain(value: object, where: str) -> Iterator[str]:
    """What a plan file, which carries its problem as JSON, could not hold: TOML knows dates, nan and inf."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _not_plain(inner, f"{where}.{key}")
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from _not_plain(inner, f"{where}[{index}]")
    elif not (value is None or isinstance(value, str | bool) or is_number(value)):
        yield f"{where}: {_short(value)} has no form in a plan file; give a finite number or a text"


def _rows(data: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    rows = data.get(name)
    return [row if isinstance(row, dict) else {} for row in rows] if isinstance(rows, list) else []


def _choose(name: str, known: Sequence[str]) -> str:
    return near_misses(name, known) or f"; choose one of {', '.join(map(repr, known)) or 'none so far'}"


def _duplicates(home: str, rows: Sequence[Mapping[str, Any]], origins: Sequence[str] | None) -> Iterator[str]:
    seen: set[str] = set()
    for index, row in enumerate(rows):
        name = row.get("name")
        if isinstance(name, str):
            if name in seen:
                yield f"{path_of([home, index, 'name'], origins)}: '{name}' is used twice; rename one of them"
            seen.add(name)


def _switches(data: Mapping[str, Any], names: Sequence[str]) -> Iterator[str]:
    pairs: Counter[tuple[str, str]] = Counter()
    for index, row in enumerate(_rows(data, "switches")):
        ends = (row.get("from"), row.get("to"))
        for side, name in zip(("from", "to"), ends, strict=True):
            if isinstance(name, str) and name not in names:
                yield f"switches[{index}].{side}: there is no version '{name}'{_choose(name, names)}"
        first, second = ends
        if not isinstance(first, str) or not isinstance(second, str):
            continue
        if first == second:
            yield f"switches[{index}]: leads from '{first}' to itself; remove it"
        pairs[first, second] += 1
        if pairs[first, second] == 2:
            yield f"switches[{index}]: '{first}' to '{second}' is listed twice; keep one"


def _curve_samples(versions: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    counts = []
    for row in versions:
        curve = row.get("curve")
        drawn = curve.get("samples") if isinstance(curve, dict) else None
        counts.append(len(drawn) if isinstance(drawn, list) else 0)
    most = max(counts, default=0)
    for index, count in enumerate(counts):
        if count not in (0, most):
            yield (
                f"versions[{index}].curve.samples: holds {count} draws where another version holds {most}; "
                "draws are joint by index, give the same number everywhere (or none)"
            )


def _nodes(
    nodes: Sequence[Mapping[str, Any]], versions: Sequence[str], weighted: bool, origins: Sequence[str] | None
) -> Iterator[str]:
    lengths = Counter(len(n["labels"]) for n in nodes if isinstance(n.get("labels"), list))
    usual = lengths.most_common(1)[0][0] if lengths else 0
    for index, node in enumerate(nodes):
        at = partial(_node_field, index, origins)
        for field in ("samples_per_s", "joules_per_sample"):
            table = node.get(field)
            for name in table if isinstance(table, dict) else ():
                if name not in versions:
                    yield f"{at(field)}: there is no version '{name}'{_choose(str(name), versions)}"
        labels, samples = node.get("labels"), node.get("samples")
        if isinstance(labels, list) and all(isinstance(n, int) for n in labels):
            if len(labels) != usual:
                yield f"{at('labels')}: has {len(labels)} entries, other nodes have {usual}; write 0 for none"
            if isinstance(samples, int) and sum(labels) != samples:
                yield f"{at('labels')}: sums to {sum(labels)}, samples is {samples}; make them equal"
        elif labels is None and weighted:
            yield f"{at('labels')}: is missing, and label_weight is above 0; add the histogram or set it to 0"
        windows = node.get("available")
        for number, window in enumerate(windows if isinstance(windows, list) else ()):
            if not (isinstance(window, list) and len(window) == 2 and all(is_number(end) for end in window)):
                continue
            if window[0] >= window[1]:
                where = path_of(["nodes", index, "available", number], origins)
                yield f"{where}: ends at {window[1]:g}, not after its start {window[0]:g}; swap the two"


def _node_field(index: int, origins: Sequence[str] | None, field: str) -> str:
    return path_of(["nodes", index, field], origins)
