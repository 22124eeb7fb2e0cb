"""Factorized convolutions, plain and transposed, in one to three dimensions, with groups.

Everything happens on the *canonical* weight (g, o, i, *k): g groups of o output and i input
channels each, whatever torch's layout is. A scheme says which matrices are decomposed and how the
factors become a chain of convolutions:

    kxk-1x1    the paper's: k x k from i to r, then 1 x 1 from r to o
    1x1-kxk    1 x 1 from i to r, then k x k from r to o
    tucker2    1 x 1 from i to r_in, k x k from r_in to r_out, 1 x 1 from r_out to o
    separable  k x 1 from i to r, then 1 x k from r to o (two dimensions only)

All stages are ordinary `nn.Conv*` children, named `v`, `core` (tucker2) and `u`; `u` has the bias.

`kxk-1x1+bn` has a batch norm between the two, named `norm`. It begins as the identity in evaluation; in
training it normalizes, so that even at full rank the layer is not the dense one any more. Made dense, its
running statistics are folded in, and the convolution has a bias in any case.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from takifugu.errors import LayerError
from takifugu.lowrank.decompose import Decomposer, Factors
from takifugu.lowrank.factorized import Dense, Factorized, Pairs, Unfolding, Weights, empty_like_weight
from takifugu.lowrank.view import weight_view

_PLAIN: dict[int, Any] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
_TRANSPOSED: dict[int, Any] = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
_NORMS: dict[int, Any] = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
_WITH_NORM = "+bn"
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


class _FactorizedConv(Factorized):
    schemes = ("kxk-1x1", "1x1-kxk", "tucker2", "separable")
    # Only here is what follows the norm 1 x 1: a larger kernel's zero padding does not see the norm's shift.
    named_schemes = ("kxk-1x1" + _WITH_NORM,)
    # A sum over many positions: what moves together at one of them does not at the next.
    gradient_correlation = 0.0
    dimensions: int
    transposed: bool

    v: Any
    norm: Any
    core: Any
    u: Any
    config: dict[str, Any]
    """The dense layer's constructor arguments, to rebuild it."""

    @classmethod
    def takes(cls, module: nn.Module) -> bool:
        dense = (_TRANSPOSED if cls.transposed else _PLAIN)[cls.dimensions]
        return isinstance(module, dense)

    @classmethod
    def obstacle(cls, module: Dense, scheme: str) -> str | None:
        if scheme == "separable" and (cls.dimensions != 2 or min(module.kernel_size) < 2):
            return "the separable scheme needs a two-dimensional kernel larger than 1 both ways"
        return None

    @classmethod
    def unfoldings(cls, module: Dense, scheme: str) -> list[Unfolding]:
        g, o, i, *k = cls._canonical_shape(module.weight.shape, module.groups)
        K = math.prod(k)
        scheme = scheme.removesuffix(_WITH_NORM)

        def canonical(weights: Weights) -> Tensor:
            return cls._canonical(weights["weight"], g)

        if scheme == "kxk-1x1":
            return [Unfolding("weight", o, i * K, g, lambda w: canonical(w).reshape(g, o, i * K))]
        if scheme == "1x1-kxk":
            return [
                Unfolding("weight", o * K, i, g, lambda w: canonical(w).movedim(2, -1).reshape(g, o * K, i))
            ]
        if scheme == "tucker2":
            return [
                Unfolding("out", o, i * K, g, lambda w: canonical(w).reshape(g, o, i * K)),
                Unfolding("in", i, o * K, g, lambda w: canonical(w).transpose(1, 2).reshape(g, i, o * K)),
            ]
        kh, kw = k
        return [
            Unfolding(
                "weight",
                o * kw,
                i * kh,
                g,
                lambda w: canonical(w).permute(0, 1, 4, 2, 3).reshape(g, o * kw, i * kh),
            )
        ]

    @classmethod
    def shell(cls, module: Dense, scheme: str, rank: Mapping[str, int]) -> Self:
        layer = cls()
        layer.describe_(scheme, rank, module)
        layer.norm = None
        layer.config = _config(module, cls.transposed)
        vars(layer).update(layer.config)  # other people's code reads `stride`, `in_channels` and so on
        _, o, i, *_ = cls._canonical_shape(module.weight.shape, module.groups)
        stage = _Stages(module, cls.dimensions, cls.transposed)
        if scheme.removesuffix(_WITH_NORM) == "kxk-1x1":
            layer.v = stage.spatial(i, rank["weight"])
            if scheme.endswith(_WITH_NORM):
                layer.norm = _norm(module, cls.dimensions, rank["weight"])
            layer.u = stage.pointwise(rank["weight"], o)
        elif scheme == "1x1-kxk":
            layer.v = stage.pointwise(i, rank["weight"])
            layer.u = stage.spatial(rank["weight"], o)
        elif scheme == "tucker2":
            layer.v = stage.pointwise(i, rank["in"])
            layer.core = stage.spatial(rank["in"], rank["out"])
            layer.u = stage.pointwise(rank["out"], o)
        else:
            layer.v = stage.spatial(i, rank["weight"], along=0)
            layer.u = stage.spatial(rank["weight"], o, along=1)
        layer.u.bias = module.bias
        return layer

    @classmethod
    def factor_params(cls, module: Dense, scheme: str, rank: Mapping[str, int]) -> int:
        if scheme != "tucker2":
            factors = super().factor_params(module, scheme, rank)
            return factors + (2 * module.groups * rank["weight"] if scheme.endswith(_WITH_NORM) else 0)
        g, o, i, *k = cls._canonical_shape(module.weight.shape, module.groups)
        r_out, r_in = rank["out"], rank["in"]
        return g * (i * r_in + r_in * r_out * math.prod(k) + r_out * o)

    @property
    def stages(self) -> list[Any]:
        """The convolutions."""
        return [self.v, self.core, self.u] if self.scheme == "tucker2" else [self.v, self.u]

    @property
    def chain(self) -> list[Any]:
        """What the input goes through."""
        return self.stages if self.norm is None else [self.v, self.norm, self.u]

    def factor_parameters(self) -> list[nn.Parameter]:
        return [stage.weight for stage in self.stages]

    def factor_pairs(self) -> list[tuple[Tensor, Tensor]]:
        assert self.scheme != "tucker2", "it has three factors"
        g = self.config["groups"]
        v, u = (_get(stage, g) for stage in self.stages)  # (g, r, i, ...) and (g, o, r, ...)
        if self.norm is not None:
            v = v * self._gain().reshape(g, -1, *[1] * (v.dim() - 2)).to(v.dtype)
        return [(u.movedim(2, -1).reshape(g, -1, u.shape[2]), v.flatten(2))]

    def squared_norm(self) -> Tensor:
        if self.scheme != "tucker2":
            return super().squared_norm()
        v, core, u = (_get(stage, self.config["groups"]).flatten(3) for stage in self.stages)
        u, v = u[..., 0], v[..., 0]  # (g, o, r), (g, s, i); the core is (g, r, s, k)
        return torch.einsum("grsk,grq,gst,gqtk->", core, u.mT @ u, v @ v.mT, core)

    def share_(self, other: Factorized) -> None:
        if self.norm is not None:
            raise LayerError(
                "convolutions that share their weight cannot have batch norms between the factors"
            )
        for stage, weight in zip(self.stages, other.factor_parameters(), strict=True):
            stage.weight = weight

    def factors_(self, factors: Mapping[str, list[Factors]]) -> None:
        g, o, i, *k = self._canonical_shape(self.shapes["weight"], self.config["groups"])
        A = torch.stack([block.A for block in factors["weight"]])
        B = torch.stack([block.B for block in factors["weight"]])
        r = self.rank["weight"]
        one = [1] * self.dimensions
        if self.scheme.removesuffix(_WITH_NORM) == "kxk-1x1":
            v, u = B.reshape(g, r, i, *k), A.reshape(g, o, r, *one)
        elif self.scheme == "1x1-kxk":
            v, u = B.reshape(g, r, i, *one), A.reshape(g, o, *k, r).movedim(-1, 2)
        else:
            kh, kw = k
            v, u = B.reshape(g, r, i, kh, 1), A.reshape(g, o, kw, 1, r).permute(0, 1, 4, 3, 2)
        _set(self.v, v)
        _set(self.u, u)

    def pairs(self) -> Pairs | None:
        if self.scheme == "tucker2":
            return None
        g, r = self.config["groups"], self.rank["weight"]
        v, u = _get(self.v, g).detach(), _get(self.u, g).detach()
        # u is (g, o, r, *k), where k is whatever part of the kernel the scheme has left to it.
        return {"weight": (u.movedim(2, -1).reshape(g, -1, r), v.reshape(g, r, -1))}

    @torch.no_grad()
    def fill_(self, weights: Weights, unfoldings: list[Unfolding], decompose: Decomposer) -> float:
        if self.scheme != "tucker2":
            return super().fill_(weights, unfoldings, decompose)
        # Higher-order SVD: a basis for the outputs, one for the inputs, and the core between them.
        g, o, i, *k = self._canonical_shape(self.shapes["weight"], self.config["groups"])
        r_out, r_in = self.rank["out"], self.rank["in"]
        basis = {
            unfolding.name: torch.stack(
                [
                    torch.linalg.qr(decompose(block.double(), self.rank[unfolding.name]).A).Q
                    for block in unfolding.unfold(weights)
                ]
            )
            for unfolding in unfoldings
        }
        W = self._canonical(weights["weight"], g).double().reshape(g, o, i, -1)
        core = torch.einsum("goik,gor,gis->grsk", W, basis["out"], basis["in"])
        # The three stages get the same norm, as the two factors of an SVD split by sqrt(S) have.
        energy, kept = float(W.square().sum()), float(core.square().sum())
        common = (kept * g * g * r_out * r_in) ** (1 / 3) if kept > 0 else 1.0
        scale_out, scale_in = (common / (g * r_out)) ** 0.5, (common / (g * r_in)) ** 0.5
        one = [1] * self.dimensions
        _set(self.u, (basis["out"] * scale_out).reshape(g, o, r_out, *one))
        _set(self.v, (basis["in"].mT * scale_in).reshape(g, r_in, i, *one))
        _set(self.core, (core / (scale_out * scale_in)).reshape(g, r_out, r_in, *k))
        return (max(0.0, energy - kept) / energy) ** 0.5 if energy > 0 else 0.0

    def dense_shell(self, device: torch.device | str) -> Dense:
        build = (_TRANSPOSED if self.transposed else _PLAIN)[self.dimensions]
        dense = build(**self.config, bias=False, device="meta")
        dense.weight = empty_like_weight(self.u.weight, *self.shapes["weight"], device=device)
        if any(_is_channels_last(stage.weight) for stage in self.stages):
            _to_channels_last_(dense)
        dense.bias = self.u.bias
        return dense

    def dense_weights(self, precise: bool = False) -> dict[str, Tensor]:
        g, o, i, *k = self._canonical_shape(self.shapes["weight"], self.config["groups"])
        dtype = self.u.weight.dtype
        wide = torch.float64 if precise and self.u.weight.device.type != "mps" else dtype
        wide = torch.float32 if wide in (torch.float16, torch.bfloat16) else wide
        parts = [_get(stage, g).to(wide) for stage in self.stages]
        if self.scheme.removesuffix(_WITH_NORM) == "kxk-1x1":
            v, u = parts[0].flatten(3), parts[1].flatten(3)[..., 0]
            if self.norm is not None:
                v = v * self._gain().to(wide).reshape(g, -1, 1, 1)
            W = torch.einsum("gor,grik->goik", u, v)
        elif self.scheme == "1x1-kxk":
            v, u = parts[0].flatten(3)[..., 0], parts[1].flatten(3)
            W = torch.einsum("gork,gri->goik", u, v)
        elif self.scheme == "tucker2":
            v, core, u = parts[0].flatten(3)[..., 0], parts[1].flatten(3), parts[2].flatten(3)[..., 0]
            W = torch.einsum("gor,grsk,gsi->goik", u, core, v)
        else:
            v, u = parts[0].flatten(3), parts[1].flatten(3)
            W = torch.einsum("gorw,grih->goihw", u, v)
        W = W.reshape(g, o, i, *k)
        if self.transposed:
            W = W.transpose(1, 2)
        W = W.reshape(self.shapes["weight"])
        return {"weight": W if precise else W.to(dtype)}

    # ---- the norm between the factors -----------------------------------------------------------------

    def _gain(self) -> Tensor:
        """By how much the norm multiplies each channel in evaluation."""
        gain: Tensor = self.norm.weight / (self.norm.running_var + self.norm.eps).sqrt()
        return gain

    @torch.no_grad()
    def to_dense(self, device: torch.device | str | None = None) -> nn.Module:
        dense: Any = super().to_dense(device)
        if self.norm is not None and dense.weight.device.type != "meta":
            shift = (self.norm.bias - self.norm.running_mean * self._gain()).double()
            g = self.config["groups"]
            u = _get(self.u, g).flatten(3)[..., 0].double()
            folded = torch.einsum("gor,gr->go", u, shift.reshape(g, -1)).reshape(-1)
            if self.u.bias is not None:
                folded = folded + self.u.bias.double()
            dense.bias = nn.Parameter(folded.to(dense.weight), requires_grad=dense.weight.requires_grad)
        module: nn.Module = dense
        return module

    def rerank_obstacle(self) -> str | None:
        if self.norm is None:
            return None
        return "the batch norm between its factors belongs to their rank; make it dense first"

    @property
    def weight(self) -> Tensor:
        """The product of the factors: for reading, not for optimizing."""
        return weight_view(self, "weight")

    @property
    def bias(self) -> nn.Parameter | None:
        bias: nn.Parameter | None = self.u.bias
        return bias

    # ---- the canonical view of a weight ------------------------------------------------------------

    @classmethod
    def _canonical_shape(cls, shape: Sequence[int], groups: int) -> tuple[int, ...]:
        first, second, *k = shape
        o, i = (second, first // groups) if cls.transposed else (first // groups, second)
        return (groups, o, i, *k)

    @classmethod
    def _canonical(cls, weight: Tensor, groups: int) -> Tensor:
        blocks = weight.reshape(groups, weight.shape[0] // groups, *weight.shape[1:])
        return blocks.transpose(1, 2) if cls.transposed else blocks


class _PlainConv(_FactorizedConv):
    transposed = False

    def forward(self, input: Tensor) -> Tensor:
        for stage in self.chain:
            input = stage(input)
        return input


class _TransposedConv(_FactorizedConv):
    transposed = True

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        if output_size is not None and self.scheme == "separable":
            raise LayerError(
                "a separable transposed convolution does not take output_size; "
                "set output_padding, or use another scheme for this layer"
            )
        for stage in self.chain:
            spatial = output_size is not None and isinstance(stage, tuple(_TRANSPOSED.values()))
            input = stage(input, output_size) if spatial else stage(input)
        return input


class FactorizedConv1d(_PlainConv):
    kind, dimensions = "conv1d", 1


class FactorizedConv2d(_PlainConv):
    kind, dimensions = "conv2d", 2


class FactorizedConv3d(_PlainConv):
    kind, dimensions = "conv3d", 3


class FactorizedConvTranspose1d(_TransposedConv):
    kind, dimensions = "conv_transpose1d", 1


class FactorizedConvTranspose2d(_TransposedConv):
    kind, dimensions = "conv_transpose2d", 2


class FactorizedConvTranspose3d(_TransposedConv):
    kind, dimensions = "conv_transpose3d", 3


class _Stages:
    """Builds the convolutions of a chain from the dense one's stride, padding and so on."""

    def __init__(self, dense: Dense, dimensions: int, transposed: bool) -> None:
        self.dense, self.dimensions, self.transposed = dense, dimensions, transposed

    def pointwise(self, i: int, o: int) -> Any:
        return self._build(_PLAIN[self.dimensions], i, o, kernel_size=(1,) * self.dimensions)

    def spatial(self, i: int, o: int, along: int | None = None) -> Any:
        """The k x k stage, or the part of it along one dimension only."""

        def cut(values: Any, neutral: int) -> Any:
            if along is None or isinstance(values, str):
                return values
            return tuple(value if d == along else neutral for d, value in enumerate(values))

        dense = self.dense
        options: dict[str, Any] = {
            "kernel_size": cut(dense.kernel_size, 1),
            "stride": cut(dense.stride, 1),
            "padding": cut(dense.padding, 0),
            "dilation": cut(dense.dilation, 1),
            "padding_mode": dense.padding_mode,
        }
        if self.transposed:
            options["output_padding"] = cut(dense.output_padding, 0)
        return self._build((_TRANSPOSED if self.transposed else _PLAIN)[self.dimensions], i, o, **options)

    def _build(self, conv: Any, i: int, o: int, **options: Any) -> Any:
        g = self.dense.groups
        stage = conv(g * i, g * o, groups=g, bias=False, device="meta", **options)
        stage.weight = empty_like_weight(self.dense.weight, *stage.weight.shape)
        if _is_channels_last(self.dense.weight):
            _to_channels_last_(stage)
        return stage


def _norm(dense: Dense, dimensions: int, rank: int) -> Any:
    """A batch norm that does nothing yet, in evaluation."""
    weight = dense.weight
    norm = _NORMS[dimensions](dense.groups * rank, device=weight.device, dtype=weight.dtype)
    nn.init.constant_(norm.weight, math.sqrt(1 + norm.eps))
    return norm.requires_grad_(weight.requires_grad)


def _config(module: Dense, transposed: bool) -> dict[str, Any]:
    names = ["in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups"]
    names += ["padding_mode"] + (["output_padding"] if transposed else [])
    return {name: getattr(module, name) for name in names}


def _set(stage: Any, canonical: Tensor) -> None:
    """Writes a stage's weight from its canonical form (g, out, in, *k)."""
    if isinstance(stage, tuple(_TRANSPOSED.values())):
        canonical = canonical.transpose(1, 2)
    stage.weight.data.copy_(canonical.reshape(stage.weight.shape))


def _get(stage: Any, groups: int) -> Tensor:
    """A stage's weight in canonical form."""
    weight: Tensor = stage.weight
    blocks = weight.reshape(groups, weight.shape[0] // groups, *weight.shape[1:])
    return blocks.transpose(1, 2) if isinstance(stage, tuple(_TRANSPOSED.values())) else blocks


def _is_channels_last(weight: Tensor) -> bool:
    wanted = _CHANNELS_LAST.get(weight.dim())
    return wanted is not None and weight.is_contiguous(memory_format=wanted) and not weight.is_contiguous()


def _to_channels_last_(module: Any) -> None:
    module.weight.data = module.weight.data.contiguous(memory_format=_CHANNELS_LAST[module.weight.dim()])
