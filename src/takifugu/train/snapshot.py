"""A training run at one step, as the bytes of a safetensors file: model, optimizer, method, standing.

Everything is kept by name and in full, whatever the model is wrapped or sharded in, so that a snapshot can be
looked at with plain tools.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as tensors_from_bytes
from safetensors.torch import save as tensors_to_bytes
from torch import Tensor, nn
from torch.optim import Optimizer

from takifugu.errors import CheckpointError
from takifugu.structure import Structure

FORMAT = "takifugu.training/1"
_KEY = "takifugu"


@dataclass(frozen=True, eq=False)
class Snapshot:
    tensors: dict[str, Tensor]
    header: dict[str, Any]

    def to_bytes(self) -> bytes:
        header = json.dumps({"format": FORMAT, **self.header}, allow_nan=False)
        return bytes(tensors_to_bytes(self.tensors, {_KEY: header}))

    @classmethod
    def from_bytes(cls, content: bytes) -> Snapshot:
        try:
            tensors = tensors_from_bytes(content)
            header = json.loads(_metadata(content)[_KEY])
        except (SafetensorError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"it is damaged or not a safetensors file ({error})") from None
        if not isinstance(header, dict) or header.get("format") != FORMAT:
            raise CheckpointError(f"it is not a training checkpoint (format {FORMAT})")
        return cls(tensors, header)

    def part(self, prefix: str) -> dict[str, Tensor]:
        """The tensors under a prefix, without it."""
        start = f"{prefix}."
        return {name.removeprefix(start): t for name, t in self.tensors.items() if name.startswith(start)}

    @property
    def structure(self) -> Structure:
        return Structure.from_dict(self.header["structure"])


def model_tensors(module: nn.Module) -> dict[str, Tensor]:
    """The model's state, each tensor once: tied weights have several names."""
    kept: dict[str, Tensor] = {}
    seen: set[tuple[int, ...]] = set()
    for name, tensor in module.state_dict().items():
        key = (tensor.data_ptr(), *tensor.shape)
        if tensor.numel() and key in seen:
            continue
        seen.add(key)
        kept[f"model.{name}"] = _copied(tensor)
    return kept


def fill_model_(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Puts a snapshot's tensors into a model of the same structure."""
    try:
        missing, extra = module.load_state_dict(dict(tensors), strict=False)
    except RuntimeError as error:
        raise CheckpointError(f"it does not fit the model: {error}") from None
    state = module.state_dict()
    filled = {state[name].data_ptr() for name in tensors if name in state}
    if extra or any(state[name].data_ptr() not in filled for name in missing if state[name].numel()):
        odd = (*extra, *missing)[0]
        raise CheckpointError(f"it does not fit the model: {odd!r} is not in both")


def optimizer_tensors(
    module: nn.Module, optimizer: Optimizer
) -> tuple[dict[str, Tensor], list[dict[str, Any]], dict[str, dict[str, Any]]]:
    """The state's tensors, the groups by parameter names, and what of the state is plain numbers."""
    names: dict[Any, str] = {parameter: name for name, parameter in module.named_parameters()}
    groups = [
        {key: [names[p] for p in value] if key == "params" else value for key, value in group.items()}
        for group in optimizer.param_groups
    ]
    tensors: dict[str, Tensor] = {}
    plain: dict[str, dict[str, Any]] = {}
    for parameter, state in optimizer.state.items():
        name = names[parameter]
        for key, value in state.items():
            if isinstance(value, Tensor):
                tensors[f"optimizer.{key}.{name}"] = _copied(value)
            else:
                plain.setdefault(name, {})[key] = value
    return tensors, groups, plain


def fill_optimizer_(module: nn.Module, optimizer: Optimizer, snapshot: Snapshot) -> None:
    """Gives an optimizer of the same kind the groups and the state of a snapshot."""
    parameters = dict(module.named_parameters())
    try:
        optimizer.param_groups[:] = [
            {
                key: [parameters[name] for name in value]
                if key == "params"
                else tuple(value)
                if isinstance(value, list)
                else value
                for key, value in group.items()
            }
            for group in snapshot.header["groups"]
        ]
        optimizer.state.clear()
        for name, plain in snapshot.header["plain_state"].items():
            optimizer.state[parameters[name]].update(plain)
        for place, tensor in snapshot.part("optimizer").items():
            key, _, name = place.partition(".")
            optimizer.state[parameters[name]][key] = _placed(tensor, parameters[name])
    except KeyError as error:
        raise CheckpointError(f"its optimizer state does not fit the model: no parameter {error}") from None


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().clone()


def _placed(tensor: Tensor, parameter: nn.Parameter) -> Tensor:
    """On the parameter's device, laid out in memory as it is. Step counts stay where torch keeps them."""
    if tensor.shape != parameter.shape:
        return tensor.clone()
    return torch.empty_like(parameter, dtype=tensor.dtype, requires_grad=False).copy_(tensor)


def _metadata(content: bytes) -> dict[str, str]:
    size = int.from_bytes(content[:8], "little")
    metadata: dict[str, str] = json.loads(content[8 : 8 + size])["__metadata__"]
    return metadata
