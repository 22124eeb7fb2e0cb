"""The label search on the time-expanded graph: states are (version, loss, time), edges are rounds.

Layer k holds what k rounds can lead to. The search is exact on its options: a label is dropped only if
another of the same version is at least as good in energy, time and loss (after no more rounds), or if
its lower bound reaches the cutoff. That is enough because every curve is monotone, waiting is free and
earlier is never worse. Complete options make it the exact solver; `sweep.py` is the approximate one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from takifugu.plan.bounds import Guide
from takifugu.plan.curves import Floats
from takifugu.plan.dominance import undominated
from takifugu.plan.options import Options
from takifugu.plan.plan import Decision
from takifugu.plan.problem import Problem, at_most

Ints = NDArray[np.int64]


class OutOfTime(Exception):
    """The time limit, or an interruption, came before the end."""


@dataclass
class Layer:
    version: Ints
    energy: Floats
    clock: Floats
    loss: Floats
    parent: Ints
    option: Ints

    def __len__(self) -> int:
        return len(self.version)

    def take(self, rows: Ints) -> Layer:
        columns = (self.version, self.energy, self.clock, self.loss, self.parent, self.option)
        return Layer(*(column[rows] for column in columns))  # type: ignore[arg-type]


def _joined(layers: Sequence[Layer]) -> Layer:
    def column(name: str) -> NDArray[np.generic]:
        return np.concatenate([getattr(layer, name) for layer in layers])

    return Layer(*(column(n) for n in ("version", "energy", "clock", "loss", "parent", "option")))  # type: ignore[arg-type]


@dataclass
class Found:
    """The best plan seen and what was proved on the way."""

    energy_j: float = np.inf
    decisions: tuple[Decision, ...] = ()
    least_pruned_j: float = np.inf
    """The smallest lower bound among labels that were dropped for it."""
    complete: bool = False
    """Whether the search ended by itself, without width or time cutting it."""
    labels: int = 0


@dataclass
class Search:
    problem: Problem
    options: Sequence[Options | None]
    guide: Guide | None
    tolerance: float = 0.0
    max_labels: int | None = None
    """Exact searches give up (incomplete) beyond this many labels in all."""
    known_j: float = np.inf
    """Energy of a plan that is known already; only better ones are looked for."""
    check: Callable[[], None] = field(default=lambda: None)
    observe: Callable[[Layer], None] | None = None
    """Sees every surviving layer (the front is collected this way)."""

    def __post_init__(self) -> None:
        problem = self.problem
        index = problem.version_index
        self._moves: list[list[tuple[int, float, float, float]]] = [
            [(v, 0.0, 0.0, 0.0)] for v in range(len(problem.versions))
        ]
        for s in problem.switches:
            self._moves[index[s.target]].append((index[s.source], s.energy_j, s.time_s, s.loss_jump))
        self._starts = [None if o is None else start_table(o) for o in self.options]
        self._layers: list[Layer] = []
        self._archive: list[Floats] = [np.zeros((0, 3)) for _ in problem.versions]

    @property
    def depth(self) -> int:
        return len(self._layers) - 1

    @property
    def cutoff(self) -> float:
        """Labels whose bound reaches this are dropped: they cannot lead to a plan that is worth having."""
        return min(self.found.energy_j, self.known_j) * (1.0 - self.tolerance)

    def run(self) -> Found:
        problem = self.problem
        self.found = found = Found()
        zero, one = np.zeros(1, dtype=np.int64), np.ones(1)
        layer = Layer(
            zero + problem.version_index[problem.start_version],
            0.0 * one,
            problem.start_time_s * one,
            problem.start_loss * one,
            zero - 1,
            zero - 1,
        )
        rounds = 0
        self._layers = [layer]
        found.complete = True
        while len(layer) and (problem.max_rounds is None or rounds < problem.max_rounds):
            self.check()
            children = self._expand(layer, rounds)
            rounds += 1
            layer = self._select(children, rounds)
            self._layers.append(layer)
            found.labels += len(layer)
            if self.observe is not None:
                self.observe(layer)
            if self.max_labels is not None and found.labels > self.max_labels:
                found.complete = False
                break
        return found

    def _expand(self, layer: Layer, rounds: int) -> list[Layer]:
        children = []
        for target in range(len(self.problem.versions)):
            options = self.options[target]
            if options is None or not len(options):
                continue
            for source, energy_j, time_s, jump in self._moves[target]:
                rows = np.flatnonzero(layer.version == source)
                if not len(rows):
                    continue
                base = Layer(
                    np.full(len(rows), target),
                    layer.energy[rows] + energy_j,
                    layer.clock[rows] + time_s,
                    layer.loss[rows] + jump,
                    rows,
                    rows,
                )
                base = self._bounded(base, rounds)
                # Blocks keep the tables of labels by options at a bounded size.
                block = max(1, 400_000 // len(options))
                for first in range(0, len(base), block):
                    part = base.take(np.arange(first, min(first + block, len(base))))
                    children.append(self._rounds(part, target, options, rounds, source != target))
                    self.check()
        return children

    def _rounds(self, base: Layer, target: int, options: Options, rounds: int, switched: bool) -> Layer:
        """Every option from every label, as far as limits and bounds allow."""
        from takifugu.plan.compiled import sets

        problem = self.problem
        table = self._starts[target]
        start = base.clock[:, None] if table is None else sets.earliest_starts(base.clock, *table)
        clock = start + options.time_s[None, :]
        loss = problem.versions[target].curve.step(base.loss[:, None], options.share[None, :])
        fine = clock <= problem.time_limit
        if not switched:
            fine &= loss < base.loss[:, None]
        done = fine & (loss <= problem.loss_limit)
        if done.any():
            self._note_arrivals(base, options, done, target)
        label, option = np.nonzero(fine & ~done)
        return self._bounded(
            Layer(
                np.full(len(label), target),
                base.energy[label] + options.energy_j[option],
                clock[label, option],
                loss[label, option],
                base.parent[label],
                option,
            ),
            rounds + 1,
        )

    def _note_arrivals(self, base: Layer, options: Options, done: NDArray[np.bool_], target: int) -> None:
        energy = np.where(done, base.energy[:, None] + options.energy_j[None, :], np.inf)
        place = int(energy.argmin())
        label, option = divmod(place, len(options))
        best = float(energy[label, option])
        if best < self.found.energy_j and best < self.known_j:
            self.found.energy_j = best
            last = Decision(target, options.used(option))
            self.found.decisions = (*self.path(len(self._layers) - 1, int(base.parent[label])), last)

    def path(self, depth: int, row: int) -> tuple[Decision, ...]:
        steps: list[Decision] = []
        while depth > 0:
            layer = self._layers[depth]
            version = int(layer.version[row])
            options = self.options[version]
            assert options is not None
            steps.append(Decision(version, options.used(int(layer.option[row]))))
            row = int(layer.parent[row])
            depth -= 1
        return tuple(reversed(steps))

    def _bounded(self, labels: Layer, rounds: int) -> Layer:
        """Labels that may still lead to a plan below the cutoff."""
        if self.guide is None or not len(labels):
            return labels
        version = int(labels.version[0])
        bound = labels.energy + self.guide.energy_to_go(version, labels.loss, labels.clock, rounds)
        dear = bound >= self.cutoff
        late = self.guide.hopeless(version, labels.loss, labels.clock, rounds)
        if dear.any():
            pruned = bound[dear & ~late]
            if len(pruned):
                self.found.least_pruned_j = min(self.found.least_pruned_j, float(pruned.min()))
        return labels.take(np.flatnonzero(~dear & ~late))

    def _select(self, children: list[Layer], rounds: int) -> Layer:
        children = [c for c in children if len(c)]
        if not children:
            return Layer(*(np.zeros(0, dtype=t) for t in (int, float, float, float, int, int)))
        pool = _joined(children)
        kept = []
        for version in range(len(self.problem.versions)):
            rows = np.flatnonzero(pool.version == version)
            if not len(rows):
                continue
            old = self._archive[version]
            new = np.stack([pool.energy[rows], pool.clock[rows], pool.loss[rows]], axis=1)
            both = np.concatenate([old, new])
            best = undominated(both[:, 0], both[:, 1], both[:, 2])
            self._archive[version] = both[best]
            kept.append(rows[best[best >= len(old)] - len(old)])
        return pool.take(np.sort(np.concatenate(kept)))


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
