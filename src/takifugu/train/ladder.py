"""The versions of a model a plan may choose from, with what each costs: FLOPs, bytes, memory."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode

from takifugu.errors import DataError, UsageError
from takifugu.lowrank.choice import choose, structure_from, survey
from takifugu.lowrank.surgery import apply_
from takifugu.structure import Structure

DENSE = "dense"


@dataclass(frozen=True)
class Rung:
    """A version: what it is and what it costs."""

    name: str
    structure: Structure
    train_flops_per_sample: float
    """Counted by torch over forward and backward; about three forward passes."""
    payload_bytes: int
    """Parameters and buffers: what travels each way."""
    memory_bytes: int
    """Estimated: weights, gradients, the optimizer's state, and what forward keeps for backward."""


def check_ratios(ratios: Sequence[float]) -> None:
    for ratio in ratios:
        if not 0 < ratio <= 1:
            raise UsageError(f"rank ratio {ratio:g} is not above 0 and at most 1; e.g. 0.5,0.25,0.125")


def ladder(
    model: nn.Module,
    ratios: Sequence[float],
    where: Any,
    example: Tensor,
    batch: int,
    optimizer_copies: int = 1,
) -> tuple[Rung, ...]:
    """The dense model and one version for each rank ratio, from the largest to the smallest.

    A ratio is dropped if its version is dense, or costs no less than the one before it. `example` holds at
    least one input; `batch` is the batch size that memory is estimated for; `optimizer_copies` says how many
    tensors the optimizer keeps for each parameter. The model is not touched.
    """
    check_ratios(ratios)
    rungs = [_rung(DENSE, model, Structure(), example, batch, optimizer_copies)]
    for ratio in sorted(set(map(float, ratios)), reverse=True):
        structure = _structure(model, ratio, where, example, warn=len(rungs) == 1)
        if structure.id == rungs[-1].structure.id or structure.is_dense:
            continue
        rung = _rung(f"r{ratio:g}", model, structure, example, batch, optimizer_copies)
        # By default layers whose rank falls below 8 stay dense, so a smaller ratio can make a larger model.
        if not _dominated(rung, rungs[-1]):
            rungs.append(rung)
    return tuple(rungs)


def _dominated(rung: Rung, before: Rung) -> bool:
    return (
        rung.payload_bytes >= before.payload_bytes
        and rung.train_flops_per_sample >= before.train_flops_per_sample
    )


def _structure(model: nn.Module, ratio: float, where: Any, example: Tensor, *, warn: bool) -> Structure:
    """Return the version of this ratio. A warning for the largest one will do: smaller ones are dropped if
    they make no difference."""
    if warn:
        return choose(model, ratio, where, example_input=example[:2])
    return structure_from(model, survey(model, ratio, where, example_input=example[:2]))


def optimizer_copies(kind: str, momentum: float = 0.0) -> int:
    """How many tensors an optimizer keeps for each parameter."""
    return 2 if kind.startswith("adam") else int(momentum > 0)


def _rung(
    name: str, model: nn.Module, structure: Structure, example: Tensor, batch: int, copies: int
) -> Rung:
    version = copy.deepcopy(model)
    apply_(version, structure)
    parameters = list(version.parameters())
    payload = sum(t.numel() * t.element_size() for t in (*parameters, *version.buffers()))
    learned = sum(p.numel() * p.element_size() for p in parameters if p.requires_grad)
    # Two samples where there are: batch norm does not train on one.
    few = example[:2] if len(example) > 1 else example.repeat(2, *[1] * (example.dim() - 1))
    flops, kept = _one_step(version, few)
    memory = payload + learned * (1 + copies) + kept / len(few) * batch
    return Rung(name, structure, flops / len(few), payload, round(memory))


def _one_step(model: nn.Module, inputs: Tensor) -> tuple[int, float]:
    """FLOPs of forward and backward, and the bytes that forward keeps for backward (parameters aside)."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    model.train()
    with (
        torch.random.fork_rng(devices=[]),
        torch.enable_grad(),
        FlopCounterMode(display=False) as counter,
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
    ):
        try:
            outputs = model(inputs)
        except RuntimeError as error:
            if inputs.is_floating_point():
                raise
            # The usual cause: features as whole numbers, which Linear and Conv layers do not take.
            raise DataError(
                f"the model does not take inputs of {inputs.dtype} ({error}); return them as float32 "
                "unless its first layer is an embedding"
            ) from error
        labels = torch.zeros(len(outputs), dtype=torch.long, device=outputs.device)
        cross_entropy(outputs, labels).backward()
    return int(counter.get_total_flops()), float(sum(kept.values()))
