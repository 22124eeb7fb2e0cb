"""Who of a team comes: policies without a plan go ahead with whoever is there.

A round of a team begins at once with those of its members who are there and stay until its end. If nobody is,
it begins when the first of them comes.
"""

from __future__ import annotations

from bisect import bisect_right
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


class _Crowd(NamedTuple):
    """Members of a team who are there from one coming or going to the next, and the first to leave."""

    used: Used
    cost: RoundCost
    until_s: float


class _Team(NamedTuple):
    members: Used
    who: Ints
    opens: Floats
    """[member, window]"""
    closes: Floats
    moments: list[float]
    """When one of them comes or goes"""
    crowds: dict[tuple[int, int], _Crowd | None]
    """By version, and by how many of the moments are over"""


class Turnout:
    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self._opens, closes = fleet.window_table
        self._closes = np.array(
            [[at_most(b) if np.isfinite(b) else b for b in row] for row in closes.tolist()]
        )
        self._last_opening = float(self._opens.max(where=self._opens < np.inf, initial=-np.inf))
        self._teams: dict[int, _Team] = {}

    def of(self, version: int, used: Used, ready_s: float) -> Muster | None:
        """The next round of a team; nothing, if none of its members ever comes again for long enough."""
        return next(self._held(version, used, ready_s), None)

    def largest(self, version: int, used: Used, ready_s: float) -> Muster | None:
        """The round with the most samples, at whatever moment it can be held; the earliest of equals."""
        return max(self._held(version, used, ready_s), key=lambda m: sum(m.used.values()), default=None)

    def more_to_come(self, clock_s: float) -> bool:
        return clock_s < self._last_opening

    def _held(self, version: int, used: Used, ready_s: float) -> Iterator[Muster]:
        """Rounds of a team: now, and whenever somebody comes."""
        team, start_s = self._team(used), ready_s
        while start_s < np.inf:
            crowd = self._there(version, team, start_s)
            if crowd is not None and start_s + crowd.cost.time_s > crowd.until_s:
                crowd = self._staying(version, team, start_s, crowd)
            if crowd is not None:
                yield Muster(start_s, crowd.used, crowd.cost)
            start_s = float(team.opens.min(where=team.opens > start_s, initial=np.inf))

    def _team(self, used: Used) -> _Team:
        key = id(used)
        if key not in self._teams:  # which keeps `used`, so its id stays its own
            who = np.fromiter(used, dtype=np.int64)
            opens, closes = self._opens[who], self._closes[who]
            moments = np.unique(np.concatenate([opens, closes], axis=None))
            self._teams[key] = _Team(used, who, opens, closes, moments.tolist(), {})
        return self._teams[key]

    def _there(self, version: int, team: _Team, clock_s: float) -> _Crowd | None:
        key = (version, bisect_right(team.moments, clock_s))
        if key not in team.crowds:
            team.crowds[key] = self._crowd(version, team, (team.opens <= clock_s) & (team.closes > clock_s))
        return team.crowds[key]

    def _staying(self, version: int, team: _Team, start_s: float, crowd: _Crowd) -> _Crowd | None:
        """Without those who leave before the end; the round may then be shorter."""
        found: _Crowd | None = crowd
        while found is not None and start_s + found.cost.time_s > found.until_s:
            whole = (team.opens <= start_s) & (team.closes >= start_s + found.cost.time_s)
            in_it = np.array([[int(i) in found.used] for i in team.who])
            found = self._crowd(version, team, whole & in_it)
        return found

    def _crowd(self, version: int, team: _Team, windows: NDArray[np.bool_]) -> _Crowd | None:
        """Members with one of these windows."""
        there = windows.any(axis=1)
        if not there.any():
            return None
        used = {int(i): team.members[int(i)] for i in team.who[there]}
        until = np.where(windows, team.closes, -np.inf).max(axis=1)[there].min()
        return _Crowd(used, self.fleet.round_cost(version, used), float(until))
