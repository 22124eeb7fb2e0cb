"""Changes models: `apply_` makes a model have a structure; the public verbs are short uses of it.

Collect, validate, then mutate: every new layer is built and filled before the first one is put in
place, so a call that fails leaves the model as it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from takifugu.errors import LayerError, StructureError, UsageError, near_misses
from takifugu.lowrank import fastpath
from takifugu.lowrank.candidates import (
    Candidate,
    Where,
    layer_of,
    refusal,
    refuse_wrappers,
    require_module,
    sharers,
    walk,
)
from takifugu.lowrank.choice import TIEABLE, checked_weights, present_structure, structure_from, survey
from takifugu.lowrank.coverage import warn_if_little
from takifugu.lowrank.decompose import DECOMPOSERS, Decomposer
from takifugu.lowrank.factorized import Factorized
from takifugu.lowrank.layers import kind_named
from takifugu.lowrank.references import check_references
from takifugu.lowrank.report import DensifyReport, FactorReport, factor_report
from takifugu.lowrank.snapshot import Snapshot
from takifugu.structure import LayerSpec, Structure


def factorize_(
    model: nn.Module,
    rank: Any = 0.25,
    where: Where = None,
    *,
    scheme: str | Mapping[str, str] | None = None,
    svd: str = "exact",
    force: bool = False,
    rerank: bool = False,
    example_input: Any = None,
    only_if_faster: Any = None,
) -> FactorReport:
    """Makes layers low-rank, in place, by truncated SVD of their weights.

    Args:
        rank: a ratio in (0, 1] of the full rank, an int, a rule of `takifugu.ranks`, or a dict from
            layer-name pattern to any of these.
        where: which layers: a predicate `(name, module) -> bool`, one or several name patterns,
            `tk.everything`, or None for the default: every supported layer except embeddings, the output
            layer, the first layer if another one remains, and layers for which a ratio or a rule gives a
            rank below 8. Output and first layer are the last and the first Linear or Conv, in execution
            order if there is an `example_input`, else in registration order.
        scheme: how convolutions are split: "kxk-1x1" (the paper's, default), "1x1-kxk", "tucker2",
            "separable", "fastest" (measured on `example_input`), or a dict by pattern.
        svd: "exact", or "randomized" for layers many thousands wide.
        force: also factorize what is frozen or would cost more than the dense weight; with `where=None`
            every supported layer except embeddings.
        rerank: also give new ranks to layers that are factorized already.
        example_input: an input for the model (a tuple for several arguments, a dict for keywords):
            the report then counts MACs.
        only_if_faster: an example input; each layer is timed on it, forward and backward, and stays
            dense if its factors are not faster.

    Returns a report: what was done to which layer, at what cost, with what error, and why others
    were left as they are. A failed call leaves the model as it was.
    """
    verdicts = survey(
        model,
        rank,
        where,
        scheme=scheme,
        force=force,
        rerank=rerank,
        example_input=example_input,
        only_if_faster=only_if_faster,
    )
    structure = structure_from(model, verdicts)
    example = only_if_faster if only_if_faster is not None else example_input
    warn_if_little(model, verdicts, where, stacklevel=2)
    report = factor_report(model, verdicts, structure, example, where)
    swaps = build_swaps(model, structure)
    errors = fill_(swaps, decomposer(svd))
    with _trial(model, swaps):
        report = report.completed(model, errors, example)
    commit_(model, swaps)
    return report


def apply_(model: nn.Module, structure: Structure, *, svd: str = "exact") -> dict[str, float]:
    """Makes the model have this structure: factorizes, re-ranks and densifies layers as needed.

    Returns the relative error of each layer that was decomposed.
    """
    swaps = build_swaps(model, structure)
    errors = fill_(swaps, decomposer(svd))
    commit_(model, swaps)
    return errors


def densify_(model: nn.Module) -> DensifyReport:
    """Turns every factorized layer back into a plain torch module, in place, and says how exactly."""
    swaps = build_swaps(model, Structure())
    if not swaps:
        raise UsageError(f"{type(model).__name__} has no factorized layer; there is nothing to densify")
    report = DensifyReport({swap.name: _rounding(swap.old, swap.new) for swap in swaps})
    commit_(model, swaps)
    return report


def structure_of(model: nn.Module) -> Structure:
    """The structure the model has now; an empty one if nothing is factorized."""
    require_module(model)
    return present_structure(model)


# ---- building and putting in place -------------------------------------------------------------------


@dataclass(frozen=True)
class Swap:
    """A module and what is to take its place."""

    name: str
    old: nn.Module
    new: nn.Module
    unfilled: Candidate | None = None
    """The layer whose weights the new factors are still to be made from; None if there is nothing to do."""

    @property
    def cost(self) -> int:
        """How much work the decomposition is, roughly: m * n * min(m, n) for each matrix."""
        if self.unfilled is None:
            return 0
        assert isinstance(self.new, Factorized)
        unfoldings = self.unfilled.layer.unfoldings(self.unfilled.dense, self.new.scheme)
        return sum(u.count * u.m * u.n * u.limit for u in unfoldings)

    def fill_(self, decompose: Decomposer) -> float:
        """Sets the factors by decomposing the old layer's weights; returns the relative error."""
        assert self.unfilled is not None
        assert isinstance(self.new, Factorized)
        unfoldings = self.unfilled.layer.unfoldings(self.unfilled.dense, self.new.scheme)
        return self.new.fill_(checked_weights(self.unfilled), unfoldings, decompose)


def decomposer(name: str) -> Decomposer:
    if not isinstance(name, str) or name not in DECOMPOSERS:
        raise UsageError(f"unknown svd {name!r}; one of {', '.join(map(repr, DECOMPOSERS))}")
    return DECOMPOSERS[name]


@torch.inference_mode(False)  # what is created in inference mode could never learn
def build_swaps(model: nn.Module, structure: Structure) -> list[Swap]:
    """All that must change for the model to have the structure; the new factors are still empty."""
    refuse_wrappers(model)
    modules = {name: module for name, module in walk(model) if layer_of(module)}
    present = present_structure(model)
    made: dict[str, nn.Module] = {}
    swaps: list[Swap] = []
    for spec in structure:
        if spec.name not in modules:
            known = near_misses(spec.name, modules)
            raise StructureError(f"{type(model).__name__} has no layer {spec.name!r}{known}")
        old = modules[spec.name]
        if present.get(spec.name) == spec and (spec.tie is None or spec.tie not in made):
            continue
        swap = _factorized(spec, old, _named(made, modules, spec.tie))
        if spec.tie is not None and not _share(old, modules.get(spec.tie)):
            raise StructureError(
                f"{spec.name!r} is tied to {spec.tie!r} in the structure, but not in this model; "
                "tie their weights first"
            )
        made[spec.name] = swap.new
        swaps.append(swap)
    _check_ties(structure, model, modules)
    for spec in present:
        if spec.name not in structure:
            swap = _densified(spec, modules[spec.name], made.get(spec.tie or ""))
            made[spec.name] = swap.new
            swaps.append(swap)
    check_references(model, swaps)
    return swaps


def fill_(swaps: Sequence[Swap], decompose: Decomposer) -> dict[str, float]:
    """Makes the new factors from the old weights; the relative error of each layer."""
    return {swap.name: swap.fill_(decompose) for swap in swaps if swap.unfilled is not None}


def commit_(model: nn.Module, swaps: Sequence[Swap]) -> None:
    """Put the new modules in place, wherever the old ones are registered; on an error, none of them."""
    before = Snapshot(model)
    new_for = {swap.old: swap.new for swap in swaps}
    try:
        for parent in list(model.modules()):
            for child_name, child in parent._modules.items():
                if child in new_for:
                    parent._modules[child_name] = new_for[child]
        fastpath.update_(model)
    except BaseException:
        before.restore_()
        raise


@contextmanager
def _trial(model: nn.Module, swaps: Sequence[Swap]) -> Iterator[None]:
    """The model with the new modules in place; afterwards it is as before."""
    before = Snapshot(model)
    try:
        commit_(model, swaps)
        yield
    finally:
        before.restore_()


def _factorized(spec: LayerSpec, old: nn.Module, leader: nn.Module | None) -> Swap:
    layer = kind_named(spec.kind)
    candidate = Candidate(spec.name, old, layer)
    _check_fits(spec, candidate)
    dense = old.dense_shell(old.factor_parameters()[0].device) if isinstance(old, Factorized) else old
    new = layer.shell(dense, spec.scheme, spec.rank)
    new.train(old.training)
    adopt_hooks(new, old)
    if leader is None:
        on_meta = new.factor_parameters()[0].device.type == "meta"
        return Swap(spec.name, old, new, None if on_meta else candidate)
    if not isinstance(leader, Factorized):
        raise StructureError(f"{spec.name!r} is tied to {spec.tie!r}, which is not factorized")
    same_sizes = [p.shape for p in new.factor_parameters()] == [p.shape for p in leader.factor_parameters()]
    if not same_sizes or not any({new.kind, leader.kind} <= together for together in TIEABLE):
        raise StructureError(
            f"{spec.name!r} cannot share the factors of {spec.tie!r}: they differ in kind, shape or rank"
        )
    new.share_(leader)
    return Swap(spec.name, old, new)


def _densified(spec: LayerSpec, old: nn.Module, leader: Any) -> Swap:
    assert isinstance(old, Factorized)
    reason = refusal(Candidate(spec.name, old, type(old)), spec.scheme)
    if reason is not None:
        raise LayerError(f"{spec.name!r} cannot be made dense: {reason}")
    new = old.to_dense()
    if leader is not None:
        new.weight = leader.weight
    adopt_hooks(new, old)
    return Swap(spec.name, old, new)


def _check_fits(spec: LayerSpec, candidate: Candidate) -> None:
    where, layer, old = f"layer {spec.name!r}", candidate.layer, candidate.module
    if layer_of(old) is not layer:
        found = layer_of(old)
        kind = found.kind if found is not None else type(old).__name__
        raise StructureError(f"{where} is a {kind} in this model and a {spec.kind} in the structure")
    known = (*layer.schemes, *layer.named_schemes)
    if spec.scheme not in known:
        raise StructureError(
            f"{where}: unknown scheme {spec.scheme!r} for a {spec.kind}; one of {', '.join(known)}"
        )
    reason = refusal(candidate, spec.scheme)
    if reason is not None:
        raise LayerError(f"{where} cannot be factorized: {reason}")
    reason = old.rerank_obstacle() if isinstance(old, Factorized) else None
    if reason is not None:
        raise LayerError(f"{where} cannot change its rank: {reason}")
    dense = candidate.dense
    shapes = {name: tuple(weight.shape) for name, weight in layer.weights_of(dense).items()}
    if shapes != dict(spec.shapes):
        raise StructureError(
            f"{where} has weights {shapes} in this model, {dict(spec.shapes)} in the structure"
        )
    limits = {unfolding.name: unfolding.limit for unfolding in layer.unfoldings(dense, spec.scheme)}
    if set(limits) != set(spec.rank):
        raise StructureError(f"{where}: ranks are given for {sorted(spec.rank)}, needed for {sorted(limits)}")
    for matrix, limit in limits.items():
        if not 1 <= spec.rank[matrix] <= limit:
            raise StructureError(f"{where}: rank {spec.rank[matrix]} of {matrix} is not within 1..{limit}")


def _check_ties(structure: Structure, model: nn.Module, modules: Mapping[str, nn.Module]) -> None:
    """Layers that share a weight go together, or the weight would become two without a word."""
    shared = sharers(model)
    for spec in structure:
        old = modules[spec.name]
        first = old.factor_parameters()[:1] if isinstance(old, Factorized) else []
        for weight in first or kind_named(spec.kind).weights_of(old).values():
            for holder in shared.get(id(weight), []):
                owner = next((n for n in modules if holder == n or holder.startswith(f"{n}.")), holder)
                other = structure.get(owner)
                if owner != spec.name and (
                    other is None or (other.tie or other.name) != (spec.tie or spec.name)
                ):
                    raise StructureError(
                        f"{spec.name!r} shares its weight with {owner!r} in this model, but not in the "
                        "structure; choose a structure for this model, or untie the weights first"
                    )


def _share(some: nn.Module, other: nn.Module | None) -> bool:
    return other is not None and not {*map(id, some.parameters())}.isdisjoint(map(id, other.parameters()))


def _named(made: Mapping[str, nn.Module], modules: Mapping[str, nn.Module], name: str | None) -> Any:
    return None if name is None else made.get(name, modules.get(name))


_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_is_full_backward_hook",
)


def adopt_hooks(new: nn.Module, old: nn.Module) -> None:
    """The users' hooks move along; sharing the dicts keeps their handles working."""
    for attribute in _HOOKS:
        if hasattr(old, attribute):
            setattr(new, attribute, getattr(old, attribute))


@torch.no_grad()
def _rounding(old: nn.Module, new: Any) -> float:
    """How far the dense weights are from the factors' exact product, relative, in the Frobenius norm."""
    assert isinstance(old, Factorized)
    exact = old.dense_weights(precise=True)
    dense = old.weights_of(new)
    if any(weight.device.type == "meta" for weight in dense.values()):
        return 0.0
    off = sum(float((dense[name] - weight).square().sum()) for name, weight in exact.items())
    size = sum(float(weight.square().sum()) for weight in exact.values())
    return float((off / size) ** 0.5) if size > 0 else 0.0
