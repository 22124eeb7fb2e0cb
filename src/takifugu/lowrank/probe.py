"""Looks at a model's layers while it runs once on an example: what they get, and how fast they are."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.rnn import PackedSequence
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.flop_counter import FlopCounterMode

from takifugu.errors import TakifuguError, UsageError
from takifugu.lowrank.snapshot import CopyOnWrite, Snapshot, tensors_of

Visit = Callable[[str, nn.Module, tuple[Any, ...], dict[str, Any]], None]


def observe(
    model: nn.Module, names: Iterable[str], example: Any, visit: Visit, *, every_call: bool = False
) -> None:
    """Run the model once on the example and call `visit` with the first input of each named layer.

    With `every_call`, with all its inputs. The model is left as it was; see `untouched`.
    """
    arguments, options = as_call(example)

    def watch(name: str) -> None:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not every_call:
                handle.remove()  # visiting may call the layer again
            with _disable_current_modes():  # the guard must not slow down what is timed
                visit(name, module, args, kwargs)

        handle = model.get_submodule(name).register_forward_pre_hook(hook, with_kwargs=True)

    with untouched(model), _explained(), _protected(model, example):
        for name in names:
            watch(name)
        model(*arguments, **options)


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; afterwards the model and all random states are as they were.

    Every module gets back the very objects it held, so that neither a hook nor a tensor on another device can
    be left behind, and its buffers get back their values; also if the block raises.
    """
    _refuse_lazy(model)
    snapshot = Snapshot(model, values=model.buffers())
    python, numbers = random.getstate(), np.random.get_state()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=_cuda_devices(model)):
            model.eval()
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numbers)
        snapshot.restore_()


@contextmanager
def _protected(model: nn.Module, example: Any) -> Iterator[None]:
    """Undoes in-place operations on the model's tensors and on the example."""
    inputs = (value for value in tree_flatten(example)[0] if isinstance(value, Tensor))
    guard = CopyOnWrite([*tensors_of(model), *inputs])
    try:
        with guard:
            yield
    finally:
        guard.restore_()


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except (TakifuguError, MemoryError):
        raise
    except Exception as error:
        raise UsageError(f"the model does not run on the example input: {error}") from error


def _refuse_lazy(model: nn.Module) -> None:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise UsageError(
                f"{name!r} has no shape yet (a lazy module), and running the example input would set it; "
                "run the model once first, or leave the example input out"
            )


def as_call(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """An example input as a call: a tuple or list is the arguments, a dict the keywords."""
    if isinstance(example, Mapping):
        return (), dict(example)
    if isinstance(example, tuple | list) and not isinstance(example, PackedSequence):
        return tuple(example), {}
    return (example,), {}


def macs(model: nn.Module, names: Iterable[str], example: Any) -> dict[str, int]:
    """Count the multiply-accumulates of one forward pass: of each named layer, and of the model under "".

    All calls of a layer are added up. A layer that the example does not reach is missing from the result.
    Counted on shapes alone where that is possible; a model whose path depends on the data is run for real.
    """
    names = list(names)
    with untouched(model):
        try:
            return _macs_on_meta(model, names, example)
        except Exception:  # whatever it is, a real run shows whether the example is at fault
            pass
    with untouched(model), _explained(), _protected(model, example), _countable_kernels():
        arguments, options = as_call(example)
        with _counter() as counter:
            found = _count_calls(model, names, counter)
            model(*arguments, **options)
    return {**found, "": int(counter.get_total_flops()) // 2}


def _macs_on_meta(model: nn.Module, names: Sequence[str], example: Any) -> dict[str, int]:
    # One name per module, and no tying by `functional_call`: with tying it exchanges the tensors of a module
    # that has two names twice, and puts the meta tensor back as the original.
    hollow: dict[str, Tensor] = {}
    on_meta: dict[int, Tensor] = {}
    for prefix, module in model.named_modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                if id(tensor) not in on_meta:
                    on_meta[id(tensor)] = tensor.detach().to("meta")
                hollow[f"{prefix}.{name}" if prefix else name] = on_meta[id(tensor)]
    arguments, options = tree_map(_to_meta, as_call(example))
    with _counter() as counter:
        found = _count_calls(model, names, counter)
        torch.func.functional_call(model, hollow, arguments, options, tie_weights=False)
    return {**found, "": int(counter.get_total_flops()) // 2}


def _counter() -> FlopCounterMode:
    counter = FlopCounterMode(display=False, custom_mapping=_fused_kernels())
    # Its module tracker registers gradient hooks even without gradients, and fails on parameters that are
    # passed to a module as arguments (DeBERTa). Our own hooks identify the layers.
    counter.mod_tracker = _NoTracker()  # type: ignore[assignment]
    return counter


class _NoTracker(AbstractContextManager[None]):
    parents = frozenset({"Global"})

    def __exit__(self, *_: object) -> None:
        return None


def _count_calls(model: nn.Module, names: Sequence[str], counter: FlopCounterMode) -> dict[str, int]:
    """The MACs of each layer, added up while the model runs. `untouched` removes the hooks."""
    found: dict[str, int] = {}

    def watch(name: str) -> None:
        began = [0]

        def before(*_: Any) -> None:
            began[0] = counter.get_total_flops()

        def after(*_: Any) -> None:
            found[name] = found.get(name, 0) + (counter.get_total_flops() - began[0]) // 2

        module = model.get_submodule(name)
        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)

    for name in names:
        watch(name)
    return found


@contextmanager
def _countable_kernels() -> Iterator[None]:
    """Switches off fused kernels that hide their matrix products from the counter."""
    fast_path = torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        with torch.backends.cudnn.flags(enabled=False) if torch.cuda.is_available() else nullcontext():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)


def _fused_kernels() -> dict[Any, Any]:
    """FLOPs of the CPU kernels and grouped products that torch's counter does not know."""
    known = {
        "_scaled_dot_product_flash_attention_for_cpu": _attention_flops,
        "mkldnn_rnn_layer": _recurrence_flops,
        "_grouped_mm": _grouped_flops,
    }
    return {getattr(torch.ops.aten, op): flops for op, flops in known.items() if hasattr(torch.ops.aten, op)}


def _attention_flops(q: Sequence[int], k: Sequence[int], v: Sequence[int], *_: Any, **__: Any) -> int:
    return 2 * math.prod(q[:-1]) * k[-2] * (q[-1] + v[-1])


def _recurrence_flops(x: Sequence[int], w: Sequence[int], u: Sequence[int], *_: Any, **__: Any) -> int:
    return 2 * x[0] * x[1] * (math.prod(w) + math.prod(u))


def _grouped_flops(a: Sequence[int], b: Sequence[int], *_: Any, **__: Any) -> int:
    # Rows in groups (2-D) times one matrix per group, or a batch of products: every row meets one matrix.
    return 2 * math.prod(a) * b[-1]


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
