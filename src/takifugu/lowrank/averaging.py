"""The average of models that several nodes trained from one.

The mean of factors is not the factors of the mean: mean(U) mean(V) differs from mean(U V). The exact mean of
N products of rank r has rank N r at most, and is cheap to recompress without ever forming it:

    sum_k w_k A_k B_k = [w_1 A_1 ... w_N A_N] [B_1; ...; B_N] = (Q_A R_A) (Q_B R_B)^T

so that an SVD of the small core `R_A R_B^T` is enough. The result is split by sqrt(S), as every decomposition
here is.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from takifugu.errors import UsageError
from takifugu.lowrank.candidates import walk
from takifugu.lowrank.decompose import Factors, balanced
from takifugu.lowrank.factorized import Factorized, Pairs

HOW = ("factors", "products")


class Trained(Protocol):
    """A node's contribution: the state it ended with, and for how many samples it counts."""

    @property
    def state(self) -> Mapping[str, Tensor]: ...
    @property
    def samples(self) -> float: ...


@dataclass(frozen=True, eq=False)
class Averaged:
    state: dict[str, Tensor]
    truncation: float
    """Relative Frobenius distance from the exact mean product, over all factorized layers."""
    notes: tuple[str, ...] = ()
    """Where it was not done as asked for."""


def check_how(how: str) -> None:
    if how not in HOW:
        raise UsageError(f"averaging {how!r} is not known; one of {', '.join(map(repr, HOW))}")


def average(model: nn.Module, updates: Sequence[Trained], how: str = "factors") -> Averaged:
    """The mean of the updates, weighted by samples; `model` gives the structure and is not touched.

    `how="factors"` is the mean of every tensor. `how="products"` averages what the factors multiply to, and
    recompresses to the same ranks; all that is not factorized is the mean in either case. Of integer
    buffers (counts of batches seen) the largest is kept.
    """
    check_how(how)
    weights = _weights(updates)
    expected = model.state_dict()
    for index, update in enumerate(updates):
        _check(expected, update.state, index)
    state = {
        name: _mean([update.state[name] for update in updates], weights).to(tensor.device)
        for name, tensor in expected.items()
    }
    layers = _factorized(model)
    if not layers:
        return Averaged(state, 0.0)
    with torch.no_grad():
        return _factors_apart(model, layers, updates, weights, state, how)


def _factors_apart(
    model: nn.Module,
    layers: Mapping[str, Factorized],
    updates: Sequence[Trained],
    weights: Sequence[float],
    state: dict[str, Tensor],
    how: str,
) -> Averaged:
    """What is special about the factorized layers: the error of their mean, or a better one."""
    scratch = copy.deepcopy(model).cpu()
    own = {name: scratch.get_submodule(name) for name in layers}
    pairs: dict[str, list[Pairs]] = {name: [] for name in layers}
    dense: dict[str, dict[str, Tensor]] = {}
    for update, weight in zip(updates, weights, strict=True):
        scratch.load_state_dict(update.state)
        for name, layer in own.items():
            assert isinstance(layer, Factorized)
            found = layer.pairs()
            if found is not None:
                pairs[name].append({matrix: (_copied(A), _copied(B)) for matrix, (A, B) in found.items()})
                continue
            sums = dense.setdefault(name, {})
            for matrix, W in layer.dense_weights(precise=True).items():
                sums[matrix] = sums.get(matrix, torch.zeros_like(W)) + weight * W
    scratch.load_state_dict(state)
    lost = total = 0.0
    notes: list[str] = []
    for name, layer in own.items():
        assert isinstance(layer, Factorized)
        if name in dense:
            now = layer.dense_weights(precise=True)
            lost += sum(float((now[matrix] - W).square().sum()) for matrix, W in dense[name].items())
            total += sum(float(W.square().sum()) for W in dense[name].values())
            if how == "products":
                notes.append(f"{name!r}: {layer.scheme} has no two-factor form; averaged by factors")
            continue
        if how == "products":
            layer_lost, layer_total = _recompress_(layer, pairs[name], weights)
        else:
            layer_lost, layer_total = _distance(layer, pairs[name], weights)
        lost, total = lost + layer_lost, total + layer_total
    if how == "products":
        state = {
            name: tensor.detach().to(state[name].device) for name, tensor in scratch.state_dict().items()
        }
    return Averaged(state, math.sqrt(lost / total) if total > 0 else 0.0, tuple(notes))


def _factorized(model: nn.Module) -> dict[str, Factorized]:
    """The factorized layers by name; of layers that share their factors, the first."""
    found: dict[str, Factorized] = {}
    seen: set[int] = set()
    for name, module in walk(model):
        if isinstance(module, Factorized) and id(module.factor_parameters()[0]) not in seen:
            seen.add(id(module.factor_parameters()[0]))
            found[name] = module
    return found


def _recompress_(
    layer: Factorized, updates: Sequence[Pairs], weights: Sequence[float]
) -> tuple[float, float]:
    """Sets the factors to the best ones of the mean product; squares of what was lost and of the whole."""
    found: dict[str, list[Factors]] = {}
    lost = total = 0.0
    for matrix, (A_now, B_now) in _of(layer).items():
        found[matrix] = []
        for block in range(A_now.shape[0]):
            A, B = _stacked(updates, weights, matrix, block)
            U, s, V_t = _svd_of_product(A, B)
            r, energy = A_now.shape[-1], float(s.square().sum())
            found[matrix].append(balanced(U[:, :r], s[:r], V_t[:r], energy, like=B_now[block]))
            lost += float(s[r:].square().sum())
            total += energy
    layer.factors_(found)
    return lost, total


def _distance(layer: Factorized, updates: Sequence[Pairs], weights: Sequence[float]) -> tuple[float, float]:
    """Squared distance of the layer's product from the mean product, and the latter's square."""
    lost = total = 0.0
    for matrix, (A_now, B_now) in _of(layer).items():
        for block in range(A_now.shape[0]):
            A, B = _stacked(updates, weights, matrix, block)
            away_A = torch.cat([A, -A_now[block].double()], dim=1)
            away_B = torch.cat([B, B_now[block].double()])
            lost += float(_core(away_A, away_B)[1].square().sum())
            total += float(_core(A, B)[1].square().sum())
    return lost, total


def _copied(factor: Tensor) -> Tensor:
    # A copy also of float64: the module it is read from takes the next update in.
    return factor.to(torch.float64, copy=True)


def _of(layer: Factorized) -> Pairs:
    found = layer.pairs()
    assert found is not None
    return found


def _stacked(
    updates: Sequence[Pairs], weights: Sequence[float], matrix: str, block: int
) -> tuple[Tensor, Tensor]:
    """A (m, N r) and B (N r, n), whose product is the mean product of one group or gate."""
    A = torch.cat([w * update[matrix][0][block] for update, w in zip(updates, weights, strict=True)], dim=1)
    B = torch.cat([update[matrix][1][block] for update in updates])
    return A, B


def _core(A: Tensor, B: Tensor) -> tuple[Tensor | None, Tensor, Tensor | None]:
    """`A @ B = Q_A core Q_B^T`, with a core no larger than it need be (None: the identity)."""
    if A.shape[1] >= min(A.shape[0], B.shape[1]):
        return None, A @ B, None
    Q_A, R_A = torch.linalg.qr(A)
    Q_B, R_B = torch.linalg.qr(B.mT)
    return Q_A, R_A @ R_B.mT, Q_B


def _svd_of_product(A: Tensor, B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    Q_A, core, Q_B = _core(A, B)
    U, s, V_t = torch.linalg.svd(core, full_matrices=False)
    return (U if Q_A is None else Q_A @ U), s, (V_t if Q_B is None else V_t @ Q_B.mT)


def _weights(updates: Sequence[Trained]) -> list[float]:
    if not updates:
        raise UsageError("there is nothing to average; a round needs at least one update")
    counts = [update.samples for update in updates]
    if min(counts) < 0 or sum(counts) <= 0:
        raise UsageError(
            f"updates are weighted by samples, and these are {counts}; at least one must be above 0"
        )
    return [count / sum(counts) for count in counts]


def _check(expected: Mapping[str, Tensor], state: Mapping[str, Tensor], index: int) -> None:
    wrong = next((name for name in (*expected, *state) if (name in expected) != (name in state)), None)
    if wrong is not None:
        where = "is missing" if wrong in expected else "does not belong to the model"
        raise UsageError(f"update {index}: {wrong!r} {where}; all updates must have the model's structure")
    for name, tensor in expected.items():
        if state[name].shape != tensor.shape:
            raise UsageError(
                f"update {index}: {name!r} is {tuple(state[name].shape)}, the model's is "
                f"{tuple(tensor.shape)}; all updates must have the model's structure"
            )


def _mean(tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    first = tensors[0]
    if not (first.is_floating_point() or first.is_complex()):
        return torch.stack(list(tensors)).amax(dim=0)
    wide = torch.complex128 if first.is_complex() else torch.float64
    total = torch.zeros_like(first, dtype=wide)
    for tensor, weight in zip(tensors, weights, strict=True):
        total.add_(tensor.to(wide), alpha=weight)
    return total.to(first.dtype)
