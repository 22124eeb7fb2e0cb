"""What the callbacks share: counting, and giving a fresh model the structure of a checkpoint."""

from __future__ import annotations

from typing import Any

from torch import nn

from takifugu.errors import UsageError
from takifugu.lowrank.surgery import build_swaps, commit_, structure_of
from takifugu.lowrank.warmstart import WarmStart
from takifugu.structure import Structure

UNITS = ("epoch", "step")


def checked_unit(unit: str) -> str:
    if unit not in UNITS:
        raise UsageError(f"unknown unit {unit!r}; count in 'epoch' or 'step'")
    return unit


def record(warm: WarmStart, model: nn.Module | None) -> dict[str, Any]:
    """Plain data for a checkpoint: how far the warm start is, and what the model looks like."""
    structure = Structure() if model is None else structure_of(model)
    return {"warm": warm.state_dict(), "structure": structure.to_dict()}


def shape_(model: nn.Module, structure: Structure) -> None:
    """The model gets the structure; new factors have no values yet, because a state dict is loaded next."""
    commit_(model, build_swaps(model, structure))
