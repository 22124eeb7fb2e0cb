"""What every chart shares: its parts as plain data, its layout, and names made safe for plotly.

A figure is a dictionary as plotly.js takes it. Colours are written as tokens, `@ink` or `@version-0/0.3`
(with opacity): the page's script replaces them by the style sheet's custom properties, so that one figure
serves the light and the dark scheme.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]

VERSION_COLOURS = 8
"""As many `--version-N` as the style sheet has."""


@dataclass(frozen=True)
class Key:
    """An entry of a legend; the traces of its group are shown and hidden with it."""

    group: str
    label: str
    token: str
    mark: str
    """line, thin, dashed, band, box, cross or diamond."""


@dataclass(frozen=True)
class Chart:
    id: str
    title: str
    note: str
    """What to see in it, below the title."""
    label: str
    """What someone hears who cannot see it."""
    data: Sequence[Json]
    layout: Json
    keys: Sequence[Key] = ()
    narrow: Mapping[str, Any] = field(default_factory=dict)
    """Changes of the layout on a small screen, by dotted path."""
    wide: bool = False
    """Whether it takes the page's whole width."""


def layout(x_title: str, y_title: str, height: int, **more: Any) -> Json:
    return {
        "height": height,
        "margin": {"l": 8, "r": 12, "t": 8, "b": 8},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"size": 12, "color": "@muted"},
        "showlegend": False,
        "hovermode": "closest",
        "hoverlabel": {
            "bgcolor": "@raised",
            "bordercolor": "@line",
            "align": "left",
            "font": {"color": "@ink", "size": 12},
            "namelength": -1,
        },
        "xaxis": axis(x_title),
        "yaxis": axis(y_title),
        **more,
    }


def axis(title: str, **more: Any) -> Json:
    named = (
        {"title": {"text": title, "standoff": 10, "font": {"color": "@muted", "size": 12}}} if title else {}
    )
    return {
        **named,
        "automargin": True,
        "gridcolor": "@grid",
        "linecolor": "@line",
        "tickcolor": "@line",
        "tickfont": {"color": "@muted", "size": 11.5},
        "zeroline": False,
        "fixedrange": False,
        **more,
    }


def names_axis(names: Sequence[str], **more: Any) -> Json:
    """One row a name, the first on top."""
    return axis(
        "",
        type="category",
        categoryorder="array",
        categoryarray=list(names),
        range=[len(names) - 0.5, -0.5],
        showgrid=False,
        ticks="",
        **more,
    )


def plain(text: str) -> str:
    """Plotly reads some HTML in its texts: what comes from a file must stay text."""
    return html.escape(text, quote=False)


def in_template(text: str) -> str:
    """The same inside a hover template, where %{...} would be filled in."""
    return plain(text).replace("%{", "%\u200b{")


def short_names(names: Iterable[str], most: int = 18) -> dict[str, str]:
    """A label for each name, short and safe; the middle is left out, for ends tell nodes apart."""
    found: dict[str, str] = {}
    taken: set[str] = set()
    for name in names:
        cut = name if len(name) <= most else f"{name[: most // 2]}…{name[-(most - most // 2 - 1) :]}"
        label, copy = cut, 1
        while label in taken:
            copy += 1
            label = f"{cut} ({copy})"
        taken.add(label)
        found[name] = plain(label)
    return found


def version_tokens(versions: Iterable[str]) -> dict[str, str]:
    """A colour for each version, by its place in the problem: the same in every chart."""
    return {name: f"@version-{index % VERSION_COLOURS}" for index, name in enumerate(versions)}


def version_keys(versions: Iterable[str], tokens: Mapping[str, str]) -> list[Key]:
    return [Key(f"version {v}", v, tokens[v], "box") for v in versions]


def vertical(x: float, text: str) -> tuple[Json, Json]:
    """A dotted line and its label, to the left of its upper end."""
    line = {"color": "@limit", "width": 1.2, "dash": "dot"}
    shape = {"type": "line", "x0": x, "x1": x, "yref": "paper", "y0": 0, "y1": 1, "line": line}
    return shape, _label(text, x=x, xanchor="right", yref="paper", y=1, yanchor="top", xshift=-3)


def horizontal(y: float, text: str) -> tuple[Json, Json]:
    """A dotted line and its label, below its left end."""
    line = {"color": "@limit", "width": 1.2, "dash": "dot"}
    shape = {"type": "line", "y0": y, "y1": y, "xref": "paper", "x0": 0, "x1": 1, "line": line}
    return shape, _label(text, y=y, yanchor="top", xref="paper", x=0, xanchor="left", xshift=3)


def _label(text: str, **place: Any) -> Json:
    return {"text": plain(text), "showarrow": False, "font": {"size": 11.5, "color": "@limit"}, **place}
