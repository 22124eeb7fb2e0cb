"""Lower bounds on what is left to pay: the continuous relaxation under prices of time and rounds.

A round is the time-1 flow of its curve, its cost spread evenly along it. If the round may be changed
midway, what is left is a one-dimensional integral over the loss: at each loss the cheapest cost per
speed. `Potential.at` is a lower bound on energy + price * time + price * rounds from any state, for
every continuation that reaches the target. The proof is in docs/decisions/101-lower-bound.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from takifugu.plan.curves import Floats, FlowCurve
from takifugu.plan.problem import Problem, Switch
from takifugu.plan.relaxation import Offers

Ints = NDArray[np.int64]

_MOST_PASSES = 8

ROUNDING = 1e-10
"""Relative deduction for floating-point rounding; limits themselves have a slack of 1e-9."""


@dataclass(frozen=True)
class Prices:
    per_second: float = 0.0
    per_round: float = 0.0
    energy: float = 1.0
    """Weight of energy itself: 0 asks for the least time or the fewest rounds instead."""
    per_switch_second: float | None = None
    """Where the price of time changes: what a second of a switch costs at least."""

    def fee(self, switch: Switch) -> float:
        rate = self.per_second if self.per_switch_second is None else self.per_switch_second
        return self.energy * switch.energy_j + rate * switch.time_s


@dataclass(frozen=True)
class Potential:
    prices: Prices
    grid: Floats
    value: Floats
    """[version, grid point]"""

    def at(self, version: int, loss: Floats) -> Floats:
        return np.asarray(np.interp(loss, self.grid, self.value[version]))


@dataclass(frozen=True)
class Landscape:
    """What all potentials of a problem share: versions' offers, switches, and a grid of losses."""

    problem: Problem
    offers: tuple[Offers | None, ...]
    grid: Floats

    @classmethod
    def of(cls, problem: Problem, offers: Sequence[Offers | None], cells: int = 600) -> Landscape:
        rough = cls(problem, tuple(offers), first_grid(problem, max(cells // 2, 100)))
        return cls(problem, tuple(offers), rough.refined(cells))

    def refined(self, cells: int) -> Floats:
        """A grid on which a typical potential climbs evenly."""
        climbs = np.zeros(len(self.grid) - 1)
        for prices in (Prices(), Prices(per_second=1.0, energy=0.0)):
            steps = self.cell_costs(prices)
            top = np.where(np.isfinite(steps), steps, 0.0)
            for row in (*top, np.where(np.isfinite(steps.min(axis=0)), steps.min(axis=0), 0.0)):
                if row.sum() > 0:
                    # Near an asymptote one cell would swallow everything: damp the tallest.
                    row = np.minimum(row, np.sort(row)[-max(len(row) // 20, 1)] * 4)
                    climbs += row / row.sum()
        climbs += climbs.sum() / len(climbs) * 0.25
        place = np.concatenate([[0.0], np.cumsum(climbs)])
        even = np.interp(np.linspace(0, place[-1], cells + 1), place, self.grid)
        # A switch is priced at the lower end of its cell: around the start, where it is most likely, that
        # end is made to lie just below, and so are the places where those switches land.
        start, span = self.problem.start_loss, self.grid[-1] - self.grid[0]
        jumps = {s.loss_jump for s in self.problem.switches if s.source == self.problem.start_version}
        extra = [start, *(start + jump - 1e-7 * span for jump in (0.0, *sorted(jumps)))]
        inside = [x for x in extra if self.grid[0] < x < self.grid[-1]]
        return np.unique(np.concatenate([even, inside]))

    def cell_costs(self, prices: Prices) -> Floats:
        """[version, cell]: a lower bound on the cost of flowing through each cell of the grid."""
        low, high = self.grid[:-1], self.grid[1:]
        middle, half = 0.5 * (low + high), 0.5 * (high - low)
        costs = np.full((len(self.problem.versions), len(low)), np.inf)
        for v, (version, offers) in enumerate(zip(self.problem.versions, self.offers, strict=True)):
            curve = version.curve
            if offers is None:
                continue
            if not isinstance(curve, FlowCurve):
                costs[v] = 0.0  # nothing is known of its speed: no bound, which is valid
                continue
            cost, share = _priced(offers, prices, curve.convex_in_data)
            speed = curve.speed(middle[None, :], share[:, None])
            steep = curve.steepness(middle[None, :], share[:, None])
            with np.errstate(divide="ignore", invalid="ignore"):
                slow = cost[:, None] / speed
                tilt = np.where(np.isfinite(slow), slow * steep * half, 0.0)
            # Each offer's cost density is convex in the loss, so it lies above its tangent at the middle;
            # the least of the tangents is concave, so its integral is at least the chord's.
            costs[v] = half * (
                np.maximum((slow + tilt).min(axis=0), 0.0) + np.maximum((slow - tilt).min(axis=0), 0.0)
            )
        return costs

    @cached_property
    def _exits(self) -> list[tuple[int, Ints, Ints, Ints, Floats]]:
        """Per version with switches, later ones first: targets, switch numbers, and where each cell lands
        (the grid point below and the part of the way to the next)."""
        index, exits = self.problem.version_index, []
        for source in reversed(range(len(self.problem.versions))):
            rows = [k for k, s in enumerate(self.problem.switches) if index[s.source] == source]
            rows = [k for k in rows if self.offers[index[self.problem.switches[k].target]] is not None]
            if not rows:
                continue
            targets = np.array([index[self.problem.switches[k].target] for k in rows])
            jumps = np.array([self.problem.switches[k].loss_jump for k in rows])
            land = self.grid[None, :-1] + jumps[:, None]
            below = np.clip(np.searchsorted(self.grid, land, side="right") - 1, 0, len(self.grid) - 2)
            part = np.clip((land - self.grid[below]) / (self.grid[below + 1] - self.grid[below]), 0.0, 1.0)
            exits.append((source, targets, np.array(rows), below, part))
        return exits

    @cached_property
    def _arrivals(self) -> list[Floats]:
        """[version][grid point, step]: the lowest loss that one whole round can lead to."""
        return [
            np.zeros((0, 0)) if o is None else v.curve.step(self.grid[:, None], o.steps()[None, :])
            for v, o in zip(self.problem.versions, self.offers, strict=True)
        ]

    def _round_costs(self, version: int, prices: Prices) -> Floats | None:
        offers = self.offers[version]
        if offers is None:
            return None
        return offers.whole_round(prices.per_second, prices.per_round, prices.energy)[None, :]

    def potential(self, prices: Prices, passes: int = _MOST_PASSES) -> Potential:
        problem, grid = self.problem, self.grid
        costs = self.cell_costs(prices)
        fee = np.array([prices.fee(s) for s in problem.switches])
        # Where no version moves, no plan passes; a finite stand-in keeps the arithmetic sane.
        envelope = np.minimum(costs.min(axis=0), 1e300)
        reachable = envelope[envelope < 1e299]
        most = 1e2 * (float(reachable.sum()) + float(fee.sum()) + 1e-30)
        costs = np.minimum(costs, most)
        # From below: with free switches first, then each pass puts the price on one switch more. Every pass
        # is a valid bound, so it may stop at any time; later versions first, since most switches lead there.
        free = np.concatenate([[0.0], np.cumsum(np.minimum(costs.min(axis=0), most))])
        value = np.tile(free, (len(costs), 1))
        leaving = {source for source, *_ in self._exits}
        for v in set(range(len(costs))) - leaving:  # no switch leads away: only its own flow
            value[v] = _climb(costs[v], np.full(len(costs[v]), np.inf), most)
        reached = np.full_like(value, np.inf)
        stale = {int(t) for _, targets, *_ in self._exits for t in targets}
        rounds = {t: self._round_costs(t, prices) for t in stale}
        for _ in range(passes):
            changed = False
            for source, targets, rows, below, part in self._exits:
                for t in stale & {int(t) for t in targets}:
                    cost = rounds[t]
                    if cost is not None:
                        reached[t] = (cost + np.interp(self._arrivals[t], grid, value[t])).min(axis=1)
                    stale.discard(t)
                # A switch anywhere in a cell is at least as dear as one from its lower end, and it is
                # followed by a whole round: two in a row, or one in mid-round, are not to be had.
                at, ahead = (np.take_along_axis(value[targets], i, axis=1) for i in (below, below + 1))
                whole = np.take_along_axis(reached[targets], below, axis=1)
                ceiling = (fee[rows, None] + np.maximum(at + part * (ahead - at), whole)).min(axis=0)
                new = np.maximum(_climb(costs[source], ceiling, most), value[source])
                if (new > value[source] * (1 + 1e-7)).any():
                    changed = True
                    stale.add(source)
                value[source] = new
            if not changed:
                break
        return Potential(prices, grid, value * (1 - ROUNDING))


def _priced(offers: Offers, prices: Prices, convex: bool) -> tuple[Floats, Floats]:
    if prices.energy == 1.0:
        return offers.price(prices.per_second, prices.per_round, convex)
    tangent = np.where(np.isinf(offers.tangent_j), np.inf, 0.0)
    left = np.where(np.isinf(offers.left_j), np.inf, 0.0)
    free = Offers(offers.time_s, offers.share, tangent, left, offers.exact)
    return free.price(prices.per_second, prices.per_round, convex)


def _climb(costs: Floats, ceiling: Floats, most: float) -> Floats:
    """value[i+1] = min(value[i] + costs[i], ceiling[i]) from value[0] = 0, without a loop."""
    total = np.concatenate([[0.0], np.cumsum(np.minimum(costs, most))])
    room = np.minimum.accumulate(np.concatenate([[0.0], ceiling - total[1:]]))
    return np.asarray(np.maximum(total + room, 0.0))


def first_grid(problem: Problem, cells: int) -> Floats:
    """Losses from the target up to the highest a plan starts from, dense above every floor."""
    low = problem.loss_limit
    high = max(problem.start_loss, low) + max((s.loss_jump for s in problem.switches), default=0.0)
    high = max(high, low + 1e-9 * max(abs(low), 1e-9))
    span = high - low
    pieces = [np.linspace(low, high, cells)]
    for version in problem.versions:
        floor = getattr(version.curve, "floor", None)
        if floor is not None:
            nearest = max(low - floor, 1e-4 * span)
            above = floor + np.geomspace(nearest, max(high - floor, nearest * 1.001), cells)
            pieces.append(above[(above > low) & (above < high)])
    grid = np.unique(np.concatenate(pieces))
    keep = np.concatenate([[True], np.diff(grid) > 1e-12 * span])
    return np.asarray(grid[keep])
