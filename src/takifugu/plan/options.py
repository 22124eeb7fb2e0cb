"""Achievable ways to spend one round: node sets with their time, energy and effective data.

Small fleets are enumerated completely. On large ones the family is built from prefixes: for a
round-time threshold, nodes in order of energy per effective sample, cut anywhere. Such sets are
achievable, never claimed to be the best: transfer and idle energy are fixed charges, and label balance
is not submodular. Lower bounds rest on `relaxation.py` or on complete enumeration instead.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from takifugu.plan.curves import Floats
from takifugu.plan.dominance import undominated
from takifugu.plan.fleet import Fleet
from takifugu.plan.problem import Window

ENUMERATION_LIMIT = 70_000
"""Most node sets per version that are listed completely."""

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Options:
    """Rows of one version: a round's length and energy (overheads included) and its share q/Q."""

    time_s: Floats
    energy_j: Floats
    share: Floats
    windows: tuple[tuple[Window, ...] | None, ...]
    """Per row: when all members are there, or nothing when always."""
    used: Callable[[int], dict[int, int]]
    """Row -> node index -> samples."""

    def __len__(self) -> int:
        return len(self.time_s)

    def take(self, rows: Ints) -> Options:
        def used(row: int) -> dict[int, int]:
            return self.used(int(rows[row]))

        windows = tuple(self.windows[int(r)] for r in rows)
        return Options(self.time_s[rows], self.energy_j[rows], self.share[rows], windows, used)


def enumerable(fleet: Fleet, version: int) -> bool:
    """Whether all node sets can be listed, one for all that differ in identical nodes alone."""
    parts, count = fleet.problem.parts, 1
    for members in identical_nodes(fleet, version):
        count *= math.comb(len(members) + parts, parts)
        if count - 1 > ENUMERATION_LIMIT:
            return False
    return True


def identical_nodes(fleet: Fleet, version: int) -> list[Ints]:
    """Groups of nodes that can join and have the same figures, labels and windows. A round is the same
    whichever of them take part, so only how many of a group do is a choice."""
    costs = fleet.by_version[version]
    figures = [fleet.samples, costs.fixed_s, costs.sample_s, costs.fixed_j, costs.sample_j, fleet.idle_w]
    groups: dict[tuple[object, ...], list[int]] = {}
    for i in np.flatnonzero(costs.can_join).tolist():
        mix = None if fleet.mix is None else fleet.mix[i].tobytes()
        key = (*(float(x[i]) for x in figures), mix, fleet.problem.nodes[i].available)
        groups.setdefault(key, []).append(i)
    return [np.array(members, dtype=np.int64) for members in groups.values()]


def rate_rows(fleet: Fleet, version: int, used: Floats) -> tuple[Floats, Floats, Floats]:
    """Length, energy and share of a round for each row of samples used ([row, node])."""
    costs = fleet.by_version[version]
    member = used > 0
    times = np.where(member, costs.fixed_s + costs.sample_s * used, 0.0)
    slowest = times.max(axis=1)
    idle = np.where(member, fleet.idle_w * (slowest[:, None] - times), 0.0)
    joules = np.where(member, costs.fixed_j + costs.sample_j * used, 0.0)
    energy = (joules + idle).sum(axis=1) + fleet.problem.overhead_j
    return slowest + fleet.problem.overhead_s, energy, fleet.shares(used)


def enumerate_options(fleet: Fleet, version: int) -> Options:
    """Every node set with every number of parts, one for all that differ in identical nodes alone, without
    those that another beats at all times."""
    groups, parts = identical_nodes(fleet, version), fleet.problem.parts
    if not groups:
        none = np.zeros(0)
        return Options(none, none, none, (), lambda row: {})
    first = np.array([members[0] for members in groups], dtype=np.int64)
    choices = [_members_by_level(len(members), parts) for members in groups]
    # [set, group, level]: how many of the group's members use so many of their parts
    codes = np.arange(1, math.prod(map(len, choices)))
    members = np.empty((len(codes), len(groups), parts), dtype=np.int64)
    for place, choice in enumerate(choices):
        members[:, place] = choice[codes % len(choice)]
        codes //= len(choice)
    costs, levels, problem = fleet.by_version[version], fleet.levels[first].astype(float), fleet.problem
    level_s = costs.fixed_s[first, None] + costs.sample_s[first, None] * levels
    level_j = costs.fixed_j[first, None] + costs.sample_j[first, None] * levels
    slowest = np.where(members > 0, level_s, 0.0).max(axis=(1, 2))
    waiting = np.where(members > 0, fleet.idle_w[first, None] * (slowest[:, None, None] - level_s), 0.0)
    energy_j = (members * (level_j + waiting)).sum(axis=(1, 2)) + problem.overhead_j
    share = fleet.shares((members * levels).sum(axis=2), first)
    windows = window_patterns(fleet, members.sum(axis=2) > 0, first)
    rows = prune(slowest + problem.overhead_s, energy_j, share, windows)
    kept = members[rows]

    def used(row: int) -> dict[int, int]:
        found: dict[int, int] = {}
        for group, counts in zip(groups, kept[row], strict=True):
            samples = np.repeat(fleet.levels[group[0]][::-1], counts[::-1])  # most first
            found.update(zip(group.tolist(), samples.tolist(), strict=False))
        return dict(sorted(found.items()))

    time_s = slowest[rows] + problem.overhead_s
    return Options(time_s, energy_j[rows], share[rows], tuple(windows[r] for r in rows), used)


def _members_by_level(size: int, parts: int) -> Ints:
    """[team, level]: how many of some identical nodes use each number of parts. The first team is nobody."""
    rows = itertools.combinations_with_replacement(range(parts + 1), size)
    return np.array([[row.count(level) for level in range(1, parts + 1)] for row in rows], dtype=np.int64)


def listed_options(fleet: Fleet, version: int, used: Floats) -> Options:
    """Rows of samples used ([row, node]), without those that another beats at all times."""
    assert used.any(axis=1).all(), "a round without nodes is no round"
    time_s, energy_j, share = rate_rows(fleet, version, used)
    windows = window_patterns(fleet, used > 0)
    rows = prune(time_s, energy_j, share, windows)
    kept = used[rows].astype(np.int64)

    def members(row: int) -> dict[int, int]:
        return {int(i): int(kept[row, i]) for i in np.flatnonzero(kept[row])}

    return Options(time_s[rows], energy_j[rows], share[rows], tuple(windows[r] for r in rows), members)


def window_patterns(
    fleet: Fleet, member: NDArray[np.bool_], nodes: Ints | None = None
) -> list[tuple[Window, ...] | None]:
    """For each row of members, the stretches of time in which all of them are there. `nodes`: which nodes the
    columns are (all)."""
    if fleet.always_available:
        return [None] * len(member)
    who = np.arange(len(fleet.samples)) if nodes is None else nodes
    kinds: dict[tuple[Window, ...] | None, int] = {}
    available = [fleet.problem.nodes[i].available for i in who.tolist()]
    kind_of = np.array([kinds.setdefault(windows, len(kinds)) for windows in available])
    first = [int(who[np.flatnonzero(kind_of == k)[0]]) for k in range(len(kinds))]
    present = np.stack([member[:, kind_of == k].any(axis=1) for k in range(len(kinds))], axis=1)
    known: dict[bytes, tuple[Window, ...] | None] = {}
    patterns = []
    for row in present:
        key = row.tobytes()
        if key not in known:
            known[key] = fleet.common_windows([first[k] for k in np.flatnonzero(row)])
        patterns.append(known[key])
    return patterns


def prune(
    time_s: Floats, energy_j: Floats, share: Floats, windows: Sequence[tuple[Window, ...] | None]
) -> Ints:
    """Rows that no other row beats. Only rows with the same windows are compared: a dominated set may
    be the only one that is open."""
    groups: dict[tuple[Window, ...] | None, list[int]] = {}
    for row, pattern in enumerate(windows):
        if pattern is None or pattern:
            groups.setdefault(pattern, []).append(row)
    kept = []
    for rows in groups.values():
        index = np.array(rows, dtype=np.int64)
        kept.append(index[undominated(time_s[index], energy_j[index], -share[index])])
    return np.sort(np.concatenate(kept)) if kept else np.zeros(0, dtype=np.int64)


def joined(parts: Sequence[Options]) -> Options:
    """Several lists as one, without rows that another beats at all times."""
    time_s, energy_j, share = (
        np.concatenate([getattr(o, name) for o in parts]) for name in ("time_s", "energy_j", "share")
    )
    windows = [w for o in parts for w in o.windows]
    rows = prune(time_s, energy_j, share, windows)
    source = np.concatenate([np.full(len(o), k) for k, o in enumerate(parts)])[rows]
    place = np.concatenate([np.arange(len(o)) for o in parts])[rows]

    def used(row: int) -> dict[int, int]:
        return parts[int(source[row])].used(int(place[row]))

    return Options(time_s[rows], energy_j[rows], share[rows], tuple(windows[int(r)] for r in rows), used)
