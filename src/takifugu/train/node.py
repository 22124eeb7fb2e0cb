"""This machine as a node: how fast it trains each version of a workload at the real batch size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn

from takifugu.errors import UsageError
from takifugu.measure import machine
from takifugu.structure import Structure
from takifugu.train.costs import time_steps
from takifugu.train.ladder import DENSE, Rung, ladder
from takifugu.train.profile import Draft
from takifugu.train.round import Samples
from takifugu.train.workload import Workload

_NEEDED: dict[str, type | tuple[type, ...]] = {"name": str, "train_flops_per_sample": (int, float)}
"""What is looked at of the file's versions, where it has some."""


@dataclass(frozen=True)
class Link:
    """The node's link, as its owner says it is."""

    bytes_per_s: float
    latency_s: float
    joules_per_byte: float


@dataclass(frozen=True)
class MeasuredNode:
    entry: dict[str, Any]
    """What belongs under [[nodes]]."""
    timings: Mapping[str, machine.Timing]
    batch_size: int
    threads: int

    def to_dict(self) -> dict[str, Any]:
        steps = {v: {**asdict(timing), "spread": timing.spread} for v, timing in self.timings.items()}
        return {
            "node": self.entry,
            "batch_size": self.batch_size,
            "threads": self.threads,
            "steps": steps,
            "energy": "estimated",
        }


def measure_node(
    draft: Draft,
    name: str,
    link: Link,
    watts: float,
    ratios: Sequence[float],
    budget_s: float = 20.0,
    data_dir: str | Path | None = None,
) -> MeasuredNode:
    """Times short rounds, optimizer and all, of every version in turns; `budget_s` is for all together."""
    workload = draft.workload()
    data = workload.load(data_dir)
    # With a file for each node the server has a validation set and nothing else.
    samples = data.train if len(data.train) else data.validation
    model = workload.build(data_dir)
    rungs = _versions(draft, workload, model, ratios, samples)
    times = time_steps(model, rungs, samples, workload.spec(), budget_s)
    timings = {rung.name: times.timing(rung.name) for rung in rungs}
    speeds = {version: workload.batch_size / timing.median_s for version, timing in timings.items()}
    power = machine.PowerModel(watts)
    dense = rungs[0]
    flops_per_s = speeds[dense.name] * dense.train_flops_per_sample
    known = next((node for node in draft.nodes if node["name"] == name), {})
    entry: dict[str, Any] = {
        "name": name,
        "flops_per_s": flops_per_s,
        "joules_per_flop": power.joules(1.0) / flops_per_s,
        "up_bytes_per_s": link.bytes_per_s,
        "down_bytes_per_s": link.bytes_per_s,
        "latency_s": link.latency_s,
        "joules_per_byte": link.joules_per_byte,
        "memory_bytes": machine.memory_bytes(),
        "samples_per_s": speeds,
        "joules_per_sample": {version: power.joules(1.0) / speed for version, speed in speeds.items()},
        # One word for the whole entry, so the weaker one: energies rest on a power model.
        "source": "estimated",
    }
    for field in ("samples", "labels", "available", "idle_watts"):
        if field in known:
            entry[field] = known[field]
    entry = {k: v for k, v in entry.items() if v is not None}
    return MeasuredNode(entry, timings, workload.batch_size, times.threads)


def _versions(
    draft: Draft, workload: Workload, model: nn.Module, ratios: Sequence[float], batch: Samples
) -> Sequence[Rung]:
    """The file's versions where it has some, else a ladder of these ratios."""
    tables = draft.data.get("versions")
    if tables is not None and not isinstance(tables, list):
        raise UsageError("versions: is not a list of tables; write [[versions]]")
    if not tables:
        return ladder(model, ratios, workload.where(model), batch.inputs[:2], workload.batch_size)
    found = []
    for table in tables:
        whole = isinstance(table, dict) and all(
            isinstance(table.get(field), kinds) for field, kinds in _NEEDED.items()
        )
        if not whole:
            raise UsageError(
                "versions: each needs a name and train_flops_per_sample; see `takifugu plan --schema`"
            )
        path = table.get("structure")
        if path is not None and not isinstance(path, str):
            raise UsageError(f"versions '{table['name']}' structure: {path!r} is not a path")
        structure = Structure() if path is None else Structure.load(draft.base / path)
        found.append(Rung(table["name"], structure, table["train_flops_per_sample"], 0, 0))
    if not found[0].structure.is_dense or found[0].name != DENSE:
        found.sort(key=lambda rung: rung.name != DENSE)
    return found
