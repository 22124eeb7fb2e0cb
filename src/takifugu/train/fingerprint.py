"""Fingerprints of data and of models: whether results that are kept on disk still belong to them."""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from takifugu.train.round import Samples

_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def samples_sha256(samples: Samples) -> str:
    """Return a hash of all inputs and labels."""
    digest = hashlib.sha256()
    for tensor in (samples.inputs, samples.labels):
        _add_tensor(digest, tensor)
    return digest.hexdigest()


def model_sha256(model: nn.Module, builder: Callable[..., Any] | None = None) -> str:
    """Return a hash of what a model computes: its modules and their settings, its weights, and its code.

    The code is that of the builder, of the modules' classes and of what these call, as far as Python names
    lead to it. It is hashed as compiled, so that comments and line numbers do not count.
    """
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(name.encode())
        _add_tensor(digest, tensor)
    roots: list[Any] = [] if builder is None else [builder]
    for name, module in model.named_modules():
        kind = type(module)
        settings = {key: value for key, value in vars(module).items() if not key.startswith("_")}
        digest.update(f"{name}:{kind.__module__}.{kind.__qualname__}".encode())
        digest.update(json.dumps(_settings(settings), sort_keys=True).encode())
        roots += [kind, *(value for value in settings.values() if callable(value))]
    for code in _codes(roots):
        _add_code(digest, code)
    return digest.hexdigest()


def _add_tensor(digest: Any, tensor: Tensor) -> None:
    plain = tensor.detach().cpu().contiguous()
    digest.update(f"{plain.dtype}{tuple(plain.shape)}".encode())
    # As bytes: NumPy has no bfloat16.
    digest.update(plain.flatten().view(torch.uint8).numpy().tobytes() if plain.numel() else b"")


def _settings(values: dict[str, Any]) -> dict[str, str]:
    """Plain attributes, such as a dropout's probability; anything else has no stable text."""
    return {key: repr(value) for key, value in values.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)


def _codes(roots: list[Any]) -> Iterator[CodeType | str]:
    """The code of functions and classes and of what they name, each once; constants as text."""
    todo, seen = list(reversed(roots)), set[int]()
    while todo:
        one = todo.pop()
        if id(one) in seen or _is_foreign(one):
            continue
        seen.add(id(one))
        if isinstance(one, type):
            yield json.dumps(_settings(dict(vars(one))), sort_keys=True)
            todo += [*vars(one).values(), *one.__bases__]
        elif isinstance(one, FunctionType):
            yield one.__code__
            todo += [cell.cell_contents for cell in one.__closure__ or () if _is_filled(cell)]
            for value in (*(one.__defaults__ or ()), *(one.__kwdefaults__ or {}).values(), *_named(one)):
                if _is_plain(value):
                    yield repr(value)
                else:
                    todo.append(value)
        elif isinstance(one, property):
            todo += [one.fget, one.fset]
        elif isinstance(one, functools.partial):
            yield repr([value for value in (*one.args, *one.keywords.values()) if _is_plain(value)])
            todo.append(one.func)
        elif isinstance(one, (MethodType, staticmethod, classmethod)):
            todo.append(one.__func__)
        elif inspect.isroutine(one) or callable(one):
            todo.append(getattr(one, "__wrapped__", None))


def _named(function: FunctionType) -> Iterator[Any]:
    """What the function's global names stand for; of a module, those of its attributes that it may use."""
    names = list(_names(function.__code__))
    for name in names:
        found = function.__globals__.get(name)
        if not inspect.ismodule(found):
            yield found
        elif not _is_foreign(found):
            yield from (vars(found)[attribute] for attribute in names if attribute in vars(found))


def _names(code: CodeType) -> Iterator[str]:
    """Global names and attributes in the order of their use, those of nested functions included."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _is_foreign(thing: Any) -> bool:
    """Whether it is the code of an installed package, which changes with its release only."""
    name = thing.__name__ if inspect.ismodule(thing) else getattr(thing, "__module__", None)
    if not isinstance(name, str):
        return False
    if name.partition(".")[0] in sys.stdlib_module_names and name != "__main__":
        return True
    path = getattr(sys.modules.get(name), "__file__", None) or ""
    return "site-packages" in path or "dist-packages" in path


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _add_code(digest: Any, code: CodeType | str) -> None:
    if isinstance(code, str):
        digest.update(code.encode())
        return
    digest.update(code.co_code)
    digest.update(repr((code.co_names, code.co_varnames, code.co_freevars)).encode())
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            _add_code(digest, constant)
        elif isinstance(constant, frozenset):  # the order of strings differs from process to process
            digest.update(repr(sorted(map(repr, constant))).encode())
        else:
            digest.update(repr(constant).encode())
