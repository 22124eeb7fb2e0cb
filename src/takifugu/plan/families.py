"""Achievable node sets for large fleets: prefixes of good orders, under many round-time thresholds.

An order is by energy per effective sample, for each threshold (which decides how many parts of a node fit
and how long it idles) and each label multiplier. Every prefix is a set; cumulative sums give the time,
energy and share of all of them at once, so the work is near-linear in nodes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from takifugu.plan.curves import Floats
from takifugu.plan.fleet import Fleet
from takifugu.plan.options import Ints, Options, prune
from takifugu.plan.relaxation import effective_weights

THRESHOLDS = 400
CUTS = 400
ORDERS = 3200
"""Most thresholds, most prefixes per order and most orders that are looked at."""
SPREAD = 6
"""Of the thresholds, if not all can be had, so many are spread over all there are."""


@dataclass(frozen=True)
class Family:
    """All prefixes of one version; rows say which order and where it is cut."""

    time_s: Floats
    energy_j: Floats
    share: Floats
    order: Ints
    cut: Ints
    begin: Ints
    """[order]: where it begins in the two lists that follow"""
    nodes: Ints
    samples: Ints
    """All orders one after another: nodes, and the samples each of them uses."""

    _known: dict[int, dict[int, int]] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def by_share(self) -> Ints:
        """Rows, the largest share first."""
        return np.argsort(-self.share, kind="stable")

    def used(self, row: int) -> dict[int, int]:
        """The set of a row; rounds with the same set share it."""
        found = self._known.get(row)
        if found is None:
            members = self._members(row)
            found = dict(zip(self.nodes[members].tolist(), self.samples[members].tolist(), strict=True))
            self._known[row] = found
        return found

    def who(self, row: int) -> Ints:
        """The nodes of a row."""
        return self.nodes[self._members(row)]

    def _members(self, row: int) -> slice:
        first = int(self.begin[self.order[row]])
        return slice(first, first + int(self.cut[row]))


def prefixes(
    fleet: Fleet,
    version: int,
    multipliers: Floats,
    present: NDArray[np.bool_] | None = None,
    most_orders: int = ORDERS,
    favoured_s: Floats | None = None,
) -> Family | None:
    """The family of a version, from the nodes that can join (and are `present`). `favoured_s`: round times
    to be looked at first, best ones first, if there are too many."""
    from takifugu.plan.compiled import sets

    who, crowd = fleet.crowd(version, present)
    if not len(who):
        return None
    most = max(min(THRESHOLDS, most_orders // len(multipliers)), SPREAD)
    weights = np.ascontiguousarray(effective_weights(fleet, multipliers)[:, who])
    lean = np.zeros((len(who), 0))
    if fleet.mix is not None:
        lean = 0.5 * fleet.problem.label_weight * (fleet.mix - fleet.fleet_mix)[who]
    limits_s = _thresholds(np.unique(crowd.level_s), most, favoured_s)
    slowest, joules, data, order, cut, begin, members, used = sets.prefixes(
        crowd, weights, lean, limits_s, CUTS
    )
    problem = fleet.problem
    return Family(
        slowest + problem.overhead_s,
        joules + problem.overhead_j,
        data / fleet.total,
        order,
        cut,
        begin,
        who[members],
        used,
    )


def listed_family(options: Options) -> Family:
    """Sets that were listed as a family: each is an order of its own, cut at its end."""
    sets = [options.used(row) for row in range(len(options))]
    count = np.array([len(used) for used in sets], dtype=np.int64)
    return Family(
        options.time_s,
        options.energy_j,
        options.share,
        np.arange(len(sets)),
        count,
        np.concatenate([[0], np.cumsum(count)]),
        np.array([node for used in sets for node in used], dtype=np.int64),
        np.array([samples for used in sets for samples in used.values()], dtype=np.int64),
    )


def _thresholds(distinct: Floats, most: int, favoured_s: Floats | None) -> Floats:
    """Some of the round times there can be: the favoured ones, and others evenly among all."""
    if len(distinct) <= most:
        return distinct
    picked = np.zeros(0, dtype=np.int64)
    if favoured_s is not None:
        # A favoured time of a larger fleet stands for the longest round of this one that fits into it.
        at = np.searchsorted(distinct, favoured_s * (1 + 1e-12), side="right") - 1
        _, first = np.unique(at, return_index=True)
        picked = at[np.sort(first)]
        picked = picked[picked >= 0][: most - SPREAD]
    spread = np.linspace(0, len(distinct) - 1, most - len(picked)).round().astype(np.int64)
    return np.asarray(distinct[np.union1d(picked, spread)])


def thin(family: Family, per_second: list[float], per_round: float, bins: int) -> Ints:
    """Rows worth searching: for each price of time, the cheapest for at least each of some shares."""
    kept: list[Ints] = []
    edges = np.quantile(family.share, np.linspace(0, 1, bins + 1))
    even = np.linspace(family.share.min(), family.share.max(), bins + 1)
    edges = np.unique(np.concatenate([edges, even]))
    for price in per_second:
        cost = family.energy_j + price * family.time_s + per_round
        order = family.by_share
        # The cheapest row among those with at least this share, going down.
        lowest = np.minimum.accumulate(cost[order])
        leads = order[cost[order] <= lowest]
        place = np.searchsorted(-family.share[leads], -edges, side="right") - 1
        kept.append(leads[place[place >= 0]])
        ratio = cost / family.share
        falling = np.minimum.accumulate(ratio[order])
        kept.append(order[ratio[order] <= falling])
    return np.unique(np.concatenate(kept))


def family_options(fleet: Fleet, family: Family, rows: Ints) -> Options:
    """Some rows of a family as options, without those that are beaten at all times."""
    member_windows: list[tuple[tuple[float, float], ...] | None] = [None] * len(rows)
    if not fleet.always_available:
        begin = family.begin[family.order[rows]]
        member_windows = fleet.windows_of_many(family.nodes, begin, family.cut[rows])
    keep = prune(family.time_s[rows], family.energy_j[rows], family.share[rows], member_windows)
    rows = rows[keep]

    def used(row: int) -> dict[int, int]:
        return family.used(int(rows[row]))

    windows = tuple(member_windows[int(k)] for k in keep)
    return Options(family.time_s[rows], family.energy_j[rows], family.share[rows], windows, used)
