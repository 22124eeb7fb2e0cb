"""From an estimate of what is left to pay to a function that provably bounds it from below.

A piecewise linear V is valid for a version if no round gains more than it costs: V(l) - V(F(l, x)) <= c(x)
for every loss and every share. `gains` bounds the largest gain per cost on every cell of losses and every
interval of shares; slopes are then divided by the largest ratio of all rounds that pass over them.
Lowering a slope never breaks another inequality, so switches are dealt with afterwards, by lowering.
docs/decisions/104-whole-rounds.md has the proof; names follow it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from takifugu.plan.certificate_grid import bends, fine_grid, step_points, steps_in, that_matter
from takifugu.plan.curves import Floats, SmoothCurve, asymptotes, shape_of
from takifugu.plan.potentials import ROUNDING, Prices
from takifugu.plan.values import Arrivals, Charges, Terrain, Values, charges, merged, thinned, walk_up

Ints = NDArray[np.int64]

_LEAST = 0.9
"""Slopes are raised by at most one over this where no round forbids it."""
_HOT = 0.93
"""Shares whose rounds come this close to being worth while are looked at closely."""
_SPLIT = 1.0005
_PIECES = 8
"""Rounds that seem to gain more than this are looked at again, their interval of shares in pieces."""
_REPAIRS = 2
_STEP = 0.05
"""Steps of other versions count if they are this high, as a part of the cheapest round."""
_LOOKS = 3
"""So often steps are given points of their own, where a repair takes too much of a value."""
LOST = 0.002


@dataclass(frozen=True)
class Later:
    """What is left to pay if one waits for the next phase."""

    grids: tuple[Floats, ...]
    """[version]"""
    bounds: tuple[tuple[Floats, ...], ...]
    """[version]: each holds, and is linear between grid points"""


def certify(
    terrain: Terrain,
    estimate: Values,
    price: int,
    most_j: float,
    cells: Sequence[int],
    later: Later | None = None,
    lost: float = LOST,
) -> Values:
    """A lower bound on what is left to pay, from one of the estimate's prices. `cells`: how finely each
    version is looked at; values above `most_j` are of no interest and capped. `later`: the next phase.
    `lost`: where a repair takes more than this part of a value, that version is looked at again."""
    prices = estimate.prices[price]
    versions = len(terrain.offers)
    grids = [terrain.grid] * versions
    value: list[Floats] = [np.full(len(terrain.grid), most_j) for _ in range(versions)]
    ways: dict[int, _Rounds] = {}
    cap, matter = np.array([most_j]), that_matter(terrain, estimate, price)
    for v in reversed(terrain.trainable()):  # switches mostly lead to later ones: these come first
        terrain.check()
        offers, curve = terrain.offers[v], terrain.problem.versions[v].curve
        assert offers is not None
        assert isinstance(curve, SmoothCurve)
        rough = np.minimum(estimate.value[v][price], most_j)
        full = charges(offers, prices)
        coarse = thinned(full)
        close = _closely(terrain, v, full, coarse, rough)
        close_look = v in matter
        grid = fine_grid(terrain, curve, rough, coarse, cells[v] if close_look else cells[v] // 4)
        exits = list(_likely_exits(terrain, v, estimate, price, later))
        steps = [
            steps_in(grids[target], value[target], _STEP * float(close.at_high.min())) - switch.loss_jump
            for source, target, switch in terrain.switches
            if source == v and target in ways
        ]
        if later is not None:
            steps.append(bends(later.grids[v], np.maximum.reduce(later.bounds[v]), grid))
        grid = np.unique(np.concatenate([grid, *(x[(x > grid[0]) & (x < grid[-1])] for x in steps)]))
        highest = -np.inf
        for look in range(1 + _LOOKS):
            limit = np.minimum.reduce([np.full(len(grid), np.inf), *(x.left(grid) for x in exits)])
            limit = np.minimum.accumulate(limit[::-1])[::-1]  # values never fall with the loss
            way = _Rounds.of(curve, grid, close, offers.exact)
            guess = walk_up(way.arrivals, close.left[None, :], close.at_high[None, :], limit[None, :], cap)[0]
            smooth = _sound(way, _flowing(way, limit, most_j))[0] if offers.exact else None
            if smooth is not None and smooth[-1] >= guess[-1] * (1 - lost):
                sound = smooth
            else:
                sound, ratio = _sound(way, guess)
                if look == 0 and close_look and smooth is None and sound[-1] < guess[-1] * (1 - lost):
                    smooth = _sound(way, _flowing(way, limit, most_j))[0]  # quicker than a closer look
                if smooth is not None:  # the higher of two is as sound as each of them
                    sound, _ = _sound(way, np.maximum(sound, smooth))
            if sound[-1] > highest:
                highest, grids[v], value[v], ways[v] = float(sound[-1]), grid, sound, way
            if look == _LOOKS or not close_look or sound[-1] >= guess[-1] * (1 - lost):
                break
            more = step_points(curve, grid, guess, ratio, close)
            if not len(more):
                break
            grid = np.unique(np.concatenate([grid, more]))
    all_exits = _Exits(terrain, prices, grids, value, ways, later)
    _switched(all_exits, most_j)
    for v in range(versions):
        if v not in ways:  # nobody can train it: a switch comes first, or the next phase
            value[v] = _only_exits(all_exits, v, most_j)
    rows = tuple((x - ROUNDING * np.abs(x))[None, :] for x in value)
    return Values((prices,), tuple(grids), rows, rows)


def _sound(way: _Rounds, guess: Floats) -> tuple[Floats, Floats]:
    """The guess, repaired, and what rounds seemed to gain per cost before."""
    ratio, sound = gains(way, guess), guess
    for k in range(_REPAIRS):
        sound = _repaired(way, sound, guess, gains(way, sound) if k else ratio)
    return sound, ratio


def _flowing(way: _Rounds, limit: Floats, most_j: float) -> Floats:
    """What is left to pay if rounds could be cut short (decision 101). Where there are few node sets, whole
    rounds make steps all the way up, and a repair takes much off them; nothing of this, which has none."""
    grid, close = way.arrivals.grid, way.close
    speed = way.curve.speed(0.5 * (grid[1:] + grid[:-1])[:, None], close.high[None, :])
    with np.errstate(divide="ignore", invalid="ignore"):
        slope = np.where(speed > 0.0, close.left[None, :] / speed, np.inf).min(axis=1)
    total = np.concatenate([[0.0], np.cumsum(np.minimum(slope * np.diff(grid), most_j))])
    room = np.minimum.accumulate(np.minimum(limit - total, 0.0))
    return np.asarray(np.clip(total + room, 0.0, most_j))


def _closely(terrain: Terrain, version: int, full: Charges, coarse: Charges, rough: Floats) -> Charges:
    """All intervals of shares near those worth while; a third of the others."""
    if len(coarse.high) == len(full.high):
        return full
    with np.errstate(divide="ignore", invalid="ignore"):
        gain = (rough[:, None] - terrain.arrivals(version, coarse.high).ahead(rough)) / coarse.left
    hot = gain.max(axis=0) > _HOT
    ends = np.searchsorted(full.high, coarse.high)
    keep = np.zeros(len(full.high), dtype=bool)
    keep[ends] = True
    for j in np.flatnonzero(hot):
        keep[(ends[j - 1] + 1 if j else 0) : ends[j] + 1] = True
    return merged(full, keep)


@dataclass(frozen=True)
class _Exit:
    """A way to go on other than by a round: a switch, or waiting for the next phase."""

    fee: float
    jump: float
    grid: Floats
    bounds: tuple[Floats, ...]
    """On what is left where it leads: each holds, and is linear between grid points."""

    def left(self, loss: Floats) -> Floats:
        best = np.maximum.reduce([np.interp(loss + self.jump, self.grid, row) for row in self.bounds])
        return np.asarray(self.fee + best)


def _likely_exits(
    terrain: Terrain, version: int, estimate: Values, price: int, later: Later | None
) -> Iterator[_Exit]:
    """Exits, to other versions by the estimate: for guesses. `_switched` proves what has to be proven."""
    if later is not None:
        yield _Exit(0.0, 0.0, later.grids[version], later.bounds[version])
    for source, target, switch in terrain.switches:
        if source == version and terrain.usable[target]:
            fee, after = estimate.prices[price].fee(switch), estimate.after_switch[target][price]
            yield _Exit(fee, switch.loss_jump, estimate.grids[target], (after,))


@dataclass(frozen=True)
class _Ahead:
    """A version's value after its rounds, and how far below its chords it may dip."""

    near: Floats
    """[point, interval]: after the interval's smallest share"""
    far: Floats
    """[point, interval]: after its largest"""
    across: Floats
    """[point, interval]: the dip across the interval of shares"""
    along_far: Floats
    """[cell, interval]: the dip along the cell, after the largest share"""
    along: Floats
    """[cell, interval]: the dip along the cell, after any share of the interval"""
    steepest: Floats
    """[cell, interval]: the steepest slope on the way of any such round"""

    @classmethod
    def of(cls, way: _Rounds, value: Floats, slopes: _Range) -> _Ahead:
        from takifugu.plan.compiled import gain_bounds

        there, before = way.arrivals, way.before
        return cls(
            *gain_bounds.ahead(
                there.grid,
                np.ascontiguousarray(value),
                slopes.floor,
                slopes.roof,
                (there.cell, there.above, there.done),
                (before.cell, before.above, before.done),
                way.weak,
                way.strong,
                way.close.high - way.close.low,
            )
        )


@dataclass(frozen=True)
class _Rounds:
    """One version's rounds on a fine grid."""

    curve: SmoothCurve
    close: Charges
    before: Arrivals
    arrivals: Arrivals
    weak: Floats
    strong: Floats
    speed: Floats
    """[cell, interval]: at least the largest speed per cost"""
    exact: bool

    @classmethod
    def of(cls, curve: SmoothCurve, grid: Floats, close: Charges, exact: bool) -> _Rounds:
        if exact:
            before = arrivals = Arrivals.of(curve, grid, close.high)
        else:
            before, arrivals = Arrivals.at_ends(curve, grid, close.low, close.high)
        weak, strong = curve.pull(grid[:, None], close.low[None, :], close.high[None, :])
        speed = _speed_per_cost(curve, grid[1:], close, exact)
        return cls(curve, close, before, arrivals, weak, strong, speed, exact)


def gains(way: _Rounds, value: Floats) -> Floats:
    """[cell, interval]: at least the largest gain per cost of any round from the cell with a share in the
    interval. Several bounds hold; the smallest counts."""
    from takifugu.plan.compiled import gain_bounds

    grid, close = way.arrivals.grid, way.close
    slopes = _Range(np.diff(value) / np.diff(grid))
    ahead = _Ahead.of(way, value, slopes)
    ratio = gain_bounds.gain_ratios(
        np.ascontiguousarray(value),
        ahead.near,
        ahead.far,
        ahead.across,
        ahead.along_far,
        ahead.along,
        ahead.steepest,
        close.left,
        close.right,
        way.speed,
        way.exact,
    )
    if not way.exact:
        cell, interval = np.nonzero(ratio > _SPLIT)
        finer = _split_gains(way.curve, grid, value, slopes, cell, interval, close)
        ratio[cell, interval] = np.minimum(ratio[cell, interval], finer)
    return ratio


def _split_gains(
    curve: SmoothCurve,
    grid: Floats,
    value: Floats,
    slopes: _Range,
    cell: Ints,
    interval: Ints,
    close: Charges,
) -> Floats:
    """The same bound for single pairs of cell and interval, both cut in pieces: each piece's largest share
    at the least cost on the line over the interval."""
    from takifugu.plan.compiled import gain_bounds

    part = np.linspace(0.0, 1.0, _PIECES + 1)
    shares = close.low[:, None] + (close.high - close.low)[:, None] * part[1:]
    costs = close.left[:, None] + (close.right - close.left)[:, None] * part[:-1]
    shape = shape_of(curve)
    if shape is not None:
        tables = (slopes.floor, slopes.roof, cell, interval, shares, asymptotes(curve, shares), costs)
        return gain_bounds.split_ratios(shape, grid, np.ascontiguousarray(value), *tables)
    share, cost = shares[interval, None, :], costs[interval, None, :]
    width = grid[cell + 1] - grid[cell]
    loss = (grid[cell, None] + width[:, None] * part)[:, :, None]
    here = (value[cell, None] + (value[cell + 1] - value[cell])[:, None] * part)[:, :, None]
    after = np.minimum(curve.step(loss, share), loss)
    left_j = np.where(after <= grid[0], 0.0, np.interp(after, grid, value))
    place = np.clip(np.searchsorted(grid, after, side="right") - 1, 0, len(grid) - 2)
    least, most = slopes(place[:, :-1], place[:, 1:])
    least = np.where(after[:, :-1] < grid[0], 0.0, least)
    along = np.minimum(
        (most - least) * (width / _PIECES)[:, None, None] * 0.25,
        np.maximum(left_j[:, 1:] - left_j[:, :-1], 0.0),
    )
    gain = np.maximum(here[:, 1:] - left_j[:, 1:], here[:, :-1] - left_j[:, :-1]) + along
    gain = np.minimum(gain, here[:, 1:] - left_j[:, :-1])
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.where(gain > 0.0, gain / cost, 0.0).max(axis=(1, 2), initial=0.0))


def _speed_per_cost(curve: SmoothCurve, loss: Floats, close: Charges, exact: bool) -> Floats:
    """[loss, interval]: at least the largest speed per cost in the interval."""
    with np.errstate(divide="ignore", invalid="ignore"):
        fast = curve.speed(loss[:, None], close.high[None, :])
        if exact:
            return np.asarray(fast / close.left)
        first = close.low == 0.0  # a line from nothing: speed over share never falls with the share
        slow = np.where(first, 0.0, curve.speed(loss[:, None], np.where(first, 1.0, close.low)[None, :]))
        if curve.convex_in_data:
            ends = np.maximum(np.where(slow > 0.0, slow / close.left, 0.0), fast / close.right)
        else:
            ends = fast / close.left
        return np.asarray(np.where(first, fast / close.right, ends))


class _Range:
    """The least and the greatest of a row between two places, for many pairs at once."""

    def __init__(self, row: Floats) -> None:
        self.least, self.most = [row], [row]
        step = 1
        while step < len(row):
            for table, pick in ((self.least, np.minimum), (self.most, np.maximum)):
                wider = table[-1].copy()
                wider[:-step] = pick(wider[:-step], table[-1][step:])
                table.append(wider)
            step *= 2
        self.count = len(row)
        self.floor, self.roof = np.array(self.least), np.array(self.most)

    def __call__(self, first: Ints, last: Ints) -> tuple[Floats, Floats]:
        last = np.maximum(last, first)
        level = _LOG[last - first + 1]
        one = level * self.count + first
        two = level * self.count + last - (1 << level) + 1
        return (
            np.minimum(self.floor.take(one), self.floor.take(two)),
            np.maximum(self.roof.take(one), self.roof.take(two)),
        )


_LOG = np.concatenate([[0], np.log2(np.arange(1, 1 << 16)).astype(np.int64)])


def _repaired(way: _Rounds, value: Floats, guess: Floats, ratio: Floats) -> Floats:
    """Slopes divided by the largest gain per cost (`ratio`) of all rounds that pass over them (below 1 it
    raises again what an earlier repair took too much of, but not above the guess)."""
    from takifugu.plan.compiled import gain_bounds

    worst = gain_bounds.worst_on_the_way(ratio, way.arrivals.cell, way.arrivals.done, _LEAST)
    return np.concatenate([[0.0], np.cumsum(np.minimum(np.diff(value) / worst, np.diff(guess)))])


@dataclass(frozen=True)
class _Exits:
    """All the ways out of every version: switches, whose ends change as values are lowered, and others."""

    terrain: Terrain
    prices: Prices
    grids: list[Floats]
    value: list[Floats]
    ways: dict[int, _Rounds]
    later: Later | None

    def of(self, version: int, after: Mapping[int, tuple[Floats, ...]]) -> Iterator[_Exit]:
        """`after`: bounds on a round of each version and what is left then."""
        if self.later is not None:
            yield _Exit(0.0, 0.0, self.later.grids[version], self.later.bounds[version])
        for source, target, switch in self.terrain.switches:
            if source == version and target in self.ways:
                yield _Exit(self.prices.fee(switch), switch.loss_jump, self.grids[target], after[target])


def _switched(exits: _Exits, most_j: float) -> None:
    """Lowers values until no exit leads to less than they say."""
    value, ways = exits.value, exits.ways
    after = {v: _round_first(way, value[v]) for v, way in ways.items()}
    for _ in range(50):
        changed = False
        for source in sorted(ways, reverse=True):
            exits.terrain.check()
            here = exits.grids[source]
            excess = np.zeros(len(here))
            for exit_ in exits.of(source, after):
                points = np.union1d(here, exit_.grid - exit_.jump)
                points = points[(points >= here[0]) & (points <= here[-1])]
                now = np.interp(points, here, value[source])
                land = points + exit_.jump
                # Each bound is linear between these points, and one of them is enough.
                left = [exit_.fee + np.minimum(np.interp(land, exit_.grid, x), most_j) for x in exit_.bounds]
                over = np.minimum.reduce([np.maximum((now - x)[1:], (now - x)[:-1]) for x in left])
                over = np.maximum.accumulate(np.maximum(np.append(over[:1], over), 0.0))
                # At each point the excess up to the next one, so that the line between lies above it.
                place = np.searchsorted(points, np.append(here[1:], here[-1]))
                np.maximum(excess, over[place], out=excess)
            if excess[-1] <= 1e-12 * most_j:
                continue
            lowered = value[source] - excess
            value[source] = np.minimum.accumulate(lowered[::-1])[::-1]
            after[source] = _round_first(ways[source], value[source])
            changed = True
        if not changed:
            return
    for row in value:  # never seen: switches that keep undercutting each other
        row[:] = 0.0


def _only_exits(exits: _Exits, version: int, most_j: float) -> Floats:
    """What is left to pay where no round can come first: never less from a higher loss, so the grid point
    below any loss gives a bound."""
    grid = exits.grids[version]
    here = np.concatenate([grid[:1], grid[:-1]])
    least = np.full(len(here), most_j)
    for exit_ in exits.of(version, {v: (exits.value[v],) for v in exits.ways}):
        np.minimum(least, exit_.left(here), out=least)
    return np.maximum.accumulate(least)


def _round_first(way: _Rounds, value: Floats) -> tuple[Floats, ...]:
    """Bounds on (a round, then what is left), each linear between points: by chords less their dips, by
    each cell's lower end, and the value itself."""
    from takifugu.plan.compiled import gain_bounds

    close = way.close
    slopes = _Range(np.diff(value) / np.diff(way.arrivals.grid))
    ahead = _Ahead.of(way, value, slopes)
    low_end, chord = gain_bounds.round_bounds(
        ahead.near,
        ahead.far,
        ahead.across,
        ahead.along_far if way.exact else ahead.along,
        close.left,
        close.right,
        way.exact,
    )
    shifted = np.maximum.accumulate(np.concatenate([low_end[:1], low_end[:-1]]))
    chords = np.minimum.accumulate(chord[::-1])[::-1]
    return chords, shifted, value
