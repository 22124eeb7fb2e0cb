"""The front of energy, time and loss: plans that no other plan beats in all three at once.

Small fleets with few rounds are searched completely. Elsewhere candidates come from sweeps and from solves
with earlier deadlines and lower losses; every beginning of a candidate is a candidate, too.
`Front.exhaustive` tells which of the two it was.

With a confidence, the loss of a plan is the one that it reaches in the asked share of the curves' samples and
on the curves themselves. Labels of the search are compared by the loss on one set of curves at a time, so
such a front is never known to be complete.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from takifugu.plan.curves import Curve, Floats
from takifugu.plan.dominance import undominated
from takifugu.plan.fleet import Fleet
from takifugu.plan.options import Ints, Options
from takifugu.plan.plan import Decision, Plan, replay
from takifugu.plan.problem import Problem
from takifugu.plan.result import Result
from takifugu.plan.robust import check_confidence, worlds
from takifugu.plan.samples import final_losses, needed, sample_count
from takifugu.plan.search import Layer, OutOfTime, Search
from takifugu.plan.solve import SMALL_ROWS, Solver, solve
from takifugu.plan.sweep import Sweep

MOST_POINTS = 60
"""Points that are listed, unless more are asked for."""
MOST_MEMBERS = 1_000_000
"""Nodes in all rounds of all points together: about 30 MB of JSON. Beyond it fewer points are listed."""
MOST_LABELS = 60_000
"""Where the complete search gives up, and candidates are looked for instead."""
_FASTER, _DEADLINES = 0.85, 6
"""Each further solve must be done in this part of the time that the last one took; how many there are."""
_LOWER = (0.25, 0.5, 0.75)
"""Further solves have to get this part of the way from the target to the lowest floor of any curve."""


@dataclass(frozen=True)
class Point:
    energy_j: float
    time_s: float
    loss: float
    rounds: int
    plan: Plan = field(repr=False, compare=False)

    @property
    def decisions(self) -> tuple[Decision, ...]:
        return self.plan.decisions


@dataclass(frozen=True)
class Front:
    problem: Problem = field(repr=False)
    points: tuple[Point, ...]
    exhaustive: bool
    """Whether every plan was considered."""
    left_out: int = 0
    """Points that were found and are not listed."""
    confidence: float | None = None
    interrupted: bool = False
    """By Ctrl-C: these are the points that were found until then."""

    @property
    def complete(self) -> bool:
        """Whether these are all points of the front."""
        return self.exhaustive and not self.left_out

    def plan_file(self, point: Point) -> dict[str, Any]:
        """Return a plan file for the same problem with the point's loss as its target."""
        wanted = replace(self.problem, target_loss=point.loss)
        result = Result("feasible", point.plan, None, wanted, "front", confidence=self.confidence)
        return result.to_dict()

    def to_dict(self) -> dict[str, Any]:
        return {
            "format": "takifugu.front/1",
            "complete": self.complete,
            "exhaustive": self.exhaustive,
            "left_out": self.left_out,
            "confidence": self.confidence,
            "points": [
                {
                    "energy_j": p.energy_j,
                    "time_s": p.time_s,
                    "loss": p.loss,
                    "rounds": p.rounds,
                    "plan": self.plan_file(p),
                }
                for p in self.points
            ],
            "problem_sha256": self.problem.sha256,
        }


def front(
    problem: Problem,
    time_limit_s: float | None = None,
    most: int | None = MOST_POINTS,
    confidence: float | None = None,
) -> Front:
    """Return plans that no other plan found beats in energy, time and loss at once, `most` of them."""
    if confidence is not None:
        check_confidence(problem, confidence)
    finder = _Finder(problem, time_limit_s, confidence)
    exhaustive = interrupted = False
    try:
        exhaustive = finder.search()
        if not exhaustive:
            finder.look_around()
    except OutOfTime:
        pass
    except KeyboardInterrupt:
        interrupted = True
    points, left_out = finder.points(most)
    return Front(problem, tuple(points), exhaustive, left_out, confidence, interrupted)


@dataclass(frozen=True)
class _Batch:
    """Candidates that were found together."""

    values: Floats
    """[candidate, 3]: energy, time and loss"""
    decisions: Callable[[int], Sequence[Decision]]


class _Finder:
    def __init__(self, problem: Problem, time_limit_s: float | None, confidence: float | None) -> None:
        self.problem = problem
        self.ends = np.inf if time_limit_s is None else time.monotonic() + time_limit_s
        self.solver = Solver(problem, 0.01, time_limit_s, lambda _: None)
        self.fleet = self.solver.fleet
        self.batches: list[_Batch] = []
        self.judge = None if confidence is None else _Judge(problem, confidence)

    def check(self) -> None:
        if time.monotonic() > self.ends:
            raise OutOfTime

    @property
    def listed(self) -> bool:
        """Whether all node sets can be listed."""
        solver = self.solver
        return solver.complete and sum(len(o) for o in solver.all_options if o is not None) <= SMALL_ROWS

    # ---- candidates ---------------------------------------------------------------------------------

    def search(self) -> bool:
        """Search all plans; true if every one was considered."""
        self.check()
        if not self.listed:
            return False
        if self.judge is None:
            return self._labels(self.problem, MOST_LABELS)
        self._labels(self.problem, MOST_LABELS)
        possible = worlds(self.problem)
        for world in possible:
            self._labels(world, MOST_LABELS // len(possible))
        return False

    def _labels(self, problem: Problem, most: int) -> bool:
        # Without a target no label is final: every layer is a part of the front.
        endless = replace(problem, target_loss=-1e18)
        options = self.solver.all_options
        search = Search(endless, options, None, max_labels=most, check=self.check)
        known = _Known(self.judge, options) if self.judge is not None else None

        def seen(layer: Layer) -> None:
            depth = search.depth
            loss = layer.loss if known is None else known.layer(layer)
            values = np.stack([layer.energy, layer.clock, loss], axis=1)
            self.batches.append(_Batch(values, lambda i: search.path(depth, i)))

        search.observe = seen
        return search.run().complete

    def look_around(self) -> None:
        """Sweeps and solves, where not every plan could be considered."""
        problem = self.problem
        if problem.met_at_start:
            return
        self._sweeps()
        reached = solve(problem, 0.01, self._left_s(), explain_infeasible=False, thorough=False)
        self._take(reached)
        floor = min(getattr(v.curve, "floor", problem.target_loss) for v in problem.versions)
        for part in _LOWER if floor < problem.target_loss else ():
            lower = problem.target_loss + part * (floor - problem.target_loss)
            if not self._solve(replace(problem, target_loss=lower)):
                break
        plan, aim = reached.plan, problem
        if plan is not None and self.judge is not None:  # what holds in enough samples aims lower
            short = self.judge.final(plan.decisions, plan.loss) - plan.loss
            aim = replace(problem, target_loss=problem.target_loss - short)
        for _ in range(_DEADLINES):
            if plan is None:
                break
            by_s = problem.start_time_s + _FASTER * (plan.time_s - problem.start_time_s)
            plan = self._solve(replace(aim, deadline_s=by_s))

    def _sweeps(self) -> None:
        """Labels of wide sweeps, and the plans that they end with."""
        problem, solver = self.problem, self.solver
        options = solver.all_options if self.listed else solver.family_options(40)
        guide = solver.dual.guide
        progress = next(p for p in guide.potentials if p.prices == solver.dual.prices)
        for caution in (0.002, 0.02, 0.2):
            sweep = Sweep(
                problem, options, guide, progress, 400, 48, times=16, caution=caution, check=self.check
            )
            known = _Known(self.judge, options) if self.judge is not None else None

            def noted(sweep: Sweep, cells: Ints, known: _Known | None = known) -> None:
                loss = sweep.loss[cells] if known is None else known.cells(sweep, cells)
                values = np.stack([sweep.energy[cells], sweep.clock[cells], loss], axis=1)
                self.batches.append(_Batch(values, lambda i: sweep.path(int(cells[i]))))

            sweep.observe = noted
            try:
                sweep.run()
            finally:
                if sweep.found.decisions:
                    self._add(sweep.found.decisions)

    def _solve(self, problem: Problem) -> Plan | None:
        found = solve(problem, 0.01, self._left_s(), explain_infeasible=False, thorough=False)
        self._take(found)
        return found.plan

    def _take(self, found: Result) -> None:
        if found.plan is not None:
            self._add(found.plan.decisions)
        if found.stats.get("interrupted"):
            raise KeyboardInterrupt
        self.check()

    def _left_s(self) -> float | None:
        return None if np.isinf(self.ends) else max(self.ends - time.monotonic(), 1e-6)

    def _add(self, decisions: Sequence[Decision]) -> None:
        """A plan and all of its beginnings."""
        plan = replay(self.problem, decisions, self.fleet)
        if plan is None or not plan.rounds:
            return
        energy = np.cumsum([row.energy_j for row in plan.rounds])
        seconds = {(s.source, s.target): s.time_s for s in self.problem.switches}
        before = [self.problem.start_version, *(row.version for row in plan.rounds)]
        ends = [
            row.start_s + row.time_s - (seconds[old, row.version] if old != row.version else 0.0)
            for old, row in zip(before, plan.rounds, strict=False)
        ]
        loss = np.array([row.loss for row in plan.rounds])
        if self.judge is not None:
            loss = self.judge.along(plan.decisions)
        values = np.stack([energy, ends, loss], axis=1)
        self.batches.append(_Batch(values, lambda i: plan.decisions[: i + 1]))

    # ---- points -------------------------------------------------------------------------------------

    def points(self, most: int | None) -> tuple[list[Point], int]:
        """The front of all candidates, and how many of its points had to be left out."""
        problem = self.problem
        found: list[Point] = []
        if problem.met_at_start:
            empty = Plan((), 0.0, problem.start_time_s, problem.start_loss)
            found.append(Point(0.0, empty.time_s, empty.loss, 0, empty))
        left_out = 0
        if self.batches:
            labels = np.concatenate([b.values for b in self.batches])
            first = np.cumsum([0, *(len(b.values) for b in self.batches)])
            index = np.flatnonzero((labels[:, 2] < problem.start_loss) & (labels[:, 1] <= problem.time_limit))
            index = index[undominated(labels[index, 0], labels[index, 1], labels[index, 2])]
            chosen = index if most is None else _some(labels, index, most, problem.loss_limit)
            left_out = len(index) - len(chosen)
            plans = []
            for i in chosen.tolist():
                batch = int(np.searchsorted(first, i, side="right")) - 1
                plans.append(self._point(self.batches[batch].decisions(i - int(first[batch]))))
            found += [p for p in plans if p is not None]
        found.sort(key=lambda p: (-p.loss, p.energy_j, p.time_s))
        members = np.cumsum([sum(len(d.used) for d in p.decisions) for p in found])
        if len(found) and members[-1] > MOST_MEMBERS:
            fewer = max(2, int(len(found) * MOST_MEMBERS / members[-1]))
            keep = np.unique(np.linspace(0, len(found) - 1, fewer).round().astype(int))
            left_out += len(found) - len(keep)
            found = [found[k] for k in keep.tolist()]
        return self._unbeaten(found), left_out

    def _point(self, decisions: Sequence[Decision]) -> Point | None:
        plan = replay(self.problem, decisions, self.fleet)
        if plan is None or not plan.rounds:
            return None
        loss = plan.loss if self.judge is None else self.judge.final(plan.decisions, plan.loss)
        return Point(plan.energy_j, plan.time_s, loss, len(plan.rounds), plan)

    @staticmethod
    def _unbeaten(points: list[Point]) -> list[Point]:
        """Replayed figures may differ from a label's in the last digit, and equals may appear."""
        if not points:
            return points
        table = np.array([(p.energy_j, p.time_s, p.loss) for p in points])
        return [points[i] for i in undominated(table[:, 0], table[:, 1], table[:, 2]).tolist()]


def _some(labels: Floats, index: Ints, most: int, loss_limit: float) -> Ints:
    """So many of the points, spread over all losses; the ends and the best at the target are among them."""
    index = index[np.argsort(-labels[index, 2], kind="stable")]
    if len(index) <= most:
        return index
    reached = index[labels[index, 2] <= loss_limit]
    kept = [index[0], index[-1]]
    kept += [int(reached[np.argmin(labels[reached, column])]) for column in (0, 1) if len(reached)]
    rest = index[~np.isin(index, kept)]
    wanted = max(0, most - len(set(kept)))
    spread = (
        rest[np.unique(np.linspace(0, len(rest) - 1, wanted).round().astype(int))] if wanted else rest[:0]
    )
    return np.unique(np.concatenate([np.array(kept, dtype=np.int64), spread]))


class _Judge:
    """The loss that a plan reaches in the asked share of the samples, and on the curves themselves."""

    def __init__(self, problem: Problem, confidence: float) -> None:
        self.problem = problem
        self.count = sample_count(problem)
        self.enough = needed(confidence, self.count)
        self.curves: list[tuple[Curve, ...]] = [
            (v.curve, *(v.curve_samples or (v.curve,) * self.count)) for v in problem.versions
        ]
        """[version]: the curve itself, then its samples"""
        index = problem.version_index
        self.jump = {(index[s.source], index[s.target]): s.loss_jump for s in problem.switches}
        self.fleet = Fleet.of(problem)
        self.start = np.full((1, 1 + self.count), problem.start_loss)
        self._shares: dict[int, tuple[object, float]] = {}

    def step(self, version: int, losses: Floats, share: Floats) -> Floats:
        """[label, curve]: the losses after rounds of these shares."""
        columns = [curve.step(losses[:, k], share) for k, curve in enumerate(self.curves[version])]
        return np.minimum(np.stack(columns, axis=1), losses)

    def loss(self, losses: Floats) -> Floats:
        """[label]: of losses by [label, curve]."""
        ordered = np.sort(losses[:, 1:], axis=1)
        return np.maximum(losses[:, 0], ordered[:, self.enough - 1])

    def along(self, decisions: Sequence[Decision]) -> Floats:
        """After each round of a plan."""
        version, here, found = self.problem.version_index[self.problem.start_version], self.start, []
        for decision in decisions:
            jump = self.jump[version, decision.version] if version != decision.version else 0.0
            version = decision.version
            here = self.step(version, here + jump, np.array([self._share(decision)]))
            found.append(float(self.loss(here)[0]))
        return np.array(found)

    def final(self, decisions: Sequence[Decision], loss: float) -> float:
        drawn = np.sort(final_losses(self.problem, decisions, self.fleet))
        return max(loss, float(drawn[self.enough - 1]))

    def _share(self, decision: Decision) -> float:
        key = id(decision.used)
        if key not in self._shares:  # which keeps `used`, so that its id stays its own
            self._shares[key] = (decision.used, self.fleet.round_cost(decision.version, decision.used).share)
        return self._shares[key][1]


class _Known:
    """Losses under every curve of labels, whose search follows one set of curves only."""

    def __init__(self, judge: _Judge, options: Sequence[Options | None]) -> None:
        self.judge, self.options = judge, options
        self.losses = judge.start
        """[label, curve]: of the last layer, or of all cells of a sweep"""
        self.version = np.array([judge.problem.version_index[judge.problem.start_version]])

    def layer(self, layer: Layer) -> Floats:
        """Of a layer that was made from the last one."""
        source = self.version[layer.parent] if len(layer) else layer.version
        before = self.losses[layer.parent] if len(layer) else self.losses[:0]
        self.losses = self._after(before, source, layer.version, layer.option)
        self.version = layer.version
        return self.judge.loss(self.losses)

    def cells(self, sweep: Sweep, cells: Ints) -> Floats:
        """Of cells whose parents were seen before."""
        if len(self.losses) < len(sweep.loss):
            self.losses = np.repeat(self.judge.start, len(sweep.loss), axis=0)
        rows, parent = cells[sweep.parent[cells] >= 0], sweep.parent[cells]
        parent = parent[parent >= 0]
        versions = len(self.judge.problem.versions)
        source, version = (x // sweep.times % versions for x in (parent, rows))
        self.losses[rows] = self._after(self.losses[parent], source, version, sweep.option[rows])
        return self.judge.loss(self.losses[cells])

    def _after(self, before: Floats, source: Ints, version: Ints, option: Ints) -> Floats:
        judge, after = self.judge, np.empty(before.shape)
        for old, new in {*zip(source.tolist(), version.tolist(), strict=True)}:
            rows = np.flatnonzero((source == old) & (version == new))
            options = self.options[new]
            assert options is not None
            jump = judge.jump[old, new] if old != new else 0.0
            after[rows] = judge.step(new, before[rows] + jump, options.share[option[rows]])
        return after
