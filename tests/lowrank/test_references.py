"""References to a layer that a replacement cannot follow are noticed before anything is changed."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import takifugu as tk
from takifugu.errors import LayerError, TakifuguWarning
from takifugu.structure import Structure

X = torch.randn(4, 16, generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


HOLDERS: dict[str, tuple[Callable[[Net], Any], str]] = {
    "list": (lambda net: [net.head, net.body[0]], r"Net.held \(a list\) holds 'body.0'"),
    "tuple": (lambda net: (net.body[0],), r"Net.held \(a tuple\) holds 'body.0'"),
    "dict": (lambda net: {"first": [net.body[0]]}, r"Net.held \(a dict\) holds 'body.0'"),
    "weights": (lambda net: [net.body[0].weight], r"Net.held \(a list\) holds 'body.0.weight'"),
    "method": (lambda net: net.body[0].forward, r"Net.held \(a method\) holds 'body.0'"),
    "partial": (lambda net: partial(print, net.body[0]), r"Net.held \(a partial\) holds 'body.0'"),
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_layers_held_outside_the_registered_modules_are_refused(holder: str) -> None:
    model = Net()
    make, message = HOLDERS[holder]
    object.__setattr__(model, "held", make(model))
    modules = list(model.modules())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for change in (
        lambda: tk.factorize_(model, 4, where="body.0"),
        lambda: tk.apply_(model, tk.choose(model, 4, where="body.0")),
        lambda: tk.WarmStart(4, warmup=0, where="body.0")(model, optimizer, epoch=0),
    ):
        with pytest.raises(LayerError, match=message + " outside the registered modules.*nn.ModuleList"):
            change()
    assert list(model.modules()) == modules
    tk.factorize_(model, 4, where="body.2")  # what is not held can be replaced
    model.held = {"again": model.body[2]}
    with pytest.raises(LayerError, match=r"holds 'body.2"):
        tk.densify_(model)


def test_a_reference_inside_a_child_names_the_child() -> None:
    model = Net()
    model.body.hidden = [model.head]
    with pytest.raises(LayerError, match=r"Sequential.hidden of 'body' \(a list\) holds 'head'"):
        tk.factorize_(model, 2, where="head")


def test_what_a_layer_keeps_for_itself_is_no_obstacle() -> None:
    model = nn.ModuleDict({"rnn": nn.LSTM(8, 8), "biases": nn.Linear(8, 8)})
    model.held = [model["biases"].bias]  # the bias stays the same parameter
    tk.factorize_(model, 2, where="*", force=True)
    tk.densify_(model)


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_lost_gradient_hooks_are_announced(kind: str) -> None:
    model = Net()
    handle = getattr(model.body[0].weight, kind)(lambda gradient: None)
    getattr(model.body[0].bias, kind)(lambda gradient: None)  # stays, and so does its hook
    with pytest.warns(TakifuguWarning, match=r"the gradient hooks on 'body.0.weight' are lost"):
        tk.factorize_(model, 4, where="body.0")
    handle.remove()
    getattr(model.body[0].u.weight, kind)(lambda gradient: None)
    with pytest.warns(TakifuguWarning, match=r"the gradient hooks on 'body.0.u.weight' are lost"):
        tk.apply_(model, Structure())


def test_removed_hooks_are_not_announced() -> None:
    model = Net()
    model.body[0].weight.register_hook(lambda gradient: None).remove()
    tk.factorize_(model, 4, where="body.0")


# ---- gradients that no step has used ----------------------------------------------------------------------


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(X).square().mean().backward()
    optimizer.step()


def start(**options: Any) -> tuple[Net, torch.optim.Optimizer, tk.WarmStart]:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    warm = tk.WarmStart(4, warmup=2, where="body.*")
    warm(model, optimizer, step=0)
    step(model, optimizer)
    warm(model, optimizer, step=1)
    return model, optimizer, warm


@pytest.mark.parametrize("accumulated", [False, True])
def test_a_switch_between_backward_and_step_is_announced(accumulated: bool) -> None:
    model, optimizer, warm = start()
    if not accumulated:
        optimizer.zero_grad()
    model(X).square().mean().backward()
    with pytest.warns(
        TakifuguWarning, match=r"drops the gradient of 'body.0.weight' and 1 more, which optim"
    ):
        warm(model, optimizer, step=2)


def stale(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    step(model, optimizer)


def zeroed(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    step(model, optimizer)
    optimizer.zero_grad(set_to_none=False)


def removed(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    step(model, optimizer)
    optimizer.zero_grad()


def clipped(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(X).square().mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    optimizer.step()


def closed(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(X).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)


def skipped(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """What a GradScaler does with an overflow: no step."""
    optimizer.zero_grad()
    (model(X) * float("inf")).square().mean().backward()


@pytest.mark.parametrize("loop", [stale, zeroed, removed, clipped, closed, skipped])
@pytest.mark.parametrize("foreach", [False, True])
def test_ordinary_loops_are_not_warned(loop: Callable[..., None], foreach: bool) -> None:
    model, optimizer, warm = start(foreach=foreach)
    optimizer.zero_grad()
    loop(model, optimizer)
    warm(model, optimizer, step=2)
    assert warm.switched


# ---- writing to a product ---------------------------------------------------------------------------------

WRITES: dict[str, Callable[[Any], Any]] = {
    "data in place": lambda layer: layer.weight.data.normal_(),
    "data item": lambda layer: layer.weight.data.__setitem__(0, 1.0),
    "data copied": lambda layer: layer.weight.data.copy_(torch.zeros(16, 16)),
    "data set": lambda layer: setattr(layer.weight, "data", torch.zeros(16, 16)),
    "detached": lambda layer: layer.weight.detach().zero_(),
    "copied": lambda layer: layer.weight.copy_(torch.zeros(16, 16)),
    "initialised": lambda layer: nn.init.xavier_uniform_(layer.weight),
    "out": lambda layer: torch.mul(torch.ones(16, 16), 2, out=layer.weight),
    **{
        f"data {name}": lambda layer, name=name: getattr(operator, name)(layer.weight.data, 2.0)
        for name in ("iadd", "isub", "imul", "itruediv", "ifloordiv", "ipow", "imod")
    },
}


@pytest.mark.parametrize("write", WRITES)
def test_writes_to_a_product_are_refused(write: str) -> None:
    model = Net()
    tk.factorize_(model, 4, where="body.0")
    layer = model.body[0]
    before = [p.detach().clone() for p in layer.parameters()]
    with (
        torch.no_grad(),
        pytest.raises(LayerError, match="weight of a FactorizedLinear is the product of its"),
    ):
        WRITES[write](layer)
    assert all(torch.equal(p, b) for p, b in zip(layer.parameters(), before, strict=True))


def test_data_and_detach_of_a_product_can_be_read() -> None:
    model = Net()
    tk.factorize_(model, 4, where="body.0")
    layer = model.body[0]
    product = (layer.u.weight @ layer.v.weight).detach()
    for read in (layer.weight.data, layer.weight.detach(), layer.weight.data.detach()):
        assert read.shape == (16, 16)
        assert not read.requires_grad
        assert not (read * 2).requires_grad
        assert torch.equal(read, product)
        assert torch.equal(read.clone().mul_(2), 2 * product)
        assert torch.equal(torch.from_numpy(read.numpy()), product)
    leaf = layer.weight.detach().requires_grad_()
    leaf.sum().backward()
    assert torch.equal(leaf.grad, torch.ones(16, 16))
    assert layer.u.weight.grad is None
    layer.weight.sum().backward()
    assert layer.u.weight.grad is not None
