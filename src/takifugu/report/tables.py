"""The tables of the page: policies, ranks, rounds, sources."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from takifugu.report import units
from takifugu.report.markup import Html, join, tag
from takifugu.report.records import Run
from takifugu.report.units import NOTHING, SPACE
from takifugu.structure import LayerSpec, Structure


def box(label: str, head: Sequence[str], rows: Iterable[Html], caption: str, class_: str = "") -> Html:
    """A table that scrolls within its own box, also by keyboard."""
    heads = join((tag("th", h, scope="col") for h in head), "")
    table = tag(
        "table",
        tag("caption", caption, class_="hidden"),
        tag("thead", tag("tr", heads)),
        tag("tbody", join(rows)),
        class_=class_ or None,
    )
    return tag("div", table, class_="scroll", role="region", aria_label=label, tabindex="0")


def row(first: Html | str, *cells: Html | str, class_: str | None = None) -> Html:
    inner = join((tag("td", cell) for cell in cells), "")
    return tag("tr", tag("th", first, scope="row"), inner, class_=class_)


# ---- policies --------------------------------------------------------------------------------------------


def policies(run: Run) -> Html:
    order = sorted(run.baselines, key=lambda b: (b.outcome is None, not b.met, b.energy_j, b.name))
    most = max((r.energy_j for r in (run, *order)), default=0.0)
    rows = []
    for each in (run, *order):
        cells = _policy(each, run, most)
        if not order:
            del cells["Against this run"]
        class_ = "this" if each is run else None if each.met else "missed"
        rows.append(row(*cells.values(), class_=class_))
    return box("Policies compared", list(cells), rows, "What each policy took and reached", "policies")


def _policy(run: Run, this: Run, most: float) -> dict[str, Html | str]:
    """The cells of a row by the heads of their columns. A run in progress shows what it has so far."""
    end, last = run.outcome, run.rounds[-1] if run.rounds else None
    cells: dict[str, Html | str] = dict.fromkeys(_COLUMNS, NOTHING)
    this_run = tag("span", "this run", class_="chip")
    cells["Policy"] = join((run.name, this_run), " ") if run is this else run.name
    cells["Energy"] = _bar(run.energy_j, most)
    cells["Rounds"] = f"{len(run.rounds):,}"
    if end is None:
        cells["Reached"] = "in progress"
        if last is not None:
            cells["Time"], cells["Loss"] = units.duration(last.end_s), units.loss(last.loss)
            cells["Accuracy"], cells["Bytes"] = _accuracy(last.accuracy), units.amount(last.total_bytes)
        return cells
    word = "yes" if run.met else "late" if run.late else "no"
    cells["Reached"] = tag("span", word, class_="good" if run.met else "bad")
    if run is not this and run.met and this.met:
        cells["Against this run"] = units.deviation(run.energy_j, this.energy_j)
    cells["Time"], cells["Loss"] = units.duration(end.time_s), units.loss(end.loss)
    cells["Accuracy"], cells["Bytes"] = _accuracy(end.accuracy), units.amount(end.bytes)
    cells["Rounds"] = f"{end.rounds:,}"
    cells["Energy predicted"] = _predicted(end.predicted.energy_j, end.energy_j, units.energy)
    cells["Time predicted"] = _predicted(end.predicted.time_s, end.time_s, units.duration)
    return cells


_COLUMNS = (
    "Policy", "Reached", "Energy", "Against this run", "Time", "Loss", "Accuracy", "Bytes", "Rounds",
    "Energy predicted", "Time predicted",
)  # fmt: skip


def _bar(joules: float, most: float) -> Html:
    share = joules / most if most > 0 else 0.0
    return tag("span", units.energy(joules), class_="bar", style=f"--share:{share:.4f}")


def _accuracy(value: float | None) -> str:
    return NOTHING if value is None else f"{value * 100:.1f}{SPACE}%"


def _predicted(predicted: float | None, actual: float, shown: Any) -> Html | str:
    if predicted is None:
        return NOTHING
    return join((shown(predicted), tag("small", units.deviation(actual, predicted))), " ")


# ---- ranks -----------------------------------------------------------------------------------------------


def used_structures(run: Run) -> dict[str, Structure]:
    """The structure of each version that run.json names or a round used, in the problem's order."""
    found: dict[str, Structure] = {}
    named = run.header.get("versions")
    for version, id in named.items() if isinstance(named, Mapping) else ():
        if id in run.structures:
            found[version] = run.structures[id]
    for each in (run, *run.baselines):
        for r in each.rounds:
            if r.version not in found and r.structure is not None:
                structure = each.structures.get(r.structure) or run.structures.get(r.structure)
                if structure is not None:
                    found[r.version] = structure
    return {name: found[name] for name in run.problem.versions if name in found}


def ranks(versions: Mapping[str, Structure]) -> Html | None:
    layers: dict[str, LayerSpec] = {}
    for structure in versions.values():
        for spec in structure:
            layers.setdefault(spec.name, spec)
    if not layers:
        return None
    rows = [
        row(
            tag("code", name),
            " · ".join("\u00d7".join(map(str, shape)) for shape in spec.shapes.values()),
            *(_rank(structure.get(name)) for structure in versions.values()),
        )
        for name, spec in layers.items()
    ]
    return box(
        "Ranks", ("Layer", "Dense shape", *versions), rows, "Rank of each layer in each version", "ranks"
    )


def _rank(spec: LayerSpec | None) -> Html | str:
    if spec is None:
        return tag("span", "dense", class_="quiet")
    values = list(spec.rank.values())
    if len(values) == 1 or len(set(values)) == 1:
        text = f"{values[0]}" if len(values) == 1 else f"{values[0]} each"
    else:
        text = ", ".join(f"{matrix} {rank}" for matrix, rank in spec.rank.items())
    share = _share(spec)
    return text if share is None else tag("span", text, class_="bar", style=f"--share:{share:.4f}")


def _share(spec: LayerSpec) -> float | None:
    """Rank over full rank where a layer has one matrix and no gates; elsewhere the number must do."""
    if list(spec.rank) != ["weight"] or "weight" not in spec.shapes:
        return None
    shape = spec.shapes["weight"]
    return min(1.0, spec.rank["weight"] / min(shape[0], math.prod(shape[1:]) or 1))


# ---- rounds and events -----------------------------------------------------------------------------------


def rounds(run: Run) -> Html:
    status: dict[int, dict[str, int]] = {}
    for m in run.members:
        counts = status.setdefault(m.round, {})
        counts[m.status] = counts.get(m.status, 0) + 1
    rows = []
    for r in run.rounds:
        counts = status.get(r.number, {})
        expected = r.predicted
        rows.append(
            row(
                f"{r.number}",
                r.version,
                units.duration(r.start_s),
                units.duration(r.end_s),
                units.energy(r.energy_j),
                NOTHING if expected is None or expected.energy_j is None else units.energy(expected.energy_j),
                units.loss(r.loss),
                NOTHING if expected is None or expected.loss is None else units.loss(expected.loss),
                _accuracy(r.accuracy),
                units.amount(r.bytes),
                f"{r.samples:,}",
                f"{sum(counts.values()):,}",
                f"{counts.get('dropped', 0)}",
                NOTHING if r.truncation is None else units.digits(r.truncation, 2),
            )
        )
    head = (
        "Round", "Version", "Start", "End", "Energy", "predicted", "Loss", "predicted", "Accuracy", "Bytes",
        "Samples", "Members", "Dropped", "Truncation",
    )  # fmt: skip
    return box("Rounds", head, rows, "Every round as rounds.jsonl has it", "tall")


def events(run: Run) -> Html:
    rows = []
    for index, event in enumerate(run.events, start=1):
        kind = next((str(event[key]) for key in ("event", "kind", "type") if key in event), "")
        rest = {k: v for k, v in event.items() if k not in ("event", "kind", "type", "round")}
        rows.append(row(f"{index}", str(event.get("round", NOTHING)), kind, said(rest)))
    return box(
        "Events", ("", "Round", "Event", "Details"), rows, "Events as events.jsonl has them", "tall words"
    )


# ---- sources ---------------------------------------------------------------------------------------------


def facts(values: Mapping[str, Html | str], class_: str = "facts") -> Html:
    """Names and values, one under the other."""
    return tag("dl", join(tag("div", tag("dt", k), tag("dd", v)) for k, v in values.items()), class_=class_)


def said(value: Any) -> str:
    """A value of a JSON file as text: nested tables with dots, numbers with few digits."""
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {said(v)}" for k, v in flat(value).items())
    if isinstance(value, list):
        return ", ".join(said(v) for v in value) if value else "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    return NOTHING if value is None else str(value)


def flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, inner in value.items():
        if isinstance(inner, Mapping) and inner:
            found.update(flat(inner, f"{prefix}{key}."))
        else:
            found[f"{prefix}{key}"] = inner
    return found
