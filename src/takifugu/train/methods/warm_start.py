"""Pufferfish: dense for some epochs, then low-rank by truncated SVD, in the middle of the run.

All the work is `takifugu.WarmStart`'s; this is its place in a training run.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from takifugu.errors import UsageError
from takifugu.lowrank.candidates import Where, find
from takifugu.lowrank.choice import choose
from takifugu.lowrank.layers import SCHEMES
from takifugu.lowrank.optimizer_state import check_way
from takifugu.lowrank.ranks import follows_from_shapes, rule_for
from takifugu.lowrank.rewarm import Rewarm
from takifugu.lowrank.surgery import decomposer
from takifugu.lowrank.warmstart import AUTO, WarmStart
from takifugu.train.methods.base import Method, Run
from takifugu.train.methods.options import require_alone, require_count, told_as

RANK = 0.25
"""The paper's, for all its networks."""
WARMUP = 10
"""Epochs. The paper has 80 of 300 for CIFAR-10, 10 to 15 of 90 for ImageNet, 10 for its language tasks."""

DENSE = "dense"
"""How a stage back to dense is written in TOML, which has no null."""


class WarmStarted(Method):
    """Options:

    rank: what `takifugu.WarmStart` takes; 0.25.
    warmup: dense epochs, or "auto": until the layers' stable ranks have settled; 10.
    stages: several switches instead of one: [[5, 0.5], [10, 0.25], [30, "dense"]].
    state: what becomes of the optimizer's state: auto, projected, fresh, reset (as in the paper's code).
    rewarm: optimizer steps over which the learning rate comes back after a switch; 0.
    svd: exact or randomized.
    scheme: how convolutions are split; by default as in the paper.
    """

    def __init__(
        self,
        *,
        rank: Any = None,
        warmup: int | str | None = None,
        stages: Sequence[Sequence[Any]] | None = None,
        state: str = "auto",
        rewarm: int = 0,
        svd: str = "exact",
        scheme: str | Mapping[str, str] | None = None,
        where: Where = None,
    ) -> None:
        require_alone("stages", stages, rank=rank, warmup=warmup)
        with told_as("rank"):
            rule_for(RANK if rank is None else rank)
        if warmup not in (None, AUTO):
            require_count("warmup", warmup, 0, 'epochs (or "auto")')
        with told_as("state"):
            check_way(state)
            if state == "calibrated":
                raise UsageError(
                    "calibrated needs gradients between two epochs; use auto, projected or fresh"
                )
        with told_as("rewarm"):
            Rewarm(rewarm)
        with told_as("svd"):
            decomposer(svd)
        require_scheme(scheme)
        self.scheme = scheme
        with told_as("stages" if stages is not None else "warmup"):
            self.warm = WarmStart(
                RANK if rank is None else rank,
                WARMUP if warmup is None else warmup,
                where,
                stages=None if stages is None else _stages(stages),
                state=state,
                rewarm=rewarm,
                svd=svd,
                scheme=scheme,
            )

    def build_(self, module: nn.Module) -> None:
        # Nothing changes yet, but a pattern or a rank that fits no layer is told now, not after the warm-up.
        for _, rank in self.warm.stages:
            if rank is not None and follows_from_shapes(rule_for(rank)):
                choose(module, rank, self.warm.where, scheme=self.scheme)
        find(module, self.warm.where)  # all that can be said of rules that look at trained weights

    def attach_(self, run: Run) -> None:
        self.warm.rewarm.follow_(run.optimizer)  # a run may go on in the middle of it

    def before_epoch_(self, run: Run) -> None:
        for at, _ in self.warm.stages:
            if isinstance(at, int) and at >= run.epochs:
                raise UsageError(
                    f"method: the switch at epoch {at} is never reached, the run has {run.epochs}; switch "
                    "earlier (--set method.warmup=..., or method.stages), or train longer (--set epochs=...)"
                )
        self.warm.wrap = None if run.sharding == "none" else run.wrap
        done, before, started = self.warm.done, _count(run.model), time.perf_counter()
        run.model = self.warm(run.model, run.optimizer, epoch=run.epoch)
        if self.warm.done == done:
            return
        report = self.warm.report
        assert report is not None
        run.note(
            "switch",
            epoch=run.epoch,
            params_before=before,
            params=_count(run.model),
            layers=0 if report.layers is None else len(report.layers.factorized),
            seconds=time.perf_counter() - started,
            state=str(report.state).removeprefix("optimizer state "),
        )

    def state_dict(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        return self.warm.state_dict(), {}

    def load_state_dict(self, data: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        self.warm.load_state_dict(data)


def require_scheme(scheme: Any) -> None:
    for wanted in scheme.values() if isinstance(scheme, Mapping) else [scheme]:
        if wanted is not None and wanted not in SCHEMES:
            raise UsageError(f"scheme: {wanted!r} is not known; one of {', '.join(sorted(SCHEMES))}")


def _stages(stages: Any) -> list[tuple[int, Any]]:
    if not isinstance(stages, list | tuple):
        raise UsageError(f"{stages!r} is not a list of pairs such as [[5, 0.5], [10, 0.25]]")
    for stage in stages:
        if not isinstance(stage, list | tuple) or len(stage) != 2:
            raise UsageError(f"{stage!r} is not a pair of an epoch and a rank such as [10, 0.25]")
    return [(at, None if rank == DENSE else rank) for at, rank in stages]


def _count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
