"""Gap and time of the planner on 100 random problems of realistic size (see plan_instances.py).

    python -m benchmarks.plan_quality [--count 100] [--time-limit 30] [--first 0] [--family groups]
    python -m benchmarks.plan_quality --join FIRST.json SECOND.json

Writes benchmarks/results/plan_quality_30s.json (or whatever the limit is): one row per problem, and the
figures of docs/results/planner.md; and plan_best_known.json, the lowest energy any run found for each.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np

from benchmarks.plan_instances import groups, instance
from takifugu.plan.baselines import run_baselines
from takifugu.plan.solve import solve
from takifugu.plan.verify import verify

FAMILIES = {"unequal": instance, "groups": groups}
"""All devices differ; or there are two to five kinds of identical ones."""
RESULTS = Path(__file__).parent / "results"
BEST_KNOWN = RESULTS / "plan_best_known.json"
"""The lowest energy of a verified plan that any run of this benchmark has found, by seed."""


def key_of(row: dict[str, object]) -> str:
    """Under which a problem's best known energy is kept."""
    return str(row["seed"]) if row.get("family", "unequal") == "unequal" else f"{row['family']}-{row['seed']}"


def update_best_known(rows: list[dict[str, object]]) -> dict[str, float]:
    known: dict[str, float] = json.loads(BEST_KNOWN.read_text()) if BEST_KNOWN.exists() else {}
    for row in rows:
        for energy in (row["energy_j"] if row.get("verified") else None, row.get("best_baseline_j")):
            if isinstance(energy, float):
                seed = key_of(row)
                known[seed] = min(known.get(seed, np.inf), energy)
    RESULTS.mkdir(exist_ok=True)
    BEST_KNOWN.write_text(json.dumps(known, indent=0, sort_keys=True) + "\n")
    return known


def measure(seed: int, family: str, time_limit_s: float, tolerance: float) -> dict[str, object]:
    problem = FAMILIES[family](seed)
    begin = time.perf_counter()
    result = solve(problem, tolerance, time_limit_s, explain_infeasible=False)
    seconds = time.perf_counter() - begin
    row: dict[str, object] = {
        "seed": seed,
        "family": family,
        "nodes": len(problem.nodes),
        "versions": len(problem.versions),
        "parts": problem.parts,
        "labels": problem.label_weight > 0,
        "windows": any(n.available is not None for n in problem.nodes),
        "max_rounds": problem.max_rounds,
        "status": result.status,
        "gap": result.gap,
        "energy_j": result.energy_j,
        "lower_bound_j": result.lower_bound_j,
        "rounds": None if result.plan is None else len(result.plan.rounds),
        "seconds": round(seconds, 3),
    }
    if result.plan is not None:
        row["verified"] = verify(problem.to_dict(), result.to_dict()).ok
        energies = [p.energy_j for p in run_baselines(problem).values() if p is not None]
        row["best_baseline_j"] = min(energies, default=None)
    return row


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--family", choices=FAMILIES, default="unequal")
    parser.add_argument("--time-limit", type=float, default=30.0)
    parser.add_argument("--tolerance", type=float, default=0.01)
    parser.add_argument(
        "--join", type=Path, nargs="+", help="results of parts of the problems, made with --first"
    )
    options = parser.parse_args()
    rows: list[dict[str, object]] = []
    if options.join:
        rows = [row for path in options.join for row in json.loads(path.read_text())["rows"]]
    else:
        begin = time.perf_counter()
        solve(instance(1000, nodes=30), options.tolerance, options.time_limit, explain_infeasible=False)
        print(f"first of all, loops loaded or translated, not counted: {time.perf_counter() - begin:.1f} s")
        for seed in range(options.first, options.first + options.count):
            rows.append(measure(seed, options.family, options.time_limit, options.tolerance))
            print(json.dumps(rows[-1]), flush=True)
    found = summary(rows, options.time_limit, options.tolerance)
    RESULTS.mkdir(exist_ok=True)
    family = "" if options.family == "unequal" else f"_{options.family}"
    name = f"plan_quality{family}_{options.time_limit:g}s.json"
    (RESULTS / name).write_text(json.dumps({"summary": found, "rows": rows}, indent=1) + "\n")
    print(json.dumps(found, indent=1))


def summary(rows: list[dict[str, object]], time_limit_s: float, tolerance: float) -> dict[str, object]:
    gaps = np.array([1.0 if r["gap"] is None else r["gap"] for r in rows], dtype=float)
    seconds = np.array([r["seconds"] for r in rows], dtype=float)
    proven = gaps <= tolerance
    beaten = [
        r["seed"]
        for r in rows
        if r.get("best_baseline_j") and r["energy_j"] > r["best_baseline_j"] * (1 + 1e-9)  # type: ignore[operator]
    ]
    known = update_best_known(rows)
    over = [float(r["energy_j"]) / known[key_of(r)] for r in rows if r["energy_j"] is not None]  # type: ignore[arg-type]
    return {
        "count": len(rows),
        "time_limit_s": time_limit_s,
        "tolerance": tolerance,
        "with_plan": int(sum(r["energy_j"] is not None for r in rows)),
        "proven_within_2_s": int((proven & (seconds <= 2.0)).sum()),
        "proven_within_limit": int(proven.sum()),
        "median_seconds": float(np.median(seconds)),
        "median_gap": float(np.median(gaps)),
        "gap_quartiles": [float(q) for q in np.quantile(gaps, [0.25, 0.5, 0.75, 0.9])],
        "all_verified": all(r.get("verified", True) for r in rows),
        "above_a_baseline": beaten,
        "mean_over_best_known": float(np.mean(over)),
    }


if __name__ == "__main__":
    main()
