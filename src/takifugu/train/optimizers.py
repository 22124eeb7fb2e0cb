"""What `[workload].optimizer` means: a kind and its options, checked before anything is trained."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from takifugu.errors import UsageError, near_misses
from takifugu.lowrank.factorized import Factorized
from takifugu.numbers import is_number

_KINDS: dict[str, tuple[type[torch.optim.Optimizer], frozenset[str]]] = {
    "sgd": (torch.optim.SGD, frozenset({"lr", "momentum", "weight_decay", "nesterov", "dampening"})),
    "adam": (torch.optim.Adam, frozenset({"lr", "betas", "eps", "weight_decay", "amsgrad"})),
    "adamw": (torch.optim.AdamW, frozenset({"lr", "betas", "eps", "weight_decay", "amsgrad"})),
}
_FLAGS = frozenset({"nesterov", "amsgrad"})


def check(table: Mapping[str, Any], where: str = "optimizer") -> None:
    """Raises `UsageError` unless the table is an optimizer that can be built."""
    kind = table.get("kind")
    if not isinstance(kind, str) or kind not in _KINDS:
        known = ", ".join(_KINDS)
        raise UsageError(
            f"{where}.kind: {kind!r} is not known{near_misses(str(kind), _KINDS)}; one of {known}"
        )
    accepted = _KINDS[kind][1]
    for option, value in table.items():
        if option == "kind":
            continue
        if option not in accepted:
            raise UsageError(
                f"{where}.{option}: {kind} has no such option{near_misses(option, accepted)}; "
                f"accepted: {', '.join(sorted(accepted))}"
            )
        if not _fits(option, value):
            raise UsageError(f"{where}.{option}: {value!r} is not {_wanted(option)}")
    if "lr" not in table:
        raise UsageError(f"{where}.lr: is missing; give the learning rate, e.g. lr = 0.05")
    try:  # what only torch knows: a nesterov without momentum, betas of 1
        build(table, [nn.Parameter(torch.zeros(1))])
    except (ValueError, TypeError) as error:
        raise UsageError(f"{where}: {error}") from None


def build(
    table: Mapping[str, Any], parameters: Iterable[nn.Parameter] | Iterable[dict[str, Any]]
) -> torch.optim.Optimizer:
    """A new optimizer; the table was checked before."""
    options = {name: value for name, value in table.items() if name != "kind"}
    if "betas" in options:
        options["betas"] = tuple(options["betas"])
    return _KINDS[table["kind"]][0](parameters, **options)


def decay_factors_(
    optimizer: torch.optim.Optimizer, model: nn.Module, factor_decay: float, weight_decay: float
) -> None:
    """Gives the factors of low-rank layers a decay of their own, in groups of their own; all else has
    `weight_decay`. Called again after every change of the model; what is right already stays as it is.

    A scheduler of torch's would not know of the new groups: only for loops that set every group's rate.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, Factorized)]
    factors = {parameter for layer in layers for parameter in layer.factor_parameters()}
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        own = [parameter for parameter in group["params"] if parameter in factors]
        rest = [parameter for parameter in group["params"] if parameter not in factors]
        for parameters, decay in ((rest, weight_decay), (own, factor_decay)):
            if parameters:
                groups.append({**group, "params": parameters, "weight_decay": decay})
    optimizer.param_groups[:] = groups


def _fits(option: str, value: Any) -> bool:
    if option in _FLAGS:
        return isinstance(value, bool)
    if option == "betas":
        return isinstance(value, list | tuple) and len(value) == 2 and all(map(is_number, value))
    return is_number(value) and (value > 0 if option in ("lr", "eps") else value >= 0)


def _wanted(option: str) -> str:
    if option in _FLAGS:
        return "true or false"
    if option == "betas":
        return "a list of two numbers such as [0.9, 0.999]"
    return "a number above 0" if option in ("lr", "eps") else "a number of at least 0"
