"""This machine: how long something takes on it, how much memory it has, and what that costs in energy.

There is no counter of energy behind these figures: a power model (watts times seconds) stands in for it, and
whatever rests on it is to be called estimated.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Timing:
    """Seconds of one call: the median, and the quarter of calls below and above."""

    median_s: float
    low_s: float
    high_s: float
    count: int

    def divided(self, by: int) -> Timing:
        """Of one of `by` equal parts."""
        return Timing(self.median_s / by, self.low_s / by, self.high_s / by, self.count)

    @property
    def spread(self) -> float:
        """The middle half's width, relative to the median."""
        return (self.high_s - self.low_s) / self.median_s


def in_turns(
    calls: Mapping[str, Callable[[], object]],
    least: int = 5,
    most: int = 40,
    budget_s: float = 20.0,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing]:
    """Times the calls in turns, as a machine's speed drifts: what disturbs one disturbs them all.

    Each is called once before it counts: kernels are chosen, memory is mapped.
    """
    for call in calls.values():
        call()
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    began = clock()
    for done in range(most):
        if done >= least and clock() - began > budget_s:
            break
        for name, call in calls.items():
            before = clock()
            call()
            seconds[name].append(clock() - before)
    return {name: _timing(times) for name, times in seconds.items()}


def _timing(times: list[float]) -> Timing:
    low, _, high = statistics.quantiles(times, n=4) if len(times) > 1 else (times[0],) * 3
    # A clock too coarse for the call must not make it infinitely fast.
    return Timing(max(statistics.median(times), 1e-9), low, high, len(times))


def memory_bytes() -> int | None:
    """All the memory this machine has, where the system tells."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None


@dataclass(frozen=True)
class PowerModel:
    """A machine that draws so many watts while it computes. An estimate, whatever the watts rest on."""

    watts: float

    def joules(self, seconds: float) -> float:
        return self.watts * seconds
