"""Who of a team comes: policies without a plan go ahead with whoever is there.

A round of a team begins at once with those of its members who are there and stay until its end. If nobody is,
it begins when the first of them comes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from takifugu.plan.curves import Floats
from takifugu.plan.fleet import Fleet, Ints, RoundCost, Used
from takifugu.plan.problem import at_most


class Muster(NamedTuple):
    """A round as it can be held."""

    start_s: float
    used: Used
    cost: RoundCost


class _Team(NamedTuple):
    members: Used
    who: Ints
    opens: Floats
    """[member, window]"""
    closes: Floats

    def there(self, start_s: float, until_s: float) -> NDArray[np.bool_]:
        """Members with one window that contains this whole stretch."""
        return np.asarray(((self.opens <= start_s) & (self.closes >= until_s)).any(axis=1))


class Turnout:
    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        rows = [[(a, at_most(b)) for a, b in node.windows] for node in fleet.problem.nodes]
        most = max(1, *map(len, rows))
        never = (np.inf, -np.inf)
        table = np.array([[*row, *[never] * (most - len(row))] for row in rows])
        self._opens, self._closes = table[..., 0], table[..., 1]
        self._teams: dict[int, _Team] = {}
        self._rated: dict[tuple[int, int, bytes], tuple[Used, RoundCost]] = {}

    def of(self, version: int, used: Used, ready_s: float) -> Muster | None:
        """The next round of a team; nothing, if none of its members ever comes again for long enough."""
        return next(self._held(version, used, ready_s), None)

    def largest(self, version: int, used: Used, ready_s: float) -> Muster | None:
        """The round with the most samples, at whatever moment it can be held; the earliest of equals."""
        return max(self._held(version, used, ready_s), key=lambda m: sum(m.used.values()), default=None)

    def _held(self, version: int, used: Used, ready_s: float) -> Iterator[Muster]:
        """Rounds of a team: now, and whenever somebody comes."""
        team, start_s = self._team(used), ready_s
        while start_s < np.inf:
            there = team.there(start_s, start_s)
            while there.any():
                members, cost = self._rate(version, team, there)
                staying = there & team.there(start_s, start_s + cost.time_s)
                if staying.sum() == there.sum():
                    yield Muster(start_s, members, cost)
                    break
                there = staying  # without those who leave the round may be shorter
            start_s = float(team.opens.min(where=team.opens > start_s, initial=np.inf))

    def more_to_come(self, clock_s: float) -> bool:
        return bool(((self._opens > clock_s) & (self._opens < np.inf)).any())

    def _team(self, used: Used) -> _Team:
        key = id(used)
        if key not in self._teams:  # which keeps `used`, so its id stays its own
            who = np.fromiter(used, dtype=np.int64)
            self._teams[key] = _Team(used, who, self._opens[who], self._closes[who])
        return self._teams[key]

    def _rate(self, version: int, team: _Team, there: NDArray[np.bool_]) -> tuple[Used, RoundCost]:
        key = (version, id(team.members), there.tobytes())
        if key not in self._rated:
            members = {int(i): team.members[int(i)] for i in team.who[there]}
            self._rated[key] = (members, self.fleet.round_cost(version, members))
        return self._rated[key]
