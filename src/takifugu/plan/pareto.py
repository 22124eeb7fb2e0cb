"""The whole front of energy, time and loss, from one sweep: what could be had for a little more of each."""

from __future__ import annotations

import time
from collections.abc import Callable
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
MOST_LABELS = 60_000
"""Where the search for the whole front gives up, and sweeps go on."""


@dataclass(frozen=True)
class Point:
    energy_j: float
    time_s: float
    loss: float
    rounds: int
    decisions: tuple[Decision, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return {"energy_j": self.energy_j, "time_s": self.time_s, "loss": self.loss, "rounds": self.rounds}


@dataclass(frozen=True)
class Front:
    points: tuple[Point, ...]
    interrupted: bool = False
    """By Ctrl-C: these are the points that were found until then."""


def front(problem: Problem, time_limit_s: float | None = None, most: int = MOST_POINTS) -> Front:
    """Plans that no other plan found beats in energy, time and loss at once.

    On small fleets with few rounds every plan is considered; otherwise also those of wide sweeps, so that the
    points are achievable but not proven to be the best.
    """
    ends = np.inf if time_limit_s is None else time.monotonic() + time_limit_s
    solver = Solver(problem, 0.01, time_limit_s, lambda _: None)

    def check() -> None:
        if time.monotonic() > ends:
            raise OutOfTime

    if problem.met_at_start:
        return Front((Point(0.0, problem.start_time_s, problem.start_loss, 0),))
    rows: list[Floats] = []
    paths: list[tuple[Any, int, int]] = []
    interrupted = False
    try:
        _gather(problem, solver, check, rows, paths)
    except OutOfTime:
        pass
    except KeyboardInterrupt:
        interrupted = True
        while sum(map(len, rows)) > len(paths):  # labels whose ways were not noted any more
            rows.pop()
    return Front(tuple(_points(problem, solver, rows, paths, most)), interrupted)


def _gather(
    problem: Problem,
    solver: Solver,
    check: Callable[[], None],
    rows: list[Floats],
    paths: list[tuple[Any, int, int]],
) -> None:
    """Labels and the ways to them, as many as time allows."""
    listed = solver.complete and sum(len(o) for o in solver.all_options if o is not None) <= SMALL_ROWS
    if listed:
        # Without a target nothing ends early: every layer is a part of the front.
        endless = replace(problem, target_loss=-1e18)
        search = Search(endless, solver.all_options, None, max_labels=MOST_LABELS, check=check)

        def seen(layer: Layer) -> None:
            rows.append(np.stack([layer.energy, layer.clock, layer.loss], axis=1))
            paths.extend((search, search.depth, i) for i in range(len(layer)))

        search.observe = seen
        if search.run().complete:
            return
    # What takes more rounds than the search got to: sweeps go all the way to the target.
    options = solver.all_options if listed else solver.family_options(40)
    guide = solver.dual.guide
    progress = next(p for p in guide.potentials if p.prices == solver.dual.prices)

    def noted(sweep: Sweep, cells: Ints) -> None:
        rows.append(np.stack([sweep.energy[cells], sweep.clock[cells], sweep.loss[cells]], axis=1))
        paths.extend((sweep, -1, int(c)) for c in cells)

    for caution in (0.002, 0.02, 0.2):
        sweep = Sweep(problem, options, guide, progress, 400, 48, times=16, caution=caution, check=check)
        sweep.observe = noted
        try:
            sweep.run()
        finally:
            plan = replay(problem, sweep.found.decisions, solver.fleet) if sweep.found.decisions else None
            if plan is not None:
                rows.append(np.array([[plan.energy_j, plan.time_s, plan.loss]]))
                paths.append((plan.decisions, -2, 0))


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
        cheapest = reached[np.argsort(labels[reached, 0], kind="stable")[:1]]
        index = np.unique(np.concatenate([spread, reached[: most // 3], cheapest]))
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
