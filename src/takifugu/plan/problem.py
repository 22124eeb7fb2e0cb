"""The problem, as plain frozen data. Reading it from files is `files.py`'s business."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from takifugu.errors import UsageError
from takifugu.plan.curves import Curve

Window = tuple[float, float]

SLACK = 1e-9
"""Limits hold within this relative amount."""


def at_most(limit: float) -> float:
    """The largest value that still counts as within the limit."""
    return limit + SLACK * abs(limit)


@dataclass(frozen=True)
class Version:
    name: str
    train_flops_per_sample: float
    payload_bytes: float
    curve: Curve
    memory_bytes: float | None = None
    structure: str | None = None
    source: str | None = None
    curve_samples: tuple[Curve, ...] = ()
    """The curve with its parameters drawn from their uncertainty, joint across versions by index."""


@dataclass(frozen=True)
class Switch:
    source: str
    target: str
    time_s: float
    energy_j: float
    loss_jump: float


@dataclass(frozen=True)
class Node:
    name: str
    flops_per_s: float
    joules_per_flop: float
    up_bytes_per_s: float
    down_bytes_per_s: float
    latency_s: float
    joules_per_byte: float
    samples: int
    idle_watts: float = 0.0
    memory_bytes: float | None = None
    samples_per_s: Mapping[str, float] = field(default_factory=dict)
    joules_per_sample: Mapping[str, float] = field(default_factory=dict)
    labels: tuple[int, ...] | None = None
    available: tuple[Window, ...] | None = None
    source: str | None = None

    @property
    def windows(self) -> tuple[Window, ...]:
        """When it is there: always, if nothing is said; never, if the list is empty."""
        return ((-math.inf, math.inf),) if self.available is None else self.available

    def can_hold(self, version: Version) -> bool:
        if self.memory_bytes is None or version.memory_bytes is None:
            return True
        return self.memory_bytes >= version.memory_bytes * (1 - SLACK)

    def transfer_s(self, version: Version) -> float:
        payload = version.payload_bytes
        return payload / self.down_bytes_per_s + payload / self.up_bytes_per_s + 2.0 * self.latency_s

    def sample_s(self, version: Version) -> float:
        measured = self.samples_per_s.get(version.name)
        return 1.0 / measured if measured else version.train_flops_per_sample / self.flops_per_s

    def transfer_j(self, version: Version) -> float:
        return 2.0 * version.payload_bytes * self.joules_per_byte

    def sample_j(self, version: Version) -> float:
        measured = self.joules_per_sample.get(version.name)
        return measured if measured is not None else version.train_flops_per_sample * self.joules_per_flop


MOST_ROUNDS = 100_000
"""A plan has at most so many rounds, also where the problem sets no cap: it lists every one of them."""


@dataclass(frozen=True)
class Reserve:
    """What a problem was before a reserve was taken out of its deadline and of its nodes' windows."""

    share: float
    deadline_s: float
    """The real deadline."""
    available: Mapping[str, tuple[Window, ...]] = field(default_factory=dict)
    """The real windows, of nodes that have any."""

    def to_dict(self) -> dict[str, Any]:
        windows = {name: [list(w) for w in rows] for name, rows in self.available.items()}
        return {"share": self.share, "deadline_s": self.deadline_s, "available": windows}


@dataclass(frozen=True)
class Problem:
    target_loss: float
    deadline_s: float
    start_version: str
    start_loss: float
    versions: tuple[Version, ...]
    nodes: tuple[Node, ...]
    switches: tuple[Switch, ...] = ()
    max_rounds: int | None = None
    start_time_s: float = 0.0
    overhead_s: float = 0.0
    overhead_j: float = 0.0
    parts: int = 1
    label_weight: float = 0.0
    workload: Mapping[str, Any] | None = None
    reserve: Reserve | None = field(default=None, compare=False)
    """Set by `with_reserve`. A plan file holds it beside the problem; it is not part of `to_dict`."""

    @classmethod
    def load(cls, path: str | Path) -> Problem:
        """Reads a TOML (or JSON) problem file; every mistake in it is reported at once."""
        from takifugu.plan.files import load

        return load(path)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Problem:
        from takifugu.plan.files import from_dict

        return from_dict(data)

    def to_dict(self) -> dict[str, Any]:
        """The canonical form: defaults written out, nodes inline, what is absent left out."""
        from takifugu.plan.files import to_dict

        return to_dict(self)

    @cached_property
    def sha256(self) -> str:
        text = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return hashlib.sha256(text.encode()).hexdigest()

    @cached_property
    def total_samples(self) -> int:
        return sum(node.samples for node in self.nodes)

    @cached_property
    def version_index(self) -> dict[str, int]:
        return {version.name: index for index, version in enumerate(self.versions)}

    @cached_property
    def loss_limit(self) -> float:
        return at_most(self.target_loss)

    @cached_property
    def time_limit(self) -> float:
        return at_most(self.deadline_s)

    @property
    def rounds_limit(self) -> int:
        """The most rounds a plan may have."""
        return MOST_ROUNDS if self.max_rounds is None else self.max_rounds

    def with_reserve(self, share: float) -> Problem:
        """Return the problem with earlier limits: this share of the time left is kept in reserve.

        The deadline moves earlier by the share of the time from the start to the deadline. The end of each
        window of a node moves earlier by the share of the window's length (of what is left of it after the
        start), so that a late round at the end of a window still finds its nodes.
        """
        if not 0.0 <= share < 1.0:
            raise UsageError(f"a reserve of {share:g} is not a share of the time; use 0.15, say, below 1")
        real = self.without_reserve()
        start_s = real.start_time_s
        left = max(0.0, real.deadline_s - start_s)

        def earlier(window: Window) -> Window:
            opens, closes = window
            return opens, closes - share * max(0.0, closes - max(opens, start_s))

        def tightened(node: Node) -> Node:
            if node.available is None:
                return node
            return replace(node, available=tuple(earlier(window) for window in node.available))

        windows = {node.name: node.available for node in real.nodes if node.available is not None}
        return replace(
            real,
            deadline_s=real.deadline_s - share * left,
            nodes=tuple(tightened(node) for node in real.nodes),
            reserve=Reserve(share, real.deadline_s, windows),
        )

    def without_reserve(self) -> Problem:
        """Return the problem with its real deadline and windows."""
        kept = self.reserve
        if kept is None:
            return self
        nodes = (replace(n, available=kept.available.get(n.name, n.available)) for n in self.nodes)
        return replace(self, deadline_s=kept.deadline_s, nodes=tuple(nodes), reserve=None)

    @property
    def met_at_start(self) -> bool:
        return self.start_loss <= self.loss_limit
