"""What a command's TARGET means: a zoo network, or the user's own `package.module:callable`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from takifugu.errors import UsageError, near_misses
from takifugu.named import named

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Target:
    """A model, an input for it if one is known, and the layers that are meant by default."""

    model: nn.Module
    example: Any
    where: Any


def resolve(target: str, shape: tuple[int, ...] | None = None) -> Target:
    """Builds the model. A callable may return it alone or with an example input."""
    from takifugu import zoo

    if target in zoo.names():
        return Target(zoo.build(target), zoo.example(target), zoo.where(target))
    if ":" not in target:
        known = ", ".join(zoo.names())
        raise UsageError(
            f"target {target!r} is neither a zoo network ({known}) nor of the form "
            f"package.module:callable{near_misses(target, zoo.names())}"
        )
    return _from_callable(target, named(target), shape)


def _from_callable(target: str, build: Any, shape: tuple[int, ...] | None) -> Target:
    import torch
    from torch import nn

    built = build() if callable(build) and not isinstance(build, nn.Module) else build
    model, example = built if isinstance(built, tuple) and len(built) == 2 else (built, None)
    if not isinstance(model, nn.Module):
        raise UsageError(f"{target!r} gave a {type(model).__name__}; it must return a torch.nn.Module")
    if shape is not None:
        example = torch.zeros(shape)
    return Target(model, example, None)
