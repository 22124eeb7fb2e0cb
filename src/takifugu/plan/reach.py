"""How soon a loss can be reached, and how low the loss can get: the search without energy.

Labels are (time, loss) alone, so there are few. It finds a plan where the cheap ones run out of time,
and says how far off an infeasible problem is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from takifugu.plan.curves import Exponential, Floats, Power
from takifugu.plan.options import Ints, Options
from takifugu.plan.plan import Decision
from takifugu.plan.potentials import Potential
from takifugu.plan.problem import MOST_ROUNDS, Problem
from takifugu.plan.ways import start_table

_LAYERS = 400
"""Where more rounds than this are needed, labels take several equal rounds at once."""


@dataclass
class Reached:
    time_s: float = np.inf
    """The earliest end of a plan that meets the target, whatever the deadline."""
    decisions: tuple[Decision, ...] = ()
    best_loss: float = np.inf
    """The lowest loss at the deadline."""
    exact: bool = True
    """Whether no label was dropped that might have mattered (given the options)."""
    ended: bool = False
    """Whether it ended because nothing lowers the loss any more, not because of a limit on rounds."""


@dataclass
class _Layer:
    version: Ints
    clock: Floats
    loss: Floats
    parent: Ints
    option: Ints
    """The option of the round, or of the `Reach.repeat` equal rounds, that led here"""


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
    repeat: int = field(default=1, init=False)
    """So many equal rounds are taken at once."""

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
        self.repeat = self._several()
        reached.exact = self.repeat == 1
        for _ in range(problem.rounds_limit // self.repeat):
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
                reached.ended = self.repeat == 1
                break
            names = ("version", "clock", "loss", "parent", "option")
            layers.append(_Layer(*(np.concatenate([getattr(k, n) for k in kept]) for n in names)))
        return reached

    def _several(self) -> int:
        """How many equal rounds labels take at once, so that there are not too many layers."""
        problem = self.problem
        curves = [v.curve for v in problem.versions]
        if not all(isinstance(c, Exponential | Power) for c in curves):
            return 1
        fewest, allowed = float(problem.rounds_limit), 0.0
        left_s = max(problem.time_limit - problem.start_time_s, 0.0)
        for curve, options in zip(curves, self.options, strict=True):
            if options is None or not len(options):
                continue
            if any(w is not None for w in options.windows):
                return 1  # several rounds need not lie in one window
            assert isinstance(curve, Exponential | Power)
            share = np.full(1, options.share.max())
            fewest = min(fewest, _rounds_needed(curve, problem.start_loss, share, problem.loss_limit))
            allowed = max(allowed, left_s / float(options.time_s.min()))
        # Beyond the deadline only the target is of interest, below it also how far one gets.
        return max(1, int(min(fewest, max(allowed, 1.0) if np.isinf(fewest) else fewest) // _LAYERS))

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

        problem, curve = self.problem, self.problem.versions[target].curve
        start = ready[:, None] if table is None else sets.earliest_starts(ready, *table)
        clock = start + self.repeat * options.time_s
        if self.repeat == 1:
            after = curve.step(loss[:, None], options.share[None, :])
            intime, best = clock <= problem.time_limit, after
        else:
            assert isinstance(curve, Exponential | Power)
            lowered = partial(curve.repeated, loss[:, None], options.share[None, :])
            after = lowered(np.full(1, float(self.repeat)))
            # As many of them as end by the deadline.
            count = np.clip((problem.time_limit - start) // options.time_s, 0, self.repeat)
            intime, best = count > 0, lowered(count)
        if intime.any():
            reached.best_loss = min(reached.best_loss, float(best[intime].min()))
        done = (after <= problem.loss_limit) & np.isfinite(clock)
        if done.any():
            needed = np.ones(after.shape)
            if self.repeat > 1:
                needed = _fewest(lowered, self.repeat, problem.loss_limit, after.shape)
            ends = np.where(done, start + needed * options.time_s, np.inf)
            first, way = divmod(int(ends.argmin()), len(options))
            if ends[first, way] < reached.time_s:
                reached.time_s = float(ends[first, way])
                last = [Decision(target, options.used(way))] * int(needed[first, way])
                reached.decisions = (*self._path(layers, int(rows[first])), *last)
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
            steps += [Decision(version, options.used(int(layer.option[row])))] * self.repeat
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


def _rounds_needed(curve: Exponential | Power, loss: float, share: Floats, limit: float) -> float:
    """How many equal rounds lead from a loss to the limit; infinity if more of them than any plan has."""
    start, count = np.full(1, loss), 1.0
    while count <= MOST_ROUNDS and curve.repeated(start, share, np.full(1, count))[0] > limit:
        count *= 2.0
    return np.inf if count > MOST_ROUNDS else count


def _fewest(lowered: Callable[[Floats], Floats], most: int, limit: float, shape: tuple[int, ...]) -> Floats:
    """The fewest of up to `most` equal rounds that meet the limit (`most` where none do)."""
    low, high = np.zeros(shape), np.full(shape, float(most))
    while (high - low > 1).any():
        middle = np.floor(0.5 * (low + high))
        met = lowered(middle) <= limit
        low, high = np.where(met, low, middle), np.where(met, np.maximum(middle, 1.0), high)
    return high
