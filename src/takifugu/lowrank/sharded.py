"""The switch of a model that `fully_shard` (FSDP2) has spread over the processes.

A sharded model cannot be unwrapped, sharded twice or deep-copied, and a module swapped inside it would stay
unsharded without a word. So nothing in it is changed: a plain copy is put together from the full weights,
switched, and sharded anew by the user's `wrap`; only then does the optimizer let go of the old parameters.
Until the last moment the old model is whole, and a failure on any process leaves everyone with it.

The price is that every process holds the full weights for the time of the switch, and the full optimizer
state of the layers that change.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, distributed, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from takifugu.errors import LayerError, UsageError
from takifugu.lowrank.surgery import Swap

_HOOK_DICTS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
_MARKS = ("_is_fsdp_managed_module", "_fsdp_use_orig_params")


def gathered(model: nn.Module) -> nn.Module:
    """A plain copy of a sharded model, on every process: to save, to densify, to export. All must call it."""
    return Gathered(model).module


class Gathered:
    """A plain copy of a sharded model, and which plain parameter stands for which sharded one."""

    def __init__(self, model: nn.Module) -> None:
        _reshard_(model)
        self.plain_of: dict[nn.Parameter, nn.Parameter] = {}
        for name, parameter in model.named_parameters():
            self.plain_of[parameter] = _whole(name, parameter)
        self.left_whole = {p for p in self.plain_of.values() if p in self.plain_of}
        """Parameters the user told `fully_shard` to ignore: shared with the old model."""
        self.module = _plain_tree(model, self.plain_of)

    @property
    def group(self) -> Any:
        """The processes that hold the model together; None for all there are."""
        meshes = [p.data.device_mesh for p in self.plain_of if isinstance(p.data, DTensor)]
        if not meshes or meshes[0].size() == distributed.get_world_size():
            return None
        if meshes[0].ndim > 1:
            raise UsageError(
                "the model is sharded over several dimensions of some of the processes, which the switch does"
                " not support; shard over one dimension, or over all processes"
            )
        return meshes[0].get_group()

    def optimizer(self, real: Optimizer, swaps: Sequence[Swap] | None = None) -> Optimizer:
        """A stand-in that holds the plain parameters, with the full state of those about to be replaced, or
        of all of them if it is not said which."""
        if swaps is None:
            changing = set(self.plain_of.values())
        else:
            changing = {p for swap in swaps for p in swap.old.parameters()}
        stand_in = copy.copy(real)
        stand_in.param_groups = [
            {**group, "params": [self.plain_of.get(p, p) for p in group["params"]]}
            for group in real.param_groups
        ]
        stand_in.state = defaultdict(dict)
        # In the groups' order, which is the same everywhere: gathering takes all processes at once.
        for parameter in [p for group in real.param_groups for p in group["params"] if p in real.state]:
            plain, state = self.plain_of.get(parameter, parameter), real.state[parameter]
            full = {key: _full(value) for key, value in state.items()} if plain in changing else state
            stand_in.state[plain] = full
        return stand_in

    def check(self, names: Mapping[str, nn.Parameter], rebuilt: nn.Module) -> dict[nn.Parameter, Any]:
        """Which new parameter stands for which plain one. `names` are the plain ones, before sharding."""
        if not any(isinstance(module, FSDPModule) for module in rebuilt.modules()):
            raise UsageError("wrap= returned a model that is not sharded; return fully_shard(module)")
        _reshard_(rebuilt)
        found = dict(rebuilt.named_parameters())
        if found.keys() != names.keys():
            odd = sorted(found.keys() ^ names.keys())[0]
            raise UsageError(f"wrap= changes the names of parameters ({odd!r}); shard without renaming")
        for name, parameter in found.items():
            if not isinstance(parameter, DTensor) and names[name] not in self.left_whole:
                raise UsageError(
                    f"wrap= leaves {name!r} unsharded; its gradients would differ between processes: "
                    "shard the root module too"
                )
        return {names[name]: parameter for name, parameter in found.items()}


def resharded_state(
    stand_in: Optimizer, new_of: Mapping[nn.Parameter, Any]
) -> tuple[list[list[Any]], dict[Any, dict[str, Any]]]:
    """The stand-in's groups and state, in terms of the sharded parameters."""
    groups = [[new_of.get(p, p) for p in group["params"]] for group in stand_in.param_groups]
    state: dict[Any, dict[str, Any]] = {}
    for parameter, entries in stand_in.state.items():
        assert isinstance(parameter, nn.Parameter)
        new = new_of.get(parameter, parameter)
        state[new] = {key: _like(value, new) for key, value in entries.items()}
    return groups, state


# ---- tensors -----------------------------------------------------------------------------------------


def _whole(name: str, parameter: nn.Parameter) -> nn.Parameter:
    data: Any = parameter.data
    if not isinstance(data, DTensor):
        return parameter
    if any(type(placement).__name__ == "_StridedShard" for placement in data.placements):
        raise LayerError(
            f"{name!r} is sharded and tensor parallel at once, which the switch does not support; "
            "factorize before the model is parallelized"
        )
    # A clone: on one process the full tensor is the old model's own memory.
    return nn.Parameter(data.full_tensor().clone(), requires_grad=parameter.requires_grad)


def _full(value: Any) -> Any:
    return value.full_tensor().clone() if isinstance(value, DTensor) else value


def _like(value: Any, parameter: Any) -> Any:
    """An entry of the optimizer's state, laid out as its parameter is."""
    if not isinstance(parameter, DTensor):
        return value
    if isinstance(value, DTensor):
        same = value.device_mesh == parameter.device_mesh and value.placements == parameter.placements
        if same or value.shape != parameter.shape:
            return value
        value = value.full_tensor()
    if not isinstance(value, Tensor) or value.shape != parameter.shape or value.dim() == 0:
        return value
    # Every process has all of it: each takes its own part, nothing is sent.
    return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)


# ---- modules -------------------------------------------------------------------------------------------


def _reshard_(model: nn.Module) -> None:
    """After a forward pass without a backward one the root's parameters are still in one piece."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _plain_tree(model: nn.Module, plain_of: Mapping[nn.Parameter, nn.Parameter]) -> nn.Module:
    """The same modules without what `fully_shard` has put on them, holding the plain parameters."""
    modules = list(model.modules())
    clones: dict[nn.Module, Any] = {}
    memo: dict[int, Any] = {id(old): new for old, new in plain_of.items()}
    for module in modules:
        kind: Any = type(module)
        if isinstance(module, FSDPModule):
            kind = kind.__mro__[module._orig_cls_mro_index]
        clones[module] = memo[id(module)] = object.__new__(kind)
    for buffer in model.buffers():
        memo[id(buffer)] = buffer
    for module in modules:
        clone = clones[module]
        for key, value in vars(module).items():
            if key in _MARKS or type(key) is not str or "composable_api" in key:
                continue
            vars(clone)[key] = _user_hooks(module, key) if key in _HOOK_DICTS else _copied(value, memo)
        if isinstance(clone, nn.RNNBase):
            clone._init_flat_weights()  # it keeps weak references to its parameters
    clone = clones[model]
    assert isinstance(clone, nn.Module)
    return clone


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # process groups, locks, open files: whatever cannot be copied is shared
        return value


def _user_hooks(module: nn.Module, name: str) -> Any:
    hooks = getattr(module, name)
    kept = copy.copy(hooks)
    for key in _sharding_hooks(hooks):
        del kept[key]
    return kept


def _sharding_hooks(hooks: Mapping[int, Any]) -> Iterator[int]:
    for key, hook in hooks.items():
        function = getattr(hook, "hook", hook)  # torch wraps some
        if str(getattr(function, "__module__", "")).startswith("torch.distributed.fsdp"):
            yield key
