"""Writes a small made-up run folder in which everything agrees: sums, clocks, plan, problem and structures.

The plan's figures come from the planner's own replay, so that the page's formulas have something to be held
against that is not theirs.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from takifugu.plan.plan import Decision, replay
from takifugu.plan.problem import Problem
from takifugu.structure import LayerSpec, Structure

VERSIONS = (("dense", 1.0, None), ("r0.5", 0.62, 32), ("r0.25", 0.35, 16))
BASELINES = (
    "no compression, all nodes (FedAvg-like)",
    "compressed from the start, all nodes",
    "fixed warm-up of 10 rounds, all nodes (Pufferfish-like)",
    "best single switch, all nodes",
    "nodes and data first, then version",
    "version first, then nodes and data",
    "greedy loss drop per joule",
    "least energy for the data each round (FedZero-like)",
    "rotating cohorts of equal size",
)
SOURCES = {
    "loss": "measured",
    "accuracy": "measured",
    "train_loss": "measured",
    "time_s": "simulated",
    "energy_j": "simulated",
    "bytes": "simulated",
}


def structure_of(rank: int | None) -> Structure:
    if rank is None:
        return Structure()
    layers = [(f"layer{i}.conv{j}", (64 * i, 64 * i, 3, 3)) for i in (1, 2, 3) for j in (1, 2)]
    return Structure(
        tuple(
            LayerSpec(name, "conv2d", "kxk-1x1", {"weight": rank * (shape[0] // 64)}, {"weight": shape})
            for name, shape in layers
        )
    )


def problem_data(
    nodes: int, rounds: int, names: list[str] | None = None, samples: int = 40
) -> dict[str, Any]:
    """A problem whose plan of about so many rounds meets the target."""
    draw = random.Random(f"problem {nodes} {rounds}")
    names = names or [f"node-{i:03d}" if nodes > 40 else f"{_KINDS[i % 4]}-{i + 1:02d}" for i in range(nodes)]
    rate = 27.0 / rounds

    def curve(floor: float, factor: float) -> dict[str, Any]:
        drawn = [
            {
                "floor": floor + draw.gauss(0, 0.012),
                "rate": rate * factor * draw.lognormvariate(0, 0.08),
                "data_gain": 0.02,
                "data_exponent": 0.5,
            }
            for _ in range(samples)
        ]
        row = {"kind": "exponential", "floor": floor, "rate": rate * factor, "data_gain": 0.02}
        return {**row, "samples": drawn} if samples else row

    versions = [
        {
            "name": name,
            "train_flops_per_sample": 3.3e9 * cost,
            "payload_bytes": 44_700_000 * cost,
            "source": "estimated",
            "curve": curve(0.20 + 0.05 * index, 0.16 - 0.01 * index),
        }
        for index, (name, cost, _) in enumerate(VERSIONS)
    ]
    return {
        "format": 1,
        "target": {"loss": 0.42, "deadline_s": 26.0 * rounds, "max_rounds": 3 * rounds},
        "start": {"version": "dense", "loss": 2.30},
        "round": {"overhead_s": 0.5, "overhead_j": 3.0},
        "data": {"parts": 1, "label_weight": 0.3},
        "versions": versions,
        "switches": [
            {"from": "dense", "to": "r0.5", "time_s": 2.0, "energy_j": 40.0, "loss_jump": 0.03},
            {"from": "r0.5", "to": "r0.25", "time_s": 2.0, "energy_j": 40.0, "loss_jump": 0.04},
            {"from": "dense", "to": "r0.25", "time_s": 2.0, "energy_j": 40.0, "loss_jump": 0.07},
        ],
        "nodes": [_node(name, draw) for name in names],
    }


_KINDS = ("jetson", "laptop", "phone", "server")


def _node(name: str, draw: random.Random) -> dict[str, Any]:
    labels = [draw.randint(20, 200) for _ in range(4)]
    samples = sum(labels)
    return {
        "name": name,
        "flops_per_s": 1e11 * draw.uniform(0.8, 3.0),
        "joules_per_flop": 2e-11 * draw.uniform(0.5, 3.0),
        "up_bytes_per_s": 1e7 * draw.uniform(0.8, 2.0),
        "down_bytes_per_s": 3e7 * draw.uniform(0.8, 2.0),
        "latency_s": 0.02,
        "joules_per_byte": 1e-7 * draw.uniform(0.5, 2.0),
        "idle_watts": 0.4,
        "samples": samples,
        "labels": labels,
        "source": "simulated",
    }


def write_run(
    folder: Path,
    nodes: int = 4,
    rounds: int = 6,
    baselines: int = 2,
    *,
    seed: int = 0,
    reached: bool = True,
    finished: bool = True,
    names: list[str] | None = None,
    policy: str = "plan",
    samples: int = 40,
) -> Path:
    problem = Problem.from_dict(problem_data(nodes, rounds, names, samples))
    _write(folder, problem, policy, rounds, seed, reached, finished, share=0.7)
    for index in range(baselines):
        name = BASELINES[index]
        slug = "".join(c if c.isalnum() else "-" for c in name.split("(")[0]).strip("-")
        _write(
            folder / "baselines" / slug,
            problem,
            name,
            rounds + 2 + index,
            seed + index + 1,
            index % 4 != 3,
            True,
            share=0.75 + 0.03 * index,
            plain=0 if index % 2 == 0 else None,
        )
    return folder


def _write(
    folder: Path,
    problem: Problem,
    policy: str,
    rounds: int,
    seed: int,
    reached: bool,
    finished: bool,
    share: float,
    plain: int | None = None,
) -> None:
    draw = random.Random(f"{policy} {seed}")
    decisions = list(_decisions(problem, rounds, share, plain, draw))
    plan = replay(problem, decisions)
    assert plan is not None
    bound = plan.energy_j * 0.992
    plan_data = {
        "format": "takifugu.plan/1",
        "status": "within_tolerance",
        "energy_j": plan.energy_j,
        "lower_bound_j": bound,
        "gap": (plan.energy_j - bound) / plan.energy_j,
        "time_s": plan.time_s,
        "loss": plan.loss,
        "solver": "labels",
        "rounds": [r.to_dict() for r in plan.rounds],
        "problem": problem.to_dict(),
        "problem_sha256": problem.sha256,
    }
    structures = {name: structure_of(rank) for name, _, rank in VERSIONS}
    rows, members, events = _carried_out(problem, plan.rounds, structures, draw)
    if not finished:
        rows = rows[: max(1, len(rows) * 2 // 3)]
    target = problem.target_loss
    if (
        reached and finished
    ):  # it ends with the first round that meets the target, at the latest with the last
        rows[-1]["loss"] = min(rows[-1]["loss"], target * 0.995)
        rows = rows[: next(i for i, row in enumerate(rows, start=1) if row["loss"] <= target)]
    else:
        for row in rows:
            row["loss"] = max(row["loss"], target * 1.01)
    members = [m for m in members if m["round"] <= len(rows)]
    events = [e for e in events if e["round"] <= len(rows)]
    folder.mkdir(parents=True, exist_ok=True)
    header = {
        "format": "takifugu.run/1",
        "policy": policy,
        "engine": "simulation",
        "seed": seed,
        "averaging": "factors",
        "world": {"seed": seed, "spread": {"speed": 0.1, "link": 0.15}, "slowdown": 0.03, "dropout": 0.02},
        "versions": {name: structure.id for name, structure in structures.items()},
        "problem_sha256": problem.sha256,
        "sources": SOURCES,
        "libraries": {"takifugu": "0.1.0", "torch": "2.13.0"},
        "command": f"takifugu run plan.json --out {folder.name} --seed {seed}",
    }
    dump(folder / "run.json", header)
    dump(folder / "problem.json", problem.to_dict())
    dump(folder / "plan.json", plan_data)
    (folder / "structures").mkdir(exist_ok=True)
    for structure in structures.values():
        structure.save(folder / "structures" / f"{structure.id}.json")
    for name, lines in (("rounds", rows), ("nodes", members), ("events", events)):
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
    if finished:
        last = rows[-1]
        result = {
            "reached": reached,
            "loss": last["loss"],
            "accuracy": last["accuracy"],
            "time_s": last["end_s"],
            "energy_j": last["total"]["energy_j"],
            "bytes": last["total"]["bytes"],
            "rounds": len(rows),
            "planned_rounds": len(plan.rounds),
            "deadline_met": reached,
            "reason": "target met" if reached else "the plan is exhausted",
            "predicted": {"energy_j": plan.energy_j, "time_s": plan.time_s, "loss": plan.loss},
            "start_loss": problem.start_loss,
        }
        dump(folder / "result.json", result)


def _decisions(problem: Problem, rounds: int, share: float, plain: int | None, draw: random.Random) -> Any:
    """Three stretches of versions, or one version all along, each round with a share of the nodes."""
    count = len(problem.nodes)
    for number in range(rounds):
        version = min(2, 3 * number // rounds) if plain is None else plain
        team = sorted(draw.sample(range(count), max(1, round(share * count))))
        yield Decision(version, {i: problem.nodes[i].samples for i in team})


def _carried_out(
    problem: Problem, planned: Any, structures: dict[str, Structure], draw: random.Random
) -> Any:
    rows: list[dict[str, Any]] = []
    members: list[dict[str, Any]] = []
    events: list[dict[str, Any]] = []
    versions = {v.name: v for v in problem.versions}
    nodes = {n.name: n for n in problem.nodes}
    clock, joules, sent, version = 0.0, 0.0, 0.0, problem.start_version
    speed = {n: draw.lognormvariate(0, 0.1) for n in nodes}
    for number, row in enumerate(planned, start=1):
        kind, switched = versions[row.version], row.version != version
        start = clock + (2.0 if switched else 0.0)
        mine = []
        for name, used in row.nodes.items():
            luck = draw.random()
            status = "dropped" if luck < 0.02 else "slow" if luck < 0.05 else "ok"
            time_s = nodes[name].sample_s(kind) * used * speed[name] + nodes[name].transfer_s(kind)
            time_s *= 2.0 if status == "slow" else 1.0
            energy = (nodes[name].sample_j(kind) * used + nodes[name].transfer_j(kind)) * draw.uniform(
                0.95, 1.12
            )
            mine.append(
                {
                    "round": number,
                    "node": name,
                    "samples": used,
                    "time_s": time_s,
                    "energy_j": energy,
                    "bytes": kind.payload_bytes * (1 if status == "dropped" else 2),
                    "train_loss": None if status == "dropped" else row.loss,
                    "status": status,
                }
            )
            if status != "ok":
                event = "dropout" if status == "dropped" else "slow"
                events.append({"round": number, "time_s": start + time_s, "event": event, "node": name})
        length = max(m["time_s"] for m in mine) + problem.overhead_s
        energy = sum(m["energy_j"] for m in mine) + problem.overhead_j + (40.0 if switched else 0.0)
        moved = sum(m["bytes"] for m in mine)
        if switched:
            events.append(
                {"round": number, "time_s": clock, "event": "switch", "from": version, "to": row.version}
            )
        clock, joules, sent, version = start + length, joules + energy, sent + moved, row.version
        back = [m for m in mine if m["status"] != "dropped"]
        rows.append(
            {
                "round": number,
                "version": row.version,
                "structure": structures[row.version].id,
                "switched": switched,
                "start_s": start,
                "end_s": clock,
                "time_s": length + (2.0 if switched else 0.0),
                "energy_j": energy,
                "loss": row.loss * 1.03 + draw.gauss(0, 0.01),
                "accuracy": 0.95 - row.loss / 3,
                "train_loss": row.loss,
                "bytes": moved,
                "samples": sum(m["samples"] for m in back),
                "members": len(mine),
                "dropped": len(mine) - len(back),
                "truncation": 0.004,
                "predicted": {
                    "start_s": row.start_s,
                    "time_s": row.time_s,
                    "energy_j": row.energy_j,
                    "loss": row.loss,
                },
                "total": {"energy_j": joules, "bytes": sent},
            }
        )
        members += mine
    events.append({"round": len(rows), "time_s": clock, "event": "target_met"})
    return rows, members, events


def dump(path: Path, data: Any) -> None:
    path.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
