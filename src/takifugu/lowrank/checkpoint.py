"""`save` and `load`: a model's structure and weights in one safetensors file. No pickle, no code.

The header's metadata holds the `Structure`, how the model was built if it is a zoo network, which
names share a tensor, and a hash over every tensor. Loading checks all of it against the model
before anything is changed.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from takifugu.errors import CheckpointError, StructureError, near_misses
from takifugu.lowrank.surgery import Swap, build_swaps, commit_, structure_of
from takifugu.structure import Structure

FORMAT = "takifugu.model/1"
_BUILDER = "_takifugu_builder"


def save(model: nn.Module, path: str | Path) -> None:
    """Writes structure and weights. The file appears whole or not at all."""
    path = Path(path)
    tensors, shared = _unique(_state(model))
    metadata = {
        "format": FORMAT,
        "structure": structure_of(model).to_json(),
        "builder": json.dumps(getattr(model, _BUILDER, None), sort_keys=True),
        "shared": json.dumps(shared, sort_keys=True),
    }
    metadata["sha256"] = _digest(tensors, metadata)
    if not path.parent.is_dir():
        raise CheckpointError(f"cannot write {str(path)!r}: the folder {str(path.parent)!r} does not exist")
    handle, partial = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".partial")
    os.close(handle)
    try:
        save_file(tensors, partial, metadata=metadata)
        os.replace(partial, path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot write {str(path)!r}: {error}") from error
    finally:
        Path(partial).unlink(missing_ok=True)


def load(path: str | Path, model: nn.Module | None = None) -> nn.Module:
    """Rebuilds what was saved: on `model` (dense or of any structure), or on a fresh zoo network.

    Every name, shape and hash is checked first; on any error the model is as it was.
    """
    path = Path(path)
    tensors, shared, metadata = _read(path)
    if model is None:
        model = _build(path, metadata)
    try:
        structure = Structure.from_json(metadata["structure"])
        swaps = build_swaps(model, structure, None)
    except StructureError as error:
        raise CheckpointError(f"{str(path)!r} was made for another model: {error}") from error
    state = {**tensors, **{alias: tensors[name] for alias, name in shared.items()}}
    expected = _expected(model, swaps)
    _check(path, expected, state)
    commit_(model, swaps)
    # Factors were built empty, and a model on the meta device has no memory to copy into.
    hollow = any(tensor.device.type == "meta" for tensor in expected.values())
    model.load_state_dict(state, strict=True, assign=hollow)
    return model


# ---- writing --------------------------------------------------------------------------------------------


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


def _digest(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    digest = hashlib.sha256()
    for key in ("format", "structure", "builder", "shared"):
        digest.update(f"{key}={metadata[key]}\n".encode())
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else b"")
    return digest.hexdigest()


# ---- reading --------------------------------------------------------------------------------------------


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, str], dict[str, str]]:
    if not path.is_file():
        raise CheckpointError(f"there is no file {str(path)!r}")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{str(path)!r} is damaged or not a safetensors file: {error}") from error
    if metadata.get("format") != FORMAT:
        found = metadata.get("format", "none")
        raise CheckpointError(
            f"{str(path)!r} was not written by takifugu.save (format {found!r}, expected {FORMAT!r})"
        )
    missing = {"structure", "builder", "shared", "sha256"} - set(metadata)
    if missing:
        raise CheckpointError(f"{str(path)!r} lacks {sorted(missing)} in its header; it has been changed")
    if _digest(tensors, metadata) != metadata["sha256"]:
        raise CheckpointError(f"{str(path)!r} does not match its own hash; it is damaged or has been changed")
    shared = json.loads(metadata["shared"])
    return tensors, shared, metadata


def _build(path: Path, metadata: Mapping[str, str]) -> nn.Module:
    from takifugu import zoo  # the one network source that runs no code of the file's choosing

    builder = json.loads(metadata["builder"])
    if not isinstance(builder, dict) or "zoo" not in builder:
        raise CheckpointError(
            f"{str(path)!r} does not say how its model is built; pass one: load(path, model)"
        )
    return zoo.build(builder["zoo"], **builder.get("options", {}))


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
        if tensor.shape != wanted.shape:
            raise CheckpointError(
                f"{name!r} has shape {tuple(tensor.shape)} in {str(path)!r} and {tuple(wanted.shape)} here"
            )
        if torch.promote_types(tensor.dtype, wanted.dtype) != wanted.dtype:
            raise CheckpointError(
                f"{name!r} is {tensor.dtype} in {str(path)!r} and {wanted.dtype} here, which would lose "
                f"digits; convert the model first: model.to({tensor.dtype})"
            )
