"""Factorized Linear: `y = (x V^T) U^T + bias`, two ordinary `nn.Linear` children.

Legend: the dense weight W (m x n) is `U @ V`; `v` holds V (r x n), `u` holds U (m x r) and the bias.
Transformers' `Conv1D` is the same layer with its weight stored transposed.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from takifugu.lowrank.decompose import Factors
from takifugu.lowrank.factorized import (
    Dense,
    Factorized,
    Pairs,
    Unfolding,
    empty_like_weight,
    hollow,
    product,
)
from takifugu.lowrank.view import weight_view


class FactorizedLinear(Factorized):
    kind = "linear"

    v: Any
    u: Any

    @classmethod
    def takes(cls, module: nn.Module) -> bool:
        return isinstance(module, nn.Linear)

    @classmethod
    def unfoldings(cls, module: Dense, scheme: str) -> list[Unfolding]:
        m, n = module.weight.shape
        return [Unfolding("weight", m, n, 1, lambda weights: weights["weight"][None])]

    @classmethod
    def shell(cls, module: Dense, scheme: str, rank: Mapping[str, int]) -> Self:
        layer = cls()
        layer.describe_(scheme, rank, module)
        m, n, r = *layer._size(module), rank["weight"]
        layer.v = hollow(nn.Linear, n, r, bias=False)
        layer.u = hollow(nn.Linear, r, m, bias=False)
        layer.v.weight = empty_like_weight(module.weight, r, n)
        layer.u.weight = empty_like_weight(module.weight, m, r)
        layer.u.bias = module.bias
        return layer

    @staticmethod
    def _size(module: Dense) -> tuple[int, int]:
        m, n = module.weight.shape
        return m, n

    def factors_(self, factors: Mapping[str, list[Factors]]) -> None:
        (only,) = factors["weight"]
        self.u.weight.data.copy_(only.A)
        self.v.weight.data.copy_(only.B)

    def pairs(self) -> Pairs:
        return {"weight": (self.u.weight.detach()[None], self.v.weight.detach()[None])}

    def dense_shell(self, device: torch.device | str) -> Dense:
        dense: nn.Linear = hollow(nn.Linear, self.in_features, self.out_features, bias=False)
        dense.weight = empty_like_weight(self.u.weight, self.out_features, self.in_features, device=device)
        dense.bias = self.u.bias
        return dense

    def dense_weights(self, precise: bool = False) -> dict[str, Tensor]:
        return {"weight": product(self.u.weight, self.v.weight, precise)}

    def factor_parameters(self) -> list[nn.Parameter]:
        return [self.u.weight, self.v.weight]

    def factor_pairs(self) -> list[tuple[Tensor, Tensor]]:
        return [(self.u.weight[None], self.v.weight[None])]

    def share_(self, other: Factorized) -> None:
        self.u.weight, self.v.weight = other.factor_parameters()

    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = self.u(self.v(input))
        return output

    # Other people's code reads these of a Linear.

    @property
    def in_features(self) -> int:
        return int(self.v.in_features)

    @property
    def out_features(self) -> int:
        return int(self.u.out_features)

    @property
    def weight(self) -> Tensor:
        """The product of the factors: for reading, not for optimizing."""
        return weight_view(self, "weight")

    @property
    def bias(self) -> nn.Parameter | None:
        bias: nn.Parameter | None = self.u.bias
        return bias


class FactorizedConv1D(FactorizedLinear):
    """Transformers' `Conv1D`: `y = x W + bias` with W (n x m), as in GPT-2."""

    kind = "transformers_conv1d"

    @classmethod
    def takes(cls, module: nn.Module) -> bool:
        conv1d = transformers_conv1d()
        return conv1d is not None and isinstance(module, conv1d)

    @classmethod
    def unfoldings(cls, module: Dense, scheme: str) -> list[Unfolding]:
        n, m = module.weight.shape
        return [Unfolding("weight", m, n, 1, lambda weights: weights["weight"].mT[None])]

    @staticmethod
    def _size(module: Dense) -> tuple[int, int]:
        n, m = module.weight.shape
        return m, n

    def dense_shell(self, device: torch.device | str) -> Dense:
        conv1d: Any = transformers_conv1d()
        with torch.device("meta"):
            dense = conv1d(self.out_features, self.in_features)
        dense.weight = empty_like_weight(self.u.weight, self.in_features, self.out_features, device=device)
        dense.bias = self.u.bias
        return dense

    def dense_weights(self, precise: bool = False) -> dict[str, Tensor]:
        return {"weight": product(self.u.weight, self.v.weight, precise).mT}

    @property
    def nf(self) -> int:
        return self.out_features

    @property
    def nx(self) -> int:
        return self.in_features


def transformers_conv1d() -> type[nn.Module] | None:
    """The class, if Transformers is loaded: a model that has such layers has loaded it."""
    library = sys.modules.get("transformers.pytorch_utils")
    return getattr(library, "Conv1D", None)
