"""The charts of loss, energy and bytes, each a function from records to plotly's plain data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from takifugu.report.drawing import (
    Chart,
    Json,
    Key,
    axis,
    horizontal,
    in_template,
    layout,
    names_axis,
    plain,
    short_names,
    version_keys,
    version_tokens,
    vertical,
)
from takifugu.report.forecast import SERVER, energy_by_node, loss_band
from takifugu.report.records import Plan, PlanFile, Problem, Run
from takifugu.report.timeline import timeline
from takifugu.report.units import amount as in_bytes
from takifugu.report.units import bytes_unit, joules_unit, loss, seconds_unit
from takifugu.report.units import energy as in_joules

MOST_NODES = 24
_ACTUAL, _PREDICTED, _BAND, _BEST, _OTHERS = "actual", "predicted", "band", "best baseline", "other baselines"


def charts(source: Run | PlanFile) -> list[Chart]:
    """All charts there is data for, in the page's order."""
    spent = spent_by_node(source)
    order = _most_first(spent)
    energy = energy_chart(source, spent)
    # Energy and bytes stand side by side: they look best at the same height.
    height = 300 if energy is None else min(420, int(energy.layout["height"]))
    made = (timeline(source, order), *loss_charts(source), energy, bytes_chart(source, height))
    return [chart for chart in made if chart is not None]


# ---- loss -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Path:
    """A loss and how it fell: before the first round, and after each."""

    loss: list[float]
    time_s: list[float]
    energy_j: list[float]


def actual_path(run: Run) -> Path:
    problem = run.problem
    begun = run.outcome.start_loss if run.outcome is not None else None
    return Path(
        [problem.start_loss if begun is None else begun, *(r.loss for r in run.rounds)],
        [problem.start_time_s, *(r.end_s for r in run.rounds)],
        [0.0, *(r.total_energy_j for r in run.rounds)],
    )


def predicted_path(problem: Problem, plan: Plan) -> Path:
    """Rounds of a plan end where the next one, or the plan, says so: its files give starts and lengths."""
    path = Path([problem.start_loss], [problem.start_time_s], [0.0])
    switches = {(s["from"], s["to"]): s.get("time_s", 0.0) for s in problem.data.get("switches", [])}
    version = problem.start_version
    for row in plan.rounds:
        switch_s = switches.get((version, row.version), 0.0) if row.version != version else 0.0
        version = row.version
        path.loss.append(row.loss)
        path.time_s.append(row.start_s + row.time_s - switch_s)
        path.energy_j.append(path.energy_j[-1] + row.energy_j)
    return path


def loss_charts(source: Run | PlanFile) -> list[Chart]:
    problem, plan = source.problem, source.plan
    runs = (source, *source.baselines) if isinstance(source, Run) else ()
    predicted = predicted_path(problem, plan) if plan is not None and plan.rounds else None
    paths = [*(actual_path(run) for run in runs if run.rounds), *([predicted] if predicted else [])]
    if not paths:
        return []
    return [_loss_chart(source, predicted, paths, over) for over in ("time", "energy")]


def _loss_chart(source: Run | PlanFile, predicted: Path | None, paths: Sequence[Path], over: str) -> Chart:
    problem = source.problem
    if over == "time":
        most = max(p.time_s[-1] for p in paths)
        deadline_near = problem.deadline_s <= 2.5 * most
        most = max(most, problem.deadline_s) if deadline_near else most
        unit = seconds_unit(most)
    else:
        most, deadline_near = max(p.energy_j[-1] for p in paths), False
        unit = joules_unit(most)

    def xs(path: Path) -> list[float]:
        return [x / unit.size for x in (path.time_s if over == "time" else path.energy_j)]

    def line(path: Path, name: str, group: str, style: Json, mode: str = "lines") -> Json:
        return {
            "type": "scatter",
            "mode": mode,
            "name": plain(name),
            "legendgroup": group,
            "x": xs(path),
            "y": path.loss,
            "line": style,
            "marker": {"size": 4.5, "color": style["color"]},
            "customdata": list(range(len(path.loss))),
            "hovertemplate": (
                f"<b>{in_template(name)}</b><br>after round %{{customdata}}: loss %{{y:.4~g}}<br>"
                f"%{{x:.4~g}} {unit.name}<extra></extra>"
            ),
        }

    data, keys, lows, highs = [], [], [problem.target_loss], [max(p.loss) for p in paths]
    if isinstance(source, Run):
        best = source.best_baseline
        others = [b for b in source.baselines if b is not best and b.rounds]
        for run in others:
            data.append(line(actual_path(run), run.name, _OTHERS, {"color": "@faint", "width": 1.1}))
        if others:
            text = f"other baselines ({len(others)})" if best else f"baselines ({len(others)})"
            keys.append(Key(_OTHERS, text, "@faint", "thin"))
        if best is not None:
            data.append(line(actual_path(best), best.name, _BEST, {"color": "@rival", "width": 1.6}))
            keys.append(Key(_BEST, f"best baseline: {best.name}", "@rival", "thin"))
    band = loss_band(problem, source.plan.rounds) if source.plan is not None else None
    if band is not None and predicted is not None:
        edge = {"width": 0, "color": "@predicted"}
        common = {"type": "scatter", "mode": "lines", "line": edge, "hoverinfo": "skip", "legendgroup": _BAND}
        data.append({**common, "name": "low", "x": xs(predicted), "y": list(band.low)})
        data.append(
            {
                **common,
                "name": "high",
                "x": xs(predicted),
                "y": list(band.high),
                "fill": "tonexty",
                "fillcolor": "@predicted/0.16",
            }
        )
        text = f"{band.share * 100:.0f} % band of {band.samples} curve samples"
        keys.insert(0, Key(_BAND, text, "@predicted", "band"))
        lows.append(min(band.low))
        highs.append(max(band.high))
    if predicted is not None:
        style = {"color": "@predicted", "width": 2, "dash": "dash"}
        data.append(line(predicted, "predicted", _PREDICTED, style))
        keys.insert(0, Key(_PREDICTED, "predicted", "@predicted", "dashed"))
    if isinstance(source, Run) and source.rounds:
        mode = "lines+markers" if len(source.rounds) <= 60 else "lines"
        style = {"color": "@ink", "width": 2.4}
        data.append(line(actual_path(source), f"{source.name}, actual", _ACTUAL, style, mode))
        keys.insert(0, Key(_ACTUAL, "actual", "@ink", "line"))

    lows += [min(p.loss) for p in paths]
    low, high = min(lows), max(highs)
    pad = 0.09 * ((high - low) or 1.0)
    marks = [horizontal(problem.target_loss, f"target {loss(problem.target_loss)}")]
    note = f"{'Validation' if isinstance(source, Run) else 'Predicted'} loss after each round."
    if deadline_near:
        marks.append(vertical(problem.deadline_s / unit.size, "deadline"))
    elif over == "time":
        far = seconds_unit(problem.deadline_s)
        note += f" The deadline, {problem.deadline_s / far.size:,.4g} {far.name}, lies far to the right."
    title = f"time ({unit.name})" if over == "time" else f"energy spent ({unit.name})"
    return Chart(
        id=f"loss-over-{over}",
        title=f"Loss over {over}",
        note=note,
        label=_loss_label(source, predicted, over),
        data=data,
        layout=layout(
            title,
            "loss",
            height=380,
            xaxis=axis(title, range=[0, most * 1.03 / unit.size]),
            yaxis=axis("loss", range=[low - pad, high + 0.4 * pad]),
            shapes=[shape for shape, _ in marks],
            annotations=[text for _, text in marks],
        ),
        keys=keys,
        narrow={"height": 330},
    )


def _loss_label(source: Run | PlanFile, predicted: Path | None, over: str) -> str:
    said = f"Loss over {over}, target {loss(source.problem.target_loss)}."
    if isinstance(source, Run) and source.rounds:
        said += (
            f" Actual: from {loss(source.problem.start_loss)} to {loss(source.rounds[-1].loss)} "
            f"in {len(source.rounds)} rounds."
        )
    if predicted is not None:
        said += f" Predicted: to {loss(predicted.loss[-1])} in {len(predicted.loss) - 1} rounds."
    if isinstance(source, Run) and source.baselines:
        said += f" {len(source.baselines)} baselines as thin lines."
    return said


# ---- energy by node --------------------------------------------------------------------------------------


def spent_by_node(source: Run | PlanFile) -> dict[str, dict[str, float]]:
    """Joules by version and node: of a run as it was, of a plan as its formulas have it."""
    if isinstance(source, PlanFile):
        return energy_by_node(source.problem, source.plan.rounds)
    version = {r.number: r.version for r in source.rounds}
    spent: dict[str, dict[str, float]] = {}
    of_round: dict[int, float] = {}
    for member in source.members:
        nodes = spent.setdefault(version[member.round], {})
        nodes[member.node] = nodes.get(member.node, 0.0) + member.energy_j
        of_round[member.round] = of_round.get(member.round, 0.0) + member.energy_j
    for row in source.rounds:
        rest = row.energy_j - of_round.get(row.number, 0.0)
        if rest > 1e-6 * row.energy_j:
            nodes = spent.setdefault(row.version, {})
            nodes[SERVER] = nodes.get(SERVER, 0.0) + rest
    return spent


def _sums(spent: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for nodes in spent.values():
        for name, joules in nodes.items():
            sums[name] = sums.get(name, 0.0) + joules
    return sums


def _most_first(spent: Mapping[str, Mapping[str, float]]) -> list[str]:
    sums = _sums(spent)
    return sorted((n for n in sums if n != SERVER), key=lambda n: (-sums[n], n))


def energy_chart(source: Run | PlanFile, spent: Mapping[str, Mapping[str, float]]) -> Chart | None:
    order = _most_first(spent)
    if not order:
        return None
    problem, sums = source.problem, _sums(spent)
    shown = order if len(order) <= MOST_NODES else order[: MOST_NODES - 1]
    rest = order[len(shown) :]
    groups: list[tuple[str, list[str]]] = [(label, [name]) for name, label in short_names(shown).items()]
    if rest:
        groups.append((f"mean of {len(rest):,} others", rest))  # their sum would dwarf every node
    if SERVER in sums:
        groups.append(("switches, overhead", [SERVER]))

    def means(joules: Mapping[str, float]) -> list[float]:
        return [sum(joules.get(name, 0.0) for name in names) / len(names) for _, names in groups]

    heights = means(sums)
    unit = joules_unit(max(heights))
    tokens = version_tokens(problem.versions)
    versions = [v for v in problem.versions if v in spent]
    labels = [label for label, _ in groups]
    data: list[Json] = []
    for version in versions:
        data.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": plain(version),
                "legendgroup": f"version {version}",
                "y": labels,
                "x": [joules / unit.size for joules in means(spent[version])],
                "marker": {"color": tokens[version], "line": {"width": 0}},
                "hovertemplate": (
                    f"<b>%{{y}}</b><br>{in_template(version)}: %{{x:.4~g}} {unit.name}<extra></extra>"
                ),
            }
        )
    keys = version_keys(versions, tokens)
    said = f" The {len(rest):,} nodes that spend least share a row, their mean." if rest else ""
    if isinstance(source, Run) and source.plan is not None and source.plan.rounds:
        planned = _sums(energy_by_node(problem, source.plan.rounds))
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": "predicted",
                "legendgroup": _PREDICTED,
                "y": labels,
                "x": [joules / unit.size for joules in means(planned)],
                "marker": {
                    "symbol": "line-ns",
                    "size": 13,
                    "line": {"width": 2.2, "color": "@ink"},
                    "color": "@ink",
                },
                "hovertemplate": f"<b>%{{y}}</b><br>predicted %{{x:.4~g}} {unit.name}<extra></extra>",
            }
        )
        keys.append(Key(_PREDICTED, "predicted", "@ink", "tick"))
        said += " The upright stroke is what the plan predicted."
    title = f"energy ({unit.name})"
    total = in_joules(sum(sums.values()))
    return Chart(
        id="energy-by-node",
        title="Energy by node",
        note="The colour is the version trained." + said,
        label=f"Energy of {len(order)} nodes, {total} in all; most at {order[0]}.",
        data=data,
        layout=layout(
            title,
            "",
            height=max(300, 84 + (22 if len(groups) <= 16 else 17) * len(groups)),
            barmode="stack",
            bargap=0.32,
            xaxis=axis(title, rangemode="tozero"),
            yaxis=names_axis(labels),
        ),
        keys=keys,
        narrow={"yaxis.tickfont.size": 10},
    )


# ---- bytes by round --------------------------------------------------------------------------------------


def bytes_by_round(source: Run | PlanFile) -> list[tuple[int, str, float]]:
    """Round, version, bytes both ways."""
    if isinstance(source, Run):
        return [(r.number, r.version, r.bytes) for r in source.rounds]
    versions = source.problem.versions
    return [
        (number, row.version, 2.0 * versions[row.version]["payload_bytes"] * len(row.nodes))
        for number, row in enumerate(source.plan.rounds, start=1)
    ]


def bytes_chart(source: Run | PlanFile, height: int = 300) -> Chart | None:
    rows = bytes_by_round(source)
    if not rows:
        return None
    unit = bytes_unit(max(amount for _, _, amount in rows))
    tokens = version_tokens(source.problem.versions)
    versions = [v for v in source.problem.versions if any(row[1] == v for row in rows)]
    data = [_bytes_bars(rows, version, tokens[version], unit.name, unit.size) for version in versions]
    title = f"bytes, both ways ({unit.name})"
    total = sum(amount for _, _, amount in rows)
    return Chart(
        id="bytes-by-round",
        title="Bytes by round",
        note="What all members receive and send, by the version trained.",
        label=f"Bytes sent and received in each of {len(rows)} rounds, {in_bytes(total)} in all.",
        data=data,
        layout=layout(
            "round",
            title,
            height=height,
            barmode="overlay",
            bargap=0.15 if len(rows) <= 80 else 0,
            xaxis=axis("round", range=[0.4, len(rows) + 0.6], showgrid=False, tickformat="d", nticks=12),
            yaxis=axis(title, rangemode="tozero"),
        ),
        keys=version_keys(versions, tokens),
    )


def _bytes_bars(
    rows: Iterable[tuple[int, str, float]], version: str, token: str, unit: str, size: float
) -> Json:
    own = [row for row in rows if row[1] == version]
    return {
        "type": "bar",
        "name": plain(version),
        "legendgroup": f"version {version}",
        "x": [number for number, _, _ in own],
        "y": [amount / size for _, _, amount in own],
        "marker": {"color": token, "line": {"width": 0}},
        "hovertemplate": f"round %{{x}}: %{{y:.4~g}} {unit}<br>{in_template(version)}<extra></extra>",
    }
