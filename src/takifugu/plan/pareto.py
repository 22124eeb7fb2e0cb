"""The whole front of energy, time and loss, from one sweep: what could be had for a little more of each."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from takifugu.plan.curves import Floats
from takifugu.plan.dominance import undominated
from takifugu.plan.options import Ints
from takifugu.plan.plan import Decision, replay
from takifugu.plan.problem import Problem
from takifugu.plan.search import Layer, OutOfTime, Search
from takifugu.plan.solve import SMALL_ROWS, Solver
from takifugu.plan.sweep import Sweep

MOST_POINTS = 60


@dataclass(frozen=True)
class Point:
    energy_j: float
    time_s: float
    loss: float
    rounds: int
    decisions: tuple[Decision, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return {"energy_j": self.energy_j, "time_s": self.time_s, "loss": self.loss, "rounds": self.rounds}


def front(problem: Problem, time_limit_s: float | None = None, most: int = MOST_POINTS) -> list[Point]:
    """Plans that no other plan found beats in energy, time and loss at once.

    On small fleets every plan is considered; on large ones those of one wide sweep, so that the points are
    achievable but not proven to be the best.
    """
    ends = np.inf if time_limit_s is None else time.monotonic() + time_limit_s
    solver = Solver(problem, 0.01, time_limit_s, lambda _: None)

    def check() -> None:
        if time.monotonic() > ends:
            raise OutOfTime

    if problem.met_at_start:
        return [Point(0.0, problem.start_time_s, problem.start_loss, 0)]
    rows: list[Floats] = []
    paths: list[tuple[Any, int, int]] = []
    if solver.complete and sum(len(o) for o in solver.all_options if o is not None) <= SMALL_ROWS:
        # Without a target nothing ends early: every layer is a part of the front.
        endless = replace(problem, target_loss=-1e18)
        search = Search(endless, solver.all_options, None, max_labels=60_000, check=check)

        def seen(layer: Layer) -> None:
            rows.append(np.stack([layer.energy, layer.clock, layer.loss], axis=1))
            paths.extend((search, search.depth, i) for i in range(len(layer)))

        search.observe = seen
        _quietly(search.run)
    else:
        options = solver.family_options(40)
        guide = solver.dual.guide
        progress = next(p for p in guide.potentials if p.prices == solver.dual.prices)

        def noted(sweep: Sweep, cells: Ints) -> None:
            rows.append(np.stack([sweep.energy[cells], sweep.clock[cells], sweep.loss[cells]], axis=1))
            paths.extend((sweep, -1, int(c)) for c in cells)

        for caution in (0.002, 0.02, 0.2):
            sweep = Sweep(problem, options, guide, progress, 400, 48, times=16, caution=caution, check=check)
            sweep.observe = noted
            _quietly(sweep.run)
            if sweep.found.decisions:
                plan = replay(problem, sweep.found.decisions, solver.fleet)
                if plan is not None:
                    rows.append(np.array([[plan.energy_j, plan.time_s, plan.loss]]))
                    paths.append((plan.decisions, -2, 0))
    return _points(problem, solver, rows, paths, most)


def _quietly(run: Any) -> None:
    with suppress(OutOfTime):
        run()


def _points(
    problem: Problem, solver: Solver, rows: list[Floats], paths: list[tuple[Any, int, int]], most: int
) -> list[Point]:
    if not rows:
        return []
    labels = np.concatenate(rows)
    better = labels[:, 2] < problem.start_loss
    index = np.flatnonzero(better)
    index = index[undominated(labels[index, 0], labels[index, 1], labels[index, 2])]
    index = index[np.argsort(-labels[index, 2], kind="stable")]
    reached = index[labels[index, 2] <= problem.loss_limit]
    if len(index) > most:
        spread = index[np.unique(np.linspace(0, len(index) - 1, most).round().astype(int))]
        index = np.unique(np.concatenate([spread, reached[: most // 3]]))
    points = []
    for i in index:
        source, depth, place = paths[int(i)]
        if depth == -2:
            decisions = source
        else:
            decisions = source.path(place) if depth < 0 else source.path(depth, place)
        plan = replay(problem, decisions, solver.fleet)
        if plan is not None and plan.rounds:
            points.append(Point(plan.energy_j, plan.time_s, plan.loss, len(plan.rounds), plan.decisions))
    return sorted(points, key=lambda p: (-p.loss, p.energy_j, p.time_s))
