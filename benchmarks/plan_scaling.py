"""How the planner scales: in nodes (to 10,000), in 1/tolerance, and against HiGHS on one discretised graph.

    python -m benchmarks.plan_scaling [--largest 10000]

Writes benchmarks/results/plan_scaling.json and docs/results/planner-scaling.svg.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, OptimizeResult, milp
from scipy.sparse import coo_matrix

from benchmarks.plan_instances import instance
from takifugu.plan.curves import Curve, Floats
from takifugu.plan.problem import Problem
from takifugu.plan.search import Search
from takifugu.plan.solve import Solver, solve
from takifugu.plan.ways import Ways

RESULTS = Path(__file__).parent / "results"
DOCS = Path(__file__).parent.parent / "docs" / "results"


@dataclass(frozen=True)
class RoundedUp:
    """A curve on a grid of losses: the next grid point above. Any object with `step` is a curve."""

    base: Curve
    low: float
    width: float

    def step(self, loss: Floats, share: Floats) -> Floats:
        after = self.base.step(loss, share)
        up = self.low + np.ceil((after - self.low) / self.width - 1e-12) * self.width
        return np.minimum(np.where(after <= self.low, after, up), loss)


def discretised(seed: int, nodes: int, rounds: int, cells: int, versions: int = 3) -> tuple[Problem, Solver]:
    problem = instance(seed, nodes=nodes, rounds=rounds, plain=True)
    kept = problem.versions[:versions]
    names = {v.name for v in kept}
    width = (problem.start_loss + 0.2 - problem.target_loss) / cells
    kept = tuple(replace(v, curve=RoundedUp(v.curve, problem.target_loss, width)) for v in kept)
    switches = tuple(s for s in problem.switches if {s.source, s.target} <= names)
    problem = replace(problem, versions=kept, switches=switches, max_rounds=rounds + 2)
    return problem, Solver(problem, 0.0, None, lambda _: None)


def median_s(run: Callable[[], object], times: int) -> float:
    """Seconds of one run, the middle one of several: some are so short that others' work shows."""
    seconds = []
    for _ in range(times):
        begin = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begin)
    return float(np.median(seconds))


def against_highs(seed: int, nodes: int, rounds: int, cells: int) -> dict[str, object]:
    """The same discretised graph for both: rounded losses, the same node sets, one budget of time. Neither
    time has the building of it: HiGHS gets a matrix of arcs, we get a table of where rounds lead."""
    problem, solver = discretised(seed, nodes, rounds, cells)
    options = [
        o.take(np.arange(0, len(o), max(1, len(o) // 12))) for o in solver.all_options if o is not None
    ]
    ways = Ways.of(problem, options)
    found = Search(problem, options, None, ways=ways).run()
    ours_s = median_s(lambda: Search(problem, options, None, ways=ways).run(), 99)
    with_graph_s = median_s(lambda: Search(problem, options, None).run(), 99)
    index = problem.version_index
    ways = [(v, v, 0.0, 0.0, 0.0) for v in range(len(options))]
    ways += [(index[s.source], index[s.target], s.time_s, s.energy_j, s.loss_jump) for s in problem.switches]
    nodes_of = {(0, index[problem.start_version], problem.start_loss): 0}
    frontier, arcs = list(nodes_of), []
    for number in range(problem.max_rounds or 0):
        following = []
        for key in frontier:
            _, version, loss = key
            for a, b, seconds, joules, jump in ways:
                if a != version:
                    continue
                after = problem.versions[b].curve.step(
                    np.full(len(options[b]), loss + jump), options[b].share
                )
                for k, value in enumerate(after):
                    head = -1
                    if value > problem.loss_limit:
                        new = (number + 1, b, round(float(value), 12))
                        if new not in nodes_of:
                            nodes_of[new] = len(nodes_of)
                            following.append(new)
                        head = nodes_of[new]
                    energy, taken = options[b].energy_j[k] + joules, options[b].time_s[k] + seconds
                    arcs.append((nodes_of[key], head, energy, taken))
        frontier = following
    count = len(nodes_of)
    tails = np.array([a[0] for a in arcs])
    heads = np.array([a[1] if a[1] >= 0 else count for a in arcs])
    order = np.arange(len(arcs))
    flow = coo_matrix(
        (np.r_[np.ones(len(arcs)), -np.ones(len(arcs))], (np.r_[tails, heads], np.r_[order, order])),
        shape=(count + 1, len(arcs)),
    ).tocsr()
    balance = np.zeros(count + 1)
    balance[0], balance[count] = 1.0, -1.0
    energies, seconds = np.array([a[2] for a in arcs]), np.array([[a[3] for a in arcs]])
    limits = [
        LinearConstraint(flow, balance, balance),
        LinearConstraint(seconds, -np.inf, problem.time_limit - problem.start_time_s),
    ]
    whole, zero_or_one = np.ones(len(arcs)), Bounds(0, 1)
    settings = {"mip_rel_gap": 1e-9, "time_limit": 60.0}

    def highs() -> OptimizeResult:
        return milp(energies, integrality=whole, bounds=zero_or_one, constraints=limits, options=settings)

    answer = highs()
    theirs_s = median_s(highs, 3)
    return {
        "arcs": len(arcs),
        "ours_j": found.energy_j if found.decisions else None,
        "highs_j": float(answer.fun) if answer.success else None,
        "ours_s": round(ours_s, 5),
        "ours_with_graph_s": round(with_graph_s, 5),
        "highs_s": round(theirs_s, 3),
        "ratio": round(theirs_s / ours_s, 1),
    }


def timed(problem: Problem, tolerance: float, limit: float | None = None) -> dict[str, object]:
    begin = time.perf_counter()
    result = solve(problem, tolerance, limit, explain_infeasible=False)
    return {
        "seconds": round(time.perf_counter() - begin, 3),
        "gap": result.gap,
        "status": result.status,
        "rounds": None if result.plan is None else len(result.plan.rounds),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--largest", type=int, default=10_000)
    largest = parser.parse_args().largest
    report: dict[str, object] = {"nodes": [], "tolerance": [], "highs": []}
    for count in (100, 300, 1000, 3000, 10_000):
        if count > largest:
            break
        row = {"nodes": count, **timed(instance(1, nodes=count, rounds=40, plain=True), 0.01, 10.0)}
        row["peak_mib"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
        report["nodes"].append(row)  # type: ignore[attr-defined]
        print(row, flush=True)
    for tolerance in (0.1, 0.05, 0.02, 0.01, 0.005):
        for seed in (1, 7):
            row = {"seed": seed, "tolerance": tolerance, **timed(instance(seed), tolerance, 10.0)}
            report["tolerance"].append(row)  # type: ignore[attr-defined]
            print(row, flush=True)
    for seed, size, rounds, cells in ((1, 6, 4, 60), (2, 6, 5, 100), (3, 6, 5, 160), (3, 6, 6, 160)):
        row = against_highs(seed, size, rounds, cells)
        report["highs"].append(row)  # type: ignore[attr-defined]
        print(row, flush=True)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "plan_scaling.json").write_text(json.dumps(report, indent=1) + "\n")
    nodes = [(float(r["nodes"]), float(r["seconds"])) for r in report["nodes"]]  # type: ignore[attr-defined]
    tolerance: dict[float, list[float]] = {}
    for r in report["tolerance"]:  # type: ignore[attr-defined]
        tolerance.setdefault(1.0 / float(r["tolerance"]), []).append(float(r["seconds"]))
    means = [(x, float(np.mean(ys))) for x, ys in sorted(tolerance.items())]
    panels = [("nodes", nodes), ("1 / tolerance", means)]
    (DOCS / "planner-scaling.svg").write_text(picture(panels))


def picture(panels: list[tuple[str, list[tuple[float, float]]]]) -> str:
    """Seconds against something, both axes logarithmic, with a line of slope 1 beside it."""
    width, height, margin = 360, 260, 48
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width * len(panels)} {height}" '
        'font-family="sans-serif" font-size="11"><rect width="100%" height="100%" fill="white"/>'
    ]
    for k, (title, points) in enumerate(panels):
        logs = np.log10(np.array(points))
        low, high = np.floor(logs.min(axis=0)), np.ceil(logs.max(axis=0))
        high = np.maximum(high, low + 1)

        def place(p: Floats, low: Floats = low, high: Floats = high, k: int = k) -> tuple[float, float]:
            x, y = (p - low) / (high - low)
            return k * width + margin + x * (width - 2 * margin), height - margin - y * (height - 2 * margin)

        for axis in (0, 1):
            for tick in np.arange(low[axis], high[axis] + 1):
                at = np.array([tick, low[1]] if axis == 0 else [low[0], tick])
                x, y = place(at)
                end = place(np.array([tick, high[1]] if axis == 0 else [high[0], tick]))
                label = f"{10.0**tick:g}"
                where = f'x="{x:.0f}" y="{y + 14:.0f}" text-anchor="middle"' if axis == 0 else (
                    f'x="{x - 6:.0f}" y="{y + 4:.0f}" text-anchor="end"'
                )  # fmt: skip
                parts.append(f'<path d="M{x:.1f} {y:.1f}L{end[0]:.1f} {end[1]:.1f}" stroke="#ddd"/>')
                parts.append(f"<text {where}>{label}</text>")
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(place, logs))
        slope = [logs[-1] - min(*(logs[-1] - low)), logs[-1]]
        guide = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(place, slope))
        parts.append(f'<polyline points="{guide}" fill="none" stroke="#999" stroke-dasharray="4 3"/>')
        parts.append(f'<polyline points="{line}" fill="none" stroke="#1560a8" stroke-width="2"/>')
        middle = k * width + width / 2
        parts.append(f'<text x="{middle}" y="{height - 10}" text-anchor="middle">{title}</text>')
        parts.append(f'<text x="{middle}" y="20" text-anchor="middle">seconds (dashed: linear)</text>')
    return "".join(parts) + "</svg>\n"


if __name__ == "__main__":
    main()
