"""Looks at a model's layers while it runs once on an example: what they get, and how fast they are."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.flop_counter import FlopCounterMode

from takifugu.errors import UsageError

Visit = Callable[[str, nn.Module, tuple[Any, ...], dict[str, Any]], None]


def observe(model: nn.Module, names: Iterable[str], example: Any, visit: Visit) -> None:
    """Runs the model once on the example and calls `visit` with the first input of each named layer.

    The model is left as it was: evaluation mode during the run, so that no statistics move, no
    gradients, random state restored.
    """
    arguments, options = as_call(example)
    handles = []

    def watch(name: str) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            handle.remove()  # the first call counts; and visiting may call the layer again
            visit(name, module, args, kwargs)

        handle = model.get_submodule(name).register_forward_pre_hook(hook, with_kwargs=True)
        handles.append(handle)
        return hook

    modes = {module: module.training for module in model.modules()}
    try:
        for name in names:
            watch(name)
        model.eval()
        with torch.no_grad(), torch.random.fork_rng(devices=_cuda_devices(model)):
            model(*arguments, **options)
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise UsageError(f"the model does not run on the example input: {error}") from error
    finally:
        for handle in handles:
            handle.remove()
        for module, mode in modes.items():
            module.training = mode


def as_call(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """An example input as a call: a tuple or list is the arguments, a dict the keywords."""
    if isinstance(example, Mapping):
        return (), dict(example)
    if isinstance(example, tuple | list) and not isinstance(example, PackedSequence):
        return tuple(example), {}
    return (example,), {}


def macs(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """Multiply-accumulates of one forward pass, counted by torch on shapes alone.

    None where the layer cannot run without data (a packed sequence's lengths, say).
    """
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    hollow = {name: tensor.detach().to("meta") for name, tensor in state.items()}
    args, kwargs = tree_map(_to_meta, (args, kwargs))
    try:
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            torch.func.functional_call(module, hollow, args, kwargs)
    except (RuntimeError, NotImplementedError, ValueError):
        return None
    return int(counter.get_total_flops()) // 2


def race(
    variants: Mapping[str, nn.Module],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    least_rounds: int = 5,
    most_rounds: int = 25,
    budget_s: float = 0.6,
) -> dict[str, float]:
    """Median seconds of forward and backward of each variant on this input, taken in turns.

    In turns, because a machine's speed drifts: what disturbs one variant disturbs them all. They run as
    in training: a batch norm among them moves its averages.
    """
    samples: dict[str, list[float]] = {name: [] for name in variants}
    with torch.random.fork_rng(), _training(variants.values()):
        for module in variants.values():
            _timed_step(module, args, kwargs)  # warm up: kernels are chosen, memory is mapped
        began = time.perf_counter()
        for done in range(most_rounds):
            if done >= least_rounds and time.perf_counter() - began > budget_s:
                break
            for name, module in variants.items():
                samples[name].append(_timed_step(module, args, kwargs))
    return {name: statistics.median(times) for name, times in samples.items()}


def _timed_step(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    leaves: list[Tensor] = []

    def fresh(value: Any) -> Any:
        if isinstance(value, PackedSequence):
            return value._replace(data=fresh(value.data))
        if isinstance(value, Tensor) and value.is_floating_point():
            value = value.detach().requires_grad_()
            leaves.append(value)
        return value

    with torch.enable_grad():
        args, kwargs = tree_map(fresh, (args, kwargs), is_leaf=lambda v: isinstance(v, PackedSequence))
        wanted = leaves + [p for p in module.parameters() if p.requires_grad]
        _synchronize(wanted)
        start = time.perf_counter()
        outputs = [t for t in _tensors(module(*args, **kwargs)) if t.requires_grad]
        seeds = [torch.ones_like(t) for t in outputs]
        # Not .backward(): the user's gradients are none of our business.
        if outputs and wanted:  # a frozen embedding has no backward pass
            torch.autograd.grad(outputs, wanted, seeds, allow_unused=True)
        _synchronize(wanted)
        return time.perf_counter() - start


def _tensors(output: Any) -> list[Tensor]:
    if isinstance(output, PackedSequence):
        return [output.data]
    found = []
    for leaf in tree_flatten(output, is_leaf=lambda v: isinstance(v, PackedSequence))[0]:
        found += [leaf.data] if isinstance(leaf, PackedSequence) else [leaf]
    return [t for t in found if isinstance(t, Tensor)]


@contextmanager
def _training(modules: Iterable[nn.Module]) -> Iterator[None]:
    modes = [(m, m.training) for module in modules for m in module.modules()]
    try:
        for module, _ in modes:
            module.training = True
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def _to_meta(value: Any) -> Any:
    return value.to("meta") if isinstance(value, Tensor) else value


def _cuda_devices(model: nn.Module) -> list[int]:
    return sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})


def _synchronize(tensors: list[Tensor]) -> None:
    if tensors and tensors[0].device.type == "cuda":
        torch.cuda.synchronize(tensors[0].device)
