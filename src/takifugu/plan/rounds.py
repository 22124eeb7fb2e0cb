"""Rounds on a grid of losses: where they lead, and what they cost at prices of time and of rounds."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from takifugu.plan.curves import Curve, Floats, asymptotes, shape_of
from takifugu.plan.problem import Switch
from takifugu.plan.relaxation import Offers, weighted

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Prices:
    per_second: float = 0.0
    per_round: float = 0.0
    energy: float = 1.0
    """Weight of energy itself: 0 asks for the least time or the fewest rounds instead."""

    def fee(self, switch: Switch) -> float:
        return self.energy * switch.energy_j + self.per_second * switch.time_s


@dataclass(frozen=True)
class Arrivals:
    """Where rounds of one version lead: every grid point of losses with every share of a list."""

    grid: Floats
    shares: Floats
    cell: Ints
    """[point, share]: the grid point below the loss after the round."""
    above: Floats
    """[point, share]: how far above it."""
    done: NDArray[np.bool_]
    """[point, share]: the round meets the target."""
    finish: Ints
    """[point]: the first share that meets the target, or -1."""
    short: Floats
    """[point]: how much of the step to that share is needed, from the one before it."""
    after: Floats = field(repr=False)
    """[point, share]: the loss after the round"""

    @classmethod
    def of(cls, curve: Curve, grid: Floats, shares: Floats) -> Arrivals:
        return cls._landed(grid, shares, after_rounds(curve, grid, shares))

    @classmethod
    def _landed(cls, grid: Floats, shares: Floats, after: Floats) -> Arrivals:
        from takifugu.plan.compiled import paths

        return cls._finished(grid, shares, after, *paths.landings(grid, np.ascontiguousarray(after)))

    def take(self, columns: Ints) -> Arrivals:
        """Of some of the shares."""
        after, cell = self.after[:, columns], self.cell[:, columns]
        above, done = self.above[:, columns], self.done[:, columns]
        return self._finished(self.grid, self.shares[columns], after, cell, above, done)

    @classmethod
    def _finished(
        cls,
        grid: Floats,
        shares: Floats,
        after: Floats,
        cell: Ints,
        above: Floats,
        done: NDArray[np.bool_],
    ) -> Arrivals:
        first = np.where(done.any(axis=1), done.argmax(axis=1), -1)
        points = np.arange(len(grid))
        # Shares come in increasing order, and no data at all leaves the loss as it is.
        before = np.where(first > 0, after[points, np.maximum(first - 1, 0)], grid)
        drop = np.maximum(before - after[points, first], 1e-300)
        short = np.clip((before - grid[0]) / drop, 0.0, 1.0)
        return cls(grid, shares, cell, above, done, first, short, after)

    @cached_property
    def part(self) -> Floats:
        """[point, share]: the same as a part of the way to the next grid point."""
        return np.asarray(self.above / np.diff(self.grid)[self.cell])

    @cached_property
    def unfinished(self) -> Ints:
        """[point]: how many shares do not meet the target."""
        return np.where(self.finish >= 0, self.finish, len(self.shares))

    def ahead(self, value: Floats) -> Floats:
        """[point, share]: the value (linear between points, 0 at the target) after the round."""
        slope = np.diff(value) / np.diff(self.grid)
        return np.where(self.done, 0.0, value[self.cell] + slope[self.cell] * self.above)


def after_rounds(curve: Curve, loss: Floats, share: Floats) -> Floats:
    """[loss, share]: the loss after a round."""
    from takifugu.plan.compiled import trails

    shape = shape_of(curve)
    if shape is None:
        return np.minimum(curve.step(loss[:, None], share[None, :]), loss[:, None])
    with np.errstate(divide="ignore"):
        return trails.after_rounds(*shape, loss, share, asymptotes(curve, share))


@dataclass(frozen=True)
class Charges:
    """Priced costs on intervals of shares: at least the line from `left` to `right` on each."""

    low: Floats
    high: Floats
    left: Floats
    right: Floats
    at_high: Floats
    """An estimate, not a bound, of the cost at the interval's upper end."""


def charges(offers: Offers, prices: Prices) -> Charges:
    """What rounds cost at the prices, for every share that the relaxed fleet can give."""
    if offers.exact:
        cost = prices.energy * offers.tangent_j[:, 0]
        cost = cost + prices.per_second * offers.time_s + prices.per_round
        order = np.argsort(-offers.share, kind="stable")
        keep = order[cost[order] <= np.minimum.accumulate(cost[order])][::-1]
        share, cost = offers.share[keep], cost[keep]
        return Charges(share, share, cost, cost, cost)
    timed = prices.per_second * offers.time_s[:, None]
    tangent, left = offers.tangent_j, offers.left_j
    if prices.energy != 1.0:
        tangent, left = (weighted(x, prices.energy) for x in (tangent, left))
    right_c = (tangent + timed).min(axis=0) + prices.per_round
    left_c = (left + timed).min(axis=0) + prices.per_round
    count = int(np.isfinite(right_c).sum())
    low = np.concatenate([[0.0], offers.share[:-1]])
    rows = (low, offers.share, left_c, right_c, right_c)
    return Charges(*(row[:count] for row in rows))
