"""Fused expert weights: modules that hold one matrix per expert in a single 3-D parameter.

Transformers writes Mixtral's and Qwen's experts that way. They are not factorized, but they may hold most of
a model's parameters, so the report lists them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from torch import nn
from torch.nn.parameter import is_lazy

from takifugu.lowrank.candidates import Where, layer_of, matches, walk
from takifugu.lowrank.default_layers import LEAST_RANK, everything

REASON = "fused 3-D expert weights (one matrix per expert) are not supported"


@dataclass(frozen=True)
class Experts:
    """A module with fused expert weights."""

    name: str
    module: nn.Module
    weights: dict[str, nn.Parameter]

    @property
    def params(self) -> int:
        return sum(weight.numel() for weight in self.weights.values())


def fused_experts(model: nn.Module, where: Where) -> list[Experts]:
    """Return the modules with fused expert weights that `where` means.

    A predicate is not asked: it was written for layers, and may fail on other modules.
    """
    found = []
    for name, module in walk(model):
        if not name or layer_of(module) or not _means(where, name):
            continue
        weights = {
            own: weight
            for own, weight in module.named_parameters(recurse=False)
            if not is_lazy(weight)
            and weight.dim() == 3
            and weight.shape[0] > 1
            # Not a table of positions or of biases: each expert's matrix is worth a factorization.
            and min(weight.shape[1:]) > LEAST_RANK
        }
        if weights:
            found.append(Experts(name, module, weights))
    return found


def _means(where: Where, name: str) -> bool:
    if where is None or where is everything:
        return True
    if callable(where):
        return False
    patterns = [where] if isinstance(where, str | re.Pattern) else where
    return any(matches(name, pattern) for pattern in patterns)
