"""Problems of many rounds whose optimum is known: rounds take whole seconds, and what they gain adds up.

All curves are exponential with the same rate and floor, and no switch has a jump: so the loss depends on the
sum of all samples used, and the least energy is found by going through all seconds and all sums. This shares
no code with the planner.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

RATE, FLOOR, START = 0.2, 0.1, 2.3


def whole_problem(
    seed: int, nodes: int = 3, needed: int = 90, every_s: int = 0, leaving_s: tuple[int, ...] = ()
) -> dict[str, Any]:
    """Nodes that come and go; the target is met when `needed` samples have been used in all. With `every_s`
    all but the first come and go again and again; with `leaving_s` they leave so long before the deadline."""
    rng = np.random.default_rng([5, seed])
    sizes = rng.integers(1, 5, nodes)
    names = ["v0", "v1"]
    total = int(sizes.sum())
    fleet = []
    slow = rng.integers(1, 9, nodes)
    deadline = int(rng.uniform(0.7, 1.6) * needed * slow.mean() / total * 1.5) + 10
    for i, size in enumerate(sizes.tolist()):
        seconds = [int(slow[i]), max(1, int(slow[i]) - int(rng.integers(0, 3)))]
        joules = float(size * rng.uniform(1, 6) / slow[i])
        row: dict[str, Any] = {
            "name": f"n{i}",
            "flops_per_s": 1.0,
            "joules_per_flop": 1.0,
            "up_bytes_per_s": 1.0,
            "down_bytes_per_s": 1.0,
            "latency_s": 0.0,
            "joules_per_byte": 0.0,
            "samples": size,
            "samples_per_s": {v: size / s for v, s in zip(names, seconds, strict=True)},
            "joules_per_sample": {v: joules * f / size for v, f in zip(names, (1.0, 0.8), strict=True)},
        }
        if rng.random() < 0.7:
            a, b = sorted(rng.integers(0, deadline + 1, 2).tolist())
            row["available"] = (
                [[a, b]] if rng.random() < 0.5 and b > a else [[0, a or 1], [b + 1, 2 * deadline]]
            )
        if every_s:
            row.pop("available", None)
            begins = range(int(rng.integers(0, every_s)), deadline, 2 * every_s)
            if i:
                row["available"] = [[a, a + every_s] for a in begins]
        if leaving_s:
            row.pop("available", None)
            if i:
                row["available"] = [[0, max(1, deadline - leaving_s[i - 1])]]
        fleet.append(row)
    loss = FLOOR + (START - FLOOR) * math.exp(-RATE * needed / total)
    curve = {"kind": "exponential", "rate": RATE, "floor": FLOOR}
    return {
        "format": 1,
        "target": {"loss": loss * (1 + 1e-7), "deadline_s": float(deadline)},
        "start": {"version": "v0", "loss": START},
        "data": {"parts": 1},
        "versions": [
            {"name": v, "train_flops_per_sample": 1.0, "payload_bytes": 0.0, "curve": curve} for v in names
        ],
        "switches": [{"from": "v0", "to": "v1", "time_s": 3.0, "energy_j": 2.0, "loss_jump": 0.0}],
        "nodes": fleet,
    }


def least_energy(problem: dict[str, Any], needed: int = 90) -> float:
    """By going through all seconds, versions and sums."""
    deadline = int(problem["target"]["deadline_s"])
    energy = np.full((2, deadline + 1, needed + 1), np.inf)
    energy[0, 0, 0] = 0.0
    teams = [_team(problem, who) for who in _teams(len(problem["nodes"]))]
    switch = problem["switches"][0]
    for now in range(deadline):
        np.minimum(energy[:, now + 1], energy[:, now], out=energy[:, now + 1])  # waiting
        for gain, seconds, joules, windows in teams:
            for version in (0, 1):
                _advance(energy, now, now, version, version, gain, seconds, joules, windows, 0.0)
            begin = now + int(switch["time_s"])
            _advance(energy, now, begin, 0, 1, gain, seconds, joules, windows, switch["energy_j"])
    return float(energy[:, :, needed].min())


def _advance(
    energy: NDArray[np.float64],
    now: int,
    begin: int,
    source: int,
    target: int,
    gain: int,
    seconds: list[int],
    joules: list[float],
    windows: list[list[list[float]]],
    fee: float,
) -> None:
    end = begin + seconds[target]
    if end >= energy.shape[1] or not all(any(a <= begin and end <= b for a, b in row) for row in windows):
        return
    needed = energy.shape[2] - 1
    to = np.minimum(np.arange(needed + 1) + gain, needed)
    np.minimum.at(energy[target, end], to, energy[source, now] + joules[target] + fee)


def _teams(nodes: int) -> list[tuple[int, ...]]:
    return [who for count in range(1, nodes + 1) for who in itertools.combinations(range(nodes), count)]


def _team(
    problem: dict[str, Any], who: tuple[int, ...]
) -> tuple[int, list[int], list[float], list[list[list[float]]]]:
    nodes = [problem["nodes"][i] for i in who]
    seconds = [max(round(n["samples"] / n["samples_per_s"][v]) for n in nodes) for v in ("v0", "v1")]
    joules = [sum(n["samples"] * n["joules_per_sample"][v] for n in nodes) for v in ("v0", "v1")]
    windows = [n.get("available", [[0.0, math.inf]]) for n in nodes]
    return sum(n["samples"] for n in nodes), seconds, joules, windows
