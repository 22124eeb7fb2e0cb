"""Which networks there are, who builds them, and which of their layers the paper makes low-rank.

No torch in here: a network's own file is imported when the network is asked for.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from takifugu.errors import UsageError, near_misses

if TYPE_CHECKING:
    from torch import Tensor, nn

BUILDER = "_takifugu_builder"
"""Attribute of a built model: `{"zoo": name, "options": {...}}`, so that a checkpoint can rebuild it.

For other functions it is `{"function": "package.module:name", "options": {...}}`; a network whose channels
were cut also has `"widths"` (`takifugu.lowrank.narrow`)."""


@dataclass(frozen=True)
class Network:
    """A registry line: the file, its builder, its example input, and the layers to factorize."""

    module: str
    builder: str
    example: str
    low_rank: str
    """Pattern of the layers' names; what comes before it, such as DDP's `module.`, does not matter."""


NETWORKS: Mapping[str, Network] = {
    # Convolutions 1 to 9, that is the first three stages and the one that widens to 512, stay dense.
    "vgg19-cifar10": Network(
        "vgg", "vgg19", "image", r"(stage4\.[1-9]\d*|stage5\.\d+)\.conv|classifier\.hidden[12]"
    ),
    # All 3x3 convolutions but those of the very first block; the 1x1 shortcuts stay dense.
    "resnet18-cifar10": Network(
        "resnet", "resnet18", "cifar_image", r"(layer1\.[1-9]\d*|layer[2-4]\.\d+)\.conv[12]"
    ),
    # Stage 4 only, and there the shortcut too.
    "resnet50-imagenet": Network(
        "resnet", "resnet50", "imagenet_image", r"layer4\.\d+\.(conv[123]|downsample\.0)"
    ),
    "wide-resnet50-2-imagenet": Network(
        "resnet", "wide_resnet50_2", "imagenet_image", r"layer4\.\d+\.(conv[123]|downsample\.0)"
    ),
    # The tied embedding and decoder stay dense.
    "lstm-wikitext2": Network("lstm_lm", "lstm_lm", "tokens", r"lstm"),
    # The first layer of either stack and the embedding stay dense.
    "transformer-multi30k": Network(
        "transformer",
        "transformer",
        "sentences",
        r"(encoder|decoder)\.layers\.[1-9]\d*\.((cross_)?attention\.(q|k|v|out)|feed_forward\.(up|down))",
    ),
}


@dataclass(frozen=True)
class PaperChoice:
    """The layers that the paper factorizes in a network, as a predicate `(name, module) -> bool`.

    It goes by the layer's place in the network, so it holds for narrow and shallow variants as well.
    """

    network: str

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        return re.compile(rf"(?:.*\.)?(?:{NETWORKS[self.network].low_rank})")

    def __call__(self, name: str, module: nn.Module) -> bool:
        return self._pattern.fullmatch(name) is not None


def names() -> tuple[str, ...]:
    """The networks' names."""
    return tuple(NETWORKS)


def where(name: str) -> Callable[[str, nn.Module], bool]:
    """The paper's choice of layers to factorize: a predicate `(layer name, module) -> bool`."""
    _network(name)
    return PaperChoice(name)


def accepts(name: str) -> set[str]:
    """The names of the options that `build(name, ...)` takes."""
    network = _network(name)
    return _accepted(_function(network, network.builder))


def build(name: str, **options: Any) -> nn.Module:
    """Build the network `name` with fresh weights, on torch's default device.

    Without options it is the paper's; width, depth and the like are options of its builder. The model
    remembers how it was built in `_takifugu_builder`, as JSON-able data.
    """
    network = _network(name)
    builder = _function(network, network.builder)
    _refuse_unknown(name, options, _accepted(builder))
    model: nn.Module = _call(name, builder, options)
    setattr(model, BUILDER, {"zoo": name, "options": {key: _plain(value) for key, value in options.items()}})
    return model


def example(name: str, batch_size: int = 1, **options: Any) -> tuple[Tensor, ...]:
    """An example input of `build(name, **options)`, the arguments of its forward: for MACs and timing.

    Takes the builder's options (those without influence on the input are accepted and ignored), and
    `image_size` or `length`. The values are fixed: no random generator is touched.
    """
    network = _network(name)
    maker = _function(network, network.example)
    used = _accepted(maker) - {"batch_size"}
    _refuse_unknown(name, options, used | _accepted(_function(network, network.builder)))
    arguments = {key: value for key, value in options.items() if key in used}
    inputs: tuple[Tensor, ...] = _call(name, maker, {"batch_size": batch_size, **arguments})
    return inputs


def _network(name: str) -> Network:
    network = NETWORKS.get(name) if isinstance(name, str) else None
    if network is None:
        raise UsageError(
            f"unknown zoo network {name!r}{near_misses(str(name), NETWORKS)}; there are {', '.join(NETWORKS)}"
        )
    return network


def _function(network: Network, function: str) -> Callable[..., Any]:
    found: Callable[..., Any] = getattr(importlib.import_module(f"takifugu.zoo.{network.module}"), function)
    return found


def _accepted(function: Callable[..., Any]) -> set[str]:
    return set(inspect.signature(function).parameters)


def _refuse_unknown(name: str, options: Mapping[str, Any], accepted: set[str]) -> None:
    for option in options:
        if option not in accepted:
            raise UsageError(
                f"{name}: unknown option {option!r}{near_misses(option, accepted)}; "
                f"accepted: {', '.join(sorted(accepted))}"
            )


def _call(name: str, function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    try:
        return function(**arguments)
    except UsageError as error:  # the network's file knows the option, but not the name it goes by here
        raise UsageError(f"{name}: {error}") from None


def _plain(value: Any) -> Any:
    """Tuples become lists, so that what is remembered equals what comes back from JSON."""
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value
