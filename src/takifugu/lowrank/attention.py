"""Factorized `nn.MultiheadAttention`: its four projections, each a FactorizedLinear child.

torch's module calls `F.linear` on its weights directly, so swapping sub-modules inside it would
change nothing; this one replaces the whole module and keeps its signature and meaning.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from takifugu.errors import LayerError
from takifugu.lowrank.decompose import Factors
from takifugu.lowrank.factorized import Dense, Factorized, Pairs, Unfolding, empty_like_weight, product
from takifugu.lowrank.linear import FactorizedLinear
from takifugu.lowrank.view import weight_view

_PROJECTIONS = ("q", "k", "v", "out")


class FactorizedMultiheadAttention(Factorized):
    kind = "attention"

    q_proj: FactorizedLinear
    k_proj: FactorizedLinear
    v_proj: FactorizedLinear
    out_proj: FactorizedLinear
    in_proj_bias: nn.Parameter | None
    embed_dim: int
    kdim: int
    vdim: int
    num_heads: int
    head_dim: int
    dropout: float
    batch_first: bool
    _qkv_same_embed_dim: bool

    @classmethod
    def takes(cls, module: nn.Module) -> bool:
        return isinstance(module, nn.MultiheadAttention)

    @classmethod
    def obstacle(cls, module: Dense, scheme: str) -> str | None:
        if module.bias_k is not None or module.bias_v is not None:
            return "add_bias_kv is not supported"
        if module.add_zero_attn:
            return "add_zero_attn is not supported"
        return None

    @classmethod
    def weights_of(cls, module: Dense) -> dict[str, nn.Parameter]:
        if module._qkv_same_embed_dim:
            inputs = {"in_proj_weight": module.in_proj_weight}
        else:
            inputs = {f"{p}_proj_weight": getattr(module, f"{p}_proj_weight") for p in ("q", "k", "v")}
        return {**inputs, "out_proj.weight": module.out_proj.weight}

    @classmethod
    def unfoldings(cls, module: Dense, scheme: str) -> list[Unfolding]:
        E = module.embed_dim
        widths = {"q": E, "k": module.kdim, "v": module.vdim, "out": E}
        return [
            Unfolding(name, E, widths[name], 1, lambda w, name=name: cls._block(w, name, E)[None])  # type: ignore[misc]
            for name in _PROJECTIONS
        ]

    @staticmethod
    def _source(module: Dense, projection: str) -> str:
        """The dense parameter that holds a projection."""
        if projection == "out":
            return "out_proj.weight"
        return "in_proj_weight" if module._qkv_same_embed_dim else f"{projection}_proj_weight"

    @staticmethod
    def _block(weights: Mapping[str, Tensor], name: str, E: int) -> Tensor:
        if name == "out":
            return weights["out_proj.weight"]
        if "in_proj_weight" in weights:
            row = "qkv".index(name) * E
            return weights["in_proj_weight"][row : row + E]
        return weights[f"{name}_proj_weight"]

    @classmethod
    def shell(cls, module: Dense, scheme: str, rank: Mapping[str, int]) -> Self:
        layer = cls()
        layer.describe_(scheme, rank, module)
        E = module.embed_dim
        layer.embed_dim, layer.kdim, layer.vdim = E, module.kdim, module.vdim
        layer.num_heads, layer.head_dim = module.num_heads, module.head_dim
        layer.dropout, layer.batch_first = module.dropout, module.batch_first
        layer._qkv_same_embed_dim = module._qkv_same_embed_dim
        layer.in_proj_bias = module.in_proj_bias
        for name, width in zip(_PROJECTIONS, (E, module.kdim, module.vdim, E), strict=True):
            plain = nn.Linear(width, E, bias=False, device="meta")
            source = cls._source(module, name)
            plain.weight = empty_like_weight(cls.weights_of(module)[source], E, width)
            projection = FactorizedLinear.shell(plain, "uv", {"weight": rank[name]})
            setattr(layer, f"{name}_proj", projection)
        layer.out_proj.u.bias = module.out_proj.bias
        return layer

    def _projection(self, name: str) -> FactorizedLinear:
        projection: FactorizedLinear = getattr(self, f"{name}_proj")
        return projection

    def factor_parameters(self) -> list[nn.Parameter]:
        return [p for name in _PROJECTIONS for p in self._projection(name).factor_parameters()]

    def factor_pairs(self) -> list[tuple[Tensor, Tensor]]:
        return [pair for name in _PROJECTIONS for pair in self._projection(name).factor_pairs()]

    def share_(self, other: Factorized) -> None:
        assert isinstance(other, FactorizedMultiheadAttention)
        for name in _PROJECTIONS:
            self._projection(name).share_(other._projection(name))

    def factors_(self, factors: Mapping[str, list[Factors]]) -> None:
        for name in _PROJECTIONS:
            self._projection(name).factors_({"weight": factors[name]})

    def pairs(self) -> Pairs:
        return {name: self._projection(name).pairs()["weight"] for name in _PROJECTIONS}

    def dense_shell(self, device: torch.device | str) -> Dense:
        dense: Any = nn.MultiheadAttention(
            self.embed_dim,
            self.num_heads,
            dropout=self.dropout,
            bias=False,
            kdim=self.kdim,
            vdim=self.vdim,
            batch_first=self.batch_first,
            device="meta",
        )
        sources = {self._source(self, name): self._projection(name) for name in _PROJECTIONS}
        for name, shape in self.shapes.items():
            like = sources[name].u.weight
            holder = dense.out_proj if name == "out_proj.weight" else dense
            setattr(holder, name.removeprefix("out_proj."), empty_like_weight(like, *shape, device=device))
        dense.in_proj_bias = self.in_proj_bias
        dense.out_proj.bias = self.out_proj.bias
        return dense

    def dense_weights(self, precise: bool = False) -> dict[str, Tensor]:
        q, k, v, out = (
            product(self._projection(name).u.weight, self._projection(name).v.weight, precise)
            for name in _PROJECTIONS
        )
        if self._qkv_same_embed_dim:
            return {"in_proj_weight": torch.cat([q, k, v]), "out_proj.weight": out}
        return {"q_proj_weight": q, "k_proj_weight": k, "v_proj_weight": v, "out_proj.weight": out}

    @property
    def in_proj_weight(self) -> Tensor | None:
        """The dense input projection: for reading, not for optimizing."""
        return weight_view(self, "in_proj_weight") if self._qkv_same_embed_dim else None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        if query.is_nested or key.is_nested:
            raise LayerError(
                "a factorized attention does not take nested tensors; pass padded tensors with a mask "
                "(for nn.TransformerEncoder: enable_nested_tensor=False)"
            )
        if is_causal and attn_mask is None:
            raise LayerError("is_causal=True is a hint about attn_mask; pass attn_mask as well")
        batched = query.dim() == 3
        if not batched:
            query, key, value = query[None], key[None], value[None]
            key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
        elif not self.batch_first:
            query, key, value = query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)

        q, k, v = self._heads(query, key, value)
        mask = self._merged_mask(attn_mask, key_padding_mask, q, k)
        dropout = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            scores = (q * math.sqrt(1.0 / self.head_dim)) @ k.transpose(-2, -1)
            weights = torch.softmax(scores if mask is None else scores + mask, dim=-1)
            weights = F.dropout(weights, dropout) if dropout > 0 else weights
            mixed = weights @ v
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)
        output: Tensor = self.out_proj(mixed.transpose(1, 2).flatten(2))

        if weights is not None and average_attn_weights:
            weights = weights.mean(dim=1)
        if not batched:
            return output[0], None if weights is None else weights[0]
        return output if self.batch_first else output.transpose(0, 1), weights

    def _heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Projects, and splits (batch, length, width) into (batch, heads, length, head width)."""
        projected = [self.q_proj(query), self.k_proj(key), self.v_proj(value)]
        if self.in_proj_bias is not None:
            biases = self.in_proj_bias.chunk(3)
            projected = [x + bias.to(x.dtype) for x, bias in zip(projected, biases, strict=True)]
        q, k, v = (x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2) for x in projected)
        return q, k, v

    def _merged_mask(
        self, attn_mask: Tensor | None, key_padding_mask: Tensor | None, q: Tensor, k: Tensor
    ) -> Tensor | None:
        """Both masks as one additive mask that broadcasts to (batch, heads, target, source)."""
        batch, length, source = q.shape[0], q.shape[2], k.shape[2]
        mask = None
        if attn_mask is not None:
            mask = _additive(attn_mask, q.dtype)
            if mask.dim() == 3:
                mask = mask.view(batch, self.num_heads, length, source)
            elif mask.shape != (length, source):
                raise LayerError(
                    f"attn_mask has shape {tuple(attn_mask.shape)}; expected {(length, source)} or "
                    f"{(batch * self.num_heads, length, source)}"
                )
        if key_padding_mask is not None:
            padding = _additive(key_padding_mask, q.dtype).view(batch, 1, 1, source)
            mask = padding if mask is None else mask + padding
        return mask


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """In torch's boolean masks True means 'do not attend'."""
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf"))
    return mask.to(dtype)
