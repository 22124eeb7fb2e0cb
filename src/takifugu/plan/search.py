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
from takifugu.plan.options import Options
from takifugu.plan.plan import Decision
from takifugu.plan.problem import Problem
from takifugu.plan.ways import Ways, bounds

Ints = NDArray[np.int64]


_BLOCK = 400_000
"""Rounds that are looked at before the clock is."""


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
    ways: Ways | None = None
    """Options as arrays and where rounds lead, if that is known beforehand."""

    def __post_init__(self) -> None:
        problem, index = self.problem, self.problem.version_index
        stay = [(v, v, 0.0, 0.0, 0.0) for v in range(len(problem.versions))]
        rows = stay + [
            (index[s.source], index[s.target], s.energy_j, s.time_s, s.loss_jump) for s in problem.switches
        ]
        rows = sorted((row for row in rows if self.options[row[1]]), key=lambda row: row[1])
        source, target = (np.array([row[k] for row in rows], dtype=np.int64) for k in (0, 1))
        energy_j, time_s, jump = (np.array([row[k] for row in rows], dtype=np.float64) for k in (2, 3, 4))
        self._moves = (source, target, energy_j, time_s, jump)
        self._widths = np.array([0 if o is None else len(o) for o in self.options])[target]
        self._ways = self.ways or Ways.of(problem, self.options)
        self._bounds = bounds(self.guide, len(problem.versions))
        self._layers: list[Layer] = []
        self._arrival: tuple[int, int, int, int] | None = None
        """Of the best plan so far: its last round's depth, version, parent and option"""

    @property
    def depth(self) -> int:
        return len(self._layers) - 1

    def run(self) -> Found:
        self.found = Found()
        try:
            self._run(self.found)
        finally:  # also when time is up
            if self._arrival is not None:
                depth, version, parent, option = self._arrival
                self.found.decisions = (*self.path(depth, parent), self._decision(version, option))
        return self.found

    def _run(self, found: Found) -> None:
        from takifugu.plan.compiled import labels

        problem = self.problem
        start = problem.version_index[problem.start_version]
        layer = Layer(
            *(np.array([x]) for x in (start, 0.0, problem.start_time_s, problem.start_loss, -1, -1))
        )
        archive = (np.zeros(len(self.options) + 1, dtype=np.int64), np.zeros((3, 0)))
        rounds, limit = 0, np.inf if problem.max_rounds is None else float(problem.max_rounds)
        self._layers = [layer]
        found.complete = True
        while len(layer) and rounds < limit:
            self.check()
            # After the last round nothing is left to do, but who looks on may want to see it.
            last = rounds + 1 >= limit and self.observe is None
            children = self._expand(layer, limit - rounds, not last)
            rounds += 1
            children = self._below_the_cutoff(*children, rounds)
            kept, archive = labels.select(len(self.options), children, archive)
            (version, parent, option), (energy, clock, loss) = (x[:, kept] for x in children)
            layer = Layer(version, energy, clock, loss, parent, option)
            self._layers.append(layer)
            found.labels += len(layer)
            if self.observe is not None:
                self.observe(layer)
            if self.max_labels is not None and found.labels > self.max_labels:
                found.complete = False
                break

    def _expand(self, layer: Layer, rounds_left: float, keep: bool) -> tuple[Ints, Floats]:
        """Every option from every label, as far as limits and bounds allow."""
        moves, labels = len(self._moves[0]), len(layer)
        if labels * int(self._widths.sum()) <= _BLOCK:  # mostly: all at once
            return self._block(layer, (0, 0), (moves, labels), rounds_left, keep)
        found = []
        for move in range(moves):
            block = max(1, _BLOCK // int(self._widths[move]))
            for first in range(0, labels, block):
                last = (move + 1, min(first + block, labels))
                found.append(self._block(layer, (move, first), last, rounds_left, keep))
                self.check()
        numbers, values = zip(*found, strict=True)
        return np.concatenate(numbers, axis=1), np.concatenate(values, axis=1)

    def _block(
        self, layer: Layer, first: tuple[int, int], last: tuple[int, int], rounds_left: float, keep: bool
    ) -> tuple[Ints, Floats]:
        from takifugu.plan.compiled import labels

        problem, found = self.problem, self.found
        here = (layer.version, layer.energy, layer.clock, layer.loss)
        while True:
            children, (energy_j, version, parent, option), pruned = labels.expand(
                here,
                self._moves,
                first,
                last,
                self._ways.rounds,
                self._ways.shapes,
                self._ways.tables,
                self._bounds,
                (problem.loss_limit, problem.time_limit, rounds_left),
                (min(found.energy_j, self.known_j), self.tolerance, found.least_pruned_j),
                keep,
            )
            if version != labels.UNKNOWN:
                break
            self._ways.learn_(here, self._moves, first, last)
        found.least_pruned_j = pruned
        if version >= 0:
            found.energy_j, self._arrival = energy_j, (self.depth, version, parent, option)
        return children

    def _below_the_cutoff(self, numbers: Ints, values: Floats, rounds: int) -> tuple[Ints, Floats]:
        """Where the guide knows more than its potentials, which is all that compiled loops read."""
        guide, found = self.guide, self.found
        if guide is None or type(guide) is Guide or not numbers.shape[1]:
            return numbers, values
        version, (energy, clock, loss) = numbers[0], values
        bound = energy.copy()
        for v in np.unique(version):
            rows = version == v
            bound[rows] += guide.energy_to_go(int(v), loss[rows], clock[rows], rounds)
        dear = bound >= min(found.energy_j, self.known_j) * (1.0 - self.tolerance)
        found.least_pruned_j = min(found.least_pruned_j, float(bound.min(where=dear, initial=np.inf)))
        return numbers[:, ~dear], values[:, ~dear]

    def _decision(self, version: int, option: int) -> Decision:
        options = self.options[version]
        assert options is not None
        return Decision(version, options.used(option))

    def path(self, depth: int, row: int) -> tuple[Decision, ...]:
        steps: list[Decision] = []
        while depth > 0:
            layer = self._layers[depth]
            steps.append(self._decision(int(layer.version[row]), int(layer.option[row])))
            row = int(layer.parent[row])
            depth -= 1
        return tuple(reversed(steps))
