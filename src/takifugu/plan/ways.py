"""What the compiled label search reads: options and bounds as arrays, and where rounds lead. For the built-in
curves that is a formula, for all others a table of what their `step` says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from takifugu.plan.bounds import Guide
from takifugu.plan.curves import Curve, Exponential, Floats, Power
from takifugu.plan.options import Options
from takifugu.plan.problem import Problem, at_most

if TYPE_CHECKING:
    from takifugu.plan.compiled import labels as loops

Ints = NDArray[np.int64]

_MOST = 4_000_000
"""Entries of tables, beyond which those that are not needed now are forgotten."""


@dataclass
class Ways:
    """Options as arrays, and where rounds lead. Tables grow by the losses that labels have."""

    problem: Problem
    options: Sequence[Options | None]
    shapes: tuple[Ints, Floats, Floats]
    """[version]: as `compiled/labels.py` has them"""
    losses: list[Floats]
    """[version]: rising"""
    rows: list[Floats]
    """[version][loss, option]: the loss after a round"""

    @classmethod
    def of(cls, problem: Problem, options: Sequence[Options | None]) -> Ways:
        from takifugu.plan.compiled import labels

        kind, pace, exponent = [], [], []
        for version in problem.versions:
            curve, known, rate, power = version.curve, labels.TABLE, 0.0, 1.0
            if type(curve) is Exponential:
                known, rate = labels.EXPONENTIAL, curve.rate
            elif type(curve) is Power:
                known, rate, power = labels.POWER, curve.scale, curve.exponent
            kind.append(known)
            pace.append(rate)
            exponent.append(power)
        shapes = (np.array(kind), np.array(pace, dtype=float), np.array(exponent, dtype=float))
        empty = [np.zeros((0, 0 if o is None else len(o))) for o in options]
        return cls(problem, options, shapes, [np.zeros(0) for _ in options], empty)

    def __post_init__(self) -> None:
        from takifugu.plan.compiled import labels

        self.rounds = columns(self.options, [v.curve for v in self.problem.versions])
        self._tabled = [
            v for v, o in enumerate(self.options) if o is not None and self.shapes[0][v] == labels.TABLE
        ]
        self._lay_out()

    def learn_(
        self, layer: loops.Labels, moves: loops.Moves, first: tuple[int, int], last: tuple[int, int]
    ) -> None:
        """What the tables need to know for some moves from some labels of a layer."""
        from takifugu.plan.compiled import labels

        new = {}
        for v in self._tabled:
            more = labels.missing(layer, moves, first, last, v, self.losses[v])
            if len(more):
                new[v] = np.unique(more)
        assert new, "asked for a table that has all it needs"
        if sum(self.rows[v].size + len(x) * self.rows[v].shape[1] for v, x in new.items()) > _MOST:
            self.losses = [np.zeros(0) for _ in self.options]
            self.rows = [row[:0] for row in self.rows]
            new = {
                v: np.unique(labels.missing(layer, moves, first, last, v, self.losses[v]))
                for v in self._tabled
            }
        for v, more in new.items():
            options = self.options[v]
            assert options is not None
            after = self.problem.versions[v].curve.step(more[:, None], options.share[None, :])
            both = np.concatenate([self.losses[v], more])
            order = np.argsort(both)
            self.losses[v] = both[order]
            self.rows[v] = np.concatenate([self.rows[v], after])[order]
        self._lay_out()

    def _lay_out(self) -> None:
        """All tables one after another."""
        table_at = np.cumsum([0, *(len(x) for x in self.losses)])
        row_at = np.cumsum([0, *(x.size for x in self.rows)])
        self.tables = (
            table_at,
            row_at,
            np.concatenate(self.losses),
            np.concatenate([x.ravel() for x in self.rows]),
        )


def bounds(guide: Guide | None, versions: int) -> loops.Bounds:
    """Of a guide, if there is one."""
    if guide is None or not guide.potentials:
        nothing = np.zeros((versions, 2))
        return np.arange(2.0), np.zeros((versions, 2, 0)), np.zeros(0), np.zeros(0), nothing, nothing
    grid = guide.potentials[0].grid
    rows = (guide.least_time, guide.least_rounds)
    assert all(np.array_equal(p.grid, grid) for p in (*guide.potentials, *rows))
    return (
        grid,
        np.stack([p.value for p in guide.potentials], axis=2),
        np.array([p.prices.per_second for p in guide.potentials]),
        np.array([p.prices.per_round for p in guide.potentials]),
        np.ascontiguousarray(rows[0].value),
        np.ascontiguousarray(rows[1].value),
    )


def columns(options: Sequence[Options | None], curves: Sequence[Curve]) -> loops.Rounds:
    """All options one after another: where versions begin; energy, time, share, asymptote; windows."""
    listed = [o for o in options if o is not None]

    def column(parts: list[Floats]) -> Floats:
        return np.concatenate([np.zeros(0), *parts])

    lowest = [
        c.asymptote(o.share) if isinstance(c, Exponential | Power) else np.zeros(len(o))
        for o, c in zip(options, curves, strict=True)
        if o is not None
    ]
    begin = np.cumsum([0, *(0 if o is None else len(o) for o in options)])
    tables = [start_table(o) for o in listed]
    if all(t is None for t in tables):
        window, opens, closes = np.zeros(begin[-1] + 1, dtype=np.int64), np.zeros(0), np.zeros(0)
    else:
        spans = [
            (np.full((len(o), 1), -np.inf), np.full((len(o), 1), np.inf)) if t is None else t
            for o, t in zip(listed, tables, strict=True)
        ]
        window = np.cumsum([0, *(opens.shape[1] for opens, _ in spans for _ in range(len(opens)))])
        opens, closes = (column([span[k].ravel() for span in spans]) for k in (0, 1))
    energy_j, time_s, share = (
        column([getattr(o, name) for o in listed]) for name in ("energy_j", "time_s", "share")
    )
    return begin, energy_j, time_s, share, column(lowest), window, opens, closes


def start_table(options: Options) -> tuple[Floats, Floats] | None:
    """[option, window]: the instants between which a round may start; nothing if always."""
    if all(w is None for w in options.windows):
        return None
    most = max(len(w) for w in options.windows if w is not None) or 1
    opens = np.full((len(options), most), np.inf)
    closes = np.full((len(options), most), -np.inf)
    for row, windows in enumerate(options.windows):
        if windows is None:
            opens[row, 0], closes[row, 0] = -np.inf, np.inf
            continue
        for place, (a, b) in enumerate(windows):
            opens[row, place] = a
            closes[row, place] = at_most(b) - options.time_s[row]
    return opens, closes
