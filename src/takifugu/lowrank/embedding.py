"""Factorized Embedding: the table E (words x width) is `U @ V`; a look-up takes rows of U times V.

Never chosen by default (`where=None`): it pays only for wide tables, and tied decoders must follow.
The layout of both factors is FactorizedLinear's, so that an embedding and a decoder can share them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from takifugu.lowrank.decompose import Factors
from takifugu.lowrank.factorized import Dense, Factorized, Pairs, Unfolding, empty_like_weight, product
from takifugu.lowrank.view import weight_view


class FactorizedEmbedding(Factorized):
    kind = "embedding"

    u: Any
    v: nn.Parameter

    @classmethod
    def takes(cls, module: nn.Module) -> bool:
        return isinstance(module, nn.Embedding)

    @classmethod
    def obstacle(cls, module: Dense, scheme: str) -> str | None:
        if module.max_norm is not None:
            return "max_norm renormalizes dense rows, which factors do not have"
        return None

    @classmethod
    def unfoldings(cls, module: Dense, scheme: str) -> list[Unfolding]:
        m, n = module.weight.shape
        return [Unfolding("weight", m, n, 1, lambda weights: weights["weight"][None])]

    @classmethod
    def shell(cls, module: Dense, scheme: str, rank: Mapping[str, int]) -> Self:
        layer = cls()
        layer.describe_(scheme, rank, module)
        (m, n), r = module.weight.shape, rank["weight"]
        layer.u = nn.Embedding(
            m,
            r,
            padding_idx=module.padding_idx,
            scale_grad_by_freq=module.scale_grad_by_freq,
            sparse=module.sparse,
            device="meta",
        )
        layer.u.weight = empty_like_weight(module.weight, m, r)
        layer.v = empty_like_weight(module.weight, r, n)
        return layer

    def factor_parameters(self) -> list[nn.Parameter]:
        return [self.u.weight, self.v]

    def factor_pairs(self) -> list[tuple[Tensor, Tensor]]:
        return [(self.u.weight[None], self.v[None])]

    def share_(self, other: Factorized) -> None:
        self.u.weight, self.v = other.factor_parameters()

    def factors_(self, factors: Mapping[str, list[Factors]]) -> None:
        (only,) = factors["weight"]
        self.u.weight.data.copy_(only.A)
        self.v.data.copy_(only.B)

    def pairs(self) -> Pairs:
        return {"weight": (self.u.weight.detach()[None], self.v.detach()[None])}

    def dense_shell(self, device: torch.device | str) -> Dense:
        m, n = self.shapes["weight"]
        dense = nn.Embedding(
            m,
            n,
            padding_idx=self.u.padding_idx,
            scale_grad_by_freq=self.u.scale_grad_by_freq,
            sparse=self.u.sparse,
            device="meta",
        )
        dense.weight = empty_like_weight(self.v, m, n, device=device)
        return dense

    def dense_weights(self, precise: bool = False) -> dict[str, Tensor]:
        return {"weight": product(self.u.weight, self.v, precise)}

    def forward(self, input: Tensor) -> Tensor:
        rows: Tensor = self.u(input)
        # As the dense look-up, whose result autocast leaves in the table's dtype.
        return (rows @ self.v).to(rows.dtype)

    @property
    def num_embeddings(self) -> int:
        return self.shapes["weight"][0]

    @property
    def embedding_dim(self) -> int:
        return self.shapes["weight"][1]

    @property
    def padding_idx(self) -> int | None:
        padding: int | None = self.u.padding_idx
        return padding

    @property
    def weight(self) -> Tensor:
        """The product of the factors: for reading, not for optimizing."""
        return weight_view(self, "weight")
