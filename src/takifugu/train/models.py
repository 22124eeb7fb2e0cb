"""Models by name, as recipes and workloads name them: a zoo network, or the user's own function."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from takifugu import zoo
from takifugu.errors import UsageError, near_misses
from takifugu.named import named
from takifugu.zoo import registry


def build(
    name: str, options: Mapping[str, Any], fitting: Mapping[str, Any], seed: int, field: str
) -> nn.Module:
    """The model with fresh weights from the seed.

    Args:
        options: for its builder.
        fitting: options that follow from the data; used where the builder has them and `options` does not.
        field: where the name was given, for messages.
    """
    make, accepted = _builder(name, field)
    arguments = {key: value for key, value in fitting.items() if key in accepted} | dict(options)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            model = make(**arguments)
        except TypeError as error:
            raise UsageError(f"{field}: {name!r} cannot be built: {error}") from error
    if not isinstance(model, nn.Module):
        raise UsageError(f"{field}: {name!r} gave a {type(model).__name__}, not a torch.nn.Module")
    if not hasattr(model, registry.BUILDER):  # zoo networks have it already
        setattr(model, registry.BUILDER, {"function": name, "options": arguments})
    return model


def usual_where(name: str, patterns: Sequence[str] = ()) -> Any:
    """Return the layers that go low-rank: the patterns', or the paper's choice for a zoo network, or None for
    the default rule of `where`."""
    if patterns:
        return list(patterns)
    return zoo.where(name) if name in zoo.names() else None


def check(name: str, field: str) -> None:
    """Raises `UsageError` for a name that can be no model's; nothing is imported for it."""
    if name not in zoo.names() and ":" not in name:
        raise UsageError(
            f"{field}: {name!r} is neither a zoo network ({', '.join(zoo.names())}) nor of "
            f"the form package.module:function{near_misses(name, zoo.names())}"
        )


def _builder(name: str, field: str) -> tuple[Callable[..., Any], set[str]]:
    check(name, field)
    if name in zoo.names():
        return lambda **options: zoo.build(name, **options), registry.accepts(name)
    function = named(name)
    if not callable(function):
        raise UsageError(f"{field}: {name!r} is a {type(function).__name__}, not a function")
    return function, set(inspect.signature(function).parameters)
