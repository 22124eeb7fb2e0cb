"""An optimizer goes on through a switch: groups, options, counts and moments."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

import takifugu as tk
from takifugu.errors import TakifuguWarning, UsageError
from takifugu.lowrank.optimizer_state import FIRST_MOMENTS, SECOND_MOMENTS, carry_
from takifugu.lowrank.surgery import build_swaps, commit_, decomposer, fill_

X = torch.randn(32, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

OPTIMIZERS = {
    "sgd": lambda groups: SGD(groups, lr=0.05, momentum=0.9),
    "nesterov": lambda groups: SGD(groups, lr=0.05, momentum=0.9, nesterov=True),
    "plain sgd": lambda groups: SGD(groups, lr=0.05),
    "adam": lambda groups: Adam(groups, lr=0.01),
    "amsgrad": lambda groups: Adam(groups, lr=0.01, amsgrad=True),
    "adamw": lambda groups: AdamW(groups, lr=0.01),
    "rmsprop": lambda groups: RMSprop(groups, lr=0.01, momentum=0.9, centered=True),
    "adagrad": lambda groups: Adagrad(groups, lr=0.1),
}


def net() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)
    ).double()


def train(model: nn.Module, optimizer: Optimizer, steps: int) -> float:
    for _ in range(steps):
        loss = (model(X) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def switch(
    model: nn.Module, optimizer: Optimizer, way: str = "projected", rank: object = 0.25, gradients=None
):
    swaps = build_swaps(model, tk.choose(model, rank, where=["0", "2"], rerank=True, force=True))
    fill_(swaps, decomposer("exact"))
    commit_(model, swaps)
    return carry_(model, optimizer, swaps, way, gradients)


def everything(optimizer: Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("way", ["projected", "fresh", "reset", "calibrated"])
def test_training_goes_on_with_every_optimizer_and_way(name: str, way: str) -> None:
    model = net()
    optimizer = OPTIMIZERS[name](model.parameters())
    train(model, optimizer, 5)
    untouched = {p: copy.deepcopy(optimizer.state[p]) for p in model[4].parameters()}
    counts = {float(s["step"]) for s in optimizer.state.values() if "step" in s}

    def gradients() -> None:
        (model(X) - 1).square().mean().backward()

    report = switch(model, optimizer, way, gradients=gradients)
    assert everything(optimizer) == list(model.parameters()), (
        "in the model's order, so that a resumed run agrees"
    )
    if way != "reset":
        for p, state in untouched.items():
            for key, value in state.items():
                now = optimizer.state[p][key]
                assert torch.equal(now, value) if isinstance(value, torch.Tensor) else now == value
    if way == "projected" and name != "plain sgd":
        assert len(report.projected) == 4
        assert {float(s["step"]) for s in optimizer.state.values() if "step" in s} == counts
    before = (model(X) - 1).square().mean().item()
    assert train(model, optimizer, 40) < before


def test_first_moments_are_those_of_the_factors_own_gradients() -> None:
    """SGD with momentum, frozen at one point: the projected buffer is what the factors would have gathered."""
    model = net()
    optimizer = SGD(model.parameters(), lr=0.0, momentum=0.9)
    low = copy.deepcopy(model)
    tk.factorize_(low, 1.0, where=["0", "2"], force=True)
    low_optimizer = SGD(low.parameters(), lr=0.0, momentum=0.9)
    train(model, optimizer, 6)
    train(low, low_optimizer, 6)
    switch(model, optimizer, rank=1.0)
    for (name, p), q in zip(model.named_parameters(), low.parameters(), strict=True):
        expected = low_optimizer.state[q]["momentum_buffer"]
        torch.testing.assert_close(optimizer.state[p]["momentum_buffer"], expected, msg=name)


@pytest.mark.parametrize("kind", ["linear", "conv", "tucker2", "lstm", "attention", "embedding"])
def test_moments_go_through_any_layer(kind: str) -> None:
    """Against the chain rule written out by finite differences of the product."""
    layers = {
        "linear": nn.Linear(6, 5),
        "conv": nn.Conv2d(4, 6, 3, groups=2),
        "tucker2": nn.Conv2d(4, 6, 3),
        "lstm": nn.LSTM(4, 5),
        "attention": nn.MultiheadAttention(4, 2),
        "embedding": nn.Embedding(7, 5),
    }
    model = nn.Sequential(layers[kind]).double()
    optimizer = Adam(model.parameters())
    dense = dict(model.named_parameters())
    for p in dense.values():
        optimizer.state[p] = {
            "step": torch.tensor(3.0),
            "exp_avg": torch.randn_like(p),
            "exp_avg_sq": torch.rand_like(p),
        }
    moments = {name: optimizer.state[p]["exp_avg"].clone() for name, p in dense.items()}
    scheme = "tucker2" if kind == "tucker2" else None
    swaps = build_swaps(model, tk.choose(model, 0.5, where="*", scheme=scheme, force=True))
    fill_(swaps, decomposer("exact"))
    commit_(model, swaps)
    carry_(model, optimizer, swaps, "projected")
    layer = model[0]
    for factor in layer.factor_parameters():
        state = optimizer.state[factor]
        assert state["exp_avg_sq"].shape == factor.shape
        assert (state["exp_avg_sq"] > 0).all()
        assert float(state["step"]) == 3.0
        # d<W, M>/d factor, one entry at a time.
        index = tuple(
            int(i) for i in torch.randint(2, (factor.dim(),)).minimum(torch.tensor(factor.shape) - 1)
        )
        sides = []
        for shift in (1e-6, -1e-6):
            factor.data[index] += shift
            weights = layer.dense_weights()
            sides.append(
                sum(
                    (weights[n.removeprefix("0.")] * m).sum().item()
                    for n, m in moments.items()
                    if n.removeprefix("0.") in weights
                )
            )
            factor.data[index] -= shift
        assert float(state["exp_avg"][index]) == pytest.approx(
            (sides[0] - sides[1]) / 2e-6, rel=1e-4, abs=1e-7
        )


def test_second_moments_lie_between_uncorrelated_and_correlated() -> None:
    """Against gradients that were really seen: for each kind of gradient one of the two is exact."""
    generator = torch.Generator().manual_seed(0)

    def positive(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    for correlated in (False, True):
        model = nn.Sequential(nn.Linear(6, 5, bias=False)).double()
        if correlated:  # positive factors, and gradients that all swing together
            model[0].weight.data = positive(5, 1) @ positive(1, 6)
            swing = torch.randn(4000, 1, 1, generator=generator, dtype=torch.float64)
            gradients = swing * positive(5, 6)
        else:
            gradients = torch.randn(4000, 5, 6, generator=generator, dtype=torch.float64)
        optimizer = Adam(model.parameters())
        optimizer.state[model[0].weight] = {
            "step": torch.tensor(4000.0),
            "exp_avg": gradients.mean(0),
            "exp_avg_sq": gradients.square().mean(0),
        }
        swaps = build_swaps(model, tk.choose(model, tk.ranks.Fixed(1), where="0"))
        fill_(swaps, decomposer("exact"))
        commit_(model, swaps)
        carry_(model, optimizer, swaps, "projected")
        U, V = model[0].u.weight.detach(), model[0].v.weight.detach()
        roots = gradients.square().mean(0).sqrt()
        for factor, seen, low, high in (
            (model[0].u.weight, gradients @ V.mT, roots**2 @ V.mT**2, (roots @ V.abs().mT) ** 2),
            (model[0].v.weight, U.mT @ gradients, U.mT**2 @ roots**2, (U.abs().mT @ roots) ** 2),
        ):
            state, real = optimizer.state[factor], seen.square().mean(0)
            torch.testing.assert_close(state["exp_avg"], seen.mean(0))
            torch.testing.assert_close(real, high if correlated else low, rtol=0.15, atol=0)
            torch.testing.assert_close(state["exp_avg_sq"], (low * high).sqrt(), rtol=1e-6, atol=0)
            assert float(state["step"]) == 4000


@pytest.mark.parametrize(
    ("name", "way"), [("sgd", "fresh"), ("adamw", "projected"), ("rmsprop", "projected")]
)
def test_the_default_way(name: str, way: str) -> None:
    model = net()
    optimizer = OPTIMIZERS[name](model.parameters())
    train(model, optimizer, 2)
    assert switch(model, optimizer, "auto").way == way


def test_groups_and_their_options_stay() -> None:
    model = net()
    groups = [
        {"params": [model[0].weight, model[4].weight], "lr": 0.5, "weight_decay": 0.1},
        {"params": [model[0].bias, model[2].weight]},
    ]
    optimizer = AdamW(groups, lr=0.01)
    train(model, optimizer, 3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
    report = switch(model, optimizer)
    first, second = optimizer.param_groups
    assert (first["lr"], first["weight_decay"]) == (0.5, 0.1)
    assert set(first["params"]) == {model[0].u.weight, model[0].v.weight, model[4].weight}
    assert set(second["params"]) == {model[0].u.bias, model[2].u.weight, model[2].v.weight}
    train(model, optimizer, 1)
    scheduler.step()
    assert first["lr"] == pytest.approx(0.05)
    assert report.left_out == ()


def test_what_was_not_optimized_is_not_now() -> None:
    model = net()
    optimizer = SGD([model[2].weight], lr=0.1, momentum=0.9)
    train(model, optimizer, 2)
    with pytest.warns(TakifuguWarning, match="does not hold the weight that '0.v.weight' stands for"):
        report = switch(model, optimizer)
    assert everything(optimizer) == [model[2].v.weight, model[2].u.weight]
    assert set(report.left_out) == {"0.v.weight", "0.u.weight"}


def test_back_up_and_re_ranked_factors_start_fresh_the_rest_is_kept() -> None:
    model = net()
    optimizer = AdamW(model.parameters())
    train(model, optimizer, 3)
    switch(model, optimizer)
    train(model, optimizer, 3)
    report = switch(model, optimizer, rank=0.5)
    assert set(report.reset) == {"0.v.weight", "0.u.weight", "2.v.weight", "2.u.weight"}
    train(model, optimizer, 3)
    swaps = build_swaps(model, tk.Structure())
    commit_(model, swaps)
    report = carry_(model, optimizer, swaps, "projected")
    assert everything(optimizer) == list(model.parameters())
    assert set(report.reset) == {"0.weight", "2.weight"}
    assert set(report.kept) == {"0.bias", "2.bias", "4.weight", "4.bias"}
    train(model, optimizer, 3)


def test_an_unknown_optimizer_is_said_and_works() -> None:
    model = net()
    optimizer = torch.optim.NAdam(model.parameters())
    train(model, optimizer, 3)
    kept = copy.deepcopy(optimizer.state[model[4].weight])
    with pytest.warns(TakifuguWarning, match="NAdam is not an optimizer whose state we know"):
        report = switch(model, optimizer)
    assert len(report.reset) == 4
    assert torch.equal(optimizer.state[model[4].weight]["exp_avg"], kept["exp_avg"])
    train(model, optimizer, 3)


def test_bad_ways() -> None:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    with pytest.raises(UsageError, match="unknown way 'prjected'"):
        switch(model, optimizer, "prjected")
    model = net()
    with pytest.raises(UsageError, match="needs gradients="):
        switch(model, SGD(model.parameters(), lr=0.1), "calibrated")


def test_the_report_counts() -> None:
    model = net()
    optimizer = AdamW(model.parameters())
    train(model, optimizer, 2)
    assert str(switch(model, optimizer)) == "optimizer state (projected): 4 kept, 4 projected"
    assert set(FIRST_MOMENTS).isdisjoint(SECOND_MOMENTS)


def test_a_convolutions_second_moments_are_taken_for_uncorrelated() -> None:
    model = nn.Sequential(nn.Conv2d(4, 6, 3), nn.Flatten(), nn.LazyLinear(2))
    model(torch.randn(2, 4, 5, 5))
    optimizer = AdamW(model.parameters())
    model(torch.randn(8, 4, 5, 5)).square().mean().backward()
    optimizer.step()
    second = optimizer.state[model[0].weight]["exp_avg_sq"].reshape(6, 36)
    tk.WarmStart(rank=2, warmup=0, where="0")(model, optimizer, epoch=0)
    u, v = model[0].u.weight, model[0].v.weight
    wanted_u = second @ v.detach().reshape(2, 36).square().T
    wanted_v = u.detach().reshape(6, 2).square().T @ second
    torch.testing.assert_close(optimizer.state[u]["exp_avg_sq"].reshape(6, 2), wanted_u)
    torch.testing.assert_close(optimizer.state[v]["exp_avg_sq"].reshape(2, 36), wanted_v)


def test_a_fused_sgd_goes_on() -> None:
    """It takes momentum for all parameters of a group or for none; fresh momentum is zero."""
    fused = net()
    plain = copy.deepcopy(fused)
    for model in (fused, plain):
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, fused=model is fused)
        train(model, optimizer, 3)
        switch(model, optimizer, "auto")
        train(model, optimizer, 3)
    for one, other in zip(fused.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("prefix", ["", "module."])
def test_names_in_the_groups_follow(prefix: str) -> None:
    model = net()
    named = [(prefix + name, parameter) for name, parameter in model.named_parameters()]
    optimizer = AdamW([{"params": named[:3]}, {"params": named[3:]}])
    train(model, optimizer, 2)
    switch(model, optimizer)
    now = {prefix + name: parameter for name, parameter in model.named_parameters()}
    found = {}
    for group in optimizer.param_groups:
        found.update(zip(group["param_names"], group["params"], strict=True))
    assert found.keys() == now.keys()
    assert all(found[name] is now[name] for name in now)


def test_names_are_put_back_when_a_switch_fails() -> None:
    model = net()
    optimizer = AdamW(model.named_parameters())
    before = optimizer.param_groups[0]["param_names"]
    warm = tk.WarmStart(warmup=0, where="2", state="calibrated")
    with pytest.raises(UsageError, match="needs gradients="):
        warm(model, optimizer, epoch=0)
    assert (
        optimizer.param_groups[0]["param_names"] == before == [name for name, _ in model.named_parameters()]
    )


def test_a_subclass_with_state_of_its_own_is_treated_as_unknown() -> None:
    class Slow(AdamW):
        def step(self, closure=None):
            super().step(closure)
            for p in everything(self):
                self.state[p].setdefault("slow", p.detach().clone()).lerp_(p.detach(), 0.5)

    model = net()
    optimizer = Slow(model.parameters())
    train(model, optimizer, 2)
    with pytest.warns(TakifuguWarning, match="Slow is not an optimizer whose state we know"):
        report = switch(model, optimizer)
    assert len(report.reset) == 4
    train(model, optimizer, 2)


def test_a_weight_frozen_since_takes_its_moments_along() -> None:
    model = net()
    optimizer = AdamW(model.parameters())
    train(model, optimizer, 3)
    model[0].weight.requires_grad_(False)
    warm = tk.WarmStart(warmup=0, where=["0", "2"], force=True)
    warm(model, optimizer, epoch=0)
    assert "0.u.weight" in warm.report.state.projected
    assert not model[0].u.weight.requires_grad
    assert optimizer.state[model[0].u.weight]["exp_avg"].abs().sum() > 0
    train(model, optimizer, 1)


def test_optimizers_with_lists_of_their_own_are_refused_before_training() -> None:
    model = net()
    lbfgs = torch.optim.LBFGS(model.parameters())
    with pytest.raises(UsageError, match="LBFGS keeps its history as one vector"):
        tk.WarmStart(warmup=10)(model, lbfgs, epoch=0)
    with pytest.raises(UsageError, match="expected a torch optimizer, got NoneType"):
        tk.WarmStart(warmup=10)(model, None, epoch=0)
