"""The front of energy, time and loss by complete enumeration, from the formulas of the problem format alone."""

from __future__ import annotations

from typing import Any

import numpy as np
from oracle import SLACK, all_moves, start_times, step


def all_ends(problem: dict[str, Any], most_states: float = 3e6) -> np.ndarray:
    """[plan, 3]: energy, time and loss of every plan within the deadline and the round cap."""
    deadline = problem["target"]["deadline_s"] * (1 + SLACK)
    versions = problem["versions"]
    names = [v["name"] for v in versions]
    moves = [all_moves(problem, v) for v in versions]
    ways = {(n, n): (0.0, 0.0, 0.0) for n in names}
    for s in problem["switches"]:
        ways[s["from"], s["to"]] = (s["time_s"], s["energy_j"], s["loss_jump"])
    start = [0.0, problem["start"].get("time_s", 0.0), problem["start"]["loss"]]
    layer, found, states = {problem["start"]["version"]: np.array([start])}, [np.zeros((0, 3))], 0
    for _ in range(problem["target"].get("max_rounds", 10**6)):
        following: dict[str, list[np.ndarray]] = {}
        for (a, b), (seconds, joules, jump) in ways.items():
            if a not in layer:
                continue
            energy, ready, loss = layer[a].T
            for move in moves[names.index(b)]:
                end = start_times(move, ready + seconds) + move.time
                after = step(versions[names.index(b)]["curve"], loss + jump, move.share)
                rows = np.stack([energy + joules + move.energy, end, after], axis=1)[end <= deadline]
                following.setdefault(b, []).append(rows)
        layer = {n: np.concatenate(parts) for n, parts in following.items() if sum(map(len, parts))}
        if not layer:
            break
        found += layer.values()
        states += sum(map(len, layer.values()))
        assert states <= most_states, "too large for complete enumeration"
    return np.concatenate(found)


def unbeaten(points: np.ndarray) -> np.ndarray:
    """The rows that no other row beats; of equal rows one."""
    points = np.unique(points, axis=0)
    kept, count = np.empty_like(points), 0
    for row in points:  # by energy, then time and loss: only earlier rows can beat later ones
        if not (kept[:count] <= row).all(axis=1).any():
            kept[count], count = row, count + 1
    return kept[:count]
