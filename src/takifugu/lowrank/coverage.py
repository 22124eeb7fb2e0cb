"""A warning if little of a model becomes low-rank, with the share and the reasons."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

from torch import nn
from torch.nn.parameter import is_lazy

from takifugu.errors import TakifuguWarning
from takifugu.lowrank.candidates import Candidate, Verdict, Where
from takifugu.lowrank.experts import REASON, fused_experts
from takifugu.lowrank.factorized import Factorized

LITTLE = 0.1
"""Below this share of the parameters a low-rank model is hardly smaller or faster than the dense one."""


def warn_if_little(model: nn.Module, verdicts: Sequence[Verdict], where: Where, stacklevel: int) -> None:
    """Warn if no layer, or only a small part of the parameters, is or becomes low-rank.

    With `where=None` the share is that of all parameters of the model, otherwise of the layers that `where`
    matches: who names one layer of a hundred means just that one.
    """
    message = little(model, verdicts, where)
    if message is not None:
        warnings.warn(message, TakifuguWarning, stacklevel=stacklevel + 1)


def little(model: nn.Module, verdicts: Sequence[Verdict], where: Where) -> str | None:
    """Return the text of the warning; None if there is nothing to warn of."""
    low = [v for v in verdicts if v.rank is not None or isinstance(v.candidate.module, Factorized)]
    sizes = {v.name: _dense_size(v.candidate) for v in verdicts}
    matched = sum(size for name, size in sizes.items() if name not in _repeated(verdicts))
    low_params = sum(sizes[v.name] for v in low if v.name not in _repeated(verdicts))
    experts = fused_experts(model, where)
    total = matched + sum(e.params for e in experts)
    if where is None:
        total = max(total, sum(p.numel() for p in model.parameters() if not is_lazy(p)))
    share = low_params / total if total else 0.0
    if low and share >= LITTLE:
        return None
    reasons: dict[str, list[tuple[str, int]]] = {}
    for verdict in verdicts:
        if verdict not in low:
            reasons.setdefault(verdict.reason or "", []).append((verdict.name, sizes[verdict.name]))
    if experts:
        reasons[REASON] = [(e.name, e.params) for e in experts]
    of = "the model's parameters" if where is None else "the parameters that where= matches"
    if low:
        some = f"only {len(low)} of {len(verdicts)} layers, {share:.1%} of {of}, become low-rank"
    else:
        some = f"no layer becomes low-rank, 0% of {of}; layers that match: {len(verdicts)}"
    largest = sorted(reasons, key=lambda reason: -sum(size for _, size in reasons[reason]))[:3]
    why = "; ".join(f"{_names([name for name, _ in reasons[r]])}: {r}" for r in largest)
    return f"{some}. {why}" if why else some


def _names(names: Sequence[str]) -> str:
    return f"{names[0]!r}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _dense_size(candidate: Candidate) -> int:
    """Return the parameters of the layer's dense weights; 0 if they are not known (lazy, parametrized)."""
    if isinstance(candidate.module, Factorized):
        return sum(math.prod(shape) for shape in candidate.module.shapes.values())
    try:
        weights = candidate.layer.weights_of(candidate.module).values()
    except (AttributeError, RuntimeError):
        return 0
    return sum(weight.numel() for weight in weights if not is_lazy(weight))


def _repeated(verdicts: Sequence[Verdict]) -> set[str]:
    """Return the layers whose weight or factors were counted before: tied ones count once."""
    seen: set[int] = set()
    repeated = set()
    for verdict in verdicts:
        keys = {id(p) for p in verdict.candidate.module.parameters() if not is_lazy(p) and p.dim() > 1}
        if keys and keys <= seen:
            repeated.add(verdict.name)
        seen |= keys
    return repeated
