"""The page: words, figures, charts and tables in one HTML file that needs nothing from outside."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Mapping
from importlib import resources
from typing import Any

from takifugu.cost_notes import cost_notes
from takifugu.errors import UsageError
from takifugu.report import tables, units
from takifugu.report.charts import charts
from takifugu.report.drawing import Chart, Key
from takifugu.report.markup import Html, join, script_json, tag
from takifugu.report.records import Plan, PlanFile, Problem, Run
from takifugu.report.words import headline

_SOURCES = ("measured", "estimated", "simulated")


def page(source: Run | PlanFile) -> str:
    drawn = charts(source)
    parts = [_top(source), *_policies(source), *_infeasible(source), *_charts(drawn), *_ranks(source)]
    parts += [_sources(source), _reproduce(source), *_details(source)]
    return _document(headline(source).title, join(parts), drawn)


# ---- the frame -------------------------------------------------------------------------------------------


def _document(title: str, content: Html, drawn: Iterable[Chart]) -> str:
    plotly, script = plotly_js(), _resource("page.js")
    figures = script_json({c.id: {"data": c.data, "layout": c.layout, "narrow": c.narrow} for c in drawn})
    # Only these two scripts may run, and nothing may be fetched: an escape forgotten somewhere does no harm.
    allowed = " ".join(f"'sha256-{_digest(text)}'" for text in (plotly, script))
    policy = f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:"
    return "\n".join(
        (
            "<!doctype html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            tag("title", f"{title} Takifugu").text,
            f"<style>\n{_resource('style.css')}</style>",
            "</head>",
            "<body>",
            "<main>",
            content.text,
            "</main>",
            f'<script type="application/json" id="figures">{figures}</script>',
            f"<script>{plotly}</script>",
            f"<script>{script}</script>",
            "</body>",
            "</html>",
            "",
        )
    )


def plotly_js() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise UsageError(
            "a page needs plotly, which is not installed: pip install 'takifugu[report]'"
        ) from None
    return str(get_plotlyjs())


def _resource(name: str) -> str:
    return resources.files("takifugu.report").joinpath(name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _section(title: str, *inside: Html | str, note: str = "") -> Html:
    said = (tag("p", note, class_="note"),) if note else ()
    return tag("section", tag("h2", title), *said, *inside)


# ---- the top ---------------------------------------------------------------------------------------------


def _top(source: Run | PlanFile) -> Html:
    words = headline(source)
    kind = "Run" if isinstance(source, Run) else "Plan"
    sentences = [tag("p", sentence) for sentence in words.sentences]
    return tag(
        "header",
        tag("p", f"Takifugu · {kind} report", class_="eyebrow"),
        tag("h1", words.title, class_=words.tone),
        tag("div", join(sentences), class_="lead"),
        tag("dl", join(_tile(*tile) for tile in _tiles(source)), class_="tiles"),
    )


def _tile(name: str, value: str, below: str, source: str | None = None) -> Html:
    under = tag("span", below) if below else Html("")
    return tag("div", tag("dt", name), tag("dd", tag("strong", value), under, _chip(source)))


def _chip(source: str | None) -> Html:
    return tag("span", source, class_=f"chip {source}") if source in _SOURCES else Html("")


def _tiles(source: Run | PlanFile) -> list[tuple[str, str, str, str | None]]:
    problem = source.problem
    target, deadline = units.loss(problem.target_loss), units.duration(problem.deadline_s)
    if isinstance(source, PlanFile):
        return _plan_tiles(source.plan, target, deadline)
    sources = _tags(source)
    last = source.rounds[-1] if source.rounds else None
    end = source.outcome
    found: list[tuple[str, str, str, str | None]] = []
    planned = source.plan.energy_j if source.plan is not None else None
    below = f"predicted {units.energy(planned)}" if planned is not None else ""
    found.append(("Energy", units.energy(source.energy_j), below, sources.get("energy_j")))
    if last is not None:
        time_s, value = (end.time_s, end.loss) if end is not None else (last.end_s, last.loss)
        found.append(("Time", units.duration(time_s), f"of {deadline}", sources.get("time_s")))
        found.append(("Loss", units.loss(value), f"target {target}", sources.get("loss")))
        accuracy = end.accuracy if end is not None else last.accuracy
        if accuracy is not None:
            found.append(
                ("Accuracy", f"{accuracy * 100:.1f}\u00a0%", "on validation data", sources.get("accuracy"))
            )
        found.append(("Bytes", units.amount(last.total_bytes), "both ways", sources.get("bytes")))
    rounds = f"{len(source.rounds):,}"
    found.append(("Rounds", rounds, f"{len(source.plan.rounds):,} planned" if source.plan else "", None))
    return found


def _plan_tiles(plan: Plan, target: str, deadline: str) -> list[tuple[str, str, str, str | None]]:
    found: list[tuple[str, str, str, str | None]] = [("Status", plan.status.replace("_", " "), "", None)]
    if plan.energy_j is not None:
        found.append(("Energy", units.energy(plan.energy_j), "predicted", None))
    if plan.lower_bound_j is not None:
        found.append(("Lower bound", units.energy(plan.lower_bound_j), "of any plan, predicted", None))
    if plan.gap is not None:
        found.append(
            ("Gap", f"0{units.SPACE}%" if plan.gap <= 1e-9 else units.percent(plan.gap), "proven", None)
        )
    if plan.time_s is not None:
        found.append(("Time", units.duration(plan.time_s), f"of {deadline}", None))
    if plan.loss is not None:
        found.append(("Loss", units.loss(plan.loss), f"target {target}", None))
    if plan.rounds:
        found.append(("Rounds", f"{len(plan.rounds):,}", "", None))
    return found


def _tags(run: Run) -> dict[str, str]:
    sources = run.header.get("sources", run.header.get("source"))
    return {str(k): str(v) for k, v in sources.items()} if isinstance(sources, Mapping) else {}


# ---- the middle ------------------------------------------------------------------------------------------


def _policies(source: Run | PlanFile) -> list[Html]:
    if not isinstance(source, Run):
        return []
    note = (
        "Everyone trains for the same loss in the same world. “Against this run” is the energy of those who "
        "reached it in time; beside each prediction stands how far reality was from it."
    )
    title = "Against the baselines" if source.baselines else "Summary"
    return [_section(title, tables.policies(source), note=note if source.baselines else "")]


def _infeasible(source: Run | PlanFile) -> list[Html]:
    if not isinstance(source, PlanFile) or not source.plan.reasons:
        return []
    reasons = [tag("li", reason) for reason in source.plan.reasons]
    return [_section("Why there is none", tag("ul", join(reasons), class_="reasons"))]


def _charts(drawn: Iterable[Chart]) -> list[Html]:
    """A wide chart is alone in its row, the others stand in pairs where there is room."""
    figures = [_figure(chart) for chart in drawn]
    if not figures:
        return []
    empty = tag("noscript", tag("p", "The charts need JavaScript; the tables have the same numbers."))
    return [tag("div", empty, join(figures), class_="charts")]


def _figure(chart: Chart) -> Html:
    keys = tag("div", join(_key(key) for key in chart.keys), class_="keys", role="group", aria_label="Legend")
    drawing = tag(
        "div",
        id=chart.id,
        class_="plot",
        role="img",
        aria_label=chart.label,
        style=f"min-height:{chart.layout['height']}px",
    )
    title = tag("h2", chart.title, id=f"{chart.id}-title")
    head = tag("figcaption", title, tag("p", chart.note, class_="note"))
    class_ = "wide" if chart.wide else None
    return tag("figure", head, keys, drawing, class_=class_, aria_labelledby=f"{chart.id}-title")


def _key(key: Key) -> Html:
    swatch = tag(
        "span",
        class_=f"swatch {key.mark}",
        style=f"--key:var(--{key.token.removeprefix('@')})",
        aria_hidden="true",
    )
    return tag("button", swatch, key.label, type="button", aria_pressed="true", data_group=key.group)


def _ranks(source: Run | PlanFile) -> list[Html]:
    if not isinstance(source, Run):
        return []
    table = tables.ranks(tables.used_structures(source))
    if table is None:
        return []
    note = "The rank each factorized layer has in each version; the bar is its share of the full rank."
    return [_section("Ranks by layer", table, note=note)]


# ---- the bottom ------------------------------------------------------------------------------------------


def _sources(source: Run | PlanFile) -> Html:
    values: dict[str, Html | str] = {}
    if isinstance(source, Run):
        for name, origin in _tags(source).items():
            values[_spoken(name)] = _chip(origin) if origin in _SOURCES else origin
    else:
        values["energy, time, loss"] = _chip("estimated")
    values["versions"] = _origins(source.problem.versions)
    values["nodes"] = _origins(source.problem.nodes)
    if notes := cost_notes(source.problem.data):
        values["costs of versions"] = join((tag("div", note) for note in notes), "")
    if isinstance(source, Run):
        header = source.header
        for key, name in (
            ("engine", "engine"),
            ("seed", "seed"),
            ("averaging", "averaging"),
            ("weights", "weights"),
        ):
            if key in header:
                values[name] = tables.said(header[key])
        for name, origin in _world(header.get("world")).items():
            values[f"world: {_spoken(name)}"] = origin
        if "libraries" in header:
            values["libraries"] = tables.said(header["libraries"])
    elif source.plan.solver:
        values["solver"] = source.plan.solver
    note = (
        "Measured: read from a counter or computed on real data. Estimated: from a model of the device. "
        "Simulated: by the virtual clock of a simulation."
    )
    return _section("Where the figures come from", tables.facts(values), note=note)


def _spoken(name: str) -> str:
    """energy_j is energy, samples_per_s stays what it is."""
    for unit in ("_j", "_s"):
        if name.endswith(unit) and "_per" not in name:
            return name.removesuffix(unit).replace("_", " ")
    return name.replace("_", " ")


def _world(world: Any) -> dict[str, str]:
    if isinstance(world, Mapping):
        return {name: tables.said(value) for name, value in tables.flat(world).items()}
    return {} if world is None else {"": tables.said(world)}


def _origins(rows: Mapping[str, Mapping[str, Any]]) -> Html:
    """How many of each origin: "8 simulated"."""
    counts: dict[str, int] = {}
    for row in rows.values():
        origin = str(row.get("source") or "not said")
        counts[origin] = counts.get(origin, 0) + 1
    parts = [join((f"{n:,}", _chip(o) if o in _SOURCES else f"({o})"), " ") for o, n in counts.items()]
    return join(parts, ", ")


def _reproduce(source: Run | PlanFile) -> Html:
    problem = source.problem
    values: dict[str, Html | str] = {"problem sha256": tag("code", problem.sha256)}
    if source.plan is not None and source.plan.problem_sha256 not in (None, problem.sha256):
        said = tag("code", f"{source.plan.problem_sha256}")
        values["plan's problem sha256"] = join((said, "differs: the plan was made for another problem"), " ")
    command = source.header.get("command") if isinstance(source, Run) else None
    if isinstance(command, list):
        command = " ".join(str(part) for part in command)
    if isinstance(source, PlanFile):
        command = f"takifugu plan PROBLEM -o {source.name}"
    shown = tag("pre", tag("code", str(command)), tabindex="0") if command else Html("")
    return _section("How to reproduce", shown, tables.facts(values, "facts long"), note=_target(problem))


def _target(problem: Problem) -> str:
    rounds = problem.data.get("target", {}).get("max_rounds")
    planned = problem.planned_for_s
    early = "" if planned is None else f" (planned for {units.duration(planned)}; the rest is a reserve)"
    cap = f" and {rounds:,} rounds at most" if isinstance(rounds, int) else ""
    return (
        f"Loss {units.loss(problem.target_loss)} within {units.duration(problem.deadline_s)}{early}{cap}, "
        f"starting from {units.loss(problem.start_loss)} with “{problem.start_version}”; "
        f"{len(problem.nodes):,} nodes, {len(problem.versions):,} versions. "
        "The same problem, plan, seed and world give the same numbers."
    )


def _details(source: Run | PlanFile) -> list[Html]:
    if not isinstance(source, Run) or not source.rounds:
        return []
    found = [tag("details", tag("summary", f"All {len(source.rounds):,} rounds"), tables.rounds(source))]
    if source.events:
        shown = tables.events(source)
        found.append(tag("details", tag("summary", f"All {len(source.events):,} events"), shown))
    return [tag("section", tag("h2", "Round by round"), *found)]
