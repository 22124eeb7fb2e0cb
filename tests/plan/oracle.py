"""Complete enumeration, written from the formulas of the problem format alone. Imports no planner code."""

from __future__ import annotations

import bisect
import itertools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

SLACK = 1e-9


@dataclass
class Move:
    time: float
    energy: float
    share: float
    windows: list[list[list[float]]]
    slowest: float
    """The slowest node's time, without the overhead."""


@dataclass
class Truth:
    energy: float = math.inf
    best_loss: float = math.inf
    states: int = 0


def all_moves(problem: dict[str, Any], version: dict[str, Any]) -> list[Move]:
    """Every set of nodes with every number of parts."""
    parts = problem["data"].get("parts", 1)
    weight = problem["data"].get("label_weight", 0.0)
    nodes = problem["nodes"]
    total = sum(n["samples"] for n in nodes)
    moves = []
    for pick in itertools.product(range(parts + 1), repeat=len(nodes)):
        team = [(n, math.ceil(k * n["samples"] / parts)) for n, k in zip(nodes, pick, strict=True) if k]
        if not team:
            continue
        need = version.get("memory_bytes", 0.0)
        if any(n.get("memory_bytes", math.inf) < need for n, _ in team):
            continue
        seconds, joules = [], 0.0
        for n, s in team:
            speed = n.get("samples_per_s", {}).get(version["name"])
            compute = s / speed if speed else version["train_flops_per_sample"] * s / n["flops_per_s"]
            payload = version["payload_bytes"]
            seconds.append(
                compute + payload / n["down_bytes_per_s"] + payload / n["up_bytes_per_s"] + 2 * n["latency_s"]
            )
            each = n.get("joules_per_sample", {}).get(version["name"])
            if each is None:
                each = version["train_flops_per_sample"] * n["joules_per_flop"]
            joules += each * s + 2 * payload * n["joules_per_byte"]
        slowest = max(seconds)
        joules += sum(
            n.get("idle_watts", 0.0) * (slowest - t) for (n, _), t in zip(team, seconds, strict=True)
        )
        used = sum(s for _, s in team)
        q = float(used)
        if weight:
            classes = len(nodes[0]["labels"])
            fleet = [sum(n["labels"][c] for n in nodes) / total for c in range(classes)]
            mine = [sum(s * n["labels"][c] / n["samples"] for n, s in team) / used for c in range(classes)]
            q = used * (1 - weight * 0.5 * sum(abs(a - b) for a, b in zip(mine, fleet, strict=True)))
        extra = problem.get("round", {})
        moves.append(
            Move(
                slowest + extra.get("overhead_s", 0.0),
                joules + extra.get("overhead_j", 0.0),
                q / total,
                [n["available"] for n, _ in team if "available" in n],
                slowest,
            )
        )
    return moves


def step(curve: dict[str, Any], loss: np.ndarray, share: float) -> np.ndarray:
    a = curve["floor"]
    if curve.get("data_gain", 0.0):
        a += curve["data_gain"] * ((1 / share) ** curve.get("data_exponent", 0.5) - 1)
    above = np.maximum(loss - a, 1e-300)
    if curve["kind"] == "exponential":
        new = a + above * math.exp(-curve["rate"] * share)
    else:
        s, c = curve["scale"], curve["exponent"]
        with np.errstate(over="ignore"):
            new = a + s * ((above / s) ** (-1 / c) + share) ** (-c)
    return np.where(loss <= a, loss, new)


def start_times(move: Move, ready: np.ndarray) -> np.ndarray:
    """Tries `ready` and every opening; the first at which each member has a window for the whole round."""
    best = np.full(len(ready), np.inf)
    openings = sorted({a for member in move.windows for a, _ in member})
    for candidate in [ready, *(np.maximum(ready, a) for a in openings)]:
        fits = np.ones(len(ready), dtype=bool)
        for member in move.windows:
            inside = np.zeros(len(ready), dtype=bool)
            for a, b in member:
                inside |= (candidate >= a) & (candidate + move.time <= b + SLACK * abs(b))
            fits &= inside
        best = np.where(fits & (candidate < best), candidate, best)
    return best


def enumerate_plans(problem: dict[str, Any], most_states: float = 3e7) -> Truth:
    """Every plan there is. No dominance, no bounds; only plans that are already dearer are left out."""
    truth = Truth(best_loss=problem["start"]["loss"])
    target = problem["target"]["loss"]
    target += SLACK * abs(target)
    deadline = problem["target"]["deadline_s"] * (1 + SLACK)
    if problem["start"]["loss"] <= target:
        truth.energy = 0.0
        return truth
    versions = problem["versions"]
    names = [v["name"] for v in versions]
    moves = [all_moves(problem, v) for v in versions]
    ways = {(n, n): (0.0, 0.0, 0.0) for n in names}
    for s in problem["switches"]:
        ways[s["from"], s["to"]] = (s["time_s"], s["energy_j"], s["loss_jump"])
    layer = {
        problem["start"]["version"]: np.array(
            [[0.0, problem["start"].get("time_s", 0.0), problem["start"]["loss"]]]
        )
    }
    for _ in range(problem["target"].get("max_rounds", 10**6)):
        following: dict[str, list[np.ndarray]] = {}
        for (a, b), (seconds, joules, jump) in ways.items():
            if a not in layer:
                continue
            energy, ready, loss = layer[a].T
            for move in moves[names.index(b)]:
                end = start_times(move, ready + seconds) + move.time
                after = step(versions[names.index(b)]["curve"], loss + jump, move.share)
                spent = energy + joules + move.energy
                ok = end <= deadline
                if ok.any():
                    truth.best_loss = min(truth.best_loss, float(after[ok].min()))
                done = ok & (after <= target)
                if done.any():
                    truth.energy = min(truth.energy, float(spent[done].min()))
                going = ok & ~done & (spent < truth.energy)
                following.setdefault(b, []).append(np.stack([spent[going], end[going], after[going]], axis=1))
        layer = {n: np.concatenate(parts) for n, parts in following.items() if sum(map(len, parts))}
        truth.states += sum(map(len, layer.values()))
        assert truth.states <= most_states, "too large for complete enumeration"
        if not layer:
            break
    return truth


def least_energy_of_groups(problem: dict[str, Any]) -> float:
    """The least energy where nodes come in groups of identical ones, whole and always there; infinity if none.

    Of a group only the number of members counts. Rounds, and states after a round, are dropped if another one
    is no worse in energy, time and loss: enough, because no node has windows and curves are monotone.
    """
    target = problem["target"]["loss"]
    target += SLACK * abs(target)
    deadline = problem["target"]["deadline_s"] * (1 + SLACK)
    versions = problem["versions"]
    names = [v["name"] for v in versions]
    moves = []
    for version in versions:
        rows = _group_moves(problem, version)
        moves.append(rows[_not_beaten(rows)])
    ways = [(n, n, 0.0, 0.0, 0.0) for n in names]
    ways += [(s["from"], s["to"], s["time_s"], s["energy_j"], s["loss_jump"]) for s in problem["switches"]]
    start = [0.0, problem["start"].get("time_s", 0.0), problem["start"]["loss"]]
    layer, best = {problem["start"]["version"]: np.array([start])}, math.inf
    for _ in range(problem["target"]["max_rounds"]):
        following: dict[str, list[np.ndarray]] = {}
        for source, name, seconds, joules, jump in ways:
            if source not in layer:
                continue
            energy, ready, loss = layer[source].T
            for time_s, energy_j, minus_share in moves[names.index(name)]:
                end, spent = ready + seconds + time_s, energy + joules + energy_j
                after = step(versions[names.index(name)]["curve"], loss + jump, -minus_share)
                ok = end <= deadline
                done = ok & (after <= target)
                if done.any():
                    best = min(best, float(spent[done].min()))
                going = ok & ~done & (spent < best)
                rows = np.stack([spent[going], end[going], after[going]], axis=1)
                following.setdefault(name, []).append(rows)
        layer = {}
        for name, parts in following.items():
            rows = np.concatenate(parts)
            if len(rows):
                layer[name] = rows[_not_beaten(rows)]
    return best


def _group_moves(problem: dict[str, Any], version: dict[str, Any]) -> np.ndarray:
    """[set, (time, energy, -share)]: every number of members of every group."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for node in problem["nodes"]:
        groups.setdefault(repr({**node, "name": ""}), []).append(node)
    kinds, sizes = [g[0] for g in groups.values()], [len(g) for g in groups.values()]
    total = sum(n["samples"] for n in problem["nodes"])
    weight, extra = problem["data"].get("label_weight", 0.0), problem.get("round", {})
    payload, rows = version["payload_bytes"], []
    seconds = [
        version["train_flops_per_sample"] * n["samples"] / n["flops_per_s"]
        + payload / n["down_bytes_per_s"]
        + payload / n["up_bytes_per_s"]
        + 2 * n["latency_s"]
        for n in kinds
    ]
    joules = [
        version["train_flops_per_sample"] * n["samples"] * n["joules_per_flop"]
        + 2 * payload * n["joules_per_byte"]
        for n in kinds
    ]
    for counts in itertools.product(*(range(size + 1) for size in sizes)):
        if not any(counts):
            continue
        slowest = max(t for t, k in zip(seconds, counts, strict=True) if k)
        energy = sum(
            k * (e + n.get("idle_watts", 0.0) * (slowest - t))
            for k, e, t, n in zip(counts, joules, seconds, kinds, strict=True)
            if k
        )
        used = sum(k * n["samples"] for k, n in zip(counts, kinds, strict=True))
        q = float(used)
        if weight:
            classes = range(len(kinds[0]["labels"]))
            mine = [
                sum(k * n["labels"][c] for k, n in zip(counts, kinds, strict=True)) / used for c in classes
            ]
            fleet = [
                sum(k * n["labels"][c] for k, n in zip(sizes, kinds, strict=True)) / total for c in classes
            ]
            q = used * (1 - weight * 0.5 * sum(abs(a - b) for a, b in zip(mine, fleet, strict=True)))
        rows.append(
            (slowest + extra.get("overhead_s", 0.0), energy + extra.get("overhead_j", 0.0), -q / total)
        )
    return np.array(rows)


def _not_beaten(rows: np.ndarray) -> np.ndarray:
    """Indices of rows (three columns) that no other one equals or beats in every column."""
    order = np.lexsort(rows.T[::-1])
    kept: list[int] = []
    # By rising first column: the second and third of those kept so far, a staircase going down.
    second: list[float] = []
    third: list[float] = []
    for i, b, c in zip(order.tolist(), rows[order, 1].tolist(), rows[order, 2].tolist(), strict=True):
        at = bisect.bisect_right(second, b)
        if at and third[at - 1] <= c:
            continue
        kept.append(i)
        at = bisect.bisect_left(second, b)
        last = at
        while last < len(third) and third[last] >= c:
            last += 1
        second[at:last], third[at:last] = [b], [c]
    return np.array(kept, dtype=np.int64)
