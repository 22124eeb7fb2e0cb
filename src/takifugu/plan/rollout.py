"""Plans that follow values: at each round the choice that costs least for what it takes off the rest.

Values are known at several prices. At each round the price counts that suits what is left of the time and
of the rounds: the one with the highest bound for the rest of the way. So a plan that falls behind pays
more for speed, and one that is ahead saves energy. Where nodes come and go, values may be those of the phase
that the plan is in; then it is the phase's own time that is left.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from takifugu.plan.attendance import Attendance
from takifugu.plan.curves import Curve, Exponential, Floats, Power, shape_of
from takifugu.plan.families import Family
from takifugu.plan.plan import Decision
from takifugu.plan.problem import Problem
from takifugu.plan.rounds import Prices
from takifugu.plan.values import Values

Ints = NDArray[np.int64]

_MOST_ROUNDS = 5000
"""Where the loop is not compiled."""
_SWITCH_REGRET = 0.02
"""A switch is looked at only where values see at most this relative loss in it."""


@dataclass(frozen=True)
class Menu:
    """A version's rounds worth having at one price: no other gives as much for less."""

    family: Family
    rows: Ints
    cost: Floats
    share: Floats
    time_s: Floats
    asymptote: Floats
    """Of the version's curve at each share, where it is a known one"""


def menu(family: Family, prices: Prices, curve: Curve) -> Menu:
    cost = family.energy_j + prices.per_second * family.time_s + prices.per_round
    order = family.by_share
    best = np.minimum.accumulate(np.concatenate([[np.inf], cost[order][:-1]]))
    rows = order[cost[order] < best]
    share = family.share[rows]
    asymptote = curve.asymptote(share) if isinstance(curve, Exponential | Power) else np.zeros(len(rows))
    return Menu(family, rows, cost[rows], share, family.time_s[rows], asymptote)


@dataclass(frozen=True)
class _Round:
    """A round that might come next, and what it leads to."""

    ratio: float
    """Its cost (with its switch's, and that of waiting for it) over how much less is left to pay after it.
    With exact values the best choice has 1 and all others more. Comparing cost + rest instead would
    favour tiny rounds wherever values err a little."""
    version: int
    family: Family
    row: int
    start_s: float
    end_s: float
    energy_j: float
    loss: float


@dataclass(frozen=True)
class Trail:
    """A plan before it is replayed."""

    rounds: tuple[_Round, ...]
    energy_j: float
    time_s: float

    def decisions(self) -> tuple[Decision, ...]:
        known: dict[tuple[int, int], tuple[Family, Decision]] = {}  # most rounds repeat a team
        found = []
        for r in self.rounds:
            key = (id(r.family), r.row)
            if key not in known:
                known[key] = (r.family, Decision(r.version, r.family.used(r.row)))
            found.append(known[key][1])
        return tuple(found)


@dataclass
class Guideposts:
    """What all rollouts of a problem share."""

    problem: Problem
    families: Sequence[Family | None]
    values: Values
    """Of the phase that a plan is in, where there are phases"""
    attendance: Attendance | None = None
    """Who is there when; nothing: everybody, always."""
    check: Callable[[], None] = lambda: None
    phases: Sequence[tuple[float, Values]] = ()
    """When each ends, how many seconds more its values charge, and they themselves"""
    _menus: dict[tuple[int, int], Menu] = field(default_factory=dict, repr=False)
    _quick: Ready | None = None

    def __post_init__(self) -> None:
        problem, index = self.problem, self.problem.version_index
        self._exits: list[list[tuple[int, float, float, float]]] = [[] for _ in self.problem.versions]
        for s in self.problem.switches:
            if self.families[index[s.target]] is not None:
                self._exits[index[s.source]].append((index[s.target], s.energy_j, s.time_s, s.loss_jump))
        self._per_second = np.array([p.per_second for p in self.values.prices])
        # Without a cap rounds are free, and infinity times nothing is no number.
        self._per_round = np.array([p.per_round for p in self.values.prices])
        self._capped = bool(self._per_round.any())
        self._shapes = [shape_of(v.curve) for v in problem.versions]
        if None not in self._shapes and self.attendance is None and not self.phases:
            self._quick = Ready.of(self)

    def follow(self, caution: float = 0.0) -> Trail | None:
        """The plan that the values lead to; nothing if it gets stuck or late. `caution`: the part of the
        time and of the round cap that it holds back when it chooses its prices."""
        problem = self.problem
        if self._quick is not None:
            return self._quick.follow(self, caution)
        version, loss = problem.version_index[problem.start_version], problem.start_loss
        energy, clock = 0.0, problem.start_time_s
        deadline_s = clock + (problem.time_limit - clock) * (1.0 - caution)
        most_rounds = np.inf if problem.max_rounds is None else problem.max_rounds * (1.0 - caution)
        steps: list[_Round] = []
        while loss > problem.loss_limit:
            if len(steps) >= min(problem.rounds_limit, _MOST_ROUNDS):
                return None
            if self.attendance is not None:
                self.check()
            seconds = deadline_s - clock
            if self.phases:
                ends = [end for end, *_ in self.phases]
                end, self.values = self.phases[min(bisect_right(ends, clock), len(ends) - 1)]
                # What is held back of a phase is not handed on to the next one.
                seconds = (end - clock) * (1.0 - caution)
            price = self._price(version, loss, seconds, most_rounds - len(steps))
            best = self._best(version, loss, clock, price)
            if best is None or best.end_s > problem.time_limit:
                return None
            if best.version == version and best.loss >= loss - 1e-12 * abs(loss):
                return None
            energy += best.energy_j
            version, loss, clock = best.version, best.loss, best.end_s
            steps.append(best)
        return Trail(tuple(steps), energy, clock)

    def _price(self, version: int, loss: float, seconds: float, rounds: float) -> int:
        """The price with the highest bound for the rest of the way."""
        from takifugu.plan.compiled import trails

        grid, rows = self.values.grids[version], self.values.value[version]
        prices = (self._per_second, self._per_round, self._capped)
        return int(trails.best_price(grid, rows, *prices, loss, float(seconds), float(rounds)))

    def _best(self, version: int, loss: float, clock: float, price: int) -> _Round | None:
        """The best round from here, with or without a switch before it."""
        prices = self.values.prices[price]
        here = self._left(version, loss, price)
        best: _Round | None = None
        for target, energy_j, time_s, jump in ((version, 0.0, 0.0, 0.0), *self._exits[version]):
            fee = energy_j + prices.per_second * time_s
            if target != version:
                left = fee + self._left(target, loss + jump, price)
                if left > here * (1 + _SWITCH_REGRET):
                    continue
            found = self._round(target, loss + jump, clock + time_s, price, here, fee)
            if found is not None and (best is None or found.ratio < best.ratio):
                best = replace(found, energy_j=found.energy_j + energy_j)
        return best

    def _left(self, version: int, loss: float, price: int) -> float:
        from takifugu.plan.compiled import trails

        return trails.left_at(self.values.grids[version], self.values.value[version][price], loss)

    def _round(
        self, version: int, loss: float, ready_s: float, price: int, here: float, fee: float
    ) -> _Round | None:
        """The best round of one version, at once or after waiting for more nodes."""
        if self.families[version] is None:
            return None
        if self.attendance is None:
            family = self.families[version]
            assert family is not None
            return self._pick(self._menu(family, version, price), version, loss, ready_s, price, here, fee)
        now = self._open_round(version, loss, ready_s, price, here, fee)
        later_s = self.attendance.next_opening(ready_s)
        if later_s > self.problem.time_limit:
            return now
        wait = self.values.prices[price].per_second * (later_s - ready_s)
        later = self._open_round(version, loss, later_s, price, here, fee + wait)
        return min((r for r in (now, later) if r is not None), key=lambda r: r.ratio, default=None)

    def _menu(self, family: Family, version: int, price: int) -> Menu:
        """Families live as long as their fleet's attendance does, so their identity will do."""
        key = (id(family), price)
        if key not in self._menus:
            curve = self.problem.versions[version].curve
            self._menus[key] = menu(family, self.values.prices[price], curve)
        return self._menus[key]

    def _open_round(
        self, version: int, loss: float, start_s: float, price: int, here: float, fee: float
    ) -> _Round | None:
        """The best round that starts now, of nodes that stay until its end."""
        assert self.attendance is not None
        stay, until = self.attendance.stay(start_s), start_s
        for _ in range(6):
            mask = stay >= until
            family = self.attendance.family(version, mask) if mask.any() else None
            if family is None:
                return None
            offer = self._menu(family, version, price)
            found = self._pick(offer, version, loss, start_s, price, here, fee)
            if found is None:
                return None
            if stay[family.who(found.row)].min() >= found.end_s:
                return found
            until = found.end_s  # some leave before it ends: without them
        return None

    def _pick(
        self, offer: Menu, version: int, loss: float, start_s: float, price: int, here: float, fee: float
    ) -> _Round | None:
        from takifugu.plan.compiled import paths, trails

        grid, left = self.values.grids[version], self.values.value[version][price]
        shape = self._shapes[version]
        if shape is not None:
            rounds = (offer.share, offer.asymptote, offer.cost)
            k, ratio, after = trails.best_for_its_gain(shape, loss, *rounds, fee, here, grid, left)
        else:
            losses = self.problem.versions[version].curve.step(np.asarray(loss), offer.share)
            k, ratio = paths.best_for_its_gain(losses, offer.cost, fee, here, grid, left)
            after = float(losses[k])
        if k < 0:
            return None
        row = int(offer.rows[k])
        return _Round(
            ratio,
            version,
            offer.family,
            row,
            start_s,
            start_s + float(offer.time_s[k]),
            float(offer.family.energy_j[row]),
            after,
        )


@dataclass
class Ready:
    """The same, compiled, for fleets that are always there: menus are laid out as they are asked for."""

    exits: tuple[Ints, Ints, Floats, Floats, Floats]
    shapes: tuple[NDArray[np.bool_], Floats, Floats]
    value: Floats
    """[version, price, point]"""
    first: Ints
    last: Ints
    """[version, price]: where a menu begins and ends; -1: not laid out yet"""
    menus: list[tuple[int, Menu]] = field(default_factory=list)
    columns: tuple[Floats, Floats, Floats, Floats] = field(default_factory=lambda: (np.zeros(0),) * 4)
    """Of all menus one after another: cost, share, asymptote, time"""

    @classmethod
    def of(cls, posts: Guideposts) -> Ready:
        rows = [row for exits in posts._exits for row in exits]
        begins = np.cumsum([0, *(len(exits) for exits in posts._exits)])
        target = np.array([row[0] for row in rows], dtype=np.int64)
        energy, time_s, jump = (np.array([row[k] for row in rows], dtype=float) for k in (1, 2, 3))
        power, pace, exponent = zip(*(s for s in posts._shapes if s is not None), strict=True)
        shapes = (np.array(power), np.array(pace, dtype=float), np.array(exponent, dtype=float))
        shape = (len(power), len(posts.values.prices))
        first, last = np.full(shape, -1), np.full(shape, -1)
        for version, family in enumerate(posts.families):
            if family is None:  # an empty menu
                first[version] = last[version] = 0
        value = np.stack(posts.values.value)
        return cls((begins, target, energy, time_s, jump), shapes, value, first, last)

    def follow(self, posts: Guideposts, caution: float) -> Trail | None:
        from takifugu.plan.compiled import trails

        problem, clock, cap = posts.problem, posts.problem.start_time_s, posts.problem.max_rounds
        most = problem.rounds_limit
        version, price, place = (np.zeros(most, dtype=np.int64) for _ in range(3))
        start_s, end_s, loss = (np.zeros(most) for _ in range(3))
        here, count = (problem.version_index[problem.start_version], problem.start_loss, clock), 0
        while True:
            how, count, *missing = trails.follow(
                count,
                *here,
                (version, price, place, start_s, end_s, loss),
                problem.loss_limit,
                problem.time_limit,
                clock + (problem.time_limit - clock) * (1.0 - caution),
                np.inf if cap is None else cap * (1.0 - caution),
                posts.values.grids[0],
                self.value,
                posts._per_second,
                posts._per_round,
                self.exits,
                (self.first, self.last, *self.columns),
                self.shapes,
                _SWITCH_REGRET,
            )
            if how > -2:
                break
            self._lay_out(posts, *missing)
            if count:
                here = (int(version[count - 1]), float(loss[count - 1]), float(end_s[count - 1]))
        if how < 0:
            return None
        switches = {(s.source, s.target): s.energy_j for s in problem.switches}
        rounds, energy, before = [], 0.0, problem.start_version
        begins = np.array([begin for begin, _ in self.menus])
        for k in range(count):
            which = int(np.searchsorted(begins, place[k], side="right")) - 1
            offer = self.menus[which][1]
            row = int(offer.rows[place[k] - begins[which]])
            name = problem.versions[version[k]].name
            energy_j = float(offer.family.energy_j[row])
            energy_j += switches[before, name] if name != before else 0.0
            rounds.append(
                _Round(1.0, int(version[k]), offer.family, row, start_s[k], end_s[k], energy_j, loss[k])
            )
            energy, before = energy + energy_j, name
        return Trail(tuple(rounds), energy, float(end_s[count - 1]) if count else clock)

    def _lay_out(self, posts: Guideposts, version: int, price: int) -> None:
        family = posts.families[version]
        assert family is not None
        offer = posts._menu(family, version, price)
        more = (offer.cost, offer.share, offer.asymptote, offer.time_s)
        begin = len(self.columns[0])
        self.columns = tuple(np.concatenate(pair) for pair in zip(self.columns, more, strict=True))  # type: ignore[assignment]
        self.first[version, price], self.last[version, price] = begin, len(self.columns[0])
        self.menus.append((begin, offer))
