"""Finds gradients that no optimizer step has used, which a switch would drop.

A gradient that is there proves nothing: many loops call `zero_grad()` only before the next `backward()`. So
every step marks the gradients it has used with their version, which any later change (a `backward()`) raises.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from takifugu.errors import TakifuguWarning
from takifugu.lowrank.surgery import Swap

_FOLLOWED = "_takifugu_followed"
_STEPPED = "_takifugu_stepped"
_USED = "_takifugu_used"


def follow_(optimizer: Optimizer) -> None:
    """Mark the gradients that this optimizer's steps use, from now on."""
    if not hasattr(optimizer, _FOLLOWED):
        optimizer.register_step_post_hook(_mark)
        setattr(optimizer, _FOLLOWED, True)


def warn_of_unused(optimizer: Optimizer, swaps: Sequence[Swap]) -> None:
    """Warn if the weights that are replaced have gradients from after the last step."""
    unused = set(_unused(optimizer))
    dropped = [
        f"{swap.name}.{name}"
        for swap in swaps
        for name, parameter in swap.old.named_parameters()
        if parameter in unused and parameter not in set(swap.new.parameters())
    ]
    if dropped:
        more = f" and {len(dropped) - 1} more" if len(dropped) > 1 else ""
        warnings.warn(
            f"the switch drops the gradient of {dropped[0]!r}{more}, which optimizer.step() has not used; "
            "call WarmStart before backward() or after step()",
            TakifuguWarning,
            stacklevel=4,
        )


def _mark(optimizer: Optimizer, *_: Any) -> None:
    if torch.compiler.is_compiling():
        return  # marks cannot be part of a graph; without a step seen there is no warning either
    setattr(optimizer, _STEPPED, True)
    for gradient in (p.grad for group in optimizer.param_groups for p in group["params"]):
        if type(gradient) is Tensor and not gradient.is_inference():
            setattr(gradient, _USED, gradient._version)


def _unused(optimizer: Optimizer) -> list[nn.Parameter]:
    if not hasattr(optimizer, _STEPPED):
        return []
    found = []
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        gradient = parameter.grad
        if type(gradient) is not Tensor or gradient.is_inference() or gradient.layout != torch.strided:
            continue
        if getattr(gradient, _USED, None) == gradient._version or not bool(gradient.any()):
            continue  # used, or set to zero since
        if not bool(gradient.isfinite().all()):
            return []  # a GradScaler leaves such gradients unused on purpose
        found.append(parameter)
    return found
