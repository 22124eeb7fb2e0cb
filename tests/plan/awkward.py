"""Problems that are easy to get wrong: groups of identical devices, few rounds, large overheads, no energy, ties."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from generator import small_problem

KINDS = ("identical", "overhead", "free", "ties", "few")


def awkward_problem(seed: int, kind: str) -> dict[str, Any]:
    """Return a small problem of one kind (sometimes of a second one as well), sized for complete enumeration."""
    rng = np.random.default_rng([4711, seed])
    data = small_problem(30_000 + seed, most_plans=3e4, force=("labels",) if rng.random() < 0.5 else ())
    kinds = {kind, *rng.choice(KINDS, 1)} if rng.random() < 0.4 else {kind}
    if "identical" in kinds:
        _make_identical(rng, data)
    if "ties" in kinds:
        _round_figures(data)
    if "free" in kinds:
        _take_energy_away(rng, data)
    if "overhead" in kinds:
        _add_overhead(rng, data)
    if "few" in kinds:
        data["target"]["max_rounds"] = int(rng.integers(1, 4))
        data["target"]["loss"] = _reached_after(
            data, data["target"]["max_rounds"], float(rng.uniform(0.5, 1.0))
        )
    return data


def identical_fleet(seed: int, least: int = 17, most: int = 24) -> dict[str, Any]:
    """Return a problem with one to three groups of identical devices, beyond complete enumeration of node sets.

    How many devices of each group take part is all that counts, so `oracle.least_energy_of_groups` knows the
    optimum.
    """
    rng = np.random.default_rng([4712, seed])
    devices, groups = int(rng.integers(least, most + 1)), int(rng.integers(1, 4))
    sizes = np.full(groups, devices // groups)
    sizes[: devices - sizes.sum()] += 1
    labels = rng.random() < 0.6
    base = small_problem(50_000 + seed)
    versions = base["versions"][:2]
    for version in versions:
        version.pop("memory_bytes", None)
    nodes: list[dict[str, Any]] = []
    classes = int(rng.integers(2, 5))
    for size in sizes.tolist():
        samples = int(rng.integers(10, 60))
        device = {
            "flops_per_s": float(rng.uniform(3, 30)),
            "joules_per_flop": float(rng.uniform(0.05, 1)),
            "up_bytes_per_s": float(rng.uniform(2, 20)),
            "down_bytes_per_s": float(rng.uniform(2, 20)),
            "latency_s": float(rng.uniform(0.001, 0.3)),
            "joules_per_byte": float(rng.uniform(0, 2)),
            "samples": samples,
        }
        if rng.random() < 0.3:
            device["idle_watts"] = float(rng.uniform(0, 1))
        if labels:
            device["labels"] = [
                int(n) for n in rng.multinomial(samples, rng.dirichlet(np.full(classes, 0.5)))
            ]
        nodes += [{**device, "name": f"n{len(nodes) + k:02d}"} for k in range(size)]
    data: dict[str, Any] = {
        "format": 1,
        "target": {"max_rounds": int(rng.integers(1, 9))},
        "start": {"version": versions[0]["name"], "loss": 2.3},
        "round": {},
        "data": {"parts": 1, "label_weight": float(rng.choice([0.3, 0.7, 1.0])) if labels else 0.0},
        "versions": versions,
        "switches": [s for s in base["switches"] if {s["from"], s["to"]} <= {v["name"] for v in versions}],
        "nodes": nodes,
    }
    if rng.random() < 0.3:
        _add_overhead(rng, data)
    longest = max(_slowest(data, n) for n in nodes) + data["round"].get("overhead_s", 0.0)
    rounds = data["target"]["max_rounds"]
    data["target"]["deadline_s"] = longest * rounds * float(rng.uniform(0.5, 1.5))
    data["target"]["loss"] = _reached_after(data, rounds, float(rng.uniform(0.3, 0.9)))
    return data


def _make_identical(rng: np.random.Generator, data: dict[str, Any]) -> None:
    """All nodes become copies of one or two of them."""
    nodes = data["nodes"]
    kinds = nodes[: int(rng.integers(1, min(2, len(nodes)) + 1))]
    while len(nodes) < 4 and (data["data"]["parts"] + 1) ** (len(nodes) + 1) <= 40:
        nodes.append({})
    data["nodes"] = [{**kinds[k % len(kinds)], "name": f"n{k}"} for k in range(len(nodes))]
    data["target"].setdefault("max_rounds", 3)
    data["target"]["max_rounds"] = min(data["target"]["max_rounds"], 3)


def _round_figures(data: dict[str, Any]) -> None:
    """Figures become small whole numbers, so that many sums are equal."""
    for node in data["nodes"]:
        for key in ("flops_per_s", "up_bytes_per_s", "down_bytes_per_s"):
            node[key] = float(2 ** max(0, round(math.log2(node[key]))))
        node["joules_per_flop"] = float(max(1, round(node["joules_per_flop"])))
        node["joules_per_byte"] = float(round(node["joules_per_byte"]))
        node["latency_s"] = 0.0
        if "labels" not in node:
            node["samples"] = max(8, 8 * round(node["samples"] / 8))
    for version in data["versions"]:
        version["train_flops_per_sample"] = float(max(1, round(version["train_flops_per_sample"])))
        version["payload_bytes"] = float(max(1, round(version["payload_bytes"])))
    for switch in data["switches"]:
        switch.update(time_s=float(round(switch["time_s"])), energy_j=float(round(switch["energy_j"])))


def _take_energy_away(rng: np.random.Generator, data: dict[str, Any]) -> None:
    """Some nodes, or all, use no energy."""
    everyone = rng.random() < 0.5
    for node in data["nodes"]:
        if everyone or rng.random() < 0.5:
            node.update(joules_per_flop=0.0, joules_per_byte=0.0)
            node.pop("joules_per_sample", None)
            node.pop("idle_watts", None)
    if everyone:
        data["round"]["overhead_j"] = 0.0
        if rng.random() < 0.5:
            for switch in data["switches"]:
                switch["energy_j"] = 0.0


def _add_overhead(rng: np.random.Generator, data: dict[str, Any]) -> None:
    """Rounds take hours or days more than their nodes do."""
    overhead = float(rng.choice([3600.0, 86_400.0, 1e7]))
    before = data["round"].get("overhead_s", 0.0)
    data["round"]["overhead_s"] = overhead
    rounds = data["target"].get("max_rounds", 3)
    data["target"]["max_rounds"] = rounds
    for node in data["nodes"]:
        node.pop("available", None)
    if "deadline_s" in data["target"]:
        data["target"]["deadline_s"] += (overhead - before) * (rounds + float(rng.uniform(0.0, 0.5)))


def _slowest(data: dict[str, Any], node: dict[str, Any]) -> float:
    return max(
        v["train_flops_per_sample"] * node["samples"] / node["flops_per_s"]
        + v["payload_bytes"] * (1 / node["up_bytes_per_s"] + 1 / node["down_bytes_per_s"])
        + 2 * node["latency_s"]
        for v in data["versions"]
    )


def _reached_after(data: dict[str, Any], rounds: int, part: float) -> float:
    """The loss that so many rounds of everyone reach with the first version, or only a part of the way."""
    curve, loss = data["versions"][0]["curve"], data["start"]["loss"]
    if curve["kind"] == "exponential":
        after = curve["floor"] + (loss - curve["floor"]) * math.exp(-curve["rate"] * rounds)
    else:
        above = (loss - curve["floor"]) / curve["scale"]
        e = curve["exponent"]
        after = curve["floor"] + curve["scale"] * (above ** (-1 / e) + rounds) ** -e
    return float(loss - part * (loss - after))
