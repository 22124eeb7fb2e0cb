"""Random small problems with every feature of the format on and off, sized for complete enumeration."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

FEATURES = (
    "labels",
    "idle",
    "windows",
    "late",
    "memory",
    "parts",
    "measured",
    "overheads",
    "cap",
    "both_ways",
    "start_time",
    "power",
    "gain",
    "steep_gain",
    "met",
)


def small_problem(seed: int, most_plans: float = 2e5, force: tuple[str, ...] = ()) -> dict[str, Any]:
    """A problem file's dictionary. Features in `force` are on; the others by the toss of a coin."""
    rng = np.random.default_rng([77, seed])
    chance = {"met": 0.04, "start_time": 0.3, "steep_gain": 0.3}
    on = {f: bool(rng.random() < chance.get(f, 0.5)) or f in force for f in FEATURES}
    if not set(force) & {"met"} and rng.random() < 0.5:
        on["met"] = False
    versions = int(rng.integers(1, 4))
    nodes = int(rng.integers(1, 4 if on["parts"] else 5))
    parts = int(rng.integers(2, 4)) if on["parts"] else 1
    rows = [_version(rng, i, on) for i in range(versions)]
    names = [v["name"] for v in rows]
    fleet = [_node(rng, i, names, on) for i in range(nodes)]
    start_time = float(rng.uniform(0, 3)) if on["start_time"] else 0.0
    data: dict[str, Any] = {
        "format": 1,
        "target": {},
        "start": {"version": names[0], "loss": float(rng.uniform(1.5, 2.5)), "time_s": start_time},
        "round": {"overhead_s": float(rng.uniform(0, 2)), "overhead_j": float(rng.uniform(0, 8))}
        if on["overheads"]
        else {},
        "data": {"parts": parts, "label_weight": float(rng.choice([0.3, 0.7, 1.0])) if on["labels"] else 0.0},
        "versions": rows,
        "switches": _switches(rng, names, on["both_ways"]),
        "nodes": fleet,
    }
    moves = versions * ((parts + 1) ** nodes - 1)
    rounds = min(6, int(math.log(most_plans) / math.log(moves))) if moves > 1 else 6
    typical = float(np.mean([_time(n, v, n["samples"]) for n in fleet for v in rows]))
    least = min(_time(n, v, 1) for n in fleet for v in rows) + data["round"].get("overhead_s", 0.0)
    deadline = start_time + typical * float(rng.uniform(0.8, rounds + 1.0))
    if on["windows"]:
        _add_windows(rng, fleet, deadline, on["late"])
    if on["cap"] or (deadline - start_time) / least >= rounds + 1:
        data["target"]["max_rounds"] = int(rng.integers(1, rounds + 1)) if on["cap"] else rounds
    data["target"]["deadline_s"] = deadline
    data["target"]["loss"] = _target(rng, data, on["met"])
    return data


def _version(rng: np.random.Generator, i: int, on: dict[str, bool]) -> dict[str, Any]:
    curve: dict[str, Any] = {"floor": float(rng.uniform(0.1, 0.6))}
    if on["power"] and rng.random() < 0.7:
        curve |= {
            "kind": "power",
            "scale": float(rng.uniform(0.5, 3)),
            "exponent": float(rng.uniform(0.3, 3)),
        }
    else:
        curve |= {"kind": "exponential", "rate": float(rng.uniform(0.2, 1.5))}
    if on["gain"]:
        curve["data_gain"] = float(rng.uniform(0, 0.3))
        curve["data_exponent"] = float(rng.uniform(1.1, 2.0) if on["steep_gain"] else rng.uniform(0.2, 1.0))
    row: dict[str, Any] = {
        "name": f"v{i}",
        "train_flops_per_sample": float(rng.uniform(1, 4)),
        "payload_bytes": float(rng.uniform(0, 6)),
        "curve": curve,
    }
    if on["memory"]:
        row["memory_bytes"] = float(rng.uniform(1, 10))
    return row


def _node(rng: np.random.Generator, i: int, names: list[str], on: dict[str, bool]) -> dict[str, Any]:
    samples = int(rng.integers(2, 30))
    row: dict[str, Any] = {
        "name": f"n{i}",
        "flops_per_s": float(rng.uniform(3, 30)),
        "joules_per_flop": float(rng.uniform(0.05, 1)),
        "up_bytes_per_s": float(rng.uniform(2, 20)),
        "down_bytes_per_s": float(rng.uniform(2, 20)),
        "latency_s": float(rng.uniform(0.001, 0.3)),
        "joules_per_byte": float(rng.uniform(0, 2)),
        "samples": samples,
    }
    if on["idle"]:
        row["idle_watts"] = float(rng.uniform(0, 3))
    if on["memory"] and rng.random() < 0.6:
        row["memory_bytes"] = float(rng.uniform(1, 12))
    if on["labels"]:
        row["labels"] = [int(n) for n in rng.multinomial(samples, rng.dirichlet([0.4, 0.4, 0.4]))]
    if on["measured"] and rng.random() < 0.6:
        row["samples_per_s"] = {name: float(rng.uniform(1, 12)) for name in names if rng.random() < 0.6}
        row["joules_per_sample"] = {name: float(rng.uniform(0, 3)) for name in names if rng.random() < 0.6}
    return row


def _switches(rng: np.random.Generator, names: list[str], both: bool) -> list[dict[str, Any]]:
    return [
        {
            "from": a,
            "to": b,
            "time_s": float(rng.uniform(0, 2)),
            "energy_j": float(rng.uniform(0, 6)),
            "loss_jump": float(rng.uniform(0, 0.2)) if rng.random() < 0.7 else 0.0,
        }
        for i, a in enumerate(names)
        for j, b in enumerate(names)
        if i != j and (i < j or both) and rng.random() < 0.85
    ]


def _add_windows(rng: np.random.Generator, fleet: list[dict[str, Any]], deadline: float, late: bool) -> None:
    for node in fleet:
        if rng.random() < 0.6:
            a = deadline * float(rng.uniform(0.05, 0.5)) if late else 0.0
            b = a + deadline * float(rng.uniform(0.2, 0.9))
            node["available"] = [[a, b]]
            if rng.random() < 0.4:
                node["available"].append([b + deadline * float(rng.uniform(0.0, 0.2)), deadline * 2.0])


def _time(node: dict[str, Any], version: dict[str, Any], samples: int) -> float:
    speed = node.get("samples_per_s", {}).get(version["name"])
    compute = samples / speed if speed else samples * version["train_flops_per_sample"] / node["flops_per_s"]
    payload = version["payload_bytes"]
    return float(
        compute
        + payload / node["up_bytes_per_s"]
        + payload / node["down_bytes_per_s"]
        + 2 * node["latency_s"]
    )


def _target(rng: np.random.Generator, data: dict[str, Any], met: bool) -> float:
    """Near what some rounds with all nodes reach, so that both outcomes happen."""
    loss = data["start"]["loss"]
    if met:
        return float(loss * 1.1)
    curve = data["versions"][int(rng.integers(len(data["versions"])))]["curve"]
    rate = curve.get("rate", 0.6)
    rounds = data["target"].get("max_rounds", 3) * float(rng.uniform(0.1, 0.9))
    return float(curve["floor"] + (loss - curve["floor"]) * math.exp(-rate * rounds) + rng.uniform(0.0, 0.15))
