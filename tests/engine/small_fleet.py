"""A fleet of unequal nodes that train a small network on the bundled digits: real, and quick."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import takifugu as tk
from takifugu.engine.policies import Policy, from_file
from takifugu.engine.setting import Setting, read_structures
from takifugu.engine.world import World
from takifugu.plan.plan import Decision, replay
from takifugu.plan.problem import Problem
from takifugu.train.workload import Workload

WORKLOAD = {
    "model": "takifugu.zoo.small:mlp",
    "model_options": {"width": 32},
    "data": "digits",
    "partition": {"kind": "dirichlet", "alpha": 1.0},
    "batch_size": 16,
    "optimizer": {"kind": "adam", "lr": 0.01},
    "validation": 0.2,
    "seed": 0,
}


def structure(rank: float = 0.25) -> tk.Structure:
    return tk.choose(Workload.from_dict(WORKLOAD).build(), rank, ["1", "3"])


def problem_dict(nodes: int = 5, **changes: Any) -> dict[str, Any]:
    """`changes`: tables of the problem file to update, e.g. target={"loss": 0.5}."""
    data: dict[str, Any] = {
        "format": 1,
        "target": {"loss": 0.6, "deadline_s": 60.0},
        "start": {"version": "dense", "loss": 2.31},
        "round": {"overhead_s": 0.1, "overhead_j": 0.5},
        "data": {"parts": 2},
        "workload": WORKLOAD,
        "versions": [
            {
                "name": "dense",
                "train_flops_per_sample": 20_000.0,
                "payload_bytes": 13_736.0,
                "curve": {"kind": "exponential", "floor": 0.2, "rate": 0.25, "data_gain": 0.05},
            },
            {
                "name": "r0.25",
                "structure": "r0.25.json",
                "train_flops_per_sample": 9_000.0,
                "payload_bytes": 6_312.0,
                "curve": {"kind": "exponential", "floor": 0.25, "rate": 0.25, "data_gain": 0.05},
            },
        ],
        "switches": [{"from": "dense", "to": "r0.25", "time_s": 0.2, "energy_j": 0.3, "loss_jump": 0.1}],
        "nodes": [
            {
                "name": f"node-{i}",
                "flops_per_s": 4e6 / (1 + i),
                "joules_per_flop": 2e-7 * (1 + 0.2 * i),
                "up_bytes_per_s": 5e4,
                "down_bytes_per_s": 1e5,
                "latency_s": 0.01,
                "joules_per_byte": 1e-5,
                "idle_watts": 0.2,
                "samples": 120 + 20 * i,
            }
            for i in range(nodes)
        ],
    }
    for name, change in changes.items():
        data[name] = {**data[name], **change} if isinstance(change, dict) else change
    return data


def write_problem(folder: Path, data: dict[str, Any]) -> Path:
    """The problem file with its structure file beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    structure().save(folder / "r0.25.json")
    path = folder / "problem.json"
    path.write_text(json.dumps(data))
    return path


def setting(data: dict[str, Any], folder: Path, world: World | None = None, **options: Any) -> Setting:
    problem = Problem.load(write_problem(folder, data))
    structures = read_structures(problem, [folder])
    return Setting.of(problem, world or World.as_profile(problem), structures, **options)


def policy(problem: Problem, rounds: list[tuple[str, dict[int, int] | None]]) -> Policy:
    """A plan by hand: a version and who uses how many samples (None: everyone all of them)."""
    everyone = {i: node.samples for i, node in enumerate(problem.nodes)}
    decisions = [Decision(problem.version_index[v], used or everyone) for v, used in rounds]
    plan = replay(problem, decisions)
    assert plan is not None
    rows = [r.to_dict() for r in plan.rounds]
    figures = {"energy_j": plan.energy_j, "time_s": plan.time_s, "loss": plan.loss}
    return from_file(problem, {"format": "takifugu.plan/1", "status": "feasible", "rounds": rows, **figures})
