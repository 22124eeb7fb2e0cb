"""What a plan means, node by node and sample by sample, by the formulas of the problem format.

The page reads files only, so these few lines stand here once more instead of an import of the planner.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from takifugu.report.records import PlannedRound, Problem

SERVER = ""
"""Where joules go that belong to no node: switches and the overhead of rounds. No node has this name."""


@dataclass(frozen=True)
class Band:
    """The range of the predicted loss after 0, 1, 2, ... rounds over the curves' samples."""

    low: tuple[float, ...]
    high: tuple[float, ...]
    samples: int
    share: float
    """The part of the samples between low and high."""


def node_seconds(node: Mapping[str, Any], version: Mapping[str, Any], samples: int) -> float:
    measured = node.get("samples_per_s", {}).get(version["name"])
    each = 1.0 / measured if measured else version["train_flops_per_sample"] / node["flops_per_s"]
    payload = version["payload_bytes"]
    way = payload / node["down_bytes_per_s"] + payload / node["up_bytes_per_s"] + 2 * node["latency_s"]
    return float(samples * each + way)


def node_joules(node: Mapping[str, Any], version: Mapping[str, Any], samples: int, waits_s: float) -> float:
    each = node.get("joules_per_sample", {}).get(version["name"])
    if each is None:
        each = version["train_flops_per_sample"] * node["joules_per_flop"]
    sending = 2 * version["payload_bytes"] * node["joules_per_byte"]
    return float(samples * each + sending + node.get("idle_watts", 0.0) * waits_s)


def round_seconds(problem: Problem, row: PlannedRound) -> dict[str, float]:
    """How long each member of a planned round is busy."""
    version = problem.versions[row.version]
    return {name: node_seconds(problem.nodes[name], version, used) for name, used in row.nodes.items()}


def energy_by_node(problem: Problem, rounds: Sequence[PlannedRound]) -> dict[str, dict[str, float]]:
    """Joules by version and node; what no node spends is the `SERVER`'s."""
    spent: dict[str, dict[str, float]] = {}
    for row in rounds:
        version, times = problem.versions[row.version], round_seconds(problem, row)
        slowest = max(times.values(), default=0.0)
        of_version = spent.setdefault(row.version, {})
        of_nodes = 0.0
        for name, used in row.nodes.items():
            joules = node_joules(problem.nodes[name], version, used, slowest - times[name])
            of_version[name] = of_version.get(name, 0.0) + joules
            of_nodes += joules
        rest = row.energy_j - of_nodes
        if rest > 1e-9 * row.energy_j:
            of_version[SERVER] = of_version.get(SERVER, 0.0) + rest
    return spent


def loss_band(problem: Problem, rounds: Sequence[PlannedRound], share: float = 0.9) -> Band | None:
    """Replays the plan once for each sample of the curves. Nothing, if too few to speak of a range."""
    count = min(
        (len(drawn) for v in problem.versions.values() if (drawn := v["curve"].get("samples"))), default=0
    )
    if count < 5 or not rounds:
        return None
    known: dict[tuple[tuple[str, int], ...], float] = {}  # most rounds repeat the same members
    shares = []
    for row in rounds:
        members = tuple(row.nodes.items())
        if members not in known:
            known[members] = _effective_share(problem, row.nodes)
        shares.append(known[members])
    paths = [list(_path(problem, rounds, shares, index)) for index in range(count)]
    columns = [sorted(column) for column in zip(*paths, strict=True)]
    cut = (1 - share) / 2
    return Band(
        low=tuple(_quantile(column, cut) for column in columns),
        high=tuple(_quantile(column, 1 - cut) for column in columns),
        samples=count,
        share=share,
    )


def _path(
    problem: Problem, rounds: Sequence[PlannedRound], shares: Sequence[float], index: int
) -> Iterator[float]:
    """The loss before the first round and after each, with the curves' sample `index`."""
    jumps = {(s["from"], s["to"]): s.get("loss_jump", 0.0) for s in problem.data.get("switches", [])}
    version, loss = problem.start_version, problem.start_loss
    yield loss
    for row, share in zip(rounds, shares, strict=True):
        loss += jumps.get((version, row.version), 0.0) if row.version != version else 0.0
        version = row.version
        curve = problem.versions[version]["curve"]
        drawn = curve.get("samples")
        loss = _step(loss, {**curve, **drawn[index]} if drawn else curve, share)
        yield loss


def _step(loss: float, curve: Mapping[str, Any], share: float) -> float:
    gain = curve.get("data_gain", 0.0)
    asymptote = curve["floor"]
    try:
        if gain:
            asymptote += gain * ((1 / share) ** curve.get("data_exponent", 0.5) - 1)
        above = loss - asymptote
        if above <= 0:
            return loss
        if curve["kind"] == "exponential":
            return float(asymptote + above * math.exp(-curve["rate"] * share))
        scale, exponent = curve["scale"], curve["exponent"]
        return float(asymptote + scale * ((above / scale) ** (-1 / exponent) + share) ** -exponent)
    except OverflowError:  # so near the asymptote, or with so little data, that the round moves nothing
        return loss


def _effective_share(problem: Problem, used: Mapping[str, int]) -> float:
    """q/Q: the effective part of all samples, less for a label mix unlike the fleet's."""
    everything = sum(node["samples"] for node in problem.nodes.values())
    amount = sum(used.values())
    weight = problem.data.get("data", {}).get("label_weight", 0.0)
    if not weight or not all("labels" in node for node in problem.nodes.values()):
        return float(amount / everything)
    fleet = [sum(column) for column in zip(*(n["labels"] for n in problem.nodes.values()), strict=True)]
    mixed = [0.0] * len(fleet)
    for name, count in used.items():
        own = problem.nodes[name]["labels"]
        for label, samples in enumerate(own):
            mixed[label] += count * samples / sum(own)
    distance = 0.5 * sum(abs(m / amount - f / sum(fleet)) for m, f in zip(mixed, fleet, strict=True))
    return float(amount * (1 - weight * distance) / everything)


def _quantile(ordered: Sequence[float], share: float) -> float:
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])
