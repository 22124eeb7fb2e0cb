"""What a command's TARGET means: a zoo network, or the user's own `package.module:callable`."""

from __future__ import annotations

import inspect
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
        model, example = zoo.build(target), zoo.example(target)
        if shape is not None and not (len(example) == 1 and example[0].is_floating_point()):
            raise UsageError(f"--shape is for networks that take one image; {target!r} takes words")
        return Target(model, example if shape is None else _zeros(shape, model), zoo.where(target))
    if ":" not in target:
        known = ", ".join(zoo.names())
        raise UsageError(
            f"target {target!r} is neither a zoo network ({known}) nor of the form "
            f"package.module:callable{near_misses(target, zoo.names())}"
        )
    return _from_callable(target, named(target), shape)


def _from_callable(target: str, build: Any, shape: tuple[int, ...] | None) -> Target:
    from torch import nn

    if callable(build) and not isinstance(build, nn.Module):
        _check_call(target, build)
        build = build()
    built = build
    model, example = built if isinstance(built, tuple) and len(built) == 2 else (built, None)
    if not isinstance(model, nn.Module):
        raise UsageError(f"{target!r} gave a {type(model).__name__}; it must return a torch.nn.Module")
    return Target(model, example if shape is None else _zeros(shape, model), None)


def _check_call(target: str, build: Any) -> None:
    try:
        signature = inspect.signature(build)
    except ValueError:  # some callables of C do not tell
        return
    try:
        signature.bind()
    except TypeError as error:
        raise UsageError(f"{target!r} is called without arguments, but it has a {error}") from error


def _zeros(shape: tuple[int, ...], model: nn.Module) -> Any:
    import torch

    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
    return torch.zeros(shape, dtype=dtype)
