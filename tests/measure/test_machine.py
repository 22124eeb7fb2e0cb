from __future__ import annotations

import itertools

import pytest

from takifugu.measure.machine import PowerModel, Timing, in_turns, memory_bytes


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
    assert order == ["a", "b"] * 5  # one to warm up, four that count, and the budget is used up
    assert found["a"] == Timing(1.0, 1.0, 1.0, 4)
    assert found["a"].spread == 0.0
    assert found["b"].median_s == 3.0
    assert found["b"].divided(3).median_s == 1.0
    assert found["b"].low_s < 3.0 < found["b"].high_s


def test_a_coarse_clock_is_not_infinite_speed() -> None:
    found = in_turns({"a": lambda: None}, least=1, most=1, clock=lambda: 5.0)
    assert found["a"].median_s > 0
    assert found["a"].count == 1


def test_memory_and_power() -> None:
    memory = memory_bytes()
    assert memory is None or memory > 10**8
    assert PowerModel(15.0).joules(2.0) == pytest.approx(30.0)
