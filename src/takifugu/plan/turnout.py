"""Who of a team comes: policies without a plan go ahead with whoever is there.

A round of a team begins at once with those of its members who are there and stay until its end. If nobody is,
it begins when the first of them comes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
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


@dataclass
class _Crowd:
    """Members of a team who are there from one coming or going to the next, and the first to leave."""

    who: Ints
    amount: Ints
    there: NDArray[np.bool_]
    """[member of the team]"""
    cost: RoundCost
    until_s: float

    @cached_property
    def used(self) -> Used:
        """Written down only for those rounds that are held: most are just looked at."""
        return dict(zip(self.who.tolist(), self.amount.tolist(), strict=True))


class _Team(NamedTuple):
    members: Used
    who: Ints
    amount: Ints
    opens: Floats
    """[member, window]"""
    closes: Floats
    moments: list[float]
    """When one of them comes or goes"""
    crowds: dict[tuple[int, int], _Crowd | None]
    """By version, and by how many of the moments are over"""


class AtOnce(NamedTuple):
    """What rounds of several teams cost and give with those who are there, and how long these stay."""

    time_s: Floats
    energy_j: Floats
    share: Floats
    until_s: Floats


class Turnout:
    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self._opens, closes = fleet.window_table
        self._closes = np.array(
            [[at_most(b) if np.isfinite(b) else b for b in row] for row in closes.tolist()]
        )
        self._last_opening = float(self._opens.max(where=self._opens < np.inf, initial=-np.inf))
        moments = np.concatenate([self._opens, self._closes], axis=None)
        self._moments = np.unique(moments[np.isfinite(moments)]).tolist()
        self._teams: dict[int, _Team] = {}

    def of(self, version: int, used: Used, ready_s: float) -> Muster | None:
        """The next round of a team; nothing, if none of its members ever comes again for long enough."""
        return next(self._held(version, used, ready_s), None)

    def largest(self, version: int, used: Used, ready_s: float) -> Muster | None:
        """The round with the most samples, at whatever moment it can be held; the earliest of equals."""
        return max(self._held(version, used, ready_s), key=lambda m: sum(m.used.values()), default=None)

    def moments_over(self, clock_s: float) -> int:
        """How often somebody has come or gone by then; until the next time the same nodes are there."""
        return bisect_right(self._moments, clock_s)

    def at_once(self, version: int, amount: Floats, clock_s: float) -> AtOnce | None:
        """Of teams (`amount[team, node]`: samples used) that all have a member who is there; else nothing."""
        windows = (self._opens <= clock_s) & (self._closes > clock_s)
        until = np.where(windows, self._closes, -np.inf).max(axis=1)
        there = (amount > 0.0) & (until > clock_s)
        if not there.any(axis=1).all():
            return None
        costs, problem = self.fleet.by_version[version], self.fleet.problem
        times = costs.fixed_s + costs.sample_s * amount
        slowest = np.where(there, times, -np.inf).max(axis=1)
        joules = costs.fixed_j + costs.sample_j * amount + self.fleet.idle_w * (slowest[:, None] - times)
        return AtOnce(
            slowest + problem.overhead_s,
            np.where(there, joules, 0.0).sum(axis=1) + problem.overhead_j,
            self.fleet.shares(np.where(there, amount, 0.0)),
            np.where(there, until, np.inf).min(axis=1),
        )

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
            amount = np.fromiter(used.values(), dtype=np.int64)
            opens, closes = self._opens[who], self._closes[who]
            moments = np.unique(np.concatenate([opens, closes], axis=None))
            self._teams[key] = _Team(used, who, amount, opens, closes, moments.tolist(), {})
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
            found = self._crowd(version, team, whole & found.there[:, None])
        return found

    def _crowd(self, version: int, team: _Team, windows: NDArray[np.bool_]) -> _Crowd | None:
        """Members with one of these windows."""
        there: NDArray[np.bool_] = np.asarray(windows.any(axis=1))
        if not there.any():
            return None
        who, amount = team.who[there], team.amount[there]
        until = np.where(windows, team.closes, -np.inf).max(axis=1)[there].min()
        return _Crowd(who, amount, there, self.fleet.cost_of(version, who, amount), float(until))
