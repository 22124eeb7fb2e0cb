"""What every factorized layer is: a module that knows the dense layer it stands for.

A layer type is a subclass with four class methods that look at a dense module (`takes`,
`obstacle`, `unfoldings`, `shell`) and four methods of its own (`factors_`, `pairs`,
`dense_shell`, `dense_weights`). Nothing else in the package knows about types of layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from takifugu.lowrank.decompose import Decomposer, Factors
from takifugu.structure import LayerSpec, Shape

Weights = Mapping[str, Tensor]
"""Dense weights by the names they have in the dense module, in torch's own layout."""

Pairs = dict[str, tuple[Tensor, Tensor]]
"""Per unfolding the factors of all groups or gates: (count, m, r) and (count, r, n)."""

Dense = Any
"""A dense torch module; its attributes differ by type, so the checker is told nothing of them."""


@dataclass(frozen=True)
class Unfolding:
    """A weight seen as `count` matrices (groups, gates) of size m x n that share one rank."""

    name: str
    m: int
    n: int
    count: int
    unfold: Callable[[Weights], Tensor]
    """Dense weights -> (count, m, n)."""

    @property
    def limit(self) -> int:
        return min(self.m, self.n)

    @property
    def params_per_rank(self) -> int:
        return self.count * (self.m + self.n)


class Factorized(nn.Module):
    """Base of the factorized layers; see the module's docstring for what a subclass defines."""

    kind: ClassVar[str]
    schemes: ClassVar[tuple[str, ...]] = ("uv",)
    """The first is the default (the paper's)."""
    named_schemes: ClassVar[tuple[str, ...]] = ()
    """More of them, used only where someone asks by name: they change what is learned, not only the cost."""

    gradient_correlation: ClassVar[float] = 0.5
    """How far the entries of a weight's gradient are taken to move together, from 0 to 1: how an optimizer's
    second moments get from the weight to its factors (docs/decisions/004)."""

    scheme: str
    rank: dict[str, int]
    shapes: dict[str, Shape]

    # ---- looking at a dense module --------------------------------------------------------------

    @classmethod
    def takes(cls, module: nn.Module) -> bool:
        """Whether `module` is of the dense type this class stands for (subclasses may qualify)."""
        raise NotImplementedError

    @classmethod
    def obstacle(cls, module: Dense, scheme: str) -> str | None:
        """Why this very module cannot be factorized, in a few words; None if it can."""
        return None

    @classmethod
    def weights_of(cls, module: Dense) -> dict[str, nn.Parameter]:
        """The dense parameters that would be factorized, by their names."""
        return {"weight": module.weight}

    @classmethod
    def unfoldings(cls, module: Dense, scheme: str) -> list[Unfolding]:
        raise NotImplementedError

    @classmethod
    def factor_params(cls, module: Dense, scheme: str, rank: Mapping[str, int]) -> int:
        """How many parameters the factors would have, biases aside."""
        return sum(u.params_per_rank * rank[u.name] for u in cls.unfoldings(module, scheme))

    @classmethod
    def shell(cls, module: Dense, scheme: str, rank: Mapping[str, int]) -> Self:
        """A factorized layer for `module` with uninitialised factors on the weight's device.

        Biases and everything else that stays are the *same* parameters, so that whoever holds them
        (an optimizer) need not notice.
        """
        raise NotImplementedError

    # ---- being one -------------------------------------------------------------------------------

    def factors_(self, factors: Mapping[str, list[Factors]]) -> None:
        """Takes the factors in, per unfolding a list over groups or gates."""
        raise NotImplementedError

    def pairs(self) -> Pairs | None:
        """What `factors_` took in, as the factors are now; None for a scheme without a two-factor form."""
        raise NotImplementedError

    def dense_shell(self, device: torch.device | str) -> Dense:
        """The dense module this layer stands for, weights uninitialised, biases shared."""
        raise NotImplementedError

    def dense_weights(self, precise: bool = False) -> dict[str, Tensor]:
        """The dense weights these factors stand for, differentiable.

        In the factors' dtype; with `precise`, formed and returned in float64 (use `product`).
        """
        raise NotImplementedError

    def factor_pairs(self) -> list[tuple[Tensor, Tensor]]:
        """The factors as stacks of matrices (count, m, r) and (count, r, n); differentiable views."""
        raise NotImplementedError

    def squared_norm(self) -> Tensor:
        """`||U V||_F^2` over all matrices, as `<U^T U, V V^T>`: nothing larger than the factors is formed."""
        return torch.stack([((U.mT @ U) * (V @ V.mT)).sum() for U, V in self.factor_pairs()]).sum()

    def rerank_obstacle(self) -> str | None:
        """Why this layer cannot go to another rank, in a few words; None if it can."""
        return None

    # ---- the same for all --------------------------------------------------------------------------

    def describe_(self, scheme: str, rank: Mapping[str, int], module: Dense) -> None:
        self.scheme = scheme
        self.rank = dict(rank)
        self.shapes = {name: tuple(weight.shape) for name, weight in self.weights_of(module).items()}

    def spec(self, name: str, tie: str | None = None) -> LayerSpec:
        return LayerSpec(name, self.kind, self.scheme, dict(self.rank), dict(self.shapes), tie)

    @torch.no_grad()
    def fill_(self, weights: Weights, unfoldings: list[Unfolding], decompose: Decomposer) -> float:
        """Sets the factors from dense weights; returns the relative error over all of them."""
        found: dict[str, list[Factors]] = {}
        lost = total = 0.0
        for unfolding in unfoldings:
            blocks = unfolding.unfold(weights)
            found[unfolding.name] = [decompose(block, self.rank[unfolding.name]) for block in blocks]
            for block, factors in zip(blocks, found[unfolding.name], strict=True):
                energy = float(torch.linalg.vector_norm(block, dtype=torch.float64)) ** 2
                lost += factors.error**2 * energy
                total += energy
        self.factors_(found)
        return (lost / total) ** 0.5 if total > 0 else 0.0

    @torch.no_grad()
    def to_dense(self, device: torch.device | str | None = None) -> nn.Module:
        """A plain torch module with the weights these factors stand for."""
        target = device if device is not None else next(self.parameters()).device
        dense = self.dense_shell(target)
        if torch.device(target).type != "meta":
            weights = self.dense_weights(precise=True)
            for name, parameter in self.weights_of(dense).items():
                parameter.copy_(weights[name])
        module: nn.Module = dense.train(self.training)
        return module

    def factor_parameters(self) -> list[nn.Parameter]:
        """The factors themselves: every parameter but the biases shared with the dense module."""
        raise NotImplementedError

    def share_(self, other: Factorized) -> None:
        """Uses the other layer's factors as its own (tied weights)."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        ranks = ", ".join(f"{name}={rank}" for name, rank in self.rank.items())
        return f"kind={self.kind}, scheme={self.scheme}, rank: {ranks}"


def empty_like_weight(weight: Tensor, *shape: int, device: torch.device | str | None = None) -> nn.Parameter:
    """An uninitialised parameter with the weight's dtype, device and need of a gradient."""
    data = torch.empty(shape, dtype=weight.dtype, device=weight.device if device is None else device)
    return nn.Parameter(data, requires_grad=weight.requires_grad)


def product(U: Tensor, V: Tensor, precise: bool = False) -> Tensor:
    """`U @ V`; 16-bit factors are multiplied at 32 bits, as their product loses digits needlessly."""
    if precise and U.device.type != "mps":
        return U.double() @ V.double()
    if U.dtype in (torch.float32, torch.float64):
        return U @ V
    return (U.float() @ V.float()).to(U.dtype)


def hollow(build: Callable[..., nn.Module], *arguments: Any, **options: Any) -> Any:
    """A module built without allocating or initialising its parameters; they are set afterwards."""
    return build(*arguments, **options, device="meta")
