"""Layers with fewer channels than their network's builder gives them, as data: the sizes of each such layer.

A method that cuts channels records the sizes in the model's builder (`record_`), `save` writes them to the
file's header, and `load` makes the same layers of a network of full size narrow before it fills them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from takifugu.errors import StructureError, near_misses
from takifugu.lowrank.surgery import Swap

BUILDER = "_takifugu_builder"
"""Attribute of a model: how it was built, as `takifugu.zoo.registry` writes it."""
WIDTHS = "widths"
"""Entry of the builder: by layer name, the first two sizes of its weight (of a batch norm, the only one)."""


def record_(model: nn.Module, layers: Iterable[str]) -> None:
    """Record the present sizes of these layers in the model's builder, so that `save` writes them."""
    builder = dict(getattr(model, BUILDER, None) or {})
    widths = {name: _sizes(model.get_submodule(name)) for name in layers}
    setattr(model, BUILDER, {**builder, WIDTHS: {**builder.get(WIDTHS, {}), **widths}})


def narrowed(model: nn.Module, widths: Any) -> list[Swap]:
    """Return the swaps that give the named layers these sizes; raise `StructureError` where that cannot be.

    The new layers hold the first channels of the old ones: `load` overwrites all values.
    """
    if not isinstance(widths, Mapping):
        raise StructureError(f"widths: expected sizes by layer name, got {type(widths).__name__}")
    modules = dict(model.named_modules())
    swaps = []
    for name, sizes in widths.items():
        old = modules.get(name)
        if old is None:
            raise StructureError(f"{type(model).__name__} has no layer {name!r}{near_misses(name, modules)}")
        if not isinstance(old, nn.Conv2d | nn.Linear | nn.BatchNorm2d) or getattr(old, "groups", 1) != 1:
            raise StructureError(f"layer {name!r} is a {type(old).__name__}, whose channels cannot be cut")
        now = _sizes(old)
        if (
            not isinstance(sizes, list)
            or len(sizes) != len(now)
            or not all(type(size) is int and 1 <= size <= most for size, most in zip(sizes, now, strict=True))
        ):
            raise StructureError(f"layer {name!r} has sizes {now} and cannot be narrowed to {sizes!r}")
        if sizes != now:
            swaps.append(Swap(name, old, _narrow(old, sizes)))
    return swaps


def resize_(layer: nn.Module) -> None:
    """Set a layer's size attributes to the sizes of its weight."""
    if isinstance(layer, nn.Conv2d):
        layer.out_channels, layer.in_channels = layer.weight.shape[:2]
    elif isinstance(layer, nn.Linear):
        layer.out_features, layer.in_features = layer.weight.shape
    elif isinstance(layer, nn.BatchNorm2d):
        layer.num_features = len(layer.weight)


def _sizes(layer: nn.Module) -> list[int]:
    weight = layer.weight
    assert isinstance(weight, Tensor)
    return list(weight.shape[:2])


@torch.no_grad()
def _narrow(old: nn.Module, sizes: list[int]) -> nn.Module:
    new = copy.deepcopy(old)
    for name, parameter in old.named_parameters(recurse=False):
        kept = parameter.detach()[tuple(map(slice, sizes[: parameter.dim()]))]
        setattr(new, name, nn.Parameter(kept.clone(), parameter.requires_grad))
    for name, buffer in old.named_buffers(recurse=False):
        if buffer.dim():  # not the batch norm's count of batches
            setattr(new, name, buffer[: sizes[0]].clone())
    resize_(new)
    return new
