"""A model's state before something is tried on it, and the way back.

`Snapshot` remembers which objects the modules hold: children, parameters, buffers, hooks, flags and every
other attribute, with the contents of plain lists, dicts and sets. `restore_` puts them back, whatever was
exchanged, added or removed in between. Values of tensors are copied only where they are asked for.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode

_CONTAINERS = (dict, OrderedDict, defaultdict, list, set, deque)


class Snapshot:
    """The objects a model is made of, and copies of the given tensors."""

    def __init__(self, model: nn.Module, values: Iterable[Tensor] = ()) -> None:
        self._modules = [(module, type(module), dict(vars(module))) for module in model.modules()]
        self._contents = [
            (value, _content(value))
            for _, _, attributes in self._modules
            for value in attributes.values()
            if type(value) in _CONTAINERS
        ]
        unique = {id(tensor): tensor for tensor in values if _has_values(tensor)}
        self._values = [(tensor, tensor.detach().clone()) for tensor in unique.values()]

    def restore_(self) -> None:
        """Put everything back, in place."""
        for module, kind, attributes in self._modules:
            if type(module) is not kind:  # lazy modules change their class when they are initialised
                module.__class__ = kind
            if not _same(vars(module).items(), attributes.items()):
                vars(module).clear()
                vars(module).update(attributes)
        for value, content in self._contents:
            if not _same(_content(value), content):
                value.clear()
                (value.update if hasattr(value, "update") else value.extend)(content)
        with torch.no_grad():
            for tensor, former in self._values:
                if not _equal(tensor, former):  # a needless copy would invalidate graphs
                    tensor.copy_(former)


class CopyOnWrite(TorchDispatchMode):
    """While active, copies each of the given tensors before the first in-place operation on it.

    A forward pass may write to its weights: `nn.Embedding(max_norm=...)` does, and so do layers that
    normalize them. Copying all parameters beforehand would double the memory for the few that need it.
    """

    supports_higher_order_operators = True

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._watched: dict[int, dict[int, Tensor]] = {}
        for tensor in tensors:
            if _has_values(tensor):
                self._watched.setdefault(_memory(tensor), {})[id(tensor)] = tensor
        self._saved: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        schema = getattr(func, "_schema", None)
        if schema is not None and schema.is_mutable:
            for position, argument in enumerate(schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    value = args[position] if position < len(args) else kwargs.get(argument.name)
                    for tensor in value if isinstance(value, list | tuple) else [value]:
                        self._save(tensor)
        return func(*args, **kwargs)

    def _save(self, tensor: Any) -> None:
        if isinstance(tensor, Tensor) and _has_values(tensor):
            for watched in self._watched.pop(_memory(tensor), {}).values():
                self._saved.append((watched, watched.detach().clone()))

    def restore_(self) -> None:
        with torch.no_grad():
            for tensor, former in self._saved:
                tensor.copy_(former)


def tensors_of(model: nn.Module) -> Iterator[Tensor]:
    """All parameters and buffers, and the tensors that are plain attributes."""
    for module in model.modules():
        for held in (module._parameters, module._buffers, vars(module)):
            for value in held.values():
                if isinstance(value, Tensor):
                    yield value


def _has_values(tensor: Tensor) -> bool:
    """True for plain tensors with memory of their own; not for subclasses (sharded, quantized)."""
    if is_lazy(tensor) or tensor.device.type == "meta" or tensor.layout != torch.strided:
        return False
    return type(tensor.data) is Tensor


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _content(value: Any) -> list[Any]:
    return list(value.items()) if isinstance(value, dict) else list(value)


def _same(one: Iterable[Any], other: Iterable[Any]) -> bool:
    """True if both hold the very same objects in the same order."""
    mine, theirs = list(one), list(other)
    return len(mine) == len(theirs) and all(map(_is, mine, theirs))


def _is(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
        return all(mine is theirs for mine, theirs in zip(one, other, strict=True))  # an item of a dict
    return one is other


def _equal(tensor: Tensor, former: Tensor) -> bool:
    try:
        return torch.equal(tensor, former)
    except RuntimeError:  # not implemented for this dtype
        return False
