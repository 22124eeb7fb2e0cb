from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest

from takifugu.measure.machine import PowerModel, Timing, Turns, in_turns, memory_bytes


def test_calls_take_turns_and_the_first_does_not_count() -> None:
    now = [0.0]
    order: list[str] = []
    durations = {"a": itertools.chain([100.0], itertools.repeat(1.0)), "b": itertools.cycle([2.0, 4.0])}

    def call(name: str):
        def run() -> None:
            order.append(name)
            now[0] += next(durations[name])

        return run

    found = in_turns({"a": call("a"), "b": call("b")}, least=4, most=6, budget_s=1.0, clock=lambda: now[0])
    # One to warm up, four that count, every other turn backwards, and the budget is used up.
    assert order == ["a", "b"] + ["a", "b", "b", "a"] * 2
    a, b = found.timing("a"), found.timing("b")
    assert a == Timing(1.0, 1.0, 1.0, 4, 0.0)
    assert a.spread == 0.0
    assert b.median_s == 3.0
    assert b.divided(3).median_s == 1.0
    assert b.low_s < 3.0 < b.high_s
    assert b.error == b.divided(3).error == pytest.approx(1.0 / 3.0)


def timed(durations: Callable[[int], float], **limits: float) -> tuple[Turns, float]:
    """Times one call that takes so long in each turn; the turns, and how long it all took."""
    now, turn = [0.0], itertools.count()

    def call() -> None:
        now[0] += durations(next(turn))

    found = in_turns({"a": call}, clock=lambda: now[0], **limits)  # type: ignore[arg-type]
    return found, sum(found.seconds["a"])


def test_short_calls_are_timed_long_enough() -> None:
    found, took_s = timed(lambda _: 0.001)
    assert 1.0 <= took_s < 1.01
    assert found.timing("a").count == pytest.approx(1000, abs=1)


def test_scattered_calls_are_timed_until_their_median_is_known() -> None:
    rng = np.random.default_rng(0)
    durations = rng.lognormal(np.log(0.01), 0.3, 100_000)
    found, took_s = timed(lambda turn: float(durations[turn]), error=0.01, budget_s=100.0)
    timing = found.timing("a")
    assert took_s > 10.0
    assert timing.error <= 0.01
    assert timing.median_s == pytest.approx(0.01, rel=0.02)
    few, took_s = timed(lambda turn: float(durations[turn]), error=0.01, budget_s=5.0)
    assert 5.0 <= took_s < 5.1
    assert few.timing("a").error > 0.01


def test_drift_does_not_change_a_ratio() -> None:
    load = [1.0, 1.3, 2.0, 5.0, 1.1, 1.0, 4.0]
    turns = Turns({"dense": [2.0 * x for x in load], "low": [0.5 * x for x in load]})
    assert turns.speedup("low", "dense") == (4.0, 0.0)


def test_a_coarse_clock_is_not_infinite_speed() -> None:
    found = in_turns({"a": lambda: None}, least=1, most=1, clock=lambda: 5.0)
    assert found.timing("a").median_s > 0
    assert found.timing("a").count == 1
    assert found.speedup("a", "a") == (1.0, 0.0)


def test_memory_and_power() -> None:
    memory = memory_bytes()
    assert memory is None or memory > 10**8
    assert PowerModel(15.0).joules(2.0) == pytest.approx(30.0)
