"""What every factorized layer must do, as checks against the dense module it stands for."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from takifugu.lowrank.candidates import Candidate
from takifugu.lowrank.decompose import exact
from takifugu.lowrank.factorized import Factorized
from takifugu.lowrank.layers import kind_of


def factorized(dense: nn.Module, scheme: str | None = None, ratio: float = 1.0) -> Factorized:
    """The dense module's factorized layer, at a share of the full rank; the dense one is kept as it is."""
    dense = copy.deepcopy(dense)
    layer = kind_of(dense)
    assert layer is not None
    scheme = scheme or layer.schemes[0]
    assert layer.obstacle(dense, scheme) is None
    unfoldings = layer.unfoldings(dense, scheme)
    rank = {u.name: max(1, int(ratio * u.limit)) for u in unfoldings}
    made = layer.shell(dense, scheme, rank)
    made.fill_(Candidate("layer", dense, layer).weights(), unfoldings, exact)
    return made.train(dense.training)


def assert_same(
    dense: nn.Module, layer: nn.Module, *args: Any, tolerance: float = 1e-8, **kwargs: Any
) -> None:
    """Same outputs, and same gradients for inputs and for all parameters both have (biases)."""
    outputs, gradients = [], []
    for module in (dense, layer):
        leaves: list[Tensor] = []
        outputs.append(_tensors(module(*_fresh(args, leaves), **dict(_fresh(kwargs, leaves)))))
        shared = dict(module.named_parameters())
        if module is layer:
            shared = {
                n.removesuffix("u.bias") + "bias" if n.endswith("u.bias") else n: p for n, p in shared.items()
            }
        biases = {name: p for name, p in shared.items() if "bias" in name}
        loss = sum((t * _probe(t)).sum() for t in outputs[-1] if t.requires_grad)
        wanted = leaves + [biases[name] for name in sorted(biases)]
        gradients.append(torch.autograd.grad(loss, wanted, allow_unused=True))
    for pair in (outputs, gradients):
        assert len(pair[0]) == len(pair[1])
        for expected, got in zip(*pair, strict=True):
            if expected is None:
                assert got is None
                continue
            torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


def assert_factor_gradients(
    layer: Factorized, dense: nn.Module, *args: Any, tolerance: float = 1e-8, **kwargs: Any
) -> None:
    """The factors' gradients are those of running the dense module on the product of the factors."""
    factors = layer.factor_parameters()
    direct = _loss(layer, args, kwargs)
    weights = layer.dense_weights()
    through_product = _loss(lambda *a, **k: torch.func.functional_call(dense, weights, a, k), args, kwargs)
    torch.testing.assert_close(direct, through_product, rtol=tolerance, atol=tolerance)
    for got, expected in zip(
        torch.autograd.grad(direct, factors), torch.autograd.grad(through_product, factors), strict=True
    ):
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


def _loss(run: Callable[..., Any], args: Any, kwargs: Any) -> Tensor:
    outputs = _tensors(run(*args, **kwargs))
    loss: Tensor = sum((t * _probe(t)).sum() for t in outputs if t.requires_grad)
    return loss


def _probe(tensor: Tensor) -> Tensor:
    """A fixed direction to take the gradient along, so that no symmetry can hide a mistake."""
    generator = torch.Generator().manual_seed(tensor.numel())
    return torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(tensor)


def _fresh(values: Any, leaves: list[Tensor]) -> Any:
    if isinstance(values, dict):
        return {key: _fresh(value, leaves) for key, value in values.items()}
    if isinstance(values, tuple):
        return tuple(_fresh(value, leaves) for value in values)
    if isinstance(values, Tensor) and values.is_floating_point():
        leaves.append(values.detach().clone().requires_grad_())
        return leaves[-1]
    return values


def _tensors(output: Any) -> list[Tensor]:
    return [t for t in tree_flatten(output)[0] if isinstance(t, Tensor)]
