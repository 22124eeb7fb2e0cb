from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import SGD, lr_scheduler

import takifugu as tk
from takifugu.errors import UsageError
from takifugu.lowrank.rewarm import Rewarm


def run(warm: tk.WarmStart, scheduler_of, steps: range, saved=None):
    """Trains; returns the rate each step was made with, the rate the scheduler shows, and what to resume from."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    if saved:
        tk.apply_(model, tk.Structure.from_json(saved["structure"]))
        model.load_state_dict(saved["model"])
    optimizer = SGD(model.parameters(), lr=0.5)
    scheduler = scheduler_of(optimizer)
    if saved:
        optimizer.load_state_dict(saved["optimizer"])
        scheduler.load_state_dict(saved["scheduler"])
        warm.load_state_dict(saved["warm"])
    used, shown = [], []
    for step in steps:
        model = warm(model, optimizer, step=step)
        loss = model(torch.randn(4, 8, generator=torch.Generator().manual_seed(step))).square().mean()
        optimizer.zero_grad()
        loss.backward()
        parameter = model[1].weight if isinstance(model[1], nn.Linear) else model[1].u.weight
        before, gradient = parameter.detach().clone(), parameter.grad.clone()
        optimizer.step()
        moved = (before - parameter.detach()).norm() / gradient.norm()
        used.append(moved.item())
        shown.append(optimizer.param_groups[0]["lr"])
        scheduler.step()
    saved = {
        "structure": tk.structure_of(model).to_json(),
        "model": {name: value.clone() for name, value in model.state_dict().items()},
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "warm": warm.state_dict(),
    }
    return used, shown, saved


SCHEDULERS = {
    "constant": lambda o: lr_scheduler.LambdaLR(o, lambda _: 1.0),
    "recursive": lambda o: lr_scheduler.ExponentialLR(o, 0.9),  # the next rate from the last
    "closed": lambda o: lr_scheduler.CosineAnnealingLR(o, 20),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_the_rate_comes_back_and_no_scheduler_notices(name: str) -> None:
    plain = tk.WarmStart(rank=0.5, warmup=3, where="0")
    _, rates, _ = run(plain, SCHEDULERS[name], range(10))
    warm = tk.WarmStart(rank=0.5, warmup=3, where="0", rewarm=Rewarm(4, start=0.2))
    used, shown, _ = run(warm, SCHEDULERS[name], range(10))
    assert shown == rates
    shares = [1, 1, 1, 0.36, 0.52, 0.68, 0.84, 1, 1, 1]
    assert used == pytest.approx([rate * share for rate, share in zip(rates, shares, strict=True)], rel=1e-3)


def test_it_goes_on_after_a_stop() -> None:
    def fresh() -> tk.WarmStart:
        return tk.WarmStart(rank=0.5, warmup=3, where="0", rewarm=4)

    whole, _, _ = run(fresh(), SCHEDULERS["recursive"], range(10))
    first, _, saved = run(fresh(), SCHEDULERS["recursive"], range(5))
    rest, _, _ = run(fresh(), SCHEDULERS["recursive"], range(5, 10), saved)
    assert first + rest == whole


def test_a_rate_that_is_a_tensor_stays_the_same_tensor() -> None:
    weight = nn.Parameter(torch.ones(3))
    rate = torch.tensor(0.1)
    optimizer = torch.optim.SGD([weight], lr=rate)
    rewarm = Rewarm(2, start=0.0)
    rewarm.follow_(optimizer)
    rewarm.begin_()
    weight.grad = torch.ones(3)
    optimizer.step()
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == pytest.approx(0.1)
    assert weight[0].item() == pytest.approx(1 - 0.1 / 3)


@pytest.mark.parametrize(("steps", "start"), [(-1, 0.1), (True, 0.1), (3, 1.5)])
def test_mistakes(steps: int, start: float) -> None:
    with pytest.raises(UsageError, match="re-warm-up"):
        Rewarm(steps, start)


def test_a_step_that_fails_does_not_lower_the_rate_for_good() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    optimizer = SGD(model.parameters(), lr=0.5)
    warm = tk.WarmStart(warmup=0, where="0", rewarm=2)
    warm(model, optimizer, step=0)

    def out_of_memory() -> float:
        raise RuntimeError("out of memory")

    for _ in range(3):
        with pytest.raises(RuntimeError, match="out of memory"):
            optimizer.step(out_of_memory)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    assert optimizer.param_groups[0]["lr"] == 0.5
