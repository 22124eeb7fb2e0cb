"""Who trained when, on which version: bars for a small fleet, a map of who took part for a large one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from takifugu.report.drawing import (
    Chart,
    Json,
    Key,
    axis,
    in_template,
    layout,
    names_axis,
    plain,
    short_names,
    version_keys,
    version_tokens,
)
from takifugu.report.forecast import round_seconds
from takifugu.report.records import Member, PlanFile, PlannedRound, Problem, Round, Run
from takifugu.report.units import Unit, seconds_unit

MOST_ROWS = 40
MOST_BARS = 2500
MOST_CELLS = 40_000
AS_PLANNED = "as planned"


@dataclass(frozen=True)
class Stint:
    """One node's part in one round."""

    round: int
    node: str
    version: str
    start_s: float
    end_s: float
    round_end_s: float
    status: str
    samples: int
    energy_j: float | None


def stints_of_run(run: Run) -> list[Stint]:
    rounds = {r.number: r for r in run.rounds}
    return [
        Stint(
            round=m.round,
            node=m.node,
            version=rounds[m.round].version,
            start_s=rounds[m.round].start_s,
            end_s=_end(rounds[m.round], m),
            round_end_s=rounds[m.round].end_s,
            status=m.status,
            samples=m.samples,
            energy_j=m.energy_j,
        )
        for m in run.members
    ]


def _end(row: Round, member: Member) -> float:
    """When the node was done; of one that dropped out, at most until nobody waited for it any longer."""
    end_s = row.start_s + member.time_s
    return min(end_s, row.end_s) if member.status == "dropped" else end_s


def stints_of_plan(problem: Problem, rounds: Sequence[PlannedRound]) -> list[Stint]:
    found = []
    for number, row in enumerate(rounds, start=1):
        times = round_seconds(problem, row)
        end_s = row.start_s + max(times.values(), default=0.0)
        for node, used in row.nodes.items():
            start = row.start_s
            found.append(
                Stint(number, node, row.version, start, start + times[node], end_s, "ok", used, None)
            )
    return found


def timeline(source: Run | PlanFile, order: Sequence[str]) -> Chart | None:
    """`order`: nodes, the one that spends most first."""
    planned = source.plan.rounds if source.plan is not None else ()
    if isinstance(source, Run):
        stints, above = stints_of_run(source), planned
    else:
        stints, above = stints_of_plan(source.problem, planned), ()
    if not stints:
        return None
    active = {s.node for s in stints}
    rows = [name for name in order if name in active]
    unit = seconds_unit(max(s.round_end_s for s in stints))
    if len(rows) <= MOST_ROWS and len(stints) <= MOST_BARS:
        return _bars(source.problem, stints, rows, above, unit)
    return _map(source.problem, stints, rows, unit)


def _used(problem: Problem, stints: Sequence[Stint | PlannedRound]) -> list[str]:
    seen = {s.version for s in stints}
    return [name for name in problem.versions if name in seen]


def _bars(
    problem: Problem, stints: Sequence[Stint], rows: Sequence[str], above: Sequence[PlannedRound], unit: Unit
) -> Chart:
    labels = short_names(rows)
    tokens, versions = version_tokens(problem.versions), _used(problem, [*stints, *above])
    data: list[Json] = []
    for version in versions:
        own = [s for s in stints if s.version == version]
        data.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": plain(version),
                "legendgroup": f"version {version}",
                "y": [labels[s.node] for s in own],
                "base": [s.start_s / unit.size for s in own],
                "x": [(s.end_s - s.start_s) / unit.size for s in own],
                "width": 0.66,
                "marker": {
                    "color": [tokens[version] + ("/0.3" if s.status == "dropped" else "") for s in own],
                    "line": {"width": 0.5, "color": "@paper"},
                },
                "customdata": [
                    [s.round, plain(s.node), f"{s.samples:,}", _said(s), _span(s, unit)] for s in own
                ],
                "hovertemplate": (
                    "<b>%{customdata[1]}</b>, round %{customdata[0]}<br>" + in_template(version) + ", "
                    "%{customdata[2]} samples%{customdata[3]}<br>%{customdata[4]}<extra></extra>"
                ),
            }
        )
    keys = version_keys(versions, tokens)
    for status, symbol, token, text in _MARKS:
        marked = [s for s in stints if s.status == status]
        if marked:
            data.append(_marks(marked, labels, unit, status, symbol, token))
            keys.append(Key(status, text, token, symbol))
    names = [labels[name] for name in rows]
    if above:
        names = [AS_PLANNED, *names]
        data += _plan_row(problem, above, tokens, unit)
    title = f"time ({unit.name})"
    return Chart(
        id="timeline",
        title="Who trains when",
        note=(
            "One row a node, the one that spends most on top; a bar lasts from the start of a round until "
            "the node is done, its colour is the version trained."
            + (" The first row is the plan." if above else "")
        ),
        label=_label(stints, rows, versions),
        data=data,
        layout=layout(
            title,
            "",
            height=96 + 27 * len(names),
            barmode="overlay",
            xaxis=axis(title, rangemode="tozero"),
            yaxis=names_axis(names),
        ),
        keys=keys,
        narrow={"yaxis.tickfont.size": 10},
        wide=True,
    )


_MARKS = (
    ("slow", "diamond", "@warn", "slowed down"),
    ("dropped", "cross", "@bad", "dropped out"),
)


def _said(stint: Stint) -> str:
    return "" if stint.status == "ok" else f", {plain(stint.status)}"


def _span(stint: Stint, unit: Unit) -> str:
    return f"{stint.start_s / unit.size:.4g} to {stint.end_s / unit.size:.4g} {unit.name}"


def _marks(
    stints: Sequence[Stint],
    labels: Mapping[str, str],
    unit: Unit,
    status: str,
    symbol: str,
    token: str,
) -> Json:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": status,
        "legendgroup": status,
        "y": [labels[s.node] for s in stints],
        "x": [(s.start_s + s.end_s) / 2 / unit.size for s in stints],
        "marker": {
            "symbol": "x-thin" if symbol == "cross" else symbol,
            "size": 8,
            "color": token,
            "line": {
                "width": 2 if symbol == "cross" else 1,
                "color": token if symbol == "cross" else "@paper",
            },
        },
        "customdata": [[s.round, plain(s.node)] for s in stints],
        "hovertemplate": f"<b>%{{customdata[1]}}</b>, round %{{customdata[0]}}: {status}<extra></extra>",
    }


def _plan_row(
    problem: Problem, rounds: Sequence[PlannedRound], tokens: Mapping[str, str], unit: Unit
) -> list[Json]:
    """The plan's rounds, slim, above the nodes."""
    lengths = [max(round_seconds(problem, row).values(), default=0.0) for row in rounds]
    return [
        {
            "type": "bar",
            "orientation": "h",
            "name": AS_PLANNED,
            "legendgroup": AS_PLANNED,
            "y": [AS_PLANNED] * len(rounds),
            "base": [row.start_s / unit.size for row in rounds],
            "x": [length / unit.size for length in lengths],
            "width": 0.34,
            "marker": {
                "color": [tokens.get(row.version, "@muted") for row in rounds],
                "line": {"width": 0.5, "color": "@paper"},
            },
            "customdata": [[n, plain(row.version), len(row.nodes)] for n, row in enumerate(rounds, start=1)],
            "hovertemplate": (
                "<b>as planned</b>, round %{customdata[0]}<br>%{customdata[1]}, "
                "%{customdata[2]} nodes<extra></extra>"
            ),
        }
    ]


def _map(problem: Problem, stints: Sequence[Stint], rows: Sequence[str], unit: Unit) -> Chart:
    """Columns are rounds as wide as they last, cells the version a node trained."""
    spans = sorted({(s.round, s.start_s, s.round_end_s) for s in stints})
    shown = rows[: max(20, min(120, MOST_CELLS // max(1, len(spans))))]
    labels, place = short_names(shown, 14), {name: index for index, name in enumerate(shown)}
    edges, column = _edges(spans, unit)
    tokens, versions = version_tokens(problem.versions), _used(problem, stints)

    def cells(chosen: Iterable[Stint], name: str, group: str, token: str) -> Json:
        z: list[list[int | None]] = [[None] * (len(edges) - 1) for _ in shown]
        for s in chosen:
            if s.node in place:
                z[place[s.node]][column[s.round]] = s.round
        return {
            "type": "heatmap",
            "name": plain(name),
            "legendgroup": group,
            "x": edges,
            "y": [labels[name] for name in shown],
            "z": z,
            "colorscale": [[0, token], [1, token]],
            "showscale": False,
            "hoverongaps": False,
            "ygap": 1,
            "hovertemplate": f"<b>%{{y}}</b>, round %{{z}}<br>{in_template(name)}<extra></extra>",
        }

    data = []
    for version in versions:
        own = [s for s in stints if s.version == version]
        data.append(cells(own, version, f"version {version}", tokens[version]))
    keys = version_keys(versions, tokens)
    for status, _, token, text in _MARKS:  # a cell is too small for a mark on it: it changes its colour
        own = [s for s in stints if s.status == status and s.node in place]
        if own:
            data.append(cells(own, text, status, token))
            keys.append(Key(status, text, token, "box"))
    left_out = len(rows) - len(shown)
    title = f"time ({unit.name})"
    return Chart(
        id="timeline",
        title="Who trains when",
        note=(
            "One row a node, the one that spends most on top; a cell is a round the node is part of, "
            f"its colour the version trained. {_left_out(left_out)}"
        ).strip(),
        label=_label(stints, rows, versions),
        data=data,
        layout=layout(
            title,
            "",
            height=110 + max(260, min(760, 7 * len(shown))),
            xaxis=axis(title, range=[0, edges[-1]], showgrid=False),
            yaxis=names_axis([labels[name] for name in shown]),
        ),
        keys=keys,
        narrow={"yaxis.tickfont.size": 10},
        wide=True,
    )


def _left_out(count: int) -> str:
    return f"{count:,} nodes that spend less are left out here; all sums count them." if count else ""


def _edges(spans: Sequence[tuple[int, float, float]], unit: Unit) -> tuple[list[float], dict[int, int]]:
    """Borders of columns: rounds, and the gaps between them; and each round's column."""
    edges: list[float] = []
    column: dict[int, int] = {}
    for number, start_s, end_s in spans:
        start, end = start_s / unit.size, end_s / unit.size
        if not edges or start > edges[-1]:
            edges.append(start)
        column[number] = len(edges) - 1
        edges.append(end)
    return edges, column


def _label(stints: Sequence[Stint], rows: Sequence[str], versions: Sequence[str]) -> str:
    count = len({s.round for s in stints})
    dropped = sum(s.status == "dropped" for s in stints)
    slow = sum(s.status == "slow" for s in stints)
    said = f"Timeline of {count} rounds on {len(rows)} nodes; versions in order: {', '.join(versions)}."
    if dropped or slow:
        said += f" {dropped} times a node dropped out, {slow} times one was slow."
    return said
