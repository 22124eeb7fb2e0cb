"""Lower bounds on what is left to pay: the continuous relaxation under prices of time and rounds.

A round is the time-1 flow of its curve, its cost spread evenly along it. If the round may be changed
midway, what is left is a one-dimensional integral over the loss: at each loss the cheapest cost per
speed. `Potential.at` is a lower bound on energy + price * time + price * rounds from any state, for
every continuation that reaches the target. The proof is in docs/decisions/101-lower-bound.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import cast

import numpy as np

from takifugu.plan.curves import Floats, FlowCurve, asymptotes, shape_of
from takifugu.plan.problem import Problem
from takifugu.plan.relaxation import Offers
from takifugu.plan.rounds import Arrivals, Charges, Ints, Prices, charges

_MOST_PASSES, _PASSES, _ENOUGH = 20, 3, 1e-5
"""Where switches lead both ways: until a pass raises nothing by more than this part."""
_STEEP = 0.2
"""Up to this slope, over half a cell, one over the speed is close to its tangent in the middle."""
_PIECES = 8
"""Intervals of shares that matter are cut in so many where a round must follow a switch."""
_KEPT = 400
"""Where rounds with up to so many shares lead is kept for other prices, and phases."""

ROUNDING = 1e-10
"""Relative deduction for floating-point rounding; limits themselves have a slack of 1e-9."""


@dataclass(frozen=True)
class Potential:
    prices: Prices
    grid: Floats
    value: Floats
    """[version, grid point]"""
    first: Floats = field(default_factory=lambda: np.zeros((0, 0)), repr=False)
    """[version, grid point]: the same, if a round of the version comes first"""

    def at(self, version: int, loss: Floats) -> Floats:
        return np.asarray(np.interp(loss, self.grid, self.value[version]))


@dataclass(frozen=True)
class Exit:
    """A way to go on other than by a round."""

    fee: float
    jump: float
    grid: Floats
    left: Floats
    """At most what is left to pay there, in lines between points; never less at a higher loss."""


@dataclass(frozen=True)
class Slowness:
    """One over the speed of one version's rounds, with some shares, in the cells of a grid."""

    first: Floats
    last: Floats
    """[share, cell]: at both ends of a line below it"""
    top: Floats
    """[share, cell]: at the upper end of the cell, where it is least"""

    @classmethod
    def of(cls, curve: FlowCurve, grid: Floats, shares: Floats) -> Slowness:
        middle, end, width = 0.5 * (grid[1:] + grid[:-1])[None, :], grid[None, 1:], np.diff(grid)
        with np.errstate(divide="ignore", invalid="ignore"):
            slow, top = (1.0 / curve.speed(loss, shares[:, None]) for loss in (middle, end))
            tilt, fall = (width * curve.steepness(loss, shares[:, None]) for loss in (middle, end))
            # It is convex: tangents lie below it. Just above an asymptote the one in the middle falls below
            # 0 within the cell, and a round that is far too dear would seem to be cheap there.
            even, never = 0.5 * tilt < _STEEP, np.isinf(top)
            first = np.where(even, slow * (1.0 + 0.5 * tilt), np.where(never, np.inf, top * (1.0 + fall)))
            last = np.where(even, slow * (1.0 - 0.5 * tilt), top)
        return cls(first, last, top)

    def take(self, rows: Ints) -> Slowness:
        return Slowness(*(x[rows] for x in (self.first, self.last, self.top)))


@dataclass(frozen=True)
class Ground:
    """A grid of losses. Where it is `shared` by many prices or phases, what rounds do there is kept."""

    problem: Problem
    grid: Floats
    shared: bool = True
    _slowness: dict[int, tuple[Floats, Slowness]] = field(default_factory=dict, repr=False)
    _arrivals: dict[int, tuple[Floats, Arrivals]] = field(default_factory=dict, repr=False)

    @cached_property
    def flows(self) -> list[bool]:
        """[version]: whether its curve is a flow whose speed is known."""
        return [isinstance(v.curve, FlowCurve) for v in self.problem.versions]

    @cached_property
    def smooth(self) -> list[bool]:
        """[version]: whether its rounds are concave in the loss as well."""
        return [getattr(v.curve, "concave_in_loss", False) for v in self.problem.versions]

    def slowness(self, version: int, some: Floats, shares: Floats) -> Slowness:
        """With some of the shares."""
        curve = cast(FlowCurve, self.problem.versions[version].curve)
        if not self.shared or len(shares) > _KEPT:
            return Slowness.of(curve, self.grid, some)
        known = self._slowness.get(version)
        if known is None or not np.array_equal(known[0], shares):
            known = self._slowness[version] = shares, Slowness.of(curve, self.grid, shares)
        return known[1].take(np.searchsorted(shares, some))

    def arrivals(self, version: int, shares: Floats) -> Arrivals:
        known = self._arrivals.get(version)
        if known is not None and np.array_equal(known[0], shares):
            return known[1]
        found = Arrivals.of(self.problem.versions[version].curve, self.grid, shares)
        if self.shared:
            self._arrivals[version] = shares, found
        return found


@dataclass(frozen=True)
class Flow:
    """One version's rounds at one price, if they could be cut short."""

    charges: Charges
    shares: Floats
    """All there are, of which some are charged; nothing, if nothing is known of the curve's speed"""
    cost: Floats
    """[cell]: at most what it costs to flow through it"""
    slope: Floats
    """[cell]: at most what a flow costs per loss anywhere in it"""

    @classmethod
    def of(cls, ground: Ground, version: int, offers: Offers, prices: Prices) -> Flow:
        curve, width = cast(FlowCurve, ground.problem.versions[version].curve), np.diff(ground.grid)
        all_charges = charges(offers, prices)
        if not ground.flows[version]:
            free = np.zeros(len(width))  # no bound, which is valid
            return cls(all_charges, free[:0], free, free)
        if offers.exact:
            cost, share, shares = all_charges.left, all_charges.high, all_charges.high
        else:
            weights = (prices.per_second, prices.per_round, prices.energy)
            cost, share = offers.priced(*weights, curve.convex_in_data)
            shares = offers.share
        slow = ground.slowness(version, share, shares)
        # The least of these lines is concave, so its integral is at least the chord's.
        first, last, top = (_times(cost, x).min(axis=0) for x in (slow.first, slow.last, slow.top))
        flow = 0.5 * width * (np.maximum(first, 0.0) + np.maximum(last, 0.0))
        return cls(all_charges, shares, flow, top)


def _times(cost: Floats, slowness: Floats) -> Floats:
    """[share, cell]: their product. A round that leads nowhere stays out of reach if it costs nothing."""
    if (cost > 0.0).all():
        return cost[:, None] * slowness
    with np.errstate(invalid="ignore"):
        product: Floats = cost[:, None] * slowness
    product[np.isinf(slowness)] = np.inf
    return product


@dataclass(frozen=True)
class Landscape:
    """What all potentials of a problem share: versions' offers, switches, and a grid of losses."""

    problem: Problem
    offers: tuple[Offers | None, ...]
    ground: Ground
    check: Callable[[], None] = lambda: None
    """Raises when time is up."""

    @classmethod
    def of(cls, problem: Problem, offers: Sequence[Offers | None], cells: int = 600) -> Landscape:
        rough = Ground(problem, first_grid(problem, max(cells // 2, 100)), shared=False)
        return cls(problem, tuple(offers), Ground(problem, cls(problem, tuple(offers), rough).refined(cells)))

    @property
    def grid(self) -> Floats:
        return self.ground.grid

    def refined(self, cells: int) -> Floats:
        """A grid on which a typical potential climbs evenly."""
        climbs = np.zeros(len(self.grid) - 1)
        for prices in (Prices(), Prices(per_second=1.0, energy=0.0)):
            flows = self._flows(prices)
            steps = np.array([f.cost for f in flows.values()] or [np.zeros(len(climbs))])
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

    def _flows(self, prices: Prices) -> dict[int, Flow]:
        found = {}
        for v, offers in enumerate(self.offers):
            if offers is not None:
                self.check()
                found[v] = Flow.of(self.ground, v, offers, prices)
        return found

    def potential(
        self,
        prices: Prices,
        passes: int = _MOST_PASSES,
        later: Sequence[Sequence[Exit]] | None = None,
        most_j: float = np.inf,
    ) -> Potential:
        """`later[version]`: ways into the next phase, from any loss on, the first one by waiting. Values
        above `most_j` are of no interest."""
        flows = self._flows(prices)
        # Where no version moves, no plan passes; a finite stand-in keeps the arithmetic sane.
        costs = np.array([f.cost for f in flows.values()] or [np.full(len(self.grid) - 1, np.inf)])
        envelope = np.minimum(costs.min(axis=0), 1e300)
        fees = sum(prices.fee(s) for s in self.problem.switches)
        most = min(1e2 * (float(envelope[envelope < 1e299].sum()) + fees + 1e-30), most_j)
        return _Climb(self, prices, flows, envelope, most, later).run(passes)

    @cached_property
    def exits(self) -> list[list[tuple[int, int]]]:
        """[version]: its switches, each with the version that it leads to."""
        index = self.problem.version_index
        found: list[list[tuple[int, int]]] = [[] for _ in self.problem.versions]
        for number, switch in enumerate(self.problem.switches):
            if self.offers[index[switch.target]] is not None:
                found[index[switch.source]].append((number, index[switch.target]))
        return found

    @cached_property
    def one_way(self) -> bool:
        """Whether all switches lead to later versions."""
        return all(target > v for v, row in enumerate(self.exits) for _, target in row)


class _Climb:
    """From the target upwards, version by version. From below: with free switches first, then each pass puts
    the price on one switch more. Every pass is a valid bound, so it may stop at any time; later versions
    first, since most switches lead there."""

    def __init__(
        self,
        land: Landscape,
        prices: Prices,
        flows: dict[int, Flow],
        envelope: Floats,
        most: float,
        later: Sequence[Sequence[Exit]] | None,
    ) -> None:
        self.land, self.prices, self.flows, self.most, self.later = land, prices, flows, most, later
        slopes = [f.slope for f in flows.values()] or [np.full(len(envelope), np.inf)]
        ways = [way for row in later or () for way in row]
        free = self._climbed(envelope, np.minimum.reduce(slopes), ways)
        self.value = np.tile(free, (len(land.offers), 1))
        self.first: dict[int, Floats] = {}
        """[version]: a round of it first, then what is left"""
        self.targets = {target for row in land.exits for _, target in row}

    def run(self, passes: int) -> Potential:
        if not self.land.one_way:  # first as if switches could follow each other: that takes no time
            while self._pass(rounds_first=False) and passes > 0:
                passes -= 1
        for _ in range(1 if self.land.one_way else _PASSES):
            if not self._pass(rounds_first=True):
                break
        first = np.array([self.first.get(v, row) for v, row in enumerate(self.value)])
        return Potential(self.prices, self.land.grid, self.value * (1 - ROUNDING), first * (1 - ROUNDING))

    def _pass(self, rounds_first: bool) -> bool:
        """Whether it raised anything."""
        changed = False
        for v in reversed(range(len(self.value))):
            found, before = self._climbed(*self._own(v), list(self._exits(v))), self.value[v, -1]
            # Of two that hold one is taken: lines between the higher of both would be too high.
            if found[-1] >= before:
                self.value[v] = found
            raised = bool(found[-1] > before * (1 + _ENOUGH))
            changed = changed or raised
            if rounds_first and v in self.flows and v in self.targets and (raised or v not in self.first):
                self.first[v] = self._round_first(v, self.flows[v])
                changed = True
        return changed

    def _own(self, version: int) -> tuple[Floats, Floats]:
        """What it costs to flow through cells, and per loss; where nobody can train, there is no way."""
        flow, never = self.flows.get(version), np.full(len(self.land.grid) - 1, np.inf)
        return (never, never) if flow is None else (flow.cost, flow.slope)

    def _climbed(self, cost: Floats, slope: Floats, exits: Sequence[Exit]) -> Floats:
        from takifugu.plan.compiled import flows as loops

        begin = np.cumsum([0, *(len(x.grid) for x in exits)])
        fee, jump = np.array([x.fee for x in exits]), np.array([x.jump for x in exits])
        point = np.concatenate([np.zeros(0), *(x.grid for x in exits)])
        left = np.concatenate([np.zeros(0), *(x.left for x in exits)])
        found: Floats = loops.climb(self.land.grid, cost, slope, (begin, fee, jump, point, left), self.most)
        return found

    def _exits(self, version: int) -> Iterator[Exit]:
        if self.later is not None:
            yield from self.later[version]
        for number, target in self.land.exits[version]:
            switch = self.land.problem.switches[number]
            left = self.first.get(target, self.value[target])
            yield Exit(self.prices.fee(switch), switch.loss_jump, self.land.grid, left)

    def _round_first(self, version: int, flow: Flow) -> Floats:
        """At most what a round of the version and then the rest cost, in lines between points."""
        value: Floats = self.value[version]
        if not len(flow.shares):
            return value
        from takifugu.plan.compiled import flows as loops

        curve, c = self.land.problem.versions[version].curve, flow.charges
        there, shape = self.land.ground.arrivals(version, flow.shares), shape_of(curve)
        pieces = 1 if shape is None or (c.low == c.high).all() else _PIECES
        share = c.low[:, None] + (c.high - c.low)[:, None] * np.arange(1, pieces + 1) / pieces
        limit = asymptotes(curve, share) if pieces > 1 else share
        low, chord = loops.rounds_first(
            self.land.grid,
            value,
            (there.cell, there.above, there.done),
            c.left,
            c.right,
            shape or (False, 0.0, 0.0),
            share,
            limit,
            pieces,
        )
        low = np.minimum(np.maximum.accumulate(low), self.most)
        chord = np.minimum(np.minimum.accumulate(chord[::-1])[::-1], self.most)
        if not self.land.ground.smooth[version]:
            chord = np.full(len(chord), -np.inf)  # rounds may not be concave in the loss
        # Three bounds, each a line in a cell: the value itself, the chord, and what holds at its lower end.
        rows = np.array([[value[:-1], value[1:]], [chord[:-1], chord[1:]], [low[:-1], low[:-1]]])
        best = rows[rows.sum(axis=1).argmax(axis=0), :, np.arange(len(low) - 1)]
        first = np.minimum(np.append(best[:, 0], np.inf), np.append(np.inf, best[:, 1]))
        if self.later is not None:  # the phase may end while that round is under way
            first = np.minimum(first, self._climbed(*self._own(version), self.later[version][:1]))
        return np.asarray(first)


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
