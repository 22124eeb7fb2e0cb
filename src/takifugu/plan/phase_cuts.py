"""Phases: stretches of time from the start to the deadline, and the rounds there can be in each."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

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
    longest_s: float
    """Rounds count as no longer than this; so they reach over the end of a phase by no more than this."""

    @classmethod
    def of(
        cls,
        problem: Problem,
        rounds: Callable[[Mask], Sequence[Offers | None]],
        most: int,
        longest_s: float = np.inf,
        least_s: float = 0.0,
    ) -> Phases:
        """They begin when somebody comes or goes; at most so many, and none that is shorter than `least_s`.
        `rounds`: relaxed ones, by version, of some of the nodes."""
        windows = [node.windows for node in problem.nodes]
        moments = np.unique([moment for row in windows for pair in row for moment in pair])
        inside = moments[(moments > problem.start_time_s) & (moments < problem.time_limit)]
        bounds = [problem.start_time_s, *inside.tolist(), problem.time_limit]
        there = [
            np.array([any(a < end and b > begin for a, b in row) for row in windows])
            for begin, end in itertools.pairwise(bounds)
        ]
        everybody = [o for o in rounds(np.ones(len(windows), dtype=bool)) if o is not None]
        longest_s = min(longest_s, max((float(o.time_s.max()) for o in everybody), default=0.0))
        size = np.array([float(node.samples) for node in problem.nodes])
        _merge(bounds, there, size, most, least_s)
        known = {mask.tobytes(): rounds(mask) for mask in there}
        offers = [known[mask.tobytes()] for mask in there]
        short = tuple(tuple(_shortened(o, longest_s) for o in row) for row in offers)
        return cls(problem, np.array(bounds), short, longest_s)

    def __len__(self) -> int:
        return len(self.offers)

    @property
    def lengths_s(self) -> Floats:
        return np.diff(self.bounds)


def _merge(bounds: list[float], there: list[Mask], size: Floats, most: int, least_s: float) -> None:
    """Takes borders away, those first that matter least: who comes or goes there, and for how long they then
    seem to be there although they are not."""
    while len(there) > 1:
        lengths = np.diff(bounds)
        short = lengths < least_s
        if len(there) <= most and not short.any():
            return
        harm = []
        for k in range(len(there) - 1):
            before, after = size[there[k + 1] & ~there[k]].sum(), size[there[k] & ~there[k + 1]].sum()
            wanted = len(there) > most or short[k] or short[k + 1]
            harm.append(before * lengths[k] + after * lengths[k + 1] if wanted else np.inf)
        k = int(np.argmin(harm))
        there[k : k + 2] = [there[k] | there[k + 1]]
        del bounds[k + 1]


def _shortened(offers: Offers | None, longest_s: float) -> Offers | None:
    return offers and replace(offers, time_s=np.minimum(offers.time_s, longest_s))
