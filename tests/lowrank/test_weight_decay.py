from __future__ import annotations

import copy

import pytest
import torch
from every_kind import CASES, Case
from torch import nn
from torch.optim import SGD
from torch.utils._python_dispatch import TorchDispatchMode

import takifugu as tk
from takifugu.errors import UsageError
from takifugu.lowrank.weight_decay import FrobeniusDecay, decay_groups


def with_gradients(model: nn.Module, case: Case) -> nn.Module:
    model(*case.example()).square().mean().backward()
    return model


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_gradient_is_that_of_the_products_norm(case: Case) -> None:
    model = with_gradients(case.factorized(), case)
    wanted = copy.deepcopy(model)
    for p, q in zip(model.parameters(), wanted.parameters(), strict=True):
        q.grad = None if p.grad is None else p.grad.clone()
    penalty = sum(weight.square().sum() for weight in wanted.layer.dense_weights().values()) * 0.3 / 2
    penalty.backward()
    FrobeniusDecay(0.3, where="layer").add_(model)
    for (name, p), q in zip(model.named_parameters(), wanted.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-6, msg=name)


def test_of_a_dense_layer_it_is_plain_decay() -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4))
    model(torch.randn(3, 6)).sum().backward()
    before = [p.grad.clone() for p in model.parameters()]
    FrobeniusDecay(0.1, where="0").add_(model)
    assert torch.allclose(model[0].weight.grad, before[0] + 0.1 * model[0].weight)
    assert all(torch.equal(p.grad, b) for p, b in list(zip(model.parameters(), before, strict=True))[1:])


class Largest(TorchDispatchMode):
    """The largest tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


def test_nothing_as_large_as_the_product_is_formed() -> None:
    model = nn.Sequential(nn.Linear(2000, 1500))
    tk.factorize_(model, rank=4, where="0")
    model(torch.randn(2, 2000)).sum().backward()
    with Largest() as seen:
        FrobeniusDecay(0.1).add_(model)
    assert 0 < seen.elements <= 4 * 2000


def test_tied_layers_are_decayed_once() -> None:
    model = nn.Sequential(nn.Linear(12, 12), nn.Linear(12, 12))
    model[1].weight = model[0].weight
    tk.factorize_(model, rank=3, where="*")
    model(torch.randn(2, 12)).sum().backward()
    u = model[0].u.weight
    before = u.grad.clone()
    FrobeniusDecay(1.0).add_(model)
    V = model[0].v.weight
    torch.testing.assert_close(u.grad - before, u @ (V @ V.T))


def test_no_layer_is_decayed_twice_before_or_after_the_switch() -> None:
    def net() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))

    decay = FrobeniusDecay(0.5, where="0")
    model = net()
    optimizer = SGD(decay.groups(model, weight_decay=0.01), lr=0.1)
    # Dense, it is the optimizer's own decay of that layer.
    twin = net()
    other = SGD(
        [
            {"params": [twin[0].weight], "weight_decay": 0.5},
            {"params": [twin[2].weight], "weight_decay": 0.01},
            {"params": [p for n, p in twin.named_parameters() if n not in ("0.weight", "2.weight")]},
        ],
        lr=0.1,
    )
    x = torch.randn(16, 8)
    for one, its in ((model, optimizer), (twin, other)):
        one(x).square().mean().backward()
        if one is model:
            decay.add_(model)
        its.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q)
    model = tk.WarmStart(rank=2, warmup=0, where="0")(model, optimizer, epoch=0)
    factors = set(model[0].factor_parameters())
    for group in optimizer.param_groups:
        assert factors.isdisjoint(group["params"]) or group["weight_decay"] == 0


def test_groups_spare_biases_and_norms_unless_asked() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.LSTM(4, 4), nn.MultiheadAttention(4, 2))
    groups = decay_groups(model, 0.1)
    names = {p: name for name, p in model.named_parameters()}
    decayed = sorted(names[p] for p in groups[0]["params"])
    assert decayed == [
        "0.weight",
        "2.weight_hh_l0",
        "2.weight_ih_l0",
        "3.in_proj_weight",
        "3.out_proj.weight",
    ]
    assert groups[0]["weight_decay"] == 0.1
    assert groups[1]["weight_decay"] == 0.0
    assert sum(len(group["params"]) for group in groups) == len(names)
    (only,) = decay_groups(model, 0.1, biases=True, norms=True)
    assert len(only["params"]) == len(names)
    with pytest.raises(UsageError, match="a decay of -1"):
        FrobeniusDecay(-1)


def test_computed_weights_are_left_to_the_optimizer() -> None:
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(6, 6)), nn.Linear(6, 6))
    decay = FrobeniusDecay(0.1)
    optimizer = SGD(decay.groups(model, weight_decay=0.2), lr=0.1)
    by_decay = {group["weight_decay"]: group["params"] for group in optimizer.param_groups}
    assert len(by_decay[0.2]) == 2  # the two parts of the normed weight
    model(torch.randn(3, 6)).sum().backward()
    decay.add_(model)
    optimizer.step()
