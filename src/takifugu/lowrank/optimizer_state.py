"""Keeps an optimizer going when layers are replaced: groups, options, step counts and moments.

A dense weight W is a function of its factors, `W = U V`. By the chain rule a gradient G of W is `G V^T`
for U and `U^T G` for V: the vector-Jacobian product of that function. First moments are averages of
gradients and go through it as they are.

Second moments are mean squares, and what becomes of them depends on how the entries of a gradient are
correlated, which nobody has recorded. If they are not, the product goes through with every entry squared.
If they are as correlated as can be, it goes through with absolute values, applied to the roots, and the
result squared (by Minkowski's inequality never too small). Taken for uncorrelated, second moments come
out much too small and Adam's first steps too large, a worse start than none; taken for correlated,
training is slow where it still has far to go. We take the geometric mean of the two, and for convolutions,
whose gradients are sums over many positions, the first alone.
docs/decisions/004 has the measurements.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

from takifugu.errors import TakifuguWarning, UsageError
from takifugu.lowrank.factorized import Factorized
from takifugu.lowrank.surgery import Swap

FIRST_MOMENTS = ("momentum_buffer", "exp_avg", "grad_avg")
SECOND_MOMENTS = ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum")
KNOWN = (SGD, Adam, AdamW, RMSprop, Adagrad)
KNOWN_STATE = {"step", *FIRST_MOMENTS, *SECOND_MOMENTS}

Gradients = Callable[[], object]
"""Runs a forward and a backward pass on some batch of the user's."""


@dataclass(frozen=True)
class StateReport:
    """What became of the optimizer's state, by parameter name."""

    way: str
    kept: tuple[str, ...] = ()
    projected: tuple[str, ...] = ()
    calibrated: tuple[str, ...] = ()
    reset: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    """New parameters that are not optimized, because the weights they replace were not."""

    def __str__(self) -> str:
        parts = [f"{len(names)} {what}" for what, names in self._named() if names]
        return f"optimizer state ({self.way}): {', '.join(parts) or 'none yet'}"

    def _named(self) -> Iterable[tuple[str, tuple[str, ...]]]:
        names = ("kept", "projected", "calibrated", "reset", "left_out")
        return [(name.replace("_", " "), getattr(self, name)) for name in names]


WAYS = ("auto", "projected", "fresh", "calibrated", "reset")
"""What becomes of the factors' state. auto: projected; fresh for SGD, whose momentum lasts ten steps only.
fresh: they start anew, all else is kept. reset: everything starts anew, as in the reference code."""


def check_way(way: str) -> None:
    if way not in WAYS:
        raise UsageError(f"unknown way {way!r} to treat optimizer state; one of {', '.join(WAYS)}")


def innermost(optimizer: Optimizer) -> Optimizer:
    """The optimizer itself, out of a wrapper such as Accelerate's."""
    inner = getattr(optimizer, "optimizer", None)
    return innermost(inner) if isinstance(inner, Optimizer) else optimizer


def mendable(optimizer: Optimizer) -> Optimizer:
    """The optimizer itself; an error if it could not be kept going when its parameters change."""
    optimizer = innermost(optimizer)
    if not isinstance(optimizer, Optimizer):
        raise UsageError(f"expected a torch optimizer, got {type(optimizer).__name__}")
    for kind in type(optimizer).__mro__:
        if kind.__name__ in _OWN_LISTS:
            raise UsageError(
                f"{kind.__name__} {_OWN_LISTS[kind.__name__]}, so its parameters cannot be exchanged; "
                "use another optimizer, or factorize_ the model first and build the optimizer afterwards"
            )
    return optimizer


_OWN_LISTS = {
    "LBFGS": "keeps its history as one vector over all parameters",
    "ZeroRedundancyOptimizer": "has shared its parameters out over the processes",
}
"""Optimizers that do not go by `param_groups` alone: they would go on with the old weights without a word."""


def carry_(
    model: nn.Module,
    optimizer: Optimizer,
    swaps: Sequence[Swap],
    way: str,
    gradients: Gradients | None = None,
) -> StateReport:
    """Puts the new parameters in the old ones' groups and gives them state. The model is changed already."""
    check_way(way)
    if way == "auto":
        way = "fresh" if isinstance(optimizer, SGD) else "projected"
    replaced = _replaced(swaps)
    if way in ("projected", "calibrated") and not _is_known(optimizer, replaced):
        warnings.warn(
            f"{type(optimizer).__name__} is not an optimizer whose state we know how to carry over "
            f"({', '.join(kind.__name__ for kind in KNOWN)} are); new factors start fresh, the rest is kept",
            TakifuguWarning,
            stacklevel=3,
        )
        way = "fresh"
    names = {parameter: name for name, parameter in model.named_parameters()}
    old_state = {old: optimizer.state.pop(old) for old in replaced if old in optimizer.state}
    held = {p for group in optimizer.param_groups for p in group["params"]}
    ledger = _Ledger(names)
    _regroup_(optimizer, model, replaced, swaps)
    if way == "reset":
        _reset_(optimizer, ledger)
        return ledger.report(way)
    ledger.kept = [p for p in names if p in optimizer.state]
    for old, news in replaced.items():
        for new, pull in news:
            if old not in held:
                ledger.left_out.append(new)
            elif way == "projected" and old_state.get(old) and pull is not None:
                optimizer.state[new] = pull(old_state[old])
                ledger.projected.append(new)
            elif new not in optimizer.state:
                _begin_(optimizer, new)
                ledger.reset.append(new)
    if way == "calibrated":
        _calibrate_(optimizer, ledger, old_state, replaced, gradients)
    _warn_of_left_out(ledger)
    return ledger.report(way)


def _is_known(optimizer: Optimizer, olds: Iterable[nn.Parameter]) -> bool:
    """Also a subclass is, unless it keeps something of its own, which we could not carry over."""
    kept = {key for old in olds for key in optimizer.state.get(old, ())}
    return isinstance(optimizer, KNOWN) and kept <= KNOWN_STATE


@dataclass
class _Ledger:
    names: dict[nn.Parameter, str]
    kept: list[nn.Parameter] = field(default_factory=list)
    projected: list[nn.Parameter] = field(default_factory=list)
    calibrated: list[nn.Parameter] = field(default_factory=list)
    reset: list[nn.Parameter] = field(default_factory=list)
    left_out: list[nn.Parameter] = field(default_factory=list)

    def report(self, way: str) -> StateReport:
        def named(parameters: list[nn.Parameter]) -> tuple[str, ...]:
            return tuple(self.names.get(p, "?") for p in dict.fromkeys(parameters))

        return StateReport(
            way,
            named(self.kept),
            named(self.projected),
            named(self.calibrated),
            named(self.reset),
            named(self.left_out),
        )


def _warn_of_left_out(ledger: _Ledger) -> None:
    orphans = [ledger.names.get(p, "?") for p in ledger.left_out if p.requires_grad]
    if orphans:
        warnings.warn(
            f"this optimizer does not hold the weight that {orphans[0]!r} stands for, so the new factors "
            f"will not be trained ({len(orphans)} of them); if another optimizer holds it, give that one its "
            "factors, or leave the layer out with where=",
            TakifuguWarning,
            stacklevel=4,
        )


# ---- which parameters take the place of which --------------------------------------------------------

Pull = Callable[[dict[str, Any]], dict[str, Any]]
"""From a dense weight's state to one factor's."""


def _replaced(swaps: Sequence[Swap]) -> dict[nn.Parameter, list[tuple[nn.Parameter, Pull | None]]]:
    """For each parameter that goes, those that come in its place and how state gets there."""
    found: dict[nn.Parameter, list[tuple[nn.Parameter, Pull | None]]] = {}
    seen: set[nn.Parameter] = set()
    for swap in swaps:
        staying = set(swap.new.parameters())
        going = [p for p in swap.old.parameters() if p not in staying]
        former = set(swap.old.parameters())
        coming = [p for p in swap.new.parameters() if p not in former and p not in seen]
        seen.update(coming)
        if isinstance(swap.new, Factorized) and not isinstance(swap.old, Factorized):
            dense = type(swap.new).weights_of(swap.old)
            sources = _sources(swap.new)
            for name, old in dense.items():
                mine = [new for new in coming if sources.get(new) == name]
                found.setdefault(old, []).extend((new, _pull(swap.new, name, new)) for new in mine)
            # What is no factor (a norm between them) joins the first weight's group, and starts anew.
            beside = [new for new in coming if new not in sources]
            found[next(iter(dense.values()))] += [(new, None) for new in beside]
        elif going:
            # Re-ranked or dense again: the old factors' moments do not determine the new ones'.
            found.setdefault(going[0], []).extend((new, None) for new in coming)
            for old in going[1:]:
                found.setdefault(old, [])
    return found


def _sources(layer: Factorized) -> dict[nn.Parameter, str]:
    """Which dense weight each factor is a part of, read off the graph of their product."""
    factors = layer.factor_parameters()
    sources: dict[nn.Parameter, str] = {}
    for name, weight in _products(layer).items():
        if not weight.requires_grad:
            continue
        reached = torch.autograd.grad(weight.sum(), factors, allow_unused=True)
        sources.update({p: name for p, g in zip(factors, reached, strict=True) if g is not None})
    return sources or dict.fromkeys(factors, next(iter(layer.shapes)))


def _products(layer: Factorized) -> dict[str, Tensor]:
    with torch.enable_grad():
        return layer.dense_weights()


def _pull(layer: Factorized, name: str, factor: nn.Parameter) -> Pull:
    def pull(state: dict[str, Any]) -> dict[str, Any]:
        def through(moment: Tensor, entries: Callable[[Tensor], Tensor] | None = None) -> Tensor:
            return _through(layer, name, factor, moment, entries)

        made: dict[str, Any] = {}
        for key, value in state.items():
            if _is_scaled_step(key, state):
                made[key] = torch.zeros_like(factor)
            elif key in FIRST_MOMENTS and isinstance(value, Tensor):
                made[key] = through(value)
            elif key in SECOND_MOMENTS:
                made[key] = through(value, torch.square)
                share = layer.gradient_correlation
                if share > 0:
                    correlated = through(value.sqrt(), torch.abs).square()
                    made[key] = made[key].pow(1 - share) * correlated.pow(share)
            else:
                made[key] = value.clone() if isinstance(value, Tensor) else value
        return _above_the_mean(made)

    return pull


def _above_the_mean(state: dict[str, Any]) -> dict[str, Any]:
    """A centered RMSprop divides by mean square minus squared mean, which must stay positive.

    Not for Adam: its two moments are biased towards zero differently, and cannot be compared as they are.
    """
    if "grad_avg" in state:
        state["square_avg"] = torch.maximum(state["square_avg"], 1.01 * state["grad_avg"].square())
    return state


def _is_scaled_step(key: str, state: dict[str, Any]) -> bool:
    """RMSprop's momentum averages steps that are scaled already, not gradients: it starts anew."""
    return key == "momentum_buffer" and "square_avg" in state


def _through(
    layer: Factorized,
    name: str,
    factor: nn.Parameter,
    moment: Tensor,
    entries: Callable[[Tensor], Tensor] | None,
) -> Tensor:
    """The vector-Jacobian product of `factors -> dense weight`; `entries` changes the Jacobian's entries.

    The map is a product of the factors, and so are its derivatives: what is done to the factors'
    entries (square, absolute value) is done to the derivatives'.
    """
    factors = layer.factor_parameters()
    kept = [(p.data, p.requires_grad) for p in factors]
    try:
        for p in factors:
            p.requires_grad_(True)  # a frozen weight has moments, too, if it was trained before
            if entries is not None:
                p.data = entries(p.data)
        weight = _products(layer)[name]
        (pulled,) = torch.autograd.grad(weight, [factor], moment.to(weight).reshape(weight.shape))
    finally:
        for p, (data, trained) in zip(factors, kept, strict=True):
            p.data = data
            p.requires_grad_(trained)
    return pulled.to(moment.dtype).clone(memory_format=torch.preserve_format)


# ---- mending the optimizer ---------------------------------------------------------------------------


def _regroup_(
    optimizer: Optimizer,
    model: nn.Module,
    replaced: dict[nn.Parameter, list[tuple[nn.Parameter, Pull | None]]],
    swaps: Sequence[Swap],
) -> None:
    """New parameters take the old ones' places; a group that was in the model's order stays in it."""
    place = {parameter: index for index, parameter in enumerate(model.parameters())}
    for group in optimizer.param_groups:
        mended: list[nn.Parameter] = []
        for parameter in group["params"]:
            mended += [new for new, _ in replaced[parameter]] if parameter in replaced else [parameter]
        if all(parameter in place for parameter in mended):
            untouched = [place[p] for p in mended if p in set(group["params"])]
            if untouched == sorted(untouched):
                mended.sort(key=place.__getitem__)
        if "param_names" in group:  # built from named_parameters()
            group["param_names"] = _renamed(group, mended, model, swaps)
        group["params"] = mended


def _renamed(
    group: dict[str, Any], mended: Sequence[nn.Parameter], model: nn.Module, swaps: Sequence[Swap]
) -> list[str]:
    """The names an optimizer built now would have: the model's, after what the user's began with."""
    known = dict(zip(group["params"], group["param_names"], strict=True))
    former = {p: f"{swap.name}.{name}" for swap in swaps for name, p in swap.old.named_parameters()}
    began = [name.removesuffix(former[p]) for p, name in known.items() if name.endswith(former.get(p, " "))]
    names = {p: (began[0] if began else "") + name for name, p in model.named_parameters()}
    return [known[p] if p in known and p not in former else names[p] for p in mended]


def _begin_(optimizer: Optimizer, parameter: nn.Parameter) -> None:
    """Most optimizers begin a state when they first see a parameter; Adagrad wants it there before.

    So does a fused SGD with momentum, if the group's other parameters have theirs: it takes all or none.
    """
    if isinstance(optimizer, SGD):
        group = next(g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))
        running = any("momentum_buffer" in optimizer.state.get(p, ()) for p in group["params"])
        if group.get("fused") and running:
            optimizer.state[parameter] = {"momentum_buffer": torch.zeros_like(parameter)}
    if isinstance(optimizer, Adagrad):
        group = next(g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))
        optimizer.state[parameter] = {
            "step": torch.tensor(0.0),
            "sum": torch.full_like(parameter, group["initial_accumulator_value"]),
        }


def _reset_(optimizer: Optimizer, ledger: _Ledger) -> None:
    optimizer.state.clear()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            _begin_(optimizer, parameter)
            ledger.reset.append(parameter)


def _calibrate_(
    optimizer: Optimizer,
    ledger: _Ledger,
    old_state: dict[nn.Parameter, dict[str, Any]],
    replaced: dict[nn.Parameter, list[tuple[nn.Parameter, Pull | None]]],
    gradients: Gradients | None,
    batches: int = 8,
) -> None:
    """Moments of the new factors from a few gradients at the new point."""
    if gradients is None:
        raise UsageError(
            "state='calibrated' needs gradients=, a function that runs one forward and backward pass"
        )
    news = {new: old_state[old] for old, pairs in replaced.items() if old in old_state for new, _ in pairs}
    sums = {new: (torch.zeros_like(new), torch.zeros_like(new)) for new in news}
    for _ in range(batches):
        optimizer.zero_grad(set_to_none=True)
        gradients()
        for new, (first, second) in sums.items():
            if new.grad is not None:
                first.add_(new.grad, alpha=1 / batches)
                second.addcmul_(new.grad, new.grad, value=1 / batches)
    optimizer.zero_grad(set_to_none=True)
    for new, (first, second) in sums.items():
        state = {
            key: value.clone() if isinstance(value, Tensor) else value for key, value in news[new].items()
        }
        for key in state:
            if _is_scaled_step(key, state):
                state[key] = torch.zeros_like(new)
            elif key in FIRST_MOMENTS and isinstance(state[key], Tensor):
                state[key] = first.clone()
            elif key in SECOND_MOMENTS:
                steps = float(state.get("step", 1)) if key == "sum" else 1.0  # Adagrad's is a sum, not a mean
                state[key] = second * steps
        optimizer.state[new] = _above_the_mean(state)
        ledger.calibrated.append(new)
    ledger.reset = [p for p in ledger.reset if p not in sums]
