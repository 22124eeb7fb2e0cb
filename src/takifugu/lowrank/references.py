"""What would go on using a layer, or get lost with it, when the layer is replaced.

A replaced layer is found wherever it is registered. References that torch does not know of are not followed:
a layer in a plain list would keep the old weight, and a gradient hook on it would never be called.
"""

from __future__ import annotations

import inspect
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from takifugu.errors import LayerError, TakifuguWarning

if TYPE_CHECKING:
    from takifugu.lowrank.surgery import Swap

_DEPTH = 4  # of lists in dicts in lists


def check_references(model: nn.Module, swaps: Sequence[Swap]) -> None:
    """Raise if a layer is held outside the registered modules; warn of gradient hooks that are lost."""
    _refuse_held(model, swaps)
    _warn_of_gradient_hooks(swaps)


def _refuse_held(model: nn.Module, swaps: Sequence[Swap]) -> None:
    going: dict[int, str] = {}
    for swap in swaps:
        staying = set(swap.new.parameters())
        going.update({id(p): f"{swap.name}.{n}" for n, p in swap.old.named_parameters() if p not in staying})
        going.update({id(part): f"{swap.name}.{n}".rstrip(".") for n, part in swap.old.named_modules()})
    for name, owner in model.named_modules():
        if id(owner) in going:
            continue  # a layer's own lists go with it
        for attribute, value in vars(owner).items():
            if attribute in _REGISTERED:
                continue
            held = _held(value, going, _DEPTH)
            if held is not None:
                place = f"{type(owner).__name__}.{attribute}" + (f" of {name!r}" if name else "")
                raise LayerError(
                    f"{place} (a {type(value).__name__}) holds {held!r} outside the registered modules, "
                    "where it would keep the old weight; use nn.ModuleList or nn.ModuleDict there, remove "
                    "the attribute, or leave the layer out with where="
                )


_EMPTY = vars(nn.Module())
_REGISTERED = frozenset(_EMPTY)
"""Parameters, buffers and children, which are exchanged, and hooks, which move along."""


def _held(value: Any, going: Mapping[int, str], depth: int) -> str | None:
    """The name of a layer or weight among `going` that can be reached through plain containers."""
    if id(value) in going:
        return going[id(value)]
    if depth == 0:
        return None
    inside: Any = ()
    if isinstance(value, Mapping):
        inside = (*value.keys(), *value.values())
    elif isinstance(value, list | tuple | set | frozenset | deque):
        inside = value
    elif inspect.ismethod(value):
        inside = (value.__self__,)
    elif isinstance(value, partial):
        inside = (value.func, value.args, value.keywords)
    return next((held for part in inside if (held := _held(part, going, depth - 1)) is not None), None)


def _warn_of_gradient_hooks(swaps: Sequence[Swap]) -> None:
    hooked = []
    for swap in swaps:
        staying = set(swap.new.parameters())
        for name, parameter in swap.old.named_parameters():
            own = (getattr(parameter, attribute, None) for attribute in _GRADIENT_HOOKS)
            if parameter not in staying and any(own):
                hooked.append(f"{swap.name}.{name}")
    if hooked:
        more = f" and {len(hooked) - 1} more" if len(hooked) > 1 else ""
        warnings.warn(
            f"the gradient hooks on {hooked[0]!r}{more} are lost, because the weight is replaced; "
            "remove them before, and register them on the new parameters",
            TakifuguWarning,
            stacklevel=5,
        )


_GRADIENT_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
