"""Averages of the weights, and a GradScaler, through the switch."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from every_kind import CASES, Case
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import takifugu as tk
from takifugu.errors import LayerError, UsageError
from takifugu.lowrank.averages import align
from takifugu.lowrank.decompose import exact


def test_aligned_factors_have_the_same_product_and_are_near() -> None:
    W = torch.randn(20, 14)
    near = exact(W, 5)
    moved = exact(W + 0.01 * torch.randn(20, 14), 5)
    turned = torch.linalg.qr(torch.randn(5, 5)).Q  # any factors of the same product will do
    factors = type(moved)(moved.A @ turned, turned.T @ moved.B, moved.error)
    aligned = align(factors, near)
    torch.testing.assert_close(aligned.A @ aligned.B, moved.A @ moved.B, rtol=1e-4, atol=1e-5)

    def apart(some, other) -> float:
        return ((some.A - other.A).norm() ** 2 + (some.B - other.B).norm() ** 2).item()

    assert apart(aligned, near) < 0.1 * apart(factors, near)
    for _ in range(20):  # no other turn does better
        Q = torch.linalg.qr(torch.randn(5, 5)).Q
        other = type(moved)(moved.A @ Q, Q.T @ moved.B, 0.0)
        assert apart(aligned, near) <= apart(other, near)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_an_average_can_be_averaged_on(case: Case) -> None:
    """After the switch the average goes on towards the model, not past it or away from it."""
    model = case.build()
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    plain = copy.deepcopy(model)
    warm = tk.WarmStart(rank=0.5, warmup=4, where="layer", scheme=case.scheme, force=True)

    def step(number: int) -> None:
        loss = (model(*case.example(seed=number)) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ema.update_parameters(model)

    for number in range(4):
        step(number)
        with torch.no_grad():
            for p, q in zip(plain.parameters(), model.parameters(), strict=True):
                p.lerp_(q, 0.1)
    best = copy.deepcopy(ema.module)
    tk.factorize_(best, rank=0.5, where="layer", scheme=case.scheme, force=True)
    model = warm(model, optimizer, step=4, ema=[ema, plain])
    structure = tk.structure_of(model)
    assert tk.structure_of(ema.module) == structure == tk.structure_of(plain)
    if "tucker" not in case.name:
        for name, weight in ema.module.layer.dense_weights().items():
            wanted = best.layer.dense_weights()[name]
            torch.testing.assert_close(weight, wanted, rtol=1e-3, atol=1e-4)
    distances = []
    for _ in range(40):  # the model stands still: the average's product must come to the model's
        ema.update_parameters(model)
        off = [
            (a - b).norm().item()
            for a, b in zip(
                ema.module.layer.dense_weights().values(), model.layer.dense_weights().values(), strict=True
            )
        ]
        distances.append(sum(off))
    assert distances[-1] <= 0.05 * distances[0] + 1e-5
    assert all(later <= before * 1.01 + 1e-5 for before, later in itertools.pairwise(distances))


def test_an_average_that_cannot_follow_keeps_the_model_as_it_is() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    ema = AveragedModel(model)
    ema.module[0].weight.data[0, 0] = float("nan")
    optimizer = SGD(model.parameters(), lr=0.1)
    modules = list(model.modules())
    with pytest.raises(LayerError, match="contains NaN"):
        tk.WarmStart(rank=2, warmup=0, where="0")(model, optimizer, epoch=0, ema=ema)
    assert list(model.modules()) == modules


def test_a_grad_scaler_keeps_working() -> None:
    """Scaled by powers of two, a run is the same to the last bit, the switch included."""

    def run(scaled: bool) -> tuple[nn.Module, float]:
        torch.manual_seed(0)
        model: nn.Module = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
        optimizer = AdamW(model.parameters(), lr=1e-2)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3, enabled=scaled)
        warm = tk.WarmStart(rank=0.25, warmup=4, where="0")
        for step in range(8):
            model = warm(model, optimizer, step=step)
            x = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            scaler.scale(model(x).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
        return model, scaler.get_scale()

    plain, _ = run(False)
    model, scale = run(True)
    assert scale == 2.0**10, "it grew twice: six good steps"
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("low_rank", ["model", "average"])
def test_an_average_of_another_structure_is_refused(low_rank: str) -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16))
    average = copy.deepcopy(model)
    tk.factorize_(model if low_rank == "model" else average, 0.25, where="0")
    structures = tk.structure_of(model), tk.structure_of(average)
    with pytest.raises(UsageError, match="make it a copy of the model as it is now"):
        tk.WarmStart(warmup=0, where="*")(model, SGD(model.parameters(), lr=0.1), epoch=0, ema=average)
    assert (tk.structure_of(model), tk.structure_of(average)) == structures
