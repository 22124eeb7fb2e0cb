"""Keeps torch's transformer fast path away from factorized layers.

In evaluation `nn.TransformerEncoderLayer` hands its dense weights to one fused kernel, and
`nn.TransformerEncoder` decides *by its first layer alone* whether padded batches become nested
tensors. A factorized layer can take part in neither. Each layer that has factors declines for
itself, and an encoder that has such a layer passes padded tensors; the others go on as before.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from takifugu.lowrank.factorized import Factorized

_SWITCHES: dict[type[nn.Module], tuple[str, Any]] = {
    # Read nowhere but where torch decides on the fast path.
    nn.TransformerEncoderLayer: ("activation_relu_or_gelu", 0),
    nn.TransformerEncoder: ("use_nested_tensor", False),
}
_MEMORY = "_takifugu_fast_path"


def update_(model: nn.Module) -> None:
    """Declines where there are factors, restores where there are none any more."""
    for module in model.modules():
        for kind, (attribute, declined) in _SWITCHES.items():
            if not isinstance(module, kind) or not hasattr(module, attribute):
                continue
            has_factors = any(isinstance(part, Factorized) for part in module.modules())
            if has_factors and not hasattr(module, _MEMORY):
                setattr(module, _MEMORY, getattr(module, attribute))
                setattr(module, attribute, declined)
            elif not has_factors and hasattr(module, _MEMORY):
                setattr(module, attribute, getattr(module, _MEMORY))
                delattr(module, _MEMORY)
