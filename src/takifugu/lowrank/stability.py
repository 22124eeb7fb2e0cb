"""Follows the stable ranks of a model's layers during warm-up (Cuttlefish, MLSys 2023).

A stable rank `||W||_F^2 / ||W||_2^2` is divided by its value at the start and multiplied by the full
rank: at initialization a layer counts as full. When these have settled, what the layers are going
to need is known, and it is time to switch.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from takifugu.lowrank.candidates import Where, refusal
from takifugu.lowrank.default_layers import meant_layers
from takifugu.lowrank.factorized import Factorized


class StableRanks:
    """One observation per call; `settled` once the mean relative change stays below the threshold twice."""

    def __init__(self, threshold: float = 0.02, patience: int = 2) -> None:
        self.threshold, self.patience = threshold, patience
        self.scales: dict[str, float] = {}
        self.history: list[dict[str, float]] = []

    def observe(self, model: nn.Module, where: Where, example: Any = None, *, force: bool = False) -> None:
        seen: dict[str, float] = {}
        for candidate in meant_layers(model, where, example, force=force):
            if isinstance(candidate.module, Factorized):
                continue
            scheme = candidate.layer.schemes[0]
            if refusal(candidate, scheme) is not None:
                continue
            weights = candidate.weights()
            for unfolding in candidate.layer.unfoldings(candidate.dense, scheme):
                key = f"{candidate.name}/{unfolding.name}"
                value = max(stable_rank(block) for block in unfolding.unfold(weights))
                self.scales.setdefault(key, unfolding.limit / value)
                seen[key] = value * self.scales[key]
        self.history.append(seen)

    @property
    def settled(self) -> bool:
        if len(self.history) <= self.patience:
            return False
        recent = self.history[-self.patience - 1 :]
        return all(_change(a, b) < self.threshold for a, b in itertools.pairwise(recent))

    def state_dict(self) -> dict[str, Any]:
        return {"scales": dict(self.scales), "history": [dict(seen) for seen in self.history]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.scales = dict(state["scales"])
        self.history = [dict(seen) for seen in state["history"]]


def stable_rank(W: Tensor, iterations: int = 30) -> float:
    """`||W||_F^2 / ||W||_2^2`; the spectral norm by power iteration from a fixed start."""
    work = W.detach().float()
    energy = float(torch.linalg.vector_norm(work)) ** 2
    if energy == 0:
        return 1.0
    generator = torch.Generator(device="cpu").manual_seed(0)
    x = torch.randn(work.shape[1], generator=generator, dtype=work.dtype, device="cpu").to(work.device)
    for _ in range(iterations):
        x = work.mT @ (work @ x)
        x = x / torch.linalg.vector_norm(x).clamp_min(torch.finfo(torch.float32).tiny)
    return max(1.0, energy / float(torch.linalg.vector_norm(work @ x)) ** 2)


def _change(before: Mapping[str, float], after: Mapping[str, float]) -> float:
    shared = [key for key in after if key in before]
    return sum(abs(after[k] - before[k]) / before[k] for k in shared) / max(1, len(shared))
