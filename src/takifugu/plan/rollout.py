"""Plans that follow values: at each round the choice with the least (cost + what is left to pay after it).

Values are known at several prices. At each round the price counts that suits what is left of the time and
of the rounds: the one with the highest bound for the rest of the way. So a plan that falls behind pays
more for speed, and one that is ahead saves energy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from takifugu.plan.curves import Floats
from takifugu.plan.families import Family
from takifugu.plan.plan import Decision
from takifugu.plan.potentials import Prices
from takifugu.plan.problem import Problem
from takifugu.plan.values import Values

Ints = NDArray[np.int64]

_MOST_ROUNDS = 5000
_SWITCH_REGRET = 0.02
"""A switch is looked at only where values see at most this relative loss in it."""


@dataclass(frozen=True)
class Menu:
    """A version's rounds worth having at one price: no other gives as much for less."""

    rows: Ints
    cost: Floats
    share: Floats


def menu(family: Family, prices: Prices) -> Menu:
    cost = family.energy_j + prices.per_second * family.time_s + prices.per_round
    order = np.lexsort((cost, -family.share))
    best = np.minimum.accumulate(np.concatenate([[np.inf], cost[order][:-1]]))
    rows = order[cost[order] < best]
    return Menu(rows, cost[rows], family.share[rows])


@dataclass(frozen=True)
class Trail:
    """A plan before its numbers are replayed: for each round a version and a row of its family."""

    steps: tuple[tuple[int, int], ...]
    energy_j: float
    time_s: float


@dataclass
class Guideposts:
    """What all rollouts of a problem share."""

    problem: Problem
    families: Sequence[Family | None]
    values: Values
    check: Callable[[], None] = lambda: None
    _menus: dict[tuple[int, int], Menu] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        index = self.problem.version_index
        self._exits: list[list[tuple[int, float, float, float]]] = [[] for _ in self.problem.versions]
        for s in self.problem.switches:
            if self.families[index[s.target]] is not None:
                self._exits[index[s.source]].append((index[s.target], s.energy_j, s.time_s, s.loss_jump))
        self._per_second = np.array([p.per_second for p in self.values.prices])
        # Without a cap rounds are free, and infinity times nothing is no number.
        self._per_round = np.array([p.per_round for p in self.values.prices])
        self._capped = bool(self._per_round.any())

    def _menu(self, version: int, price: int) -> Menu:
        known = self._menus.get((version, price))
        if known is None:
            family = self.families[version]
            assert family is not None
            known = self._menus[version, price] = menu(family, self.values.prices[price])
        return known

    def _price(self, version: int, loss: float, seconds: float, rounds: float) -> int:
        """The price with the highest bound for the rest of the way."""
        grid = self.values.grids[version]
        at = np.clip((np.searchsorted(grid, loss) - 1), 0, len(grid) - 2)
        part = (loss - grid[at]) / (grid[at + 1] - grid[at])
        rows = self.values.value[version]
        here = rows[:, at] + part * (rows[:, at + 1] - rows[:, at])
        here = here - self._per_second * seconds
        return int((here - self._per_round * rounds if self._capped else here).argmax())

    def follow(self, deadline_s: float, most_rounds: float) -> Trail | None:
        """The plan that the values lead to, windows aside; nothing if it gets stuck or late."""
        problem, values = self.problem, self.values
        version, loss = problem.version_index[problem.start_version], problem.start_loss
        energy, clock = 0.0, problem.start_time_s
        steps: list[tuple[int, int]] = []
        while loss > problem.loss_limit:
            if len(steps) >= min(problem.max_rounds or _MOST_ROUNDS, _MOST_ROUNDS):
                return None
            price = self._price(version, loss, deadline_s - clock, most_rounds - len(steps))
            prices = values.prices[price]
            best, chosen = np.inf, None
            stay = float(values.at(version, np.array([loss]), price)[0])
            for target, energy_j, time_s, jump in ((version, 0.0, 0.0, 0.0), *self._exits[version]):
                if target == version and self.families[version] is None:
                    continue
                fee = energy_j + prices.per_second * time_s
                if target != version:
                    left = fee + float(values.at(target, np.array([loss + jump]), price)[0])
                    if left > stay * (1 + _SWITCH_REGRET):
                        continue
                offer = self._menu(target, price)
                after = problem.versions[target].curve.step(np.asarray(loss + jump), offer.share)
                total = offer.cost + fee + values.at(target, after, price)
                k = int(total.argmin())
                if total[k] < best:
                    best, chosen = (
                        float(total[k]),
                        (target, int(offer.rows[k]), energy_j, time_s, float(after[k])),
                    )
            if chosen is None:
                return None
            target, row, energy_j, time_s, after_loss = chosen
            if target == version and after_loss >= loss - 1e-12 * abs(loss):
                return None
            family = self.families[target]
            assert family is not None
            energy += energy_j + float(family.energy_j[row])
            clock += time_s + float(family.time_s[row])
            if clock > problem.time_limit:
                return None
            version, loss = target, after_loss
            steps.append((target, row))
        return Trail(tuple(steps), energy, clock)

    def decisions(self, trail: Trail) -> tuple[Decision, ...]:
        found = []
        for version, row in trail.steps:
            family = self.families[version]
            assert family is not None
            found.append(Decision(version, family.used(row)))
        return tuple(found)
