"""Rebuilds DistributedDataParallel around a changed model, with the options and hooks of the old wrapper."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from takifugu.errors import UsageError
from takifugu.lowrank.factorized import Factorized
from takifugu.lowrank.surgery import adopt_hooks

_MB = 1024 * 1024
_PLAIN_OPTIONS = (
    "dim",
    "find_unused_parameters",
    "gradient_as_bucket_view",
    "static_graph",
    "skip_all_reduce_unused_params",
    "batched_grad_copy",
)
"""Options that the wrapper keeps under their own names; older versions of torch lack the last two."""
_STATELESS = ("ProcessGroup", "PostLocalSGDState")
"""Types of a hook's state that hold nothing which depends on the shapes of gradients."""


def check_rebuildable(old: DistributedDataParallel, *, carries_hook: bool) -> None:
    """Raise `UsageError` if the wrapper cannot be built again from what it knows about itself."""
    if type(old).__init__ is not DistributedDataParallel.__init__:
        raise UsageError(
            f"the model is wrapped in {type(old).__name__}, a subclass of DistributedDataParallel with a "
            "constructor of its own; give WarmStart wrap=, a function that takes the plain model and wraps it"
        )
    if getattr(old, "mixed_precision", None) is not None:
        raise UsageError(
            "DistributedDataParallel(mixed_precision=...) leaves hooks in every layer and cannot be rebuilt; "
            "use torch.autocast instead"
        )
    if getattr(old, "_delay_all_reduce_params", None):
        raise UsageError(
            "DistributedDataParallel(delay_all_reduce_named_params=...) names parameters that the switch "
            "replaces; give WarmStart wrap=, a function that takes the plain model and wraps it"
        )
    for hook, state in old._comm_hooks if carries_hook else ():
        if state is not None and type(state).__name__ not in _STATELESS:
            raise UsageError(
                f"the communication hook {getattr(hook, '__qualname__', hook)!r} keeps state "
                f"({type(state).__name__}) that may belong to gradients which the switch replaces; give "
                "WarmStart hook=, an object whose attach_(ddp) registers the hook with fresh state"
            )


def rebuilt(old: DistributedDataParallel, module: nn.Module, *, carries_hook: bool) -> Any:
    """Return a new wrapper around `module` with the old one's options, hooks and mode.

    `carries_hook`: the communication hook of the gradients is registered again as well.
    """
    check_rebuildable(old, carries_hook=carries_hook)
    _check_ignored(module)
    with warnings.catch_warnings():
        # They were shown when the user built the first wrapper.
        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("ignore", UserWarning)
        new = type(old)(module, **options_of(old))
    new.training = old.training
    adopt_hooks(new, old)
    if hasattr(old, "buffer_hook"):
        new.buffer_hook = old.buffer_hook
    if not getattr(old, "_ddp_sink_clone", True):
        new._set_ddp_sink_clone(False)
    if carries_hook:
        for hook, state in old._comm_hooks:
            new.register_comm_hook(state, hook)
        builtin = _builtin_hook(old)
        if builtin is not None:
            new._register_builtin_comm_hook(builtin)
    return new


def options_of(old: DistributedDataParallel) -> dict[str, Any]:
    """Return the arguments that build a wrapper like this one."""
    accepted = inspect.signature(DistributedDataParallel.__init__).parameters
    options = {name: getattr(old, name) for name in _PLAIN_OPTIONS if name in accepted}
    if old.device_ids is not None:
        options |= {"device_ids": old.device_ids, "output_device": old.output_device}
    mesh = getattr(old, "device_mesh", None)
    options |= {"process_group": old.process_group} if mesh is None else {"device_mesh": mesh}
    # Buffers that each process keeps for itself must not be overwritten when the wrapper is built, and only
    # the older of torch's two options for this says so.
    if not old.broadcast_buffers:
        options["broadcast_buffers"] = False
    per_bucket = getattr(old, "bucket_bytes_cap_list", [])
    if per_bucket:
        options["bucket_cap_mb_list"] = [cap / _MB for cap in per_bucket]
    elif not old.bucket_bytes_cap_default:
        options["bucket_cap_mb"] = old.bucket_bytes_cap / _MB
    return options


def _builtin_hook(old: DistributedDataParallel) -> Any:
    """Return the type of the C++ hook; only the wrapper's log knows it."""
    name = str(old._get_ddp_logging_data().get("comm_hook", ""))
    kind, _, member = name.rpartition(".")
    kinds: Any = distributed
    return getattr(kinds.BuiltinCommHookType, member) if kind == "BuiltinCommHookType" else None


def _check_ignored(module: nn.Module) -> None:
    """Parameters left out of the reduction are named on the module, by names that factorizing changes."""
    layers = {name for name, part in module.named_modules() if isinstance(part, Factorized)}
    for name in getattr(module, "_ddp_params_and_buffers_to_ignore", ()):
        owner = next((layer for layer in layers if name.startswith(f"{layer}.")), None)
        if owner is not None:
            raise UsageError(
                f"DistributedDataParallel ignores {name!r}, whose layer {owner!r} is to become low-rank; "
                "leave the layer out with where="
            )
