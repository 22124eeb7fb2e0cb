"""The relaxation of node sets that lower bounds rest on: nodes may take part in fractions.

For a round no longer than a threshold T, the energy needed for an effective share of at least q is
bounded from below by a fractional knapsack. Labels enter through fixed multipliers z in [-1, 1] per
label: q is at most the sum of s_i(z) = s_i * (1 - w/2 * sum_c z_c (mix_ic - fleet_c)), for every z.
The proofs are in docs/decisions/101-lower-bound.md and 102-node-sets.md; names follow them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog

from takifugu.plan.curves import Floats
from takifugu.plan.fleet import Fleet, Used
from takifugu.plan.options import Options

THRESHOLDS = 400
KNAPSACKS, ITEMS = 16_000, 2_000_000
"""Most round-time thresholds per version; most knapsacks (thresholds times label multipliers), and items in
them (times nodes). More thresholds than that are merged, which loosens the bound a little."""

SHARES = 320
_APART = 1e-6
"""Points of the grid of effective shares; how far marks are from each other, as a part of them."""


def share_grid(fleet: Fleet, points: int = SHARES, marks: Floats | None = None) -> Floats:
    """Dense near 1, where the last and dearest nodes come in, and geometric towards the smallest share; and
    at the marks (in rising order), unless there is a point."""
    least = float(fleet.levels[:, 0].min()) / fleet.total
    if fleet.mix is not None:
        least *= 1.0 - fleet.problem.label_weight * 0.999
    even = np.linspace(0.0, 1.0, points * 5 // 8 + 1)[1:]
    grid = np.unique(np.concatenate([even, np.geomspace(min(max(least, 1e-5), 0.5), 1.0, points * 3 // 8)]))
    if marks is None or not len(marks):
        return grid
    marks = marks[np.diff(marks, prepend=0.0) > _APART * marks]
    after = np.searchsorted(grid, marks)
    near = np.minimum(np.abs(grid[np.minimum(after, len(grid) - 1)] - marks), np.abs(grid[after - 1] - marks))
    return np.union1d(grid, marks[(near > _APART * marks) & (marks < grid[-1])])


def label_multipliers(
    fleet: Fleet, versions: list[int], levels: tuple[float, ...] = (0.3, 0.6, 0.9)
) -> Floats:
    """Good multipliers z (any would be valid): the duals of a few linear programs, and z = 0."""
    if fleet.mix is None:
        return np.zeros((1, 1))
    found = [np.zeros(fleet.mix.shape[1])]
    for version in versions:
        for level in levels:
            z = _dual_multiplier(fleet, version, level, np.inf)
            if z is not None:
                found.append(z)
    return np.unique(np.round(np.array(found), 6), axis=0)


def priced_multipliers(
    fleet: Fleet,
    known: Floats,
    offers: Sequence[Offers | None],
    per_second: float,
    versions: Sequence[int],
    levels: tuple[float, ...] = (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.7, 0.9),
) -> Floats:
    """More multipliers, for rounds as short as the price of time makes them."""
    if fleet.mix is None:
        return known
    found = list(known)
    for version in versions:
        offer = offers[version]
        if offer is None or offer.exact:
            continue
        for level in levels:
            column = int(np.searchsorted(offer.share, level))
            cost = offer.tangent_j[:, min(column, len(offer.share) - 1)] + per_second * offer.time_s
            if not np.isfinite(cost).any():
                continue
            assert offer.slowest_s is not None
            limit_s = float(offer.slowest_s[int(cost.argmin())])
            z = _dual_multiplier(fleet, version, level, limit_s)
            if z is not None:
                found.append(z)
    return np.unique(np.round(np.array(found), 4), axis=0)


def used_multipliers(fleet: Fleet, known: Floats, rounds: Iterable[tuple[int, Used]]) -> Floats:
    """More multipliers, for rounds (version, samples used) of a plan: there the bound has to be close."""
    costs = [(version, fleet.round_cost(version, used)) for version, used in rounds]
    return round_multipliers(fleet, known, [(version, c.share, c.slowest_s) for version, c in costs])


def round_multipliers(fleet: Fleet, known: Floats, rounds: Iterable[tuple[int, float, float]]) -> Floats:
    """More multipliers, for rounds of a version with a share and the time of their slowest node."""
    found = list(known)
    for version, share, slowest_s in rounds:
        z = _dual_multiplier(fleet, version, share, slowest_s)
        if z is not None:
            found.append(z)
    return np.unique(np.round(np.array(found), 4), axis=0)


def _dual_multiplier(fleet: Fleet, version: int, level: float, limit_s: float) -> Floats | None:
    """The labels' multipliers where a share of `level` is had for the least energy within a round time."""
    assert fleet.mix is not None
    weight, labels = fleet.problem.label_weight, fleet.mix.shape[1]
    costs = fleet.by_version[version]
    times = costs.fixed_s[:, None] + costs.sample_s[:, None] * fleet.levels
    fitting = (times <= limit_s).sum(axis=1) * costs.can_join
    who = np.flatnonzero(fitting)
    if not len(who):
        return None
    amount = fleet.levels[who, fitting[who] - 1].astype(float)
    size = amount / fleet.total
    joules = costs.fixed_j[who] + costs.sample_j[who] * amount
    if np.isfinite(limit_s):
        joules = joules + fleet.idle_w[who] * np.maximum(limit_s - times[who, fitting[who] - 1], 0.0)
    scale = float(joules.max()) or 1.0
    lean = ((fleet.mix[who] - fleet.fleet_mix) * size[:, None]).T  # [label, node]
    eye = np.eye(labels)
    # min energy; rows: q >= level, and d_c >= +-(u_c - fleet_c * u)
    rows = np.vstack(
        [
            np.concatenate([-size, np.full(labels, 0.5 * weight)]),
            np.hstack([lean, -eye]),
            np.hstack([-lean, -eye]),
        ]
    )
    price = np.concatenate([joules / scale, np.zeros(labels)])
    bounds = [(0.0, 1.0)] * len(who) + [(0.0, None)] * labels
    limit = np.concatenate([[-level], np.zeros(2 * labels)])
    answer = linprog(price, A_ub=rows, b_ub=limit, bounds=bounds, method="highs")
    if answer.status != 0:
        return None
    dual = -np.asarray(answer.ineqlin.marginals)
    if dual[0] <= 1e-12:
        return None
    z = (dual[1 : labels + 1] - dual[labels + 1 :]) / (0.5 * weight * dual[0])
    return np.asarray(np.clip(z, -1.0, 1.0))


@dataclass(frozen=True)
class Offers:
    """Optimistic rounds of one version: what no achievable round can beat.

    `tangent_j[j, g]` is a lower bound, extended along the tangent from the grid point before, of the
    energy of a round that takes `time_s[j]` and gives `share[g]`; `left_j[j, g]` bounds every round with a
    share between grid points g-1 and g. Overheads are included; infinity: out of reach.
    """

    time_s: Floats
    share: Floats
    tangent_j: Floats
    left_j: Floats
    exact: bool
    """Whether the rows are complete achievable rounds (one time per row, no grid)."""
    multiplier: NDArray[np.int64] | None = None
    """[time, share]: of the labels' multipliers the one that the bound comes from"""
    slowest_s: Floats | None = None
    """[time]: the time of the slowest node, without the round's overhead. Never recover it as a difference: a
    large overhead cancels it, and a bound would lose the slowest node."""
    until_s: Floats | None = None
    """[time]: where round times are merged, the longest time of a slowest node that is charged as
    `slowest_s`, also without the overhead"""

    def needed(self, per_second: float, nearly: float) -> NDArray[np.int64]:
        """Multipliers without which some round that is nearly the cheapest of its share would cost less."""
        if self.multiplier is None:
            return np.zeros(0, dtype=np.int64)
        cost = self.tangent_j + per_second * self.time_s[:, None]
        near = np.isfinite(cost) & (cost <= nearly * cost.min(axis=0))
        return np.unique(self.multiplier[near])

    def sketch(self) -> Offers:
        """A few of the offers: no bound, but quick, for finding good prices."""
        if self.exact:
            return self
        t, s = self.time_s[::-3][::-1], self.share[::-3][::-1]
        return Offers(
            t, s, self.tangent_j[::-3, ::-3][::-1, ::-1], self.left_j[::-3, ::-3][::-1, ::-1], False
        )

    def priced(
        self, per_second: float, per_round: float, energy: float, convex: bool
    ) -> tuple[Floats, Floats]:
        """Least cost at each share under prices of time, rounds and energy; only offers that can matter.

        An offer matters only if no offer with at least its share costs at most as much per share:
        the speed of a curve is share times something that never falls with the share.
        """
        tangent, left = self.tangent_j, self.left_j
        if energy != 1.0:
            tangent, left = weighted(tangent, energy), weighted(left, energy)
        timed = per_second * self.time_s[:, None]
        cost = (tangent + timed).min(axis=0) + per_round
        if not convex:
            # Below the first grid point the tangent from nothing is the bound already.
            before = (left + timed).min(axis=0) + per_round
            cost[1:] = np.minimum(cost[1:], before[1:] * self.share[1:] / self.share[:-1])
        order = np.argsort(-self.share, kind="stable")
        ratio = cost[order] / self.share[order]
        best = np.minimum.accumulate(np.concatenate([[np.inf], ratio[:-1]]))
        keep = order[ratio < best]
        return cost[keep], self.share[keep]


def weighted(joules: Floats, weight: float) -> Floats:
    """What is out of reach stays so, at any weight."""
    return np.where(np.isinf(joules), np.inf, weight * np.where(np.isinf(joules), 0.0, joules))


def exact_offers(options: Options) -> Offers:
    """When the options are complete, they are their own best relaxation."""
    energy = options.energy_j[:, None]
    return Offers(options.time_s, options.share, energy, energy, exact=True)


def relaxed_offers(
    fleet: Fleet,
    version: int,
    multipliers: Floats,
    shares: Floats,
    present: NDArray[np.bool_] | None = None,
    favoured_s: Floats | None = None,
) -> Offers | None:
    """Fractional knapsacks for a ladder of round-time thresholds. Nothing, if no node can join.
    `favoured_s`: round times not to be merged with others, if there are too many, best ones first."""
    from takifugu.plan.compiled import sets

    who, crowd = fleet.crowd(version, present)
    if not len(who):
        return None
    most = max(min(THRESHOLDS, min(KNAPSACKS, ITEMS // len(who)) // len(multipliers)), 64)
    lows, highs = _ladder(crowd.level_s.ravel(), most, favoured_s)
    weights = np.ascontiguousarray(effective_weights(fleet, multipliers)[:, who])  # [z, node], over Q
    tangent, left, which = sets.knapsacks(crowd, weights, lows, highs, shares)
    problem = fleet.problem
    return Offers(
        lows + problem.overhead_s,
        shares,
        tangent + problem.overhead_j,
        left + problem.overhead_j,
        exact=False,
        multiplier=which,
        slowest_s=lows,
        until_s=highs,
    )


def split_offers(
    fleet: Fleet, version: int, multipliers: Floats, offers: Offers, per_second: float, pieces: int
) -> Offers:
    """Offers anew where merged round times matter: those at which some share is cheapest, in pieces."""
    from takifugu.plan.compiled import sets

    assert offers.slowest_s is not None
    assert offers.until_s is not None
    best = (offers.tangent_j + per_second * offers.time_s[:, None]).argmin(axis=0)
    rows = np.unique(best[offers.until_s[best] > offers.slowest_s[best]])
    if not len(rows):
        return offers
    who, crowd = fleet.crowd(version)
    distinct = np.unique(crowd.level_s)
    lows, highs = [], []
    for row in rows.tolist():
        first, last = np.searchsorted(distinct, (offers.slowest_s[row], offers.until_s[row]))
        cuts = np.unique(np.linspace(first, last + 1, pieces + 1).astype(int))
        lows.append(distinct[cuts[:-1]])
        highs.append(distinct[cuts[1:] - 1])
    low_s, high_s = np.concatenate(lows), np.concatenate(highs)
    weights = np.ascontiguousarray(effective_weights(fleet, multipliers)[:, who])
    tangent, left, which = sets.knapsacks(crowd, weights, low_s, high_s, offers.share)
    others = np.setdiff1d(np.arange(len(offers.time_s)), rows)
    slowest_s = np.concatenate([offers.slowest_s[others], low_s])
    order = np.argsort(slowest_s, kind="stable")
    extra = fleet.problem.overhead_j

    def joined(old: NDArray[Any] | None, new: NDArray[Any]) -> NDArray[Any]:
        assert old is not None
        return np.concatenate([old[others], new])[order]

    return Offers(
        slowest_s[order] + fleet.problem.overhead_s,
        offers.share,
        joined(offers.tangent_j, tangent + extra),
        joined(offers.left_j, left + extra),
        exact=False,
        multiplier=joined(offers.multiplier, which),
        slowest_s=slowest_s[order],
        until_s=joined(offers.until_s, high_s),
    )


def _ladder(times: Floats, most: int, favoured_s: Floats | None) -> tuple[Floats, Floats]:
    """Thresholds [low, high]: a round whose slowest member lies in between is charged `low` and may use
    every node that is done by `high`. With few distinct times the two are equal and nothing is lost."""
    distinct = np.unique(times)
    if len(distinct) <= most:
        return distinct, distinct
    cuts = np.linspace(0, len(distinct), (most if favoured_s is None else most // 2) + 1).astype(int)
    if favoured_s is not None:
        at = np.searchsorted(distinct, favoured_s[: most // 6] * (1 - 1e-12))
        cuts = np.concatenate([cuts, *(np.minimum(at + k, len(distinct)) for k in range(3))])
    cuts = np.unique(cuts)
    return distinct[cuts[:-1]], distinct[cuts[1:] - 1]


def effective_weights(fleet: Fleet, multipliers: Floats) -> Floats:
    """[z, node]: the most effective share that one sample of a node can add, for each multiplier."""
    count = len(fleet.samples)
    if fleet.mix is None:
        return np.full((1, count), 1.0 / fleet.total)
    lean = fleet.mix - fleet.fleet_mix
    return np.asarray((1.0 - 0.5 * fleet.problem.label_weight * (multipliers @ lean.T)) / fleet.total)
