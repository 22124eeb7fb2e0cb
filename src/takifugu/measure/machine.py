"""This machine: how long something takes on it, how much memory it has, and what that costs in energy.

There is no counter of energy behind these figures: a power model (watts times seconds) stands in for it, and
whatever rests on it is to be called estimated.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Timing:
    """Seconds of one call: the median, and the quarter of calls below and above."""

    median_s: float
    low_s: float
    high_s: float
    count: int
    error: float = 0.0
    """Half the 95 % confidence interval of the median, relative to it."""

    def divided(self, by: int) -> Timing:
        """Of one of `by` equal parts."""
        return replace(self, median_s=self.median_s / by, low_s=self.low_s / by, high_s=self.high_s / by)

    @property
    def spread(self) -> float:
        """The middle half's width, relative to the median."""
        return (self.high_s - self.low_s) / self.median_s


@dataclass(frozen=True)
class Turns:
    """Seconds of each call, turn by turn."""

    seconds: Mapping[str, Sequence[float]]

    def timing(self, name: str) -> Timing:
        times = self.seconds[name]
        low, _, high = statistics.quantiles(times, n=4) if len(times) > 1 else (times[0],) * 3
        # A clock too coarse for the call must not make it infinitely fast.
        median = max(statistics.median(times), _LEAST_S)
        return Timing(median, low, high, len(times), _median_error(times))

    def speedup(self, name: str, to: str) -> tuple[float, float]:
        """How many times faster `name` is than `to`, and the relative error of that.

        The median over turns: within a turn both met the same load, so that drift cancels.
        """
        pairs = zip(self.seconds[to], self.seconds[name], strict=True)
        ratios = [max(slow, _LEAST_S) / max(fast, _LEAST_S) for slow, fast in pairs]
        return statistics.median(ratios), _median_error(ratios)


_LEAST_S = 1e-9


def in_turns(
    calls: Mapping[str, Callable[[], object]],
    least: int = 5,
    most: int = 100_000,
    each_s: float = 1.0,
    error: float = 0.01,
    budget_s: float = 20.0,
    clock: Callable[[], float] = time.perf_counter,
) -> Turns:
    """Times the calls in turns, as a machine's speed drifts: what disturbs one disturbs them all.

    Each is called once before it counts: kernels are chosen, memory is mapped. It ends after `least` turns at
    the earliest, once each call has had `each_s` seconds and every median is known within `error`, or when
    `budget_s` is used up.
    """
    for call in calls.values():
        call()
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    began = clock()
    for done in range(most):
        if done >= least:
            if clock() - began > budget_s:
                break
            enough = all(sum(times) >= each_s for times in seconds.values())
            if enough and all(_median_error(times) <= error for times in seconds.values()):
                break
        # Every other turn runs backwards: a model that follows a large one starts with cold caches.
        for name in list(calls)[:: -1 if done % 2 else 1]:
            before = clock()
            calls[name]()
            seconds[name].append(clock() - before)
    return Turns(seconds)


def _median_error(values: Sequence[float]) -> float:
    """Half the 95 % confidence interval of the median (by ranks), relative to it."""
    ordered, count = sorted(values), len(values)
    half = 0.98 * math.sqrt(count)
    low = ordered[max(math.floor(count / 2 - half), 0)]
    high = ordered[min(math.ceil(count / 2 + half), count - 1)]
    return (high - low) / 2.0 / max(statistics.median(ordered), _LEAST_S)


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
