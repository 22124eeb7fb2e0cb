"""The whole loop for real: pilots, a plan, and the plan beside every baseline in a world that differs.

Did the plan meet the target by the deadline, did any baseline do so for less energy, and how far was the
prediction off? Losses are real; times and energies come from the engine's virtual clock, whose nodes differ
from the profile (the engine's usual spread, dropouts and slowdowns).

Target and reference rounds of a workload were set on other seeds than the ones that are reported.
"""

from __future__ import annotations

import json
import os
import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import stage

SLACK = 1.8
"""The deadline, in units of what all nodes would need for the reference rounds by their profile."""

RESERVE = 0.15
"""The share of the time that plans, and baselines as well, keep for what differs from the profile."""

AS_IT_WAS = "plan-as-it-was"
"""The plan without anything planned anew, beside the one that is run; it is in no verdict."""

OTHER_WORLDS = range(1000, 1008)
"""Seeds of worlds that the waiting is estimated on; none of them is run."""


@dataclass(frozen=True)
class Case:
    workload: Mapping[str, Any]
    nodes: int
    target: float
    reference_rounds: int
    """Rounds that dense training on all nodes needs for the target, about."""
    ratios: Sequence[float]
    warmup: int
    rounds: int
    amounts: Sequence[float]
    """Of the fleet's data, for pilots; given twice: once well and once ill balanced."""


CASES = {
    "digits": Case(
        {
            "model": "takifugu.zoo.small:mlp",
            "model_options": {"width": 64, "depth": 1},
            "data": "digits",
            "partition": {"kind": "dirichlet", "alpha": 1.0},
            "batch_size": 8,
            "optimizer": {"kind": "sgd", "lr": 0.2, "weight_decay": 0.002},
            "validation": 0.25,
        },
        nodes=8,
        target=0.32,
        reference_rounds=10,
        ratios=(0.25,),
        warmup=5,
        rounds=6,
        amounts=(1.0, 0.5, 0.5, 0.25, 0.25),
    ),
    "writers": Case(
        {
            "model": "takifugu.zoo.small:mlp",
            "model_options": {"width": 32, "depth": 1},
            "data": "mnist",
            "limit": 4000,
            "partition": {"kind": "writers"},
            "batch_size": 5,
            "optimizer": {"kind": "sgd", "lr": 0.15, "weight_decay": 0.001},
            "validation": 0.25,
        },
        nodes=100,
        target=0.75,
        reference_rounds=12,
        ratios=(0.25,),
        warmup=4,
        rounds=4,
        amounts=(1.0, 0.5, 0.25),
    ),
}


# ---- the fleets -----------------------------------------------------------------------------------------


def eight_nodes() -> list[dict[str, Any]]:
    """Three boards and five slower ones on worse links."""
    found = []
    for i in range(8):
        board = i < 3
        speed = (4e7, 3e7, 2e7)[i] if board else 1.2e7 / (1 + 0.35 * (i - 3))
        found.append(
            {
                "name": f"{'board' if board else 'phone'}-{i + 1}",
                "flops_per_s": speed,
                "joules_per_flop": (5.0 if board else 2.5 + 0.3 * i) / speed,
                "up_bytes_per_s": 2e5 if board else 6e4 + 1e4 * (i % 3),
                "down_bytes_per_s": 8e5 if board else 2.5e5,
                "latency_s": 0.01 if board else 0.04,
                "joules_per_byte": 5e-6 if board else 1.2e-5,
            }
        )
    return found


def phones(folder: Path, count: int, seed: int) -> list[dict[str, Any]]:
    """Phones drawn from a benchmark table, links from measured Wi-Fi profiles (KB/s); power is assumed."""
    scores = [
        float(row["CPU_F_AI_Score"])
        for row in json.loads((folder / "ai-benchmark-phones.json").read_text(encoding="utf-8"))
    ]
    links = list(json.loads((folder / "wifi-profiles.json").read_text(encoding="utf-8")).values())
    draw = random.Random(seed)
    found = []
    for i in range(count):
        score, link = draw.choice(scores), draw.choice(links)
        speed = 1e4 * score  # what of it small batches of a small network get out of a phone
        watts = 1.0 + 2.0 * (score / 4310.0) ** 0.5  # faster cores draw more, though less per FLOP
        found.append(
            {
                "name": f"phone-{i + 1:03}",
                "flops_per_s": speed,
                "joules_per_flop": watts / speed,
                "up_bytes_per_s": 1e3 * link["up_u"],
                "down_bytes_per_s": 1e3 * link["down_u"],
                "latency_s": 0.02,
                "joules_per_byte": 1e-6,
            }
        )
    return found


# ---- one seed -------------------------------------------------------------------------------------------


def waiting_s(problem: Any) -> float:
    """What slow and missing nodes add to a round of everyone, on average over other worlds."""
    from takifugu.engine.simulate import PATIENCE
    from takifugu.engine.world import World
    from takifugu.plan.fleet import Fleet

    version = problem.versions[0].name
    everyone = {i: node.samples for i, node in enumerate(problem.nodes)}
    planned = Fleet.of(problem).round_cost(0, everyone).time_s - problem.overhead_s
    taken = []
    for seed in OTHER_WORLDS:
        world = World.draw(problem, seed)
        for number in range(1, 11):
            fates = [world.outcome(number, node.name, version, node.samples) for node in problem.nodes]
            slowest = max((f.time_s for f in fates if f.status != "dropped"), default=0.0)
            if any(f.status == "dropped" for f in fates):
                slowest = max(slowest, PATIENCE * planned)
            taken.append(slowest)
    return max(0.0, sum(taken) / len(taken) - planned)


def one(name: str, seed: int, options: Any) -> dict[str, Any]:
    from takifugu.engine import policies
    from takifugu.engine.setting import Setting, read_structures
    from takifugu.engine.simulate import simulate
    from takifugu.engine.world import World
    from takifugu.plan.fleet import Fleet
    from takifugu.plan.problem import Problem
    from takifugu.plan.robust import solve_robust
    from takifugu.plan.solve import solve
    from takifugu.train.profile import Draft, Profile

    case = CASES[name]
    nodes = eight_nodes() if name == "digits" else phones(Path(options.fleet), case.nodes, seed)
    data_dir = options.data_dir or None
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        draft = {
            "format": 1,
            "target": {"loss": case.target, "deadline_s": 1e9, "max_rounds": 15 * case.reference_rounds},
            "round": {"overhead_s": 0.1, "overhead_j": 0.2},
            "workload": {**case.workload, "seed": seed},
            "nodes": nodes,
        }
        began = time.perf_counter()

        def profiled(like: Mapping[str, Any] | None = None) -> tuple[Any, Problem]:
            profile = Profile.prepare(
                Draft(draft, folder), case.ratios, case.rounds, case.warmup, case.amounts, data_dir, like=like
            )
            # By FLOPs: the published figures do not depend on the machine.
            finding = profile.run(folder / "pilots", costs="flops")
            finding.write(folder / "problem.toml", 15.0)
            data = finding.problem(15.0)
            data["round"]["overhead_s"] += waiting_s(Problem.from_dict(data))
            fleet = Fleet.of(Problem.from_dict(data))
            round_s = fleet.round_cost(0, {i: int(n) for i, n in enumerate(fleet.samples)}).time_s
            data["target"]["deadline_s"] = round(options.slack * case.reference_rounds * round_s, 1)
            return finding, Problem.from_dict(data)

        finding, wanted = profiled()
        passes = finding.pilot_passes
        first = solve(wanted.with_reserve(options.reserve), options.tolerance, options.plan_s)
        if first.plan is not None and options.like:
            finding, wanted = profiled(first.to_dict())
        problem = wanted.with_reserve(options.reserve)
        profiled_s = time.perf_counter() - began

        began = time.perf_counter()
        if options.confidence > 0:
            result = solve_robust(problem, options.confidence, 0.01, options.plan_s)
        else:
            result = solve(problem, options.tolerance, options.plan_s)
        planned_s = time.perf_counter() - began
        fits = {
            version: {"kind": fit.curve.kind, **fit.curve.parameters(), "r2": fit.goodness.r2}
            for version, fit in finding.fits.versions.items()
        }
        found: dict[str, Any] = {
            "seed": seed,
            "target": case.target,
            "deadline_s": wanted.deadline_s,
            "fits": fits,
            "label_weight": finding.fits.label_weight,
            "switches": [[s.source, s.target, s.loss_jump] for s in finding.result.switches],
            "pilot_passes": [passes, finding.pilot_passes],
            "status": result.status,
            "gap": result.gap,
            "profiled_s": profiled_s,
            "planned_s": planned_s,
            "policies": {},
        }
        if result.plan is None:
            return {**found, "verdict": verdict(found)}
        plan = policies.from_file(problem, result.to_dict(), replans=True)
        as_it_was = replace(plan, name="plan as it was", slug=AS_IT_WAS, replans=False)
        chosen = [plan, as_it_was, *policies.baselines(problem)]
        structures = read_structures(problem, [folder])
        world = World.draw(problem, seed)
        setting = Setting.of(
            problem, world, structures, seed, base=folder, data_dir=data_dir, deadline_s=wanted.deadline_s
        )
        for policy in chosen:
            run = setting.folder(folder / policy.slug, policy)
            outcome = simulate(policy, setting, run)
            rows = list(run.rows("rounds.jsonl"))
            kept = (
                "reached",
                "deadline_met",
                "loss",
                "time_s",
                "energy_j",
                "rounds",
                "planned_rounds",
                "replans",
                "reason",
            )
            found["policies"][policy.slug] = {
                **{key: outcome[key] for key in kept},
                "predicted": outcome["predicted"],
                "versions": [[r["version"], r["members"]] for r in rows][:: max(1, len(rows) // 12)],
                "losses": [round(r["loss"], 4) for r in rows],
                "said": [round(r["predicted"]["loss"], 4) for r in rows if r["predicted"]],
            }
    return {**found, "verdict": verdict(found)}


def verdict(found: Mapping[str, Any]) -> dict[str, Any]:
    """The plan against what was asked, against its prediction, and against the best that met the target."""
    rows = dict(found["policies"])
    plan = rows.pop("plan", None)
    rows.pop(AS_IT_WAS, None)
    met = {slug: row["energy_j"] for slug, row in rows.items() if row["deadline_met"]}
    best = min(met, key=met.__getitem__, default=None)
    if plan is None:
        return {"met": False, "best_baseline": best}
    said = plan["predicted"]
    return {
        "met": plan["deadline_met"],
        "energy_j": plan["energy_j"],
        "energy_error": plan["energy_j"] / said["energy_j"] - 1,
        "time_error": plan["time_s"] / said["time_s"] - 1,
        "rounds": plan["rounds"],
        "planned_rounds": plan["planned_rounds"],
        "best_baseline": best,
        "best_baseline_j": met.get(best) if best else None,
        "not_above_any_baseline": best is None or plan["energy_j"] <= met[best] * (1 + 1e-9),
    }


def line(name: str, found: Mapping[str, Any]) -> str:
    v = found["verdict"]
    if "energy_j" not in v:
        return f"{name}, seed {found['seed']}: no plan ({found['status']})"
    best = f"best baseline that met it {v['best_baseline']} {v['best_baseline_j']:.1f} J"
    return (
        f"{name}, seed {found['seed']}: {'met' if v['met'] else 'MISSED'}, {v['energy_j']:.1f} J "
        f"({v['energy_error']:+.1%} of the prediction), time {v['time_error']:+.1%}, rounds {v['rounds']} "
        f"({v['planned_rounds']} planned); {best if v['best_baseline'] else 'no baseline met it'}"
        f"{'' if v['not_above_any_baseline'] else '  DEARER'}"
    )


def main() -> None:
    options = stage.arguments(
        __doc__,
        rounds=1,
        workload="digits",
        seeds=1,
        plan_s=20.0,
        tolerance=0.02,
        confidence=0.0,
        slack=SLACK,
        reserve=RESERVE,
        like=1,
        data_dir=os.environ.get("TAKIFUGU_DATA", ""),
        fleet="",
    )
    results, lines = [], []
    for seed in range(options.seed, options.seed + options.seeds):
        results.append(one(options.workload, seed, options))
        lines.append(line(options.workload, results[-1]))
        print(lines[-1], flush=True)
        for slug, row in results[-1]["policies"].items():
            said = row["predicted"]
            print(
                f"    {slug}: {'met' if row['deadline_met'] else 'no'} {row['energy_j']:.1f} J "
                f"(said {said['energy_j']:.1f}), {row['time_s']:.1f} s (said {said['time_s']:.1f}), loss "
                f"{row['loss']:.4f} (said {said['loss']:.4f}), {row['rounds']} rounds "
                f"({row['planned_rounds']})",
                flush=True,
            )
    command = (
        f"python -m benchmarks.whole_loop --workload {options.workload} --seed {options.seed} "
        f"--seeds {options.seeds}"
    )
    hidden = ("data_dir", "fleet", "json", "keep")
    settings = {key: value for key, value in vars(options).items() if key not in hidden}
    stage.report(
        f"whole_loop_{options.workload}",
        {"command": command, "settings": settings, "seeds": results},
        options,
        [],
    )


if __name__ == "__main__":
    main()
