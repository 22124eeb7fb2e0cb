"""The approximate dynamic program: a sweep over progress, one label per cell, true values in it.

Progress is a potential, what is left to pay at the best prices: it falls along every good plan, across
switches too. A table of (progress, version, time) cells holds one label each, the most promising; labels
keep their true values, cells only decide who is dropped. Sweeping over rounds instead would favour labels
that idle: they look cheap beside labels that have already paid for progress.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from takifugu.plan.bounds import Guide, Ints
from takifugu.plan.curves import Floats
from takifugu.plan.options import Options
from takifugu.plan.plan import Decision
from takifugu.plan.potentials import Potential
from takifugu.plan.problem import Problem
from takifugu.plan.search import Found
from takifugu.plan.ways import start_table

_SWITCH_REGRET = 0.02
"""A switch is tried only where the bounds see at most this relative loss in it."""


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
    known_j: float = np.inf
    check: Callable[[], None] = field(default=lambda: None)
    observe: Callable[[Sweep, Ints], None] | None = None
    found: Found = field(default_factory=Found)

    def run(self) -> Found:
        problem = self.problem
        self.found = Found()
        limits = (self.guide.least_time, self.guide.least_rounds)
        self._along = Guide((self.progress,), *limits, self.guide.time_limit, self.guide.rounds_limit)
        versions = len(problem.versions)
        size = (self.buckets + 1) * self.slices * versions * self.times
        self.energy, self.clock, self.loss = np.zeros(size), np.zeros(size), np.zeros(size)
        self.rank = np.full(size, np.inf)
        self.rounds, self.parent, self.option = (np.zeros(size, dtype=np.int64) for _ in range(3))
        self._starts = [None if o is None else start_table(o) for o in self.options]
        self._from: list[list[tuple[int, float, float, float]]] = [[] for _ in range(versions)]
        for s in problem.switches:
            row = (problem.version_index[s.target], s.energy_j, s.time_s, s.loss_jump)
            self._from[problem.version_index[s.source]].append(row)
        start = problem.version_index[problem.start_version]
        self._whole = float(self.progress.at(start, np.full(1, problem.start_loss))[0]) or 1.0
        root = start * self.times
        self.clock[root], self.loss[root] = problem.start_time_s, problem.start_loss
        self.parent[root] = -1
        here = (self.loss[root : root + 1], self.clock[root : root + 1])
        self.rank[root] = self.guide.energy_to_go(start, *here, 0, self.caution)[0]
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
                rank = energy + self.guide.energy_to_go(target, loss, clock, stay.rounds, self.caution)
                rows = np.flatnonzero(rank <= stay.rank * (1 + _SWITCH_REGRET) + 1e-12 * self._whole)
                if len(rows):
                    moved = _Batch(stay.cell, energy, clock, loss, stay.rounds, rank)
                    bases.setdefault(target, []).append(moved.take(rows))
        for target, batches in sorted(bases.items()):
            names = ("cell", "energy", "clock", "loss", "rounds", "rank")
            base = _Batch(*(np.concatenate([getattr(b, n) for b in batches]) for n in names))
            self._rounds(base, target, bucket)

    def _rounds(self, base: _Batch, target: int, bucket: int) -> None:
        from takifugu.plan.compiled import sets

        problem, options = self.problem, self.options[target]
        if options is None or not len(options):
            return
        table = self._starts[target]
        start = base.clock[:, None] if table is None else sets.earliest_starts(base.clock, *table)
        clock = start + options.time_s[None, :]
        loss = problem.versions[target].curve.step(base.loss[:, None], options.share[None, :])
        energy = base.energy[:, None] + options.energy_j[None, :]
        fine = (clock <= problem.time_limit) & (energy < self.cutoff)
        if problem.max_rounds is not None:
            fine &= (base.rounds < problem.max_rounds)[:, None]
        done = fine & (loss <= problem.loss_limit)
        if done.any():
            self._arrive(base, options, np.where(done, energy, np.inf), target)
            fine &= ~done
        left = self.progress.at(target, loss)
        fine_place = ((1.0 - left / self._whole) * (self.buckets * self.slices)).astype(np.int64)
        place = np.minimum(fine_place, (self.buckets + 1) * self.slices - 1)
        # Children must come forward by a bucket, so that a bucket is final when its turn comes.
        label, option = np.nonzero(fine & (place >= (bucket + 1) * self.slices))
        if not len(label):
            return
        place, loss, clock, energy = (x[label, option] for x in (place, loss, clock, energy))
        rounds = base.rounds[label] + 1
        span = max(problem.deadline_s - problem.start_time_s, 1e-12)
        hour = ((clock - problem.start_time_s) / span * self.times).astype(np.int64)
        cell = (place * len(problem.versions) + target) * self.times + np.clip(hour, 0, self.times - 1)
        to_beat = np.minimum(self.rank[cell], self.cutoff * (1 + self.caution))
        # Most lose already at one price: only the others are ranked at all of them.
        hope = energy + self._along.energy_to_go(target, loss, clock, rounds, self.caution) < to_beat
        label, option, loss, clock, energy, rounds, cell, to_beat = (
            x[hope] for x in (label, option, loss, clock, energy, rounds, cell, to_beat)
        )
        rank = energy + self.guide.energy_to_go(target, loss, clock, rounds, self.caution)
        rank[self.guide.hopeless(target, loss, clock, rounds)] = np.inf
        better = np.flatnonzero(rank < to_beat)
        order = better[np.lexsort((rank[better], cell[better]))]
        rows = order[np.concatenate([[True], np.diff(cell[order]) > 0])] if len(order) else order
        at = cell[rows]
        self.rank[at], self.energy[at], self.clock[at] = rank[rows], energy[rows], clock[rows]
        self.loss[at], self.rounds[at] = loss[rows], rounds[rows]
        self.parent[at], self.option[at] = base.cell[label[rows]], option[rows]

    def _arrive(self, base: _Batch, options: Options, energy: Floats, target: int) -> None:
        label, option = divmod(int(energy.argmin()), len(options))
        best = float(energy[label, option])
        if best < self.cutoff:
            self.found.energy_j = best
            self.found.decisions = (*self.path(int(base.cell[label])), Decision(target, options.used(option)))
