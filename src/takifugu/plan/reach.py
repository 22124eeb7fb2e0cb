"""How soon a loss can be reached, and how low the loss can get: the search without energy.

Labels are (time, loss) alone, so there are few. It finds a plan where the cheap ones run out of time,
and says how far off an infeasible problem is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from takifugu.plan.curves import Floats
from takifugu.plan.options import Ints, Options
from takifugu.plan.plan import Decision
from takifugu.plan.potentials import Potential
from takifugu.plan.problem import Problem
from takifugu.plan.ways import start_table

_MOST_ROUNDS = 100_000


@dataclass
class Reached:
    time_s: float = np.inf
    """The earliest end of a plan that meets the target, whatever the deadline."""
    decisions: tuple[Decision, ...] = ()
    best_loss: float = np.inf
    """The lowest loss at the deadline."""
    exact: bool = True
    """Whether no label was dropped that might have mattered (given the options)."""


@dataclass
class _Layer:
    version: Ints
    clock: Floats
    loss: Floats
    parent: Ints
    option: Ints


def fastest(options: Options | None) -> Options | None:
    """Options that no other beats in time and share while the same nodes' windows hold."""
    if options is None:
        return None
    kept: list[int] = []
    best: dict[object, float] = {}
    for row in np.lexsort((-options.share, options.time_s)):
        if options.share[row] > best.get(options.windows[row], -1.0):
            best[options.windows[row]] = float(options.share[row])
            kept.append(int(row))
    return options.take(np.array(sorted(kept), dtype=np.int64))


@dataclass
class Reach:
    problem: Problem
    options: Sequence[Options | None]
    least_time: Potential | None = None
    most_labels: int = 120
    """Per version and round."""
    check: Callable[[], None] = field(default=lambda: None)

    def run(self) -> Reached:
        problem, reached = self.problem, Reached()
        reached.best_loss = problem.start_loss
        moves = [[(v, 0.0, 0.0)] for v in range(len(problem.versions))]
        for s in problem.switches:
            moves[problem.version_index[s.target]].append(
                (problem.version_index[s.source], s.time_s, s.loss_jump)
            )
        starts = [None if o is None else start_table(o) for o in self.options]
        first = np.full(1, problem.version_index[problem.start_version])
        none = np.full(1, -1)
        layers = [_Layer(first, np.full(1, problem.start_time_s), np.full(1, problem.start_loss), none, none)]
        front: list[Floats] = [np.zeros((0, 2)) for _ in problem.versions]
        limit = min(problem.max_rounds or _MOST_ROUNDS, _MOST_ROUNDS)
        for _ in range(limit):
            self.check()
            layer = layers[-1]
            kept: list[_Layer] = []
            for target, options in enumerate(self.options):
                if options is None or not len(options):
                    continue
                parts = []
                for source, time_s, jump in moves[target]:
                    rows = np.flatnonzero(layer.version == source)
                    if len(rows):
                        parts.append((rows, layer.clock[rows] + time_s, layer.loss[rows] + jump))
                if not parts:
                    continue
                rows, clock, loss = (np.concatenate(c) for c in zip(*parts, strict=True))
                children = self._rounds(layers, rows, clock, loss, target, options, starts[target], reached)
                if children is not None:
                    children = self._undominated(children, front, target, reached)
                    if len(children.version):
                        kept.append(children)
            if not kept:
                break
            names = ("version", "clock", "loss", "parent", "option")
            layers.append(_Layer(*(np.concatenate([getattr(k, n) for k in kept]) for n in names)))
        else:
            reached.exact = reached.exact and limit < _MOST_ROUNDS
        return reached

    def _rounds(
        self,
        layers: list[_Layer],
        rows: Ints,
        ready: Floats,
        loss: Floats,
        target: int,
        options: Options,
        table: tuple[Floats, Floats] | None,
        reached: Reached,
    ) -> _Layer | None:
        from takifugu.plan.compiled import sets

        problem = self.problem
        start = ready[:, None] if table is None else sets.earliest_starts(ready, *table)
        clock = start + options.time_s
        after = problem.versions[target].curve.step(loss[:, None], options.share[None, :])
        intime = clock <= problem.time_limit
        if intime.any():
            reached.best_loss = min(reached.best_loss, float(after[intime].min()))
        done = (after <= problem.loss_limit) & np.isfinite(clock)
        if done.any():
            ends = np.where(done, clock, np.inf)
            first, way = divmod(int(ends.argmin()), len(options))
            if ends[first, way] < reached.time_s:
                reached.time_s = float(ends[first, way])
                last = Decision(target, options.used(way))
                reached.decisions = (*self._path(layers, int(rows[first])), last)
        useful = np.isfinite(clock) & ~done & (clock < reached.time_s)
        label, option = np.nonzero(useful)
        if not len(label):
            return None
        clock, after = clock[label, option], after[label, option]
        if self.least_time is not None:
            # Still needed when the target is missed: what is in time may lower the best loss.
            hopeful = clock + self.least_time.at(target, after) * (1 - 1e-9) < reached.time_s
            keep = np.flatnonzero(hopeful | (clock <= problem.time_limit))
            label, option, clock, after = label[keep], option[keep], clock[keep], after[keep]
        return _Layer(np.full(len(label), target), clock, after, rows[label], option)

    def _path(self, layers: list[_Layer], row: int) -> tuple[Decision, ...]:
        steps: list[Decision] = []
        for layer in reversed(layers[1:]):
            version = int(layer.version[row])
            options = self.options[version]
            assert options is not None
            steps.append(Decision(version, options.used(int(layer.option[row]))))
            row = int(layer.parent[row])
        return tuple(reversed(steps))

    def _undominated(self, new: _Layer, front: list[Floats], target: int, reached: Reached) -> _Layer:
        old = front[target]
        clock = np.concatenate([old[:, 0], new.clock])
        loss = np.concatenate([old[:, 1], new.loss])
        order = np.lexsort((loss, clock))
        before = np.minimum.accumulate(np.concatenate([[np.inf], loss[order][:-1]]))
        best = order[loss[order] < before]
        if len(best) > 4 * self.most_labels:
            reached.exact = False
            best = best[np.unique(np.linspace(0, len(best) - 1, 4 * self.most_labels).astype(int))]
        front[target] = np.stack([clock[best], loss[best]], axis=1)
        rows = best[best >= len(old)] - len(old)
        if len(rows) > self.most_labels:
            reached.exact = False
            rows = rows[np.unique(np.linspace(0, len(rows) - 1, self.most_labels).astype(int))]
        return _Layer(new.version[rows], new.clock[rows], new.loss[rows], new.parent[rows], new.option[rows])
