"""The speed gate: races the ways to write a layer, on the input it really gets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from takifugu.lowrank import probe
from takifugu.lowrank.candidates import Verdict
from takifugu.lowrank.factorized import Factorized


def fastest(
    model: nn.Module, variants: Mapping[str, Sequence[Verdict]], example: Any, *, against_dense: bool
) -> dict[str, Verdict]:
    """Races the variants of each layer on its real input; if `against_dense`, the dense one takes part
    and where it wins the layer stays dense."""
    chosen: dict[str, Verdict] = {}

    def visit(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        runners = {v.scheme: v for v in variants[name] if v.rank is not None}
        if not runners:
            return
        entrants: dict[str, nn.Module] = {scheme: _runner(v) for scheme, v in runners.items()}
        if against_dense:
            entrants["dense"] = module
        times = probe.race(entrants, args, kwargs)
        best = min(runners, key=times.__getitem__)
        won = replace(runners[best], dense_s=times.get("dense"), factorized_s=times[best])
        if against_dense and times[best] >= times["dense"]:
            reason = "its factors are not faster"
            won = replace(won, rank=None, reason=reason)
        chosen[name] = won

    probe.observe(model, variants, example, visit)
    if against_dense:
        for name, options in variants.items():
            if name not in chosen and options[0].rank is not None:
                chosen[name] = replace(options[0], rank=None, reason="not reached by the example input")
    return chosen


def _runner(verdict: Verdict) -> nn.Module:
    """A layer of the shape to be timed, with small random factors: values do not matter to speed."""
    assert verdict.rank is not None
    candidate = verdict.candidate
    dense = candidate.dense
    if isinstance(candidate.module, Factorized):
        dense = candidate.module.dense_shell(candidate.module.factor_parameters()[0].device)
    layer = candidate.layer.shell(dense, verdict.scheme, verdict.rank)
    with torch.no_grad():
        for parameter in layer.factor_parameters():
            nn.init.normal_(parameter, std=0.02)
    return layer
