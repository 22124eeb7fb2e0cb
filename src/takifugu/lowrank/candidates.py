"""Which layers of a model could be factorized, which of them the user means, and what stands in the way."""

from __future__ import annotations

import fnmatch
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from takifugu.errors import LayerError, UsageError, near_misses
from takifugu.lowrank.factorized import Dense, Factorized
from takifugu.lowrank.layers import OPT_IN, kind_of
from takifugu.structure import LayerSpec

Pattern = str | re.Pattern[str]
Where = Callable[[str, nn.Module], bool] | Pattern | Sequence[Pattern] | None
"""A predicate (name, module) -> bool, one or several name patterns, or None for every supported layer.

A pattern is text with * and ?, or a compiled regular expression; both match the whole name."""


@dataclass(frozen=True)
class Candidate:
    """A layer that is up for factorization, dense or factorized already."""

    name: str
    module: nn.Module
    layer: type[Factorized]

    @property
    def dense(self) -> Dense:
        """A dense module of its shape; without values if the layer is factorized now."""
        if isinstance(self.module, Factorized):
            return self.module.dense_shell("meta")
        return self.module

    def weights(self) -> dict[str, Tensor]:
        if isinstance(self.module, Factorized):
            return {name: w.detach() for name, w in self.module.dense_weights(precise=True).items()}
        return {name: w.detach() for name, w in self.layer.weights_of(self.module).items()}


@dataclass(frozen=True)
class Verdict:
    """What is to become of one layer, and why."""

    candidate: Candidate
    scheme: str
    rank: Mapping[str, int] | None = None
    """None: it stays as it is, for `reason`."""
    reason: str | None = None
    tie: str | None = None
    dense_s: float | None = None
    factorized_s: float | None = None
    """Measured seconds of forward and backward, where the speed gate was asked for."""

    @property
    def name(self) -> str:
        return self.candidate.name

    def spec(self) -> LayerSpec | None:
        layer = self.candidate.layer
        if self.rank is None:
            return None
        shapes = {name: tuple(w.shape) for name, w in layer.weights_of(self.candidate.dense).items()}
        return LayerSpec(self.name, layer.kind, self.scheme, dict(self.rank), shapes, self.tie)


def walk(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """All modules by name, each once, without looking inside the layers that are handled as a whole."""
    seen: set[nn.Module] = set()

    def visit(prefix: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        if module in seen:
            return
        seen.add(module)
        yield prefix, module
        if isinstance(module, Factorized) or kind_of(module) is not None:
            return
        for child_name, child in module.named_children():
            yield from visit(f"{prefix}.{child_name}" if prefix else child_name, child)

    yield from visit("", model)


def layer_of(module: nn.Module) -> type[Factorized] | None:
    """The factorized type that this module has or could have."""
    return type(module) if isinstance(module, Factorized) else kind_of(module)


def find(model: nn.Module, where: Where) -> list[Candidate]:
    """The candidates the user means. Matching nothing is an error that names near misses."""
    refuse_wrappers(model)
    known = [Candidate(name, module, layer) for name, module in walk(model) if (layer := layer_of(module))]
    if not known:
        raise UsageError(f"{type(model).__name__} has no layer that can be factorized")
    if known[0].name == "":
        raise UsageError(
            f"the model itself is a {type(model).__name__} and cannot be replaced in place; "
            "put it in an nn.Sequential"
        )
    names = [candidate.name for candidate in known]
    check_where(where)
    if where is None:
        chosen = [candidate for candidate in known if candidate.layer.kind not in OPT_IN]
        if not chosen:
            raise UsageError(
                f"only {known[0].layer.kind} layers were found, which are opt-in; name them with where="
            )
        return chosen
    if callable(where):
        chosen = [candidate for candidate in known if where(candidate.name, candidate.module)]
        if not chosen:
            raise UsageError(
                f"where= matches none of the {len(names)} layers that can be factorized "
                f"(they are named like {', '.join(map(repr, names[:3]))})"
            )
        return chosen
    patterns = _patterns(where)
    everything = [name for name, _ in model.named_modules() if name]
    for pattern in patterns:
        if any(matches(name, pattern) for name in names):
            continue
        if isinstance(pattern, str):
            raise UsageError(_no_match(model, pattern, names, everything))
        raise UsageError(
            f"where=re.compile({pattern.pattern!r}) matches no whole name of a layer that can be factorized "
            f"(they are named like {', '.join(map(repr, names[:3]))})"
        )
    return [c for c in known if any(matches(c.name, pattern) for pattern in patterns)]


def check_where(where: Any) -> None:
    """Raise if `where` is none of the things that select layers."""
    takes = "where= takes name patterns or a function (name, module) -> bool"
    if isinstance(where, type):
        raise UsageError(
            f"{takes}, not a class; use where=lambda name, module: isinstance(module, {where.__name__})"
        )
    if isinstance(where, nn.Module):
        raise UsageError(f"{takes}, not a module; give the module's name, such as where='layer1.conv2'")
    if callable(where):
        try:
            inspect.signature(where).bind("name", nn.Module())
        except TypeError:
            raise UsageError(
                f"{takes}, but {getattr(where, '__name__', where)} does not take these two arguments; "
                "use where=lambda name, module: ..."
            ) from None
        except ValueError:
            pass  # a builtin without a signature
        return
    if where is None:
        return
    for pattern in _patterns(where):
        if not isinstance(pattern, str | re.Pattern) or not isinstance(_text(pattern), str):
            raise UsageError(f"{takes}, got {pattern!r}; use a string or re.compile(...)")


def _patterns(where: Any) -> list[Any]:
    if isinstance(where, str | re.Pattern):
        return [where]
    # An iterator could be read only once, and it is read at every switch.
    if isinstance(where, Mapping | bytes | Iterator) or not isinstance(where, Iterable):
        raise UsageError(
            f"where= takes name patterns or a function (name, module) -> bool, got {where!r}; "
            "use a string such as 'layer1.*', a list of them, or re.compile(...)"
        )
    patterns = list(where)
    if not patterns:
        raise UsageError("where= is an empty list, which matches nothing; leave it out to mean all layers")
    return patterns


def _text(pattern: Any) -> Any:
    return pattern.pattern if isinstance(pattern, re.Pattern) else pattern


def matches(name: str, pattern: str | re.Pattern[str]) -> bool:
    """Both kinds of patterns match the whole name."""
    if isinstance(pattern, str):
        return fnmatch.fnmatchcase(name, pattern)
    return pattern.fullmatch(name) is not None


def _no_match(model: nn.Module, pattern: str, names: list[str], everything: list[str]) -> str:
    matched = fnmatch.filter(everything, pattern)
    if matched:
        owner = next((name for name in names if matched[0].startswith(name + ".")), None)
        if owner is not None:
            return (
                f"where={pattern!r} names a part of {owner!r}, which is factorized as a whole; name {owner!r}"
            )
        kind = type(model.get_submodule(matched[0])).__name__
        inside = (
            f"; for the layers inside it use '{matched[0]}.*'"
            if any(name.startswith(matched[0] + ".") for name in names)
            else ""
        )
        return f"where={pattern!r} matches {matched[0]!r}, a {kind}, which cannot be factorized{inside}"
    return f"where={pattern!r} matches no layer that can be factorized{near_misses(pattern, names)}"


def refusal(candidate: Candidate, scheme: str) -> str | None:
    """Why this layer must stay as it is, whatever the user says; None if nothing stands in the way."""
    module: Any = candidate.module
    if isinstance(module, Factorized):
        quantized = [p for p in module.factor_parameters() if not _is_plain(p)]
        return _foreign(candidate.name, quantized[0]) if quantized else None
    if parametrize.is_parametrized(module):
        return "its weight is parametrized; remove the parametrization first"
    dense_type: Any = next(base for base in type(module).__mro__ if base.__module__.startswith(_HOMES))
    own_forward = "forward" in vars(module)  # patched on this very module
    if own_forward or any(
        getattr(type(module), method, None) is not getattr(dense_type, method, None) for method in _BEHAVIOUR
    ):
        return f"{type(module).__name__} has a forward of its own"
    try:
        weights: dict[str, Any] = dict(candidate.layer.weights_of(module))
    except AttributeError:
        return f"{type(module).__name__} does not keep its weight where {dense_type.__name__} does"
    for weight in weights.values():
        if is_lazy(weight):
            return "its shape is not known yet (a lazy module); run the model once first"
        if not isinstance(weight, nn.Parameter):
            return "its weight is computed from other parameters (weight_norm, pruning); make it plain first"
    if any(weight.numel() == 0 for weight in weights.values()):
        return "its weight has no elements"
    if len({id(weight) for weight in weights.values()}) < len(weights):
        return "two of its matrices are one parameter, which factors cannot be"
    for part in module.modules():
        for attribute, value in vars(part).items():
            if isinstance(value, Tensor) and attribute.startswith(("bias", "in_proj_bias")):
                return f"its {attribute} is computed from other parameters (pruning?); make it plain first"
    for weight in weights.values():
        if not _is_plain(weight):
            return _foreign(candidate.name, weight)
    for name, _ in (*module.named_parameters(), *module.named_buffers()):
        if name not in weights and not name.rpartition(".")[2].startswith(("bias", "in_proj_bias")):
            return f"it also holds {name!r}, which would be lost"
    return candidate.layer.obstacle(module, scheme)


_HOMES = ("torch.nn.modules.", "transformers.pytorch_utils")
_BEHAVIOUR = ("__call__", "forward", "_conv_forward", "_output_padding")
"""What a subclass can override and then compute something else than the dense type does."""


_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _is_plain(weight: Tensor) -> bool:
    return type(weight.data) is Tensor and weight.dtype in _FLOATS and weight.layout == torch.strided


def _foreign(name: str, weight: Tensor) -> str:
    kind = type(weight.data).__name__
    if kind == "DTensor":
        raise LayerError(
            f"the weight of {name!r} is a DTensor (tensor parallel or fully_shard); "
            "factorize the model before it is sharded"
        )
    described = kind if kind != "Tensor" else str(weight.dtype)
    return f"its weight is not a plain float tensor ({described}: quantized?)"


_WRAPPERS = {
    "DistributedDataParallel": "module",
    "FullyShardedDataParallel": "module",
    "DataParallel": "module",
    "OptimizedModule": "_orig_mod",  # torch.compile
}


def require_module(model: Any) -> None:
    """Raise if this is not a torch module."""
    if isinstance(model, type) and issubclass(model, nn.Module):
        raise UsageError(
            f"expected a model, got the class {model.__name__}; create one: {model.__name__}(...)"
        )
    if not isinstance(model, nn.Module):
        raise UsageError(f"expected a model (a torch.nn.Module), got a {type(model).__name__}")


def refuse_adapters(model: nn.Module) -> None:
    """Raise if the model has adapters (LoRA and its relatives), which are no layers of their own.

    They are found by structure, so that no adapter library need be installed.
    """
    wrapper = None
    for name, module in model.named_modules():
        foreign = type(module).__module__.partition(".")[0] == "peft"
        parts = {part.lower() for part in (*module._modules, *module._parameters)}
        if {"lora_a", "lora_b"} <= parts or (foreign and "base_layer" in parts):
            raise UsageError(
                f"{name or type(module).__name__!r} has an adapter (PEFT, LoRA), which would be lost or "
                "factorized; merge the adapters into the weights first: model = model.merge_and_unload()"
            )
        wrapper = wrapper or (type(module).__name__ if foreign else None)
    if wrapper is not None:
        raise UsageError(
            f"the model is wrapped in PEFT's {wrapper}; use the model inside: "
            "model.merge_and_unload(), or model.get_base_model() where there is nothing to merge"
        )


def refuse_wrappers(model: nn.Module) -> None:
    """Raise for wrappers, adapters, and what is not a module.

    Wrappers hold on to the parameters they were built with, or put a prefix before every name.
    """
    require_module(model)
    refuse_adapters(model)
    for name, module in model.named_modules():
        kind = type(module).__name__
        attribute = _WRAPPERS.get(kind, "")
        if attribute and isinstance(getattr(module, attribute, None), nn.Module):
            inside = ".".join(part for part in ("model", name, attribute) if part)
            raise UsageError(
                f"the model is wrapped in {kind}, which knows the parameters it was built with; "
                f"use {inside}, and wrap it again afterwards"
            )


def sharers(model: nn.Module) -> dict[int, list[str]]:
    """For each parameter (by identity) the modules that hold it, by name, if several do."""
    holders: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            holders.setdefault(id(parameter), []).append(name)
    return {key: names for key, names in holders.items() if len(names) > 1}
