"""Phases: stretches of time from the start to the deadline, and the rounds there can be in each."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from takifugu.plan.curves import Floats
from takifugu.plan.problem import Problem
from takifugu.plan.relaxation import Offers

Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Phases:
    """Stretches of time from the start to the deadline, and the rounds there can be in each."""

    problem: Problem
    bounds: Floats
    """When phases begin, and when the last one ends."""
    offers: tuple[tuple[Offers | None, ...], ...]
    """[phase][version]: relaxed rounds of those who are there at some time of the phase"""

    @classmethod
    def of(
        cls,
        problem: Problem,
        rounds: Callable[[Mask], Sequence[Offers | None]],
        most: int,
    ) -> Phases:
        """They begin when somebody comes or goes; at most so many. `rounds`: relaxed ones, by version, of
        some of the nodes."""
        windows = [node.windows for node in problem.nodes]
        moments = np.unique([moment for row in windows for pair in row for moment in pair])
        inside = moments[(moments > problem.start_time_s) & (moments < problem.time_limit)]
        bounds = [problem.start_time_s, *inside.tolist(), problem.time_limit]
        there = [
            np.array([any(a < end and b > begin for a, b in row) for row in windows])
            for begin, end in itertools.pairwise(bounds)
        ]
        size = np.array([float(node.samples) for node in problem.nodes])
        _merge(bounds, there, size, most)
        known = {mask.tobytes(): rounds(mask) for mask in there}
        return cls(problem, np.array(bounds), tuple(tuple(known[mask.tobytes()]) for mask in there))

    def __len__(self) -> int:
        return len(self.offers)

    @property
    def lengths_s(self) -> Floats:
        return np.diff(self.bounds)


def _merge(bounds: list[float], there: list[Mask], size: Floats, most: int) -> None:
    """Takes borders away, those first that matter least: who comes or goes there, and for how long they then
    seem to be there although they are not."""
    while len(there) > max(most, 1):
        lengths, harm = np.diff(bounds), []
        for k in range(len(there) - 1):
            before, after = size[there[k + 1] & ~there[k]].sum(), size[there[k] & ~there[k + 1]].sum()
            harm.append(before * lengths[k] + after * lengths[k + 1])
        k = int(np.argmin(harm))
        there[k : k + 2] = [there[k] | there[k + 1]]
        del bounds[k + 1]
