"""Weight decay: plain, on each factor, as in the paper; or Frobenius decay, on their product.

Plain decay needs nothing: at the switch the factors take the weight's place in its group, decay included.
`decay_groups` leaves biases and norms out of it, from the start.

`FrobeniusDecay` is the gradient of `decay / 2 * ||U V||_F^2` instead, which is what decay of the dense weight
was: `decay * U (V V^T)` for U and `decay * (U^T U) V` for V. The product is never formed. Its layers are kept
out of the optimizer's own decay, so that none is decayed twice:

    decay = FrobeniusDecay(1e-4, where=["2", "4"])
    optimizer = SGD(decay.groups(model, weight_decay=1e-4), lr=0.1)
    loss.backward()
    decay.add_(model)          # with a GradScaler: after scaler.unscale_(optimizer)
    optimizer.step()
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from takifugu.errors import UsageError
from takifugu.lowrank.candidates import Where, find
from takifugu.lowrank.factorized import Factorized

Group = dict[str, Any]
_NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def decay_groups(
    model: nn.Module, weight_decay: float, *, biases: bool = False, norms: bool = False
) -> list[Group]:
    """Parameter groups for an optimizer: with decay, and without it (biases and norms, unless asked for)."""
    spared = set() if norms else {p for m in model.modules() if isinstance(m, _NORMS) for p in m.parameters()}
    if not biases:
        named = model.named_parameters()
        spared |= {p for name, p in named if name.rpartition(".")[2].startswith(("bias", "in_proj_bias"))}
    with_decay = [p for p in model.parameters() if p not in spared]
    without = [p for p in model.parameters() if p in spared]
    groups = [{"params": with_decay, "weight_decay": weight_decay}, {"params": without, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


class FrobeniusDecay:
    """Decays the product of the factors in the layers that `where` means; before the switch, the weights."""

    def __init__(self, decay: float, where: Where = None) -> None:
        if decay < 0:
            raise UsageError(f"a decay of {decay}; use 0 or more")
        self.decay, self.where = decay, where

    def groups(self, model: nn.Module, weight_decay: float, **spared: bool) -> list[Group]:
        """As `decay_groups`, with a group of its own for the layers that are decayed here instead."""
        own = {p: None for layer in self._layers(model) for p in _decayed(layer)}
        groups = decay_groups(model, weight_decay, **spared)
        for group in groups:
            group["params"] = [p for p in group["params"] if p not in own]
        groups.append({"params": list(own), "weight_decay": 0.0})
        return [group for group in groups if group["params"]]

    @torch.no_grad()
    def add_(self, model: nn.Module) -> None:
        """Adds the decay's gradient to `.grad`, between `backward()` and `step()`."""
        seen: set[nn.Parameter] = set()
        for layer in self._layers(model):
            parameters = [p for p in _decayed(layer) if p.grad is not None and p not in seen]
            seen.update(parameters)  # tied layers count once
            if not parameters:
                continue
            if any(type(p.data).__name__ == "DTensor" for p in parameters):
                raise UsageError("Frobenius decay is not supported on a model sharded by fully_shard")
            if isinstance(layer, Factorized):
                with torch.enable_grad():
                    gradients = torch.autograd.grad(layer.squared_norm() / 2, parameters)
            else:
                gradients = tuple(p.detach() for p in parameters)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                assert parameter.grad is not None
                parameter.grad.add_(gradient, alpha=self.decay)

    def _layers(self, model: nn.Module) -> list[nn.Module]:
        inner = model.module if isinstance(model, DistributedDataParallel) else model
        return [candidate.module for candidate in find(inner, self.where)]


def _decayed(layer: nn.Module) -> list[nn.Parameter]:
    """The parameters of a layer that are, or become, its factors."""
    if isinstance(layer, Factorized):
        return layer.factor_parameters()
    from takifugu.lowrank.layers import kind_of

    kind = kind_of(layer)
    assert kind is not None
    # A weight that is computed from other parameters (weight_norm, pruning) is left to the optimizer's decay.
    return [weight for weight in kind.weights_of(layer).values() if isinstance(weight, nn.Parameter)]
