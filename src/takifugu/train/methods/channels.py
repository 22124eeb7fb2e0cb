"""Channels that can be cut out of a network: where they are, how they go, and what the optimizer had on them.

A channel can go if a convolution makes it, a batch norm scales it, and only convolutions and Linears take it,
through operations that treat every channel on its own. Such chains are read off the network's graph, so that
residual blocks are handled as they should be: what is added to a shortcut has to keep its shape and is in no
chain; what is inside a block is.

Those operations also map zero to zero, hence a channel whose scale and shift are zero can be cut without any
change to what the network computes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from takifugu.errors import UsageError, near_misses
from takifugu.lowrank.narrow import record_, resize_


@dataclass(frozen=True)
class Consumer:
    """A layer that takes the channels as its inputs."""

    name: str
    columns: int
    """Inputs for each channel: 1, or the number of pixels where an image was flattened for a Linear."""


@dataclass(frozen=True)
class Chain:
    """A convolution, the batch norm after it, and all layers that its channels go to."""

    conv: str
    norm: str
    channels: int
    consumers: tuple[Consumer, ...]


@dataclass(frozen=True, eq=False)
class Cut:
    """A parameter that became smaller: the entries of `old` at these indices, by dimension, are `new`."""

    old: nn.Parameter
    new: nn.Parameter
    kept: Mapping[int, Tensor]


Kept = Mapping[str, Tensor]
"""The channels that stay, by the name of their batch norm: ascending indices."""


# ---- finding ----------------------------------------------------------------------------------------


def find_chains(module: nn.Module) -> tuple[Chain, ...]:
    """All chains of the network, in the order of its forward pass."""
    kind = type(module).__name__
    if not any(isinstance(part, nn.BatchNorm2d) for part in module.modules()):
        raise UsageError(f"{kind} has no BatchNorm2d, by whose scales channels are chosen")
    try:
        graph = fx.Tracer().trace(module)
    except Exception as error:  # whatever a forward may do that cannot be followed
        raise UsageError(
            f"the forward of {kind} cannot be followed by torch.fx ({type(error).__name__}: {error}), so "
            "nobody knows where its channels go"
        ) from None
    chains = tuple(_Finder(module, graph).chains())
    if not chains:
        raise UsageError(
            f"{kind} has no channels that can be cut: no convolution whose batch norm leads, channel by "
            "channel, to convolutions (groups=1) or Linears only"
        )
    return chains


_ELEMENTWISE_MODULES = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.GELU, nn.SiLU, nn.Hardswish, nn.Tanh,
    nn.Identity, nn.Dropout, nn.Dropout2d,
)  # fmt: skip
_ELEMENTWISE = {
    torch.relu, torch.relu_, torch.tanh, F.relu, F.relu_, F.relu6, F.leaky_relu, F.gelu, F.silu, F.hardswish,
    F.dropout, F.dropout2d, "relu", "relu_", "tanh", "contiguous",
}  # fmt: skip
_POOLING_MODULES = (nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d)
_POOLING = {
    F.max_pool2d, F.avg_pool2d, F.adaptive_avg_pool2d, F.adaptive_max_pool2d, torch.max_pool2d
}  # fmt: skip
_FLATTEN = {torch.flatten, "flatten"}
_MEAN = {torch.mean, "mean"}


class _DeadEnd(Exception):
    """The channels go where they cannot be followed."""


class _Finder:
    def __init__(self, module: nn.Module, graph: fx.Graph) -> None:
        self.graph = graph
        self.modules = dict(module.named_modules())
        self.calls = Counter(node.target for node in graph.nodes if node.op == "call_module")
        self.read_directly = {node.target.rpartition(".")[0] for node in graph.nodes if node.op == "get_attr"}
        """Modules whose parameters something else uses as well."""
        self.holders = Counter(
            id(parameter) for part in module.modules() for parameter in part.parameters(recurse=False)
        )

    def chains(self) -> Iterator[Chain]:
        for node in self.graph.nodes:
            norm = self._own(node, nn.BatchNorm2d)
            if norm is None or norm.weight is None:
                continue
            source = node.args[0] if node.args else None
            if not isinstance(source, fx.Node) or list(source.users) != [node]:
                continue
            conv = self._own(source, nn.Conv2d)
            if conv is None or conv.groups != 1:
                continue
            try:
                consumers = tuple(self._consumers(node, norm.num_features, flat=False))
            except _DeadEnd:
                continue
            if consumers:
                yield Chain(str(source.target), str(node.target), norm.num_features, consumers)

    def _own(self, node: fx.Node, kind: type[Any]) -> Any:
        """The module that the node calls, if it is just of this kind and nothing else uses it."""
        module = self.modules.get(str(node.target)) if node.op == "call_module" else None
        if module is None or type(module) is not kind:
            return None
        if self.calls[node.target] > 1 or node.target in self.read_directly:
            return None
        shared = any(self.holders[id(p)] > 1 for p in module.parameters(recurse=False))
        return None if shared else module

    def _consumers(self, node: fx.Node, channels: int, flat: bool) -> Iterator[Consumer]:
        """Where the node's channels end up. `flat`: they are the last dimension, no more the second."""
        for user in node.users:
            conv, linear = self._own(user, nn.Conv2d), self._own(user, nn.Linear)
            if conv is not None and conv.groups == 1 and not flat:
                yield Consumer(str(user.target), 1)
            elif linear is not None and flat and linear.in_features % channels == 0:
                yield Consumer(str(user.target), linear.in_features // channels)
            else:
                yield from self._consumers(user, channels, self._stays_flat(user, flat))

    def _stays_flat(self, user: fx.Node, flat: bool) -> bool:
        """Whether the channels are the last dimension after this operation, which must leave them apart."""
        module = self.modules.get(str(user.target)) if user.op == "call_module" else None
        does = user.target if user.op in ("call_function", "call_method") else None
        if isinstance(module, _ELEMENTWISE_MODULES) or does in _ELEMENTWISE:
            return flat
        if flat:
            raise _DeadEnd
        if isinstance(module, _POOLING_MODULES) or does in _POOLING:
            return False
        if isinstance(module, nn.Flatten) and (module.start_dim, module.end_dim) == (1, -1):
            return True
        if does in _FLATTEN and _argument(user, 1, "start_dim", 0) == 1:
            if _argument(user, 2, "end_dim", -1) == -1:
                return True
        elif does in _MEAN and _is_both(_argument(user, 1, "dim", None)):
            return not _argument(user, 2, "keepdim", False)
        raise _DeadEnd


def _argument(node: fx.Node, index: int, name: str, default: Any) -> Any:
    return node.args[index] if len(node.args) > index else node.kwargs.get(name, default)


def _is_both(dimensions: Any) -> bool:
    """Height and width of (N, C, H, W)."""
    if not isinstance(dimensions, list | tuple):
        return False
    return {d % 4 for d in dimensions if isinstance(d, int)} == {2, 3}


# ---- cutting ----------------------------------------------------------------------------------------


@torch.no_grad()
def cut_(module: nn.Module, chains: Sequence[Chain], kept: Kept) -> list[Cut]:
    """Leaves only these channels. Batch norms that are not named keep all of theirs."""
    plan = _plan(chains, kept)
    cuts: list[Cut] = []
    for name, by_tensor in plan.items():
        layer = module.get_submodule(name)
        for attribute, dimensions in by_tensor.items():
            old = getattr(layer, attribute)
            if isinstance(old, nn.Parameter):
                new = nn.Parameter(_taken(old.detach(), dimensions), requires_grad=old.requires_grad)
                cuts.append(Cut(old, new, dimensions))
                setattr(layer, attribute, new)
            elif old is not None:
                setattr(layer, attribute, _taken(old, dimensions))
        resize_(layer)
    if cuts:
        record_(module, plan)
    return cuts


def _plan(chains: Sequence[Chain], kept: Kept) -> dict[str, dict[str, dict[int, Tensor]]]:
    """By layer and tensor: which indices of which dimension stay. Checked before anything changes."""
    known = {chain.norm: chain for chain in chains}
    plan: dict[str, dict[str, dict[int, Tensor]]] = {}

    def note(layer: str, tensor: str, dimension: int, index: Tensor) -> None:
        plan.setdefault(layer, {}).setdefault(tensor, {})[dimension] = index

    for name, index in kept.items():
        if name not in known:
            raise UsageError(f"there are no channels to cut at {name!r}{near_misses(name, known)}")
        chain, values = known[name], index.tolist()
        if not values or values != sorted(set(values)) or values[0] < 0 or values[-1] >= chain.channels:
            raise UsageError(
                f"the channels to keep at {name!r} must be ascending indices of its {chain.channels}, at "
                f"least one; got {values[:8]}{'...' if len(values) > 8 else ''}"
            )
        for tensor in ("weight", "bias"):
            note(chain.conv, tensor, 0, index)
        for tensor in ("weight", "bias", "running_mean", "running_var"):
            note(chain.norm, tensor, 0, index)
        for consumer in chain.consumers:
            within = torch.arange(consumer.columns, device=index.device)
            columns = (index[:, None] * consumer.columns + within).reshape(-1)
            note(consumer.name, "weight", 1, columns)
    return plan


def _taken(tensor: Tensor, dimensions: Mapping[int, Tensor]) -> Tensor:
    taken = tensor
    for dimension, index in dimensions.items():
        taken = taken.index_select(dimension, index.to(tensor.device))
    last = tensor.dim() == 4 and not tensor.is_contiguous()
    return taken.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)


def carry_(optimizer: Optimizer, cuts: Sequence[Cut]) -> None:
    """The smaller parameters take the old ones' places, with the optimizer's state of what is left."""
    by_old = {cut.old: cut for cut in cuts}
    for group in optimizer.param_groups:
        group["params"] = [by_old[p].new if p in by_old else p for p in group["params"]]
    for cut in cuts:
        if cut.old not in optimizer.state:
            continue
        state = optimizer.state.pop(cut.old)
        tensors = [value for value in state.values() if isinstance(value, Tensor) and value.dim() > 0]
        if all(value.shape == cut.old.shape for value in tensors):
            optimizer.state[cut.new] = {
                key: _taken(value, cut.kept) if isinstance(value, Tensor) and value.dim() > 0 else value
                for key, value in state.items()
            }  # otherwise nobody knows what belongs to which channel, and the parameter starts anew
