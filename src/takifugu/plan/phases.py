"""Time in phases, for fleets whose nodes come and go: each phase has its own nodes and its own price of time.

What is left to pay depends on the phase as well: V_k is what a plan pays from phase k on. Waiting for the
next phase costs nothing, so V_k <= V_k+1. A round that lies in several phases is counted in the one whose
time is cheapest; its members are there in all of them. Together these values bound every plan from below:
docs/decisions/105-phases.md has the proof.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from takifugu.plan.certificate import certify
from takifugu.plan.curves import Floats
from takifugu.plan.potentials import Prices
from takifugu.plan.problem import Problem, at_most
from takifugu.plan.relaxation import Offers
from takifugu.plan.values import Terrain, Values

Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class PhasePrices:
    per_second: Floats
    """[phase]"""
    per_round: float

    def of(self, phase: int) -> Prices:
        """A switch may lie anywhere before the round it belongs to, so its time counts for the least."""
        least = float(self.per_second[: phase + 1].min())
        return Prices(float(self.per_second[phase]), self.per_round, per_switch_second=least)


@dataclass(frozen=True)
class Phases:
    """Stretches of time from the start to the deadline, and the rounds there can be in each."""

    problem: Problem
    bounds: Floats
    """When phases begin, and when the last one ends."""
    offers: tuple[tuple[Offers | None, ...], ...]
    """[phase][version]: relaxed rounds of those who are there at some time of the phase"""

    @classmethod
    def of(cls, problem: Problem, rounds: Callable[[Mask], Sequence[Offers | None]], most: int) -> Phases:
        """At most so many; they begin when somebody comes or goes. `rounds`: relaxed ones, by version, of
        some of the nodes."""
        windows = [node.windows for node in problem.nodes]
        moments = np.unique([moment for row in windows for pair in row for moment in pair])
        inside = moments[(moments > problem.start_time_s) & (moments < problem.time_limit)]
        if len(inside) >= most:
            inside = inside[np.linspace(0, len(inside) - 1, most)[1:].round().astype(int)]
        bounds = np.concatenate([[problem.start_time_s], inside, [problem.time_limit]])
        there = [
            np.array([any(a < end and b > begin for a, b in row) for row in windows])
            for begin, end in itertools.pairwise(bounds)
        ]
        return cls(problem, bounds, tuple(tuple(rounds(mask)) for mask in there))

    def __len__(self) -> int:
        return len(self.offers)

    @property
    def lengths_s(self) -> Floats:
        return np.diff(self.bounds)

    def limits_j(self, prices: PhasePrices) -> float:
        """The price of all the time and all the rounds there are. A round may end after its phase by as
        much as limits have slack, and one per phase is then counted where time is dearer."""
        slack_s = float(sum(at_most(b) - b for b in self.bounds[1:-1]))
        time_j = float(prices.per_second @ self.lengths_s + prices.per_second.max() * slack_s)
        return time_j + prices.per_round * (self.problem.max_rounds or 0)


class PhasedTerrain:
    """The problem as a path over losses and phases."""

    def __init__(
        self,
        phases: Phases,
        offers: Sequence[Offers | None],
        cells: int,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """`offers`: of everybody together, for the grid of losses that all phases share."""
        self.phases, self.problem = phases, phases.problem
        self.grid = Terrain(self.problem, offers, cells).grid
        self.terrains = [Terrain(self.problem, row, cells, check, self.grid) for row in phases.offers]

    def estimate(self, prices: Sequence[PhasePrices]) -> tuple[Values, ...]:
        """[phase]: values at several prices at once, on the rough grid."""
        found: tuple[Values, ...] = ()
        for phase in reversed(range(len(self.phases))):
            later = found[0] if found else None
            found = (self.terrains[phase].estimate([p.of(phase) for p in prices], later), *found)
        return found

    def certified(
        self, values: Sequence[Values], which: int, most_j: float, cells: int
    ) -> tuple[Values, ...]:
        """[phase]: values that provably bound what is left to pay, from one of the estimates."""
        found: tuple[Values, ...] = ()
        fine = [cells] * len(self.problem.versions)
        for phase in reversed(range(len(self.phases))):
            later = found[0] if found else None
            found = (certify(self.terrains[phase], values[phase], which, most_j, fine, later), *found)
        return found

    def from_start(self, values: Sequence[Values], prices: Sequence[PhasePrices]) -> Floats:
        """[price]: a value (or bound) of the whole plan's energy, limits priced in."""
        start = self.problem.version_index[self.problem.start_version]
        loss = np.array([self.problem.start_loss])
        whole = [float(values[0].at(start, loss, k)[0]) for k in range(len(prices))]
        return np.array([w - self.phases.limits_j(p) for w, p in zip(whole, prices, strict=True)])
