"""The fleet as arrays, and what one round on some of it costs and gives.

This is the solver's reading of the semantics in the design; `verify.py` reads them a second time, on
its own, so that a mistake here cannot hide.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from takifugu.plan.curves import Floats
from takifugu.plan.problem import Problem, Window, at_most

Ints = NDArray[np.int64]
Used = Mapping[int, int]
"""Node index -> samples used in a round."""

_MOST_COMMON = 64
"""Windows that a set of nodes may share before it is looked at on its own."""


@dataclass(frozen=True)
class VersionCosts:
    """Per node: seconds and joules of one version, split in a fixed part and a part per sample."""

    can_join: NDArray[np.bool_]
    fixed_s: Floats
    sample_s: Floats
    fixed_j: Floats
    sample_j: Floats


class Crowd(NamedTuple):
    """Some of the nodes with one version, as compiled loops read them."""

    level_s: Floats
    """[node, k-1]: seconds with k of its parts"""
    levels: Floats
    """[node, k-1]: samples with k of its parts"""
    fixed_j: Floats
    sample_j: Floats
    idle_w: Floats


@dataclass(frozen=True)
class RoundCost:
    time_s: float
    energy_j: float
    share: float
    """Effective samples over all samples of the fleet, q/Q."""
    slowest_s: float
    """The time of the slowest member: `time_s` without the round's overhead."""


@dataclass(frozen=True)
class Fleet:
    problem: Problem
    samples: NDArray[np.int64]
    levels: NDArray[np.int64]
    """[node, k-1]: samples used when a node trains on k of its parts."""
    idle_w: Floats
    mix: Floats | None
    """[node, label]: each node's label mix, or nothing when labels do not count."""
    total: float
    by_version: tuple[VersionCosts, ...]

    @classmethod
    def of(cls, problem: Problem) -> Fleet:
        nodes, parts = problem.nodes, problem.parts
        samples = np.array([n.samples for n in nodes], dtype=np.int64)
        steps = np.arange(1, parts + 1, dtype=np.int64)
        levels = -(-samples[:, None] * steps[None, :] // parts)
        mix = None
        if problem.label_weight > 0:
            counts = np.array([n.labels for n in nodes], dtype=float)
            mix = counts / counts.sum(axis=1, keepdims=True)
        # Who has no window left never joins, and must not make the fleet look larger than it is.
        start = problem.start_time_s
        left = [n.available is None or any(at_most(b) > start for _, b in n.available) for n in nodes]
        by_version = tuple(
            VersionCosts(
                can_join=np.array([n.can_hold(v) for n in nodes]) & left,
                fixed_s=np.array([n.transfer_s(v) for n in nodes]),
                sample_s=np.array([n.sample_s(v) for n in nodes]),
                fixed_j=np.array([n.transfer_j(v) for n in nodes]),
                sample_j=np.array([n.sample_j(v) for n in nodes]),
            )
            for v in problem.versions
        )
        idle = np.array([n.idle_watts for n in nodes])
        return cls(problem, samples, levels, idle, mix, float(samples.sum()), by_version)

    @cached_property
    def fleet_mix(self) -> Floats:
        assert self.mix is not None
        return np.asarray((self.mix * self.samples[:, None]).sum(axis=0) / self.total)

    @cached_property
    def always_available(self) -> bool:
        return all(node.available is None for node in self.problem.nodes)

    def crowd(self, version: int, present: NDArray[np.bool_] | None = None) -> tuple[Ints, Crowd]:
        """Who can join with a version (and is `present`)."""
        costs = self.by_version[version]
        who = np.flatnonzero(costs.can_join if present is None else costs.can_join & present)
        levels = self.levels[who].astype(float)
        level_s = costs.fixed_s[who, None] + costs.sample_s[who, None] * levels
        return who, Crowd(level_s, levels, costs.fixed_j[who], costs.sample_j[who], self.idle_w[who])

    def shares(self, used: Floats, nodes: Ints | None = None) -> Floats:
        """q/Q for rows of samples used by each node. `nodes`: whose mixes the columns have (all nodes)."""
        amount = used.sum(axis=-1)
        if self.mix is None:
            return np.asarray(amount / self.total)
        mix = self.mix if nodes is None else self.mix[nodes]
        lean = used @ mix - amount[..., None] * self.fleet_mix
        return np.asarray((amount - self.problem.label_weight * 0.5 * np.abs(lean).sum(axis=-1)) / self.total)

    def round_cost(self, version: int, used: Used) -> RoundCost:
        """Time, energy and effective share of one round, without a switch."""
        who = np.fromiter(used, dtype=np.int64, count=len(used))
        return self.cost_of(version, who, np.fromiter(used.values(), dtype=float, count=len(used)))

    def cost_of(self, version: int, who: Ints, amount: NDArray[Any]) -> RoundCost:
        """The same of some nodes and the samples that each uses."""
        costs = self.by_version[version]
        times = costs.fixed_s[who] + costs.sample_s[who] * amount
        slowest = float(times.max())
        joules = costs.fixed_j[who] + costs.sample_j[who] * amount + self.idle_w[who] * (slowest - times)
        row = np.zeros(len(self.samples))
        row[who] = amount
        return RoundCost(
            slowest + self.problem.overhead_s,
            float(joules.sum()) + self.problem.overhead_j,
            float(self.shares(row)),
            slowest,
        )

    def common_windows(self, who: Iterable[int]) -> tuple[Window, ...] | None:
        """Stretches of time that lie within one window of every member; nothing: no limit."""
        lists = {self.problem.nodes[i].available for i in who} - {None}
        return _intersect([w for w in lists if w is not None])

    def windows_of_many(self, nodes: Ints, begin: Ints, length: Ints) -> list[tuple[Window, ...] | None]:
        """The same for many sets, each a stretch of `nodes`."""
        from takifugu.plan.compiled import sets

        count, first, last = sets.common_windows(nodes, begin, length, *self.window_table, _MOST_COMMON)
        found: list[tuple[Window, ...] | None] = []
        for row, (many, opens, closes) in enumerate(zip(count.tolist(), first, last, strict=True)):
            if many < 0:
                found.append(self.common_windows(nodes[begin[row] : begin[row] + length[row]].tolist()))
            elif many == 1 and opens[0] == -np.inf:  # always
                found.append(None)
            else:
                found.append(_tidy(zip(opens[:many].tolist(), closes[:many].tolist(), strict=True)))
        return found

    @cached_property
    def window_table(self) -> tuple[Floats, Floats]:
        """[node, window]: when they open and close; where a node has fewer, never."""
        nodes = self.problem.nodes
        most = max(1, *(len(n.available or ()) for n in nodes))
        opens, closes = np.full((len(nodes), most), np.inf), np.full((len(nodes), most), -np.inf)
        for i, node in enumerate(nodes):
            if node.available is None:
                opens[i, 0], closes[i, 0] = -np.inf, np.inf
            for k, (a, b) in enumerate(node.available or ()):
                opens[i, k], closes[i, k] = a, b
        return opens, closes


def _intersect(lists: Sequence[tuple[Window, ...]]) -> tuple[Window, ...] | None:
    if not lists:
        return None
    common = sorted(set(lists[0]))
    for windows in lists[1:]:
        common = [(max(a, c), min(b, d)) for a, b in common for c, d in windows if max(a, c) < min(b, d)]
    return _tidy(common)


def _tidy(windows: Iterable[Window]) -> tuple[Window, ...]:
    kept: list[Window] = []
    for a, b in sorted(set(windows), key=lambda w: (w[0], -w[1])):
        if not kept or b > kept[-1][1]:  # one inside another adds nothing
            kept.append((a, b))
    return tuple(kept)


def earliest_start(windows: tuple[Window, ...] | None, ready_s: float, time_s: float) -> float | None:
    """The earliest instant, not before `ready_s`, at which the whole round lies in one window."""
    if windows is None:
        return ready_s
    starts = [max(ready_s, a) for a, b in windows if max(ready_s, a) + time_s <= at_most(b)]
    return min(starts, default=None)
