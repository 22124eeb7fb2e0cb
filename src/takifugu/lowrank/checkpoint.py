"""`save` and `load`: a model's structure and weights in one safetensors file. No pickle, no code.

The header's metadata holds the `Structure`, how the model was built if it was built by name, which
names share a tensor, and a hash over every tensor. Loading checks all of it against the model
before anything is changed.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from takifugu import durable
from takifugu.errors import CheckpointError, StructureError, TakifuguWarning, near_misses
from takifugu.lowrank.candidates import refuse_wrappers, require_module
from takifugu.lowrank.narrow import BUILDER, WIDTHS, narrowed
from takifugu.lowrank.snapshot import Snapshot
from takifugu.lowrank.surgery import Swap, build_swaps, commit_, structure_of
from takifugu.named import MODEL_FUNCTIONS, named
from takifugu.structure import Structure

FORMAT = "takifugu.model/1"
_KEY = "takifugu"
_HASHED = ("format", "structure", "builder", "shared")


def save(model: nn.Module, path: str | Path) -> None:
    """Write structure and weights. The file appears whole or not at all, also after a power failure."""
    path = Path(path)
    refuse_wrappers(model)
    tensors, shared = _unique(_state(model))
    header: dict[str, Any] = {
        "format": FORMAT,
        "structure": structure_of(model).to_dict(),
        "builder": getattr(model, BUILDER, None),
        "shared": shared,
    }
    header["sha256"] = _digest(tensors, header)
    # One entry, because safetensors writes several in any order: same model, same bytes.
    metadata = {_KEY: json.dumps(header, sort_keys=True)}
    if not path.parent.is_dir():
        raise CheckpointError(f"cannot write {str(path)!r}: the folder {str(path.parent)!r} does not exist")
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        save_file(tensors, partial, metadata=metadata)
        partial.chmod(_usual_mode())  # the library makes files only their owner can read
        durable.move(partial, path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot write {str(path)!r}: {error}") from error
    finally:
        partial.unlink(missing_ok=True)


def load(path: str | Path, model: nn.Module | None = None) -> nn.Module:
    """Load a saved model into `model` (dense or of any structure), or into a network that the header names.

    Without `model` the header must name a zoo network or a function of `takifugu.zoo.small`.
    Every name, shape and hash is checked first; on any error the model is as it was.
    """
    path = Path(path)
    tensors, header = _read(path)
    builder = header["builder"]
    if model is not None:
        require_module(model)
    else:
        model = _build(path, builder)
        setattr(model, BUILDER, builder)
    widths = builder.get(WIDTHS, {}) if isinstance(builder, dict) else {}
    try:
        structure = Structure.from_dict(header["structure"])
        swaps = [*narrowed(model, widths), *build_swaps(model, structure)]
    except StructureError as error:
        raise CheckpointError(f"{str(path)!r} was made for another model: {error}") from error
    state = {**tensors, **{alias: tensors[name].clone() for alias, name in header["shared"].items()}}
    expected = _expected(model, swaps)
    _check(path, expected, state)
    _check_ties(path, expected, state, header["shared"])
    before = Snapshot(model, values=_overwritten(model, expected))
    try:
        commit_(model, swaps)
        if any(tensor.device.type == "meta" for tensor in expected.values()):
            # Copies: in the file's own memory tensors lie anywhere, which is slower and rounds differently.
            own = {name: tensor.to(expected[name].dtype, copy=True) for name, tensor in state.items()}
            _assign_(model, own)
        else:
            model.load_state_dict(state, strict=True)
        if widths:
            setattr(model, BUILDER, {**(getattr(model, BUILDER, None) or {}), WIDTHS: widths})
    except BaseException:
        before.restore_()
        raise
    return model


def _overwritten(model: nn.Module, expected: Mapping[str, Tensor]) -> list[Tensor]:
    """The tensors that stay in the model and get other values."""
    memory = {tensor.untyped_storage()._cdata for tensor in expected.values()}
    state = model.state_dict().values()
    return [tensor for tensor in state if tensor.untyped_storage()._cdata in memory]


def _assign_(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """A model on the meta device has no memory to copy into: it takes the tensors over. Tied stays tied."""
    holders: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        holders.setdefault(parameter, []).append(name)
    model.load_state_dict(state, strict=True, assign=True)
    for first, *others in holders.values():
        for other in others:
            owner, _, attribute = other.rpartition(".")
            setattr(model.get_submodule(owner), attribute, model.get_parameter(first))
    hollow = [name for name, buffer in model.named_buffers() if buffer.device.type == "meta"]
    if hollow:
        warnings.warn(
            f"buffer {hollow[0]!r} is not kept in files (persistent=False) and still on the meta device; "
            "set it, or build the model on a real device",
            TakifuguWarning,
            stacklevel=3,
        )


# ---- writing --------------------------------------------------------------------------------------------


def _usual_mode() -> int:
    mask = os.umask(0)  # the only way to read it is to set it
    os.umask(mask)
    return 0o666 & ~mask


def _state(model: nn.Module) -> dict[str, Tensor]:
    state = model.state_dict()
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise CheckpointError(f"{name!r} is extra state of type {type(value).__name__}, not a tensor")
        if type(value) is not Tensor:
            raise CheckpointError(
                f"{name!r} is a {type(value).__name__} (quantized or sharded); save the plain model instead"
            )
        if value.device.type == "meta":
            raise CheckpointError(f"{name!r} is on the meta device and has no values to save")
    return dict(state)


def _unique(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Each tensor once, and the other names of those that have several (tied weights)."""
    first: dict[tuple[Any, ...], str] = {}
    tensors: dict[str, Tensor] = {}
    shared: dict[str, str] = {}
    for name, tensor in state.items():
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        if tensor.numel() and key in first:
            shared[name] = first[key]
            continue
        first[key] = name
        tensors[name] = tensor.detach().cpu().contiguous().clone()
    return tensors, shared


def _digest(tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> str:
    told = {key: header[key] for key in _HASHED}
    digest = hashlib.sha256(json.dumps(told, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else b"")
    return digest.hexdigest()


# ---- reading --------------------------------------------------------------------------------------------


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    if not path.is_file():
        raise CheckpointError(f"there is no file {str(path)!r}")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{str(path)!r} is damaged or not a safetensors file: {error}") from error
    try:
        header = json.loads(metadata.get(_KEY, "null"))
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise CheckpointError(
            f"{str(path)!r} was not written by takifugu.save (its header is not {FORMAT!r})"
        )
    missing = {*_HASHED, "sha256"} - set(header)
    if missing:
        raise CheckpointError(f"{str(path)!r} lacks {sorted(missing)} in its header; it has been changed")
    if _digest(tensors, header) != header["sha256"]:
        raise CheckpointError(f"{str(path)!r} does not match its own hash; it is damaged or has been changed")
    shared = header["shared"]
    named = isinstance(shared, dict) and all(isinstance(name, str) for name in shared.values())
    if not named or not set(shared.values()) <= set(tensors) or set(shared) & set(tensors):
        raise CheckpointError(f"{str(path)!r} names tensors it does not hold; it has been changed")
    return tensors, header


def _build(path: Path, builder: Any) -> nn.Module:
    """Build the network that the header names. Names come from fixed tables only: a file runs no code."""
    from takifugu import zoo

    builder = builder if isinstance(builder, dict) else {}
    options = builder.get("options", {})
    if not {"zoo", "function"} & set(builder) or not isinstance(options, dict):
        raise CheckpointError(
            f"{str(path)!r} does not say how its model is built; pass one: load(path, model)"
        )
    if "zoo" in builder:
        return zoo.build(builder["zoo"], **options)
    function = builder["function"]
    if not isinstance(function, str) or function not in MODEL_FUNCTIONS:
        given = ", ".join(f"{key}={value!r}" for key, value in options.items())
        raise CheckpointError(
            f"{str(path)!r} holds a model of {function!r}, which is not part of takifugu and is not "
            f"imported; build it yourself, with the options ({given}), and pass it: load(path, model)"
        )
    try:
        model: nn.Module = named(function)(**options)
    except TypeError as error:
        raise CheckpointError(f"{str(path)!r}: {function!r} cannot be built: {error}") from None
    return model


def _expected(model: nn.Module, swaps: list[Swap]) -> dict[str, Tensor]:
    """The state dict the model will have once the swaps are made."""
    state = dict(model.state_dict())
    prefixes = _prefixes(model, swaps)
    for prefix, swap in prefixes.items():
        for key in [key for key in state if key.startswith(prefix + ".")]:
            del state[key]
        for key, tensor in swap.new.state_dict().items():
            state[f"{prefix}.{key}"] = tensor
    return state


def _prefixes(model: nn.Module, swaps: list[Swap]) -> dict[str, Swap]:
    """Every name under which a swapped module is known: one for most, several for a shared module."""
    by_module = {swap.old: swap for swap in swaps}
    names = model.named_modules(remove_duplicate=False)
    return {name: by_module[module] for name, module in names if module in by_module}


def _check(path: Path, expected: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    missing = [name for name in expected if name not in state]
    extra = [name for name in state if name not in expected]
    if missing or extra:
        parts = []
        if missing:
            parts.append(f"lacks {missing[0]!r}" + (f" and {len(missing) - 1} more" if missing[1:] else ""))
        if extra:
            more = f" and {len(extra) - 1} more" if extra[1:] else ""
            parts.append(f"has {extra[0]!r}{more}, unknown to the model{near_misses(extra[0], missing)}")
        raise CheckpointError(f"{str(path)!r} was made for another model: it {', and '.join(parts)}")
    for name, tensor in state.items():
        wanted = expected[name]
        if type(wanted) is not Tensor:
            raise CheckpointError(
                f"{name!r} is a {type(wanted).__name__} in the model (quantized or sharded), which cannot be "
                "loaded into; load first, then quantize or shard"
            )
        if tensor.shape != wanted.shape:
            raise CheckpointError(
                f"{name!r} has shape {tuple(tensor.shape)} in {str(path)!r} and {tuple(wanted.shape)} here"
            )
        if not _holds(wanted.dtype, tensor.dtype):
            raise CheckpointError(
                f"{name!r} is {tensor.dtype} in {str(path)!r} and {wanted.dtype} here, which would lose "
                f"digits; convert the model first: model.to({tensor.dtype})"
            )


def _holds(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """Whether the one can take the other's values in."""
    try:
        return wide == narrow or torch.promote_types(wide, narrow) == wide
    except RuntimeError:  # torch promotes some types, such as uint16, with nothing but themselves
        return False


def _check_ties(
    path: Path, expected: Mapping[str, Tensor], state: Mapping[str, Tensor], shared: Mapping[str, str]
) -> None:
    """What is one tensor in the model must be one in the file: the last name to be loaded would win."""
    first: dict[tuple[Any, ...], str] = {}
    for name, tensor in expected.items():
        memory = tensor.untyped_storage()._cdata
        other = first.setdefault((memory, tensor.storage_offset(), tensor.shape, tensor.stride()), name)
        same = shared.get(name, name) == shared.get(other, other)
        if tensor.numel() and not same and not torch.equal(state[name], state[other]):
            raise CheckpointError(
                f"{other!r} and {name!r} are one tensor in the model (tied) and two different ones in "
                f"{str(path)!r}; untie them in the model first"
            )
