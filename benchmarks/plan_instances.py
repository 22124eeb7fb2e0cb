"""Random planning problems of realistic size: 20-100 unequal devices, 6-10 versions of a model.

Devices span two orders of magnitude in speed and one in energy per FLOP, links are Wi-Fi like, data is
unevenly spread. Each feature of the format is on in some instances and off in others. The deadline lies
between the least time a simple policy needs and several times that, so that it binds in most.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from takifugu.plan.fleet import Fleet
from takifugu.plan.problem import Problem


def groups(seed: int) -> Problem:
    """Return a feasible problem with two to five kinds of identical devices.

    Every second fleet's devices also hold equal amounts of data with equal labels; the others' data differ.
    """
    return instance(seed, identical=True)


def instance(
    seed: int,
    nodes: int | None = None,
    rounds: int | None = None,
    plain: bool = False,
    identical: bool = False,
) -> Problem:
    """A feasible problem. `rounds`: about how many a plan with all nodes needs; `plain`: no extras."""
    rng = np.random.default_rng([20231 if identical else 20230, seed])
    count = nodes or int(rng.integers(20, 101))
    wanted = rounds or int(np.exp(rng.uniform(np.log(6), np.log(120))))
    feature = (lambda p: False) if plain else (lambda p: bool(rng.random() < p))
    labels = int(rng.integers(4, 11)) if feature(0.3) else 0
    versions = _versions(rng, int(rng.integers(6, 11)), wanted, feature(0.4), plain or feature(0.75))
    names = [v["name"] for v in versions]
    idle, memory, measured = feature(0.3), feature(0.3), feature(0.3)
    fleet = [_node(rng, i, names, labels, idle, memory, measured) for i in range(count)]
    if identical:
        _make_groups(rng, fleet, same_data=seed % 2 == 0)
    switches = _switches(rng, versions, feature(0.2))
    data: dict[str, Any] = {
        "format": 1,
        "target": {"loss": 1.0, "deadline_s": 1e12},
        "start": {"version": names[0], "loss": 2.3},
        "round": {"overhead_s": 2.0, "overhead_j": 5.0} if plain or feature(0.6) else {},
        "data": {
            "parts": int(rng.choice([1, 2, 4])) if feature(0.4) else 1,
            "label_weight": float(rng.uniform(0.3, 1.0)) if labels else 0.0,
        },
        "versions": versions,
        "switches": switches,
        "nodes": fleet,
    }
    problem = Problem.from_dict(data)
    return _with_limits(problem, rng, wanted, feature(0.3), feature(0.2))


def _versions(
    rng: np.random.Generator, count: int, wanted: int, power: bool, gain: bool
) -> list[dict[str, Any]]:
    ratios = np.concatenate([[1.0], np.sort(rng.uniform(0.08, 0.75, count - 1))[::-1]])
    flops, payload, memory = 3.3e9 * rng.uniform(0.1, 1.5), 4.4e7 * rng.uniform(0.1, 1.5), 1.5e9
    floor = rng.uniform(0.15, 0.3)
    speed = 3.5 / wanted
    rows = []
    for i, ratio in enumerate(ratios):
        worse = (1 - ratio) ** 2 * rng.uniform(0.1, 0.5)
        curve: dict[str, Any] = {"floor": float(floor + worse * 0.4)}
        if power:
            exponent = float(rng.uniform(0.7, 2.0))
            curve |= {"kind": "power", "exponent": exponent, "scale": float(1.5 * (wanted / 6) ** exponent)}
        else:
            curve |= {"kind": "exponential", "rate": float(speed * (1 - 0.2 * worse) * rng.uniform(0.9, 1.1))}
        if gain:
            curve |= {"data_gain": float(rng.uniform(0.01, 0.08)), "data_exponent": 0.5}
        rows.append(
            {
                "name": "dense" if i == 0 else f"r{i}-{ratio:.2f}",
                "train_flops_per_sample": float(flops * (0.15 + 0.85 * ratio)),
                "payload_bytes": float(payload * (0.05 + 0.95 * ratio)),
                "memory_bytes": float(memory * (0.3 + 0.7 * ratio)),
                "curve": curve,
            }
        )
    return rows


def _node(
    rng: np.random.Generator, i: int, names: list[str], labels: int, idle: bool, memory: bool, measured: bool
) -> dict[str, Any]:
    samples = int(np.exp(rng.normal(6.5, 0.8))) + 20
    row: dict[str, Any] = {
        "name": f"node-{i:05d}",
        "flops_per_s": float(np.exp(rng.uniform(np.log(2e10), np.log(2e12)))),
        "joules_per_flop": float(np.exp(rng.uniform(np.log(5e-12), np.log(8e-11)))),
        "up_bytes_per_s": float(np.exp(rng.uniform(np.log(1e6), np.log(2e7)))),
        "down_bytes_per_s": float(np.exp(rng.uniform(np.log(3e6), np.log(5e7)))),
        "latency_s": float(rng.uniform(0.005, 0.08)),
        "joules_per_byte": float(np.exp(rng.uniform(np.log(2e-8), np.log(4e-7)))),
        "samples": samples,
    }
    if idle:
        row["idle_watts"] = float(rng.uniform(0.0, 2.0))
    if memory:
        row["memory_bytes"] = float(rng.choice([7e8, 1.2e9, 4e9], p=[0.15, 0.25, 0.6]))
    if labels:
        mix = rng.dirichlet(np.full(labels, 0.4))
        row["labels"] = [int(n) for n in rng.multinomial(samples, mix)]
    if measured and rng.random() < 0.5:
        speed = row["flops_per_s"] / 3e9
        row["samples_per_s"] = {n: float(speed * rng.uniform(0.8, 3.0)) for n in names[: len(names) // 2]}
        row["joules_per_sample"] = {
            n: float(3e9 * row["joules_per_flop"] * rng.uniform(0.4, 1.1)) for n in names[::2]
        }
    return row


def _make_groups(rng: np.random.Generator, fleet: list[dict[str, Any]], same_data: bool) -> None:
    """Give every device the figures of one of the first few, and its data too where that is asked for."""
    kinds = int(rng.integers(2, 6))
    if "memory_bytes" in fleet[0]:
        fleet[0]["memory_bytes"] = 4e9  # somebody can train the dense model
    for i, node in enumerate(fleet):
        kind = fleet[i % kinds]
        own = ("name",) if same_data else ("name", "samples", "labels")
        fleet[i] = {**kind, **{key: node[key] for key in own if key in node}}


def _switches(rng: np.random.Generator, versions: list[dict[str, Any]], both: bool) -> list[dict[str, Any]]:
    rows = []
    for i, a in enumerate(versions):
        for j, b in enumerate(versions):
            if i == j or (j < i and not both):
                continue
            shrink = abs(j - i) / len(versions)
            rows.append(
                {
                    "from": a["name"],
                    "to": b["name"],
                    "time_s": float(rng.uniform(0.5, 5.0)),
                    "energy_j": float(rng.uniform(5.0, 60.0)),
                    "loss_jump": float(0.12 * shrink * rng.uniform(0.3, 1.0)) if j > i else 0.0,
                }
            )
    return rows


def _with_limits(
    problem: Problem, rng: np.random.Generator, wanted: int, windows: bool, capped: bool
) -> Problem:
    """Sets the target, the deadline, windows and the cap around a simple policy that meets them all."""
    fleet = Fleet.of(problem)
    costs = fleet.by_version[0]
    everyone = {int(i): int(fleet.samples[i]) for i in np.flatnonzero(costs.can_join)}
    curve = problem.versions[0].curve
    loss = np.float64(problem.start_loss)
    for _ in range(wanted):
        loss = curve.step(loss, np.float64(fleet.round_cost(0, everyone).share))  # type: ignore[arg-type]
    problem = replace(problem, target_loss=float(loss) * 1.0005)
    # The quickest of the simplest policies: dense, always the same nodes, all that are fast enough.
    times = costs.fixed_s + costs.sample_s * fleet.samples
    quick, rounds = np.inf, wanted
    for slowest in np.sort(times[list(everyone)]):
        cost = fleet.round_cost(0, {i: n for i, n in everyone.items() if times[i] <= slowest})
        loss, needed = np.float64(problem.start_loss), 0
        while loss > problem.target_loss and needed < 4 * wanted:
            loss = curve.step(loss, np.float64(cost.share))  # type: ignore[arg-type]
            needed += 1
        if loss <= problem.target_loss and needed * cost.time_s < quick:
            quick, rounds = needed * cost.time_s, needed
    factor = float(np.exp(rng.uniform(np.log(1.02), np.log(4.0))))
    quick = float(quick)
    nodes = list(problem.nodes)
    if windows:
        for i in range(len(nodes)):
            if rng.random() < 0.3:
                opening = float(quick * factor * rng.uniform(0.05, 0.5))
                spans = (
                    ((opening, 10 * quick),)
                    if rng.random() < 0.6
                    else ((0.0, opening), (opening * 1.3, 10 * quick))
                )
                nodes[i] = replace(nodes[i], available=spans)
    problem = replace(problem, nodes=tuple(nodes), deadline_s=quick * factor)
    cap = int(np.ceil(rounds * rng.uniform(1.0, 1.6))) if capped else 300
    return replace(problem, max_rounds=max(3, cap, rounds))
