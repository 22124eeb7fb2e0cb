from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from takifugu.errors import UsageError
from takifugu.train.schedules import Moment, schedule_for


def factors(table: dict[str, Any], steps: int, epochs: int, history: tuple[float, ...] = ()) -> list[float]:
    schedule = schedule_for(table)
    return [schedule.factor(Moment(step, steps, epochs, history)) for step in range(steps * epochs)]


def test_steps_is_torchs_multi_step() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5], gamma=0.1)
    ours = factors({"kind": "steps", "at": [2, 5]}, 1, 8)
    for factor in ours:
        assert factor == pytest.approx(optimizer.param_groups[0]["lr"])
        optimizer.step()
        theirs.step()


def test_one_cycle_has_torchs_peak_and_ends() -> None:
    total = 200
    ours = factors({"kind": "one-cycle", "rise": 0.3, "initial": 0.04, "final": 4e-6}, 20, 10)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, total, cycle_momentum=False)
    for factor in ours:
        # torch counts its last step as the end, we count it as the last but one: up to a step apart.
        assert factor == pytest.approx(optimizer.param_groups[0]["lr"], abs=0.02)
        optimizer.step()
        theirs.step()


def test_inverse_sqrt_is_the_usual_rule() -> None:
    width, warmup = 512, 4000
    peak = (width * warmup) ** -0.5
    schedule = schedule_for({"kind": "inverse-sqrt", "warmup_steps": warmup})
    for step in (1, 10, 3999, 4000, 4001, 50_000):
        usual = width**-0.5 * min(step**-0.5, step * warmup**-1.5)
        assert peak * schedule.factor(Moment(step - 1, 100, 1000)) == pytest.approx(usual)


@given(st.lists(st.floats(0.1, 10), max_size=12))
def test_plateau_counts_epochs_without_a_new_best(history: list[float]) -> None:
    stalls = sum(i > 0 and history[i] >= min(history[:i]) for i in range(len(history)))
    (factor,) = factors({"kind": "plateau", "factor_each": 0.25}, 1, 1, tuple(history))
    assert factor == 0.25**stalls


@given(
    kind=st.sampled_from(["constant", "steps", "cosine", "one-cycle", "inverse-sqrt"]),
    steps=st.integers(1, 30),
    epochs=st.integers(1, 12),
    warmup=st.floats(0, 5),
)
def test_factors_are_shares_and_warmups_rise(kind: str, steps: int, epochs: int, warmup: float) -> None:
    plain = factors({"kind": kind}, steps, epochs)
    warmed = factors({"kind": kind, "warmup": warmup, "warmup_from": 0.25}, steps, epochs)
    assert all(0 <= factor <= 1 + 1e-12 for factor in plain)
    for step, (with_it, without) in enumerate(zip(warmed, plain, strict=True)):
        share = 1.0 if warmup == 0 else min(1.0, 0.25 + 0.75 * (step / steps) / warmup)
        assert math.isclose(with_it, share * without, rel_tol=1e-9)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"kind": "step"}, "schedule.kind: 'step' is not known; did you mean 'steps'"),
        ({"kind": "steps", "milestones": [3]}, "schedule.milestones: steps has no such option"),
        ({"kind": "steps", "at": 3}, r"schedule.at: 3 is not a list of epochs such as \[150, 250\]"),
        ({"kind": "cosine", "final": -1}, "schedule.final: -1 is not a number of at least 0"),
        ({"kind": "one-cycle", "rise": 1.0}, "schedule.rise: 1.0 is not a share between 0 and 1"),
        ({"kind": "inverse-sqrt", "warmup_steps": 0}, "schedule.warmup_steps: 0 is not at least 1"),
        ({"kind": "constant", "warmup_from": 2}, "schedule.warmup_from: 2 is not a share from 0 to 1"),
    ],
)
def test_mistakes_are_told(table: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        schedule_for(table)
