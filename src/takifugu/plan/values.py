"""What is left to pay, counted in whole rounds: estimates that guide.

Under prices of time and rounds a plan is a path over losses alone: from loss l, a round with share x of
version m costs c_m(x) and leads to F_m(l, x). `Terrain.estimate` solves that path problem by interpolation
between grid points: close, but no bound (`potentials.py` has those). See docs/decisions/104-whole-rounds.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from takifugu.plan.curves import Floats, FlowCurve
from takifugu.plan.potentials import Landscape, Potential
from takifugu.plan.problem import Problem
from takifugu.plan.relaxation import Offers
from takifugu.plan.rounds import Arrivals, Charges, Prices, charges

Ints = NDArray[np.int64]


def merged(all_charges: Charges, keep: NDArray[np.bool_]) -> Charges:
    """Fewer intervals: each runs up to the next upper end that is kept, at its first part's lower price."""
    ends = np.flatnonzero(keep)
    firsts = np.concatenate([[0], ends[:-1] + 1])
    single = firsts == ends
    left = all_charges.left[firsts]
    right = np.where(single, all_charges.right[ends], left)
    return Charges(all_charges.low[firsts], all_charges.high[ends], left, right, all_charges.at_high[ends])


@dataclass(frozen=True)
class Values:
    """Per version a grid of losses; per price and grid point what is left to pay."""

    prices: tuple[Prices, ...]
    grids: tuple[Floats, ...]
    value: tuple[Floats, ...]
    """[version][price, point]: before a switch or a round."""
    after_switch: tuple[Floats, ...]
    """[version][price, point]: when a round must follow."""

    def at(self, version: int, loss: Floats, price: int = 0) -> Floats:
        """Linear between points; nothing is left to pay at or below the target."""
        grid = self.grids[version]
        return np.where(loss <= grid[0], 0.0, np.interp(loss, grid, self.value[version][price]))

    def potentials(self) -> tuple[Potential, ...]:
        """One for each price; of values on one grid for all versions."""
        rows = [np.stack([v[k] for v in self.value]) for k in range(len(self.prices))]
        return tuple(Potential(p, self.grids[0], row) for p, row in zip(self.prices, rows, strict=True))

    def from_start(self, problem: Problem) -> Floats:
        """[price]: a value (or bound) of the whole plan's energy, limits priced in."""
        start = problem.version_index[problem.start_version]
        here = np.array([problem.start_loss])
        whole = np.array([float(self.at(start, here, p)[0]) for p in range(len(self.prices))])
        seconds = max(problem.time_limit - problem.start_time_s, 0.0)
        per_second = np.array([p.per_second for p in self.prices])
        per_round = np.array([p.per_round for p in self.prices])
        return np.asarray(whole - per_second * seconds - per_round * (problem.max_rounds or 0))


@dataclass
class Terrain:
    """The problem as a path over losses: versions' offers, switches, and grids that follow the prices."""

    problem: Problem
    offers: Sequence[Offers | None]
    cells: int = 150
    check: Callable[[], None] = lambda: None
    """Raises when time is up."""
    points: Floats | None = None
    """The grid of losses, where it is given."""
    _arrivals: dict[int, Arrivals] = field(default_factory=dict, repr=False)
    _landings: dict[float, tuple[Ints, Floats]] = field(default_factory=dict, repr=False)
    _ground: dict[int, Arrivals] | None = field(default=None, repr=False)
    """[version]: where rounds with any share of the fleet's grid lead, if phases share that"""

    def __post_init__(self) -> None:
        self.grid = self._drawn_grid() if self.points is None else self.points
        index = self.problem.version_index
        self.switches = [(index[s.source], index[s.target], s) for s in self.problem.switches]
        down = all(target > source for source, target, _ in self.switches)
        self.passes = 1 if down else 3
        self.usable = [
            o is not None and isinstance(v.curve, FlowCurve)
            for v, o in zip(self.problem.versions, self.offers, strict=True)
        ]
        self.sound = all(o is None or ok for o, ok in zip(self.offers, self.usable, strict=True))
        """Whether every version that can be trained has a curve these bounds can follow."""

    def _drawn_grid(self) -> Floats:
        some = [o and o.sketch() for o in self.offers]  # enough to see where values climb
        grid = Landscape.of(self.problem, some, self.cells).grid
        # Just above the target a whole round is left to pay: a step, so two points close together.
        step = grid[0] + 1e-8 * max(abs(grid[0]), 1e-3)
        return np.unique(np.concatenate([grid, [step]]))

    # Estimates.

    def estimate(self, prices: Sequence[Prices], later: Sequence[Floats] | None = None) -> Values:
        """Values on the rough grid at several prices at once, on a third of the shares. `later`: what they
        may be at most, as one may also wait for the next phase (`phases.py`)."""
        cheap = {v: _all_charges(self.offers[v], prices) for v in self.trainable()}  # type: ignore[arg-type]
        exact = any(o is not None and o.exact for o in self.offers)
        if exact and len(prices) > 1:  # complete lists keep other rows at other prices
            rows = [later and [row[k : k + 1] for row in later] for k in range(len(prices))]
            parts = [self.estimate([p], limit) for p, limit in zip(prices, rows, strict=True)]
            merge = [np.concatenate([x.value[v] for x in parts]) for v in range(len(self.offers))]
            after = [np.concatenate([x.after_switch[v] for x in parts]) for v in range(len(self.offers))]
            return Values(tuple(prices), parts[0].grids, tuple(merge), tuple(after))
        arrivals = {v: self.arrivals(v, cheap[v][0].high) for v in cheap}
        costs = {
            v: (np.array([c.left for c in row]), np.array([c.at_high for c in row]))
            for v, row in cheap.items()
        }
        return self._solve(prices, arrivals, costs, later)

    def trainable(self) -> list[int]:
        return [v for v, ok in enumerate(self.usable) if ok]

    def arrivals(self, version: int, shares: Floats) -> Arrivals:
        """On the rough grid; remembered, since most prices share their shares."""
        known = self._arrivals.get(version)
        if known is None or not np.array_equal(known.shares, shares):
            curve = self.problem.versions[version].curve
            assert isinstance(curve, FlowCurve)
            known = self._from_ground(version, shares) or Arrivals.of(curve, self.grid, shares)
            self._arrivals[version] = known
        return known

    def on_the_ground_of(self, other: Terrain) -> Terrain:
        """With the other's landings, on the same grid of losses: phases share them."""
        assert np.array_equal(self.grid, other.grid)
        if other._ground is None:
            other._ground = {}
        self._landings, self._ground = other._landings, other._ground
        return self

    def _from_ground(self, version: int, shares: Floats) -> Arrivals | None:
        """Of all shares once, then some of them; nothing, if they are not among those."""
        offers, curve = self.offers[version], self.problem.versions[version].curve
        if self._ground is None or offers is None or offers.exact:
            return None
        assert isinstance(curve, FlowCurve)
        if version not in self._ground:
            self._ground[version] = Arrivals.of(curve, self.grid, offers.share)
        full = self._ground[version]
        columns = np.minimum(np.searchsorted(full.shares, shares), len(full.shares) - 1)
        return full.take(columns) if np.array_equal(full.shares[columns], shares) else None

    def _landing(self, jump: float) -> tuple[Ints, Floats]:
        """[point]: where a switch with this jump leads: the point below, and the part of the way to the next
        one; the last point for all that is higher."""
        if jump not in self._landings:
            grid, land = self.grid, self.grid + jump
            at = np.clip(np.searchsorted(grid, land, side="right") - 1, 0, len(grid) - 2)
            part = (land - grid[at]) / (grid[at + 1] - grid[at])
            self._landings[jump] = at, np.minimum(part, 1.0)
        return self._landings[jump]

    def _solve(
        self,
        prices: Sequence[Prices],
        arrivals: dict[int, Arrivals],
        costs: dict[int, tuple[Floats, Floats]],
        later: Sequence[Floats] | None,
    ) -> Values:
        count, grids = len(prices), [self.grid] * len(self.offers)
        cap = np.array([_ceiling(self.problem, costs, p) for p in range(count)])
        value = [np.tile(cap[:, None], (1, len(g))) for g in grids]
        after = [np.tile(cap[:, None], (1, len(g))) for g in grids]
        for number in range(self.passes):
            for v in reversed(range(len(grids))):
                self.check()
                limit = np.full((count, len(grids[v])), np.inf)
                if later is not None:
                    limit = later[v].copy()
                for source, target, switch in self.switches:
                    if source == v and self.usable[target]:
                        fee = np.array([price.fee(switch) for price in prices])
                        at, part = self._landing(switch.loss_jump)
                        low, high = after[target][:, at], after[target][:, at + 1]
                        np.minimum(limit, fee[:, None] + low + part * (high - low), out=limit)
                if not self.usable[v]:  # nobody can train it: a switch is all there is
                    value[v] = np.minimum(limit, cap[:, None])
                    continue
                if number and (limit >= value[v]).all():
                    continue  # exits are no better than what is known: nothing changes
                value[v], first = _walk_up_rounds_first(arrivals[v], *costs[v], limit, cap)
                after[v] = np.minimum(first, cap[:, None])
        return Values(tuple(prices), tuple(grids), tuple(value), tuple(after))


def _ceiling(problem: Problem, costs: dict[int, tuple[Floats, Floats]], price: int) -> float:
    """More than any sensible plan costs; stands in for infinity where no version moves."""
    dearest = max((float(c[price].max()) for _, c in costs.values()), default=1.0)
    return 1e4 * max(dearest, 1e-12) * min(problem.max_rounds or 1000, 1000)


def _all_charges(offers: Offers, prices: Sequence[Prices]) -> list[Charges]:
    """On a third of the shares. A round's price is added to what rounds cost without it."""
    if offers.exact or any(p.energy != 1.0 for p in prices):
        return [thinned(charges(offers, p)) for p in prices]
    # What `thinned` keeps is all that is looked at.
    ends = np.flatnonzero(_third(int(np.isfinite(offers.tangent_j).any(axis=0).sum())))
    firsts = np.concatenate([[0], ends[:-1] + 1])
    low, single = np.concatenate([[0.0], offers.share[:-1]])[firsts], firsts == ends
    tangent, left = np.ascontiguousarray(offers.tangent_j[:, ends]), offers.left_j[:, firsts]
    known: dict[float, tuple[Floats, Floats]] = {}
    found = []
    for p in prices:
        if p.per_second not in known:
            timed = p.per_second * offers.time_s[:, None]
            known[p.per_second] = ((left + timed).min(axis=0), (tangent + timed).min(axis=0))
        left_c, at_high = (x + p.per_round for x in known[p.per_second])
        right_c = np.where(single, at_high, left_c)
        found.append(Charges(low, offers.share[ends], left_c, right_c, at_high))
    return found


def thinned(all_charges: Charges) -> Charges:
    keep = _third(len(all_charges.high))
    return all_charges if keep.all() else merged(all_charges, keep)


def _third(count: int) -> NDArray[np.bool_]:
    """Which of so many intervals of shares are kept; all, if they are few."""
    keep = np.full(count, count < 60)
    keep[::-3] = True
    keep[:1] = True  # from no data at no cost: merged with others it would be free
    return keep


def walk_up(arrivals: Arrivals, left: Floats, costs: Floats, limit: Floats, cap: Floats) -> Floats:
    """[price, point]: the least of (round + what is left after it) and (switch), from the target upwards.

    The last round uses just the data it needs, between two shares of the list; `left` is the price just
    above the smaller of them.
    """
    from takifugu.plan.compiled import paths  # compiled: only who needs values pays for it

    value = np.zeros((len(costs), len(arrivals.grid)))
    ceiling = _ceiling_of(arrivals, left, costs, limit, cap)
    paths.walk_up(arrivals.cell, arrivals.part, arrivals.unfinished, costs, ceiling, value)
    return value


def _walk_up_rounds_first(
    arrivals: Arrivals, left: Floats, costs: Floats, limit: Floats, cap: Floats
) -> tuple[Floats, Floats]:
    """The same, and the least of (round + what is left after it), for when a round must come first."""
    from takifugu.plan.compiled import paths

    value = np.zeros((len(costs), len(arrivals.grid)))
    ceiling = _ceiling_of(arrivals, left, costs, limit, cap)
    rounds = (arrivals.cell, arrivals.part, arrivals.unfinished, costs)
    return value, paths.walk_up_rounds_first(*rounds, ceiling, value)


def _ceiling_of(arrivals: Arrivals, left: Floats, costs: Floats, limit: Floats, cap: Floats) -> Floats:
    """[price, point]: the least of the last round and of what does not begin with a round."""
    k = np.maximum(arrivals.finish, 0)
    last = np.where(arrivals.finish >= 0, left[:, k] + arrivals.short * (costs - left)[:, k], np.inf)
    return np.minimum(np.minimum(last, limit), cap[:, None])
