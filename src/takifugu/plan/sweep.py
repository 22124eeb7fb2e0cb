"""The approximate dynamic program: a sweep over progress, one label per cell, true values in it.

Progress is a potential, what is left to pay at the best prices: it falls along every good plan, across
switches too. A table of (progress, version, time) cells holds one label each, the most promising; labels
keep their true values, cells only decide who is dropped. Sweeping over rounds instead would favour labels
that idle: they look cheap beside labels that have already paid for progress.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from takifugu.plan.bounds import Guide, Ints
from takifugu.plan.curves import Curve, Floats, asymptotes, shape_of
from takifugu.plan.options import Options
from takifugu.plan.plan import Decision
from takifugu.plan.potentials import Potential
from takifugu.plan.problem import Problem
from takifugu.plan.search import Found
from takifugu.plan.ways import start_table

if TYPE_CHECKING:
    from takifugu.plan.compiled import sweeps

_SWITCH_REGRET = 0.02
"""A switch is tried only where the bounds see at most this relative loss in it."""
_BIN = 0.01
"""Shares this close together are one to a first look at options."""


@dataclass
class _Batch:
    """Labels on their way: the cell they come from, and what they have spent so far."""

    cell: Ints
    energy: Floats
    clock: Floats
    loss: Floats
    rounds: Ints
    rank: Floats

    def take(self, rows: Ints) -> _Batch:
        return _Batch(
            self.cell[rows],
            self.energy[rows],
            self.clock[rows],
            self.loss[rows],
            self.rounds[rows],
            self.rank[rows],
        )


@dataclass
class Sweep:
    problem: Problem
    options: Sequence[Options | None]
    guide: Guide
    progress: Potential
    buckets: int = 300
    width: int = 8
    times: int = 6
    """Cells of time in each bucket."""
    slices: int = 8
    """Finer cells of progress within each bucket."""
    caution: float = 0.003
    """The part of the time and rounds left that ranking holds back, so as not to run out of either."""
    regret: float = 0.3
    """Options are looked at that cost so much more than the best one for what they take off the rest."""
    known_j: float = np.inf
    check: Callable[[], None] = field(default=lambda: None)
    observe: Callable[[Sweep, Ints], None] | None = None
    found: Found = field(default_factory=Found)

    def run(self) -> Found:
        problem = self.problem
        self.found = Found()
        versions = len(problem.versions)
        size = (self.buckets + 1) * self.slices * versions * self.times
        self.energy, self.clock, self.loss = np.zeros(size), np.zeros(size), np.zeros(size)
        self.rank = np.full(size, np.inf)
        self.rounds, self.parent, self.option = (np.zeros(size, dtype=np.int64) for _ in range(3))
        curves = [v.curve for v in problem.versions]
        pairs = zip(self.options, curves, strict=True)
        self._menus = [None if o is None or not len(o) else _Menu.of(o, curve) for o, curve in pairs]
        self._ranks = self.guide.laid_out
        self._first = np.zeros(len(self._ranks[0]), dtype=np.int64)
        self._from: list[list[tuple[int, float, float, float]]] = [[] for _ in range(versions)]
        for s in problem.switches:
            row = (problem.version_index[s.target], s.energy_j, s.time_s, s.loss_jump)
            self._from[problem.version_index[s.source]].append(row)
        start = problem.version_index[problem.start_version]
        self._whole = float(self.progress.at(start, np.full(1, problem.start_loss))[0]) or 1.0
        root = start * self.times
        self.clock[root], self.loss[root] = problem.start_time_s, problem.start_loss
        self.parent[root] = -1
        one = slice(root, root + 1)
        self.rank[root] = self._to_go(start, self.loss[one], self.clock[one], self.rounds[one])[0]
        per_bucket = self.slices * versions * self.times
        for bucket in range(self.buckets + 1):
            cells = bucket * per_bucket + np.arange(per_bucket)
            cells = cells[self.rank[cells] < self.cutoff * (1 + self.caution)]
            if not len(cells):
                continue
            if bucket % 16 == 0:
                self.check()
            cells = cells[np.argsort(self.rank[cells], kind="stable")[: self.width]]
            self.found.labels += len(cells)
            if self.observe is not None:
                self.observe(self, cells)
            self._expand(np.sort(cells), bucket)
        return self.found

    @property
    def cutoff(self) -> float:
        return min(self.found.energy_j, self.known_j)

    def path(self, cell: int) -> tuple[Decision, ...]:
        steps: list[Decision] = []
        while self.parent[cell] >= 0:
            version = cell // self.times % len(self.problem.versions)
            options = self.options[version]
            assert options is not None
            steps.append(Decision(version, options.used(int(self.option[cell]))))
            cell = int(self.parent[cell])
        return tuple(reversed(steps))

    def _expand(self, cells: Ints, bucket: int) -> None:
        version = cells // self.times % len(self.problem.versions)
        bases: dict[int, list[_Batch]] = {}
        for v in np.unique(version):
            here = cells[version == v]
            stay = _Batch(
                here, self.energy[here], self.clock[here], self.loss[here], self.rounds[here], self.rank[here]
            )
            bases.setdefault(int(v), []).append(stay)
            for target, energy_j, time_s, jump in self._from[int(v)]:
                loss, clock, energy = stay.loss + jump, stay.clock + time_s, stay.energy + energy_j
                rank = energy + self._to_go(target, loss, clock, stay.rounds)
                rows = np.flatnonzero(rank <= stay.rank * (1 + _SWITCH_REGRET) + 1e-12 * self._whole)
                if len(rows):
                    moved = _Batch(stay.cell, energy, clock, loss, stay.rounds, rank)
                    bases.setdefault(target, []).append(moved.take(rows))
        for target, batches in sorted(bases.items()):
            names = ("cell", "energy", "clock", "loss", "rounds", "rank")
            base = _Batch(*(np.concatenate([getattr(b, n) for b in batches]) for n in names))
            self._rounds(base, target, bucket)

    def _rounds(self, base: _Batch, target: int, bucket: int) -> None:
        from takifugu.plan.compiled import sweeps as loop

        problem, menu = self.problem, self._menus[target]
        if menu is None:
            return
        labels = (base.cell, base.energy, base.clock, base.loss, base.rounds.astype(float))
        limits = (
            problem.start_time_s,
            problem.time_limit,
            problem.deadline_s,
            problem.loss_limit,
            np.inf if problem.max_rounds is None else float(problem.max_rounds),
        )
        guide = self.guide
        least: sweeps.Least = (
            guide.least_time.grid,
            np.ascontiguousarray(guide.least_time.value[target]),
            guide.least_rounds.grid,
            np.ascontiguousarray(guide.least_rounds.value[target]),
            guide.time_limit,
            guide.rounds_limit,
        )
        prices = self.progress.prices
        progress = (self.progress.grid, np.ascontiguousarray(self.progress.value[target]))
        energy, label, option = loop.expand(
            labels,
            menu.columns,
            menu.formula,
            menu.tables(base.loss),
            (*progress, float(prices.per_second), float(prices.per_round), self._whole),
            self._ranks,
            least,
            (self.rank, self.energy, self.clock, self.loss, self.rounds, self.parent, self.option),
            (self.buckets, self.slices, len(problem.versions), self.times, bucket, target),
            limits,
            self.caution,
            self.cutoff,
            self.regret,
            self._first,
        )
        if label >= 0:
            used = menu.options.used(option)
            self.found.energy_j = energy
            self.found.decisions = (*self.path(int(base.cell[label])), Decision(target, used))

    def _to_go(self, version: int, loss: Floats, clock: Floats, rounds: Ints) -> Floats:
        """[label]: what is left to pay, some of the time and of the rounds held back."""
        from takifugu.plan.compiled import sweeps as loop

        return loop.ranked(self._ranks, version, loss, clock, rounds.astype(float), self.caution)


def _binned(share: Floats) -> tuple[Floats, Ints]:
    """The largest share of each bin, and every share's bin."""
    _, bin_of = np.unique(np.floor(np.log(np.maximum(share, 1e-9)) / _BIN), return_inverse=True)
    top = np.zeros(int(bin_of.max()) + 1)
    np.maximum.at(top, bin_of, share)
    return top, bin_of


@dataclass(frozen=True)
class _Menu:
    """A version's options as the compiled loop reads them."""

    options: Options
    curve: Curve
    columns: sweeps.Options
    formula: sweeps.Curve

    @classmethod
    def of(cls, options: Options, curve: Curve) -> _Menu:
        share = options.share
        bins, place = _binned(share)
        shape = shape_of(curve)
        lowest = [np.zeros(len(x)) if shape is None else asymptotes(curve, x) for x in (share, bins)]
        always = (np.zeros((len(share), 0)), np.zeros((len(share), 0)))
        opens, closes = start_table(options) or always
        columns = (options.energy_j, options.time_s, share, lowest[0], opens, closes, place, bins, lowest[1])
        formula = (shape is not None, *(shape or (False, 0.0, 1.0)))
        return cls(options, curve, columns, formula)

    def tables(self, loss: Floats) -> sweeps.Tables:
        """[loss, option] and [loss, bin]: where rounds lead, if there is no formula for it."""
        if self.formula[0]:
            return np.zeros((0, 0)), np.zeros((0, 0))
        rows = (np.ascontiguousarray(x) for x in (self.options.share, self.columns[7]))
        one, other = (np.ascontiguousarray(self.curve.step(loss[:, None], x[None, :])) for x in rows)
        return one, other
