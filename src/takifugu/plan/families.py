"""Achievable node sets for large fleets: prefixes of good orders, under many round-time thresholds.

An order is by energy per effective sample, for each threshold (which decides how many parts of a node fit
and how long it idles) and each label multiplier. Every prefix is a set; cumulative sums give the time,
energy and share of all of them at once, so the work is near-linear in nodes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

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
    orders: list[tuple[Ints, Ints]]
    """Nodes in order, and the samples each of them uses."""

    _known: dict[int, dict[int, int]] = field(default_factory=dict, repr=False, compare=False)

    def used(self, row: int) -> dict[int, int]:
        """The set of a row; rounds with the same set share it."""
        found = self._known.get(row)
        if found is None:
            nodes, amounts = self.orders[int(self.order[row])]
            count = int(self.cut[row])
            found = dict(zip(nodes[:count].tolist(), amounts[:count].tolist(), strict=True))
            self._known[row] = found
        return found


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
    costs = fleet.by_version[version]
    joining = costs.can_join if present is None else costs.can_join & present
    who = np.flatnonzero(joining)
    if not len(who):
        return None
    levels = fleet.levels[who].astype(float)
    level_s = costs.fixed_s[who, None] + costs.sample_s[who, None] * levels
    distinct = np.unique(level_s)
    most = max(min(THRESHOLDS, most_orders // len(multipliers)), SPREAD)
    weights = effective_weights(fleet, multipliers)[:, who]
    columns: list[list[Floats]] = [[], [], [], [], []]
    orders: list[tuple[Ints, Ints]] = []
    for limit in _thresholds(distinct, most, favoured_s):
        fitting = (level_s <= limit).sum(axis=1)
        inside = np.flatnonzero(fitting)
        amount = levels[inside, fitting[inside] - 1]
        taken_s = level_s[inside, fitting[inside] - 1]
        joules = costs.fixed_j[who[inside]] + costs.sample_j[who[inside]] * amount
        idle = fleet.idle_w[who[inside]]
        for z in weights:
            order = np.argsort((joules + idle * (limit - taken_s)) / (z[inside] * amount), kind="stable")
            cuts = np.unique(np.linspace(1, len(order), min(CUTS, len(order))).round().astype(int))
            nodes = who[inside[order]]
            rows = _rate_prefixes(fleet, nodes, amount[order], taken_s[order], joules[order], cuts)
            for column, values in zip(columns, (*rows, np.full(len(cuts), len(orders)), cuts), strict=True):
                column.append(values)
            orders.append((nodes, amount[order].astype(np.int64)))
    time_s, energy_j, share, order_of, cut = (np.concatenate(c) for c in columns)
    return Family(time_s, energy_j, share, order_of.astype(np.int64), cut.astype(np.int64), orders)


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


def _rate_prefixes(
    fleet: Fleet, nodes: Ints, amount: Floats, taken_s: Floats, joules: Floats, cuts: Ints
) -> tuple[Floats, Floats, Floats]:
    at = cuts - 1
    slowest = np.maximum.accumulate(taken_s)[at]
    idle = fleet.idle_w[nodes]
    energy = np.cumsum(joules)[at] + slowest * np.cumsum(idle)[at] - np.cumsum(idle * taken_s)[at]
    total = np.cumsum(amount)[at]
    if fleet.mix is None:
        share = total / fleet.total
    else:
        lean = np.cumsum((fleet.mix[nodes] - fleet.fleet_mix) * amount[:, None], axis=0)[at]
        share = (total - 0.5 * fleet.problem.label_weight * np.abs(lean).sum(axis=1)) / fleet.total
    return slowest + fleet.problem.overhead_s, energy + fleet.problem.overhead_j, share


def thin(family: Family, per_second: list[float], per_round: float, bins: int) -> Ints:
    """Rows worth searching: for each price of time, the cheapest for at least each of some shares."""
    kept: list[Ints] = []
    edges = np.quantile(family.share, np.linspace(0, 1, bins + 1))
    even = np.linspace(family.share.min(), family.share.max(), bins + 1)
    edges = np.unique(np.concatenate([edges, even]))
    for price in per_second:
        cost = family.energy_j + price * family.time_s + per_round
        order = np.argsort(-family.share, kind="stable")
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
        member_windows = [fleet.common_windows(family.used(int(r))) for r in rows]
    keep = prune(family.time_s[rows], family.energy_j[rows], family.share[rows], member_windows)
    rows = rows[keep]

    def used(row: int) -> dict[int, int]:
        return family.used(int(rows[row]))

    windows = tuple(member_windows[int(k)] for k in keep)
    return Options(family.time_s[rows], family.energy_j[rows], family.share[rows], windows, used)
