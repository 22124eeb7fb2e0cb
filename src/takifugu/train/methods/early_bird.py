"""EB Train: channels that will not matter show early; they are cut out and the smaller network trains on.

A penalty on the scales of batch norms presses those of needless channels towards zero. After each epoch the
channels with the smallest scales of the whole network are noted. When five notes in a row hardly differ, the
"early-bird ticket" is drawn: these channels go for good, and the optimizer's state for them.
"""

from __future__ import annotations

import copy
import itertools
import math
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from takifugu.errors import UsageError
from takifugu.train.methods.base import Method, Run
from takifugu.train.methods.channels import Chain, carry_, cut_, find_chains
from takifugu.train.methods.options import require_alone, require_amount, require_count, require_share

PRUNE = 0.5
QUEUE = 5
FLOOR = 0.1
"""Of every layer's channels so many stay, at least one, or the signal would not get through."""

_KEPT, _QUEUE = "kept/", "queue/"


class EarlyBird(Method):
    """Options:

    prune: the share of the channels that goes, of those that can be cut; 0.5.
    keep: instead of prune: the share of the model's parameters that is left, or a little less.
    sparsity: the weight of the L1 penalty on the scales, until the ticket is drawn; 1e-4.
    epsilon: the ticket is drawn when any two of the last five choices differ in less than this share; 0.1.
    latest: the ticket is drawn after so many epochs at the latest; half of the run's.
    """

    def __init__(
        self,
        *,
        prune: float | None = None,
        keep: float | None = None,
        sparsity: float = 1e-4,
        epsilon: float = 0.1,
        latest: int | None = None,
    ) -> None:
        require_alone("keep", keep, prune=prune)
        self.prune = PRUNE if prune is None else require_share("prune", prune, "the channels")
        self.keep = None if keep is None else require_share("keep", keep, "the model's parameters")
        self.sparsity = require_amount("sparsity", sparsity)
        self.epsilon = require_share("epsilon", epsilon, "the channels")
        self.latest = None if latest is None else require_count("latest", latest, 1, "epochs")
        self.kept: dict[str, Tensor] = {}
        """The channels of the ticket, by batch norm; empty before it is drawn."""
        self.queue: list[Tensor] = []
        """The last choices, as one mask over all channels each."""
        self._seen = 0
        self._chains: tuple[Chain, ...] = ()

    def build_(self, module: nn.Module) -> None:
        try:
            self._chains = find_chains(module)
        except UsageError as error:
            raise UsageError(f"method.kind: early-bird does not support this network: {error}") from None

    def before_epoch_(self, run: Run) -> None:
        if run.sharding == "fsdp":
            raise UsageError(
                "method.kind: early-bird cuts whole channels out of weights, which FSDP2 keeps in shards; "
                "use sharding none or ddp"
            )
        latest = max(1, run.epochs // 2) if self.latest is None else self.latest
        if run.epoch == 0:
            if latest >= run.epochs:
                raise UsageError(
                    f"method.latest: a ticket drawn after {latest} epochs has none left of {run.epochs}; "
                    "draw it earlier, or train longer"
                )
            self._choice(run.module)  # a keep that cannot be had is told before training
        if self.kept or run.epoch <= self._seen:  # a run that resumes within an epoch announces it anew
            return
        self._seen = run.epoch
        choice = self._choice(run.module)
        self.queue = [*self.queue[-QUEUE + 1 :], self._mask(choice)]
        if (len(self.queue) == QUEUE and self._apart < self.epsilon) or run.epoch >= latest:
            self._draw_(run, choice)

    def before_step_(self, module: nn.Module) -> None:
        if self.kept:
            return
        for chain in self._chains:
            scale = module.get_submodule(chain.norm).weight
            assert isinstance(scale, nn.Parameter)
            if scale.grad is not None:
                scale.grad.add_(scale.detach().sign(), alpha=self.sparsity)

    # ---- choosing -----------------------------------------------------------------------------------

    def _choice(self, module: nn.Module) -> dict[str, Tensor]:
        """The channels that would stay now, by batch norm."""
        scales = [_scales(module, chain) for chain in self._chains]
        floors = [max(1, math.ceil(FLOOR * chain.channels)) for chain in self._chains]
        for scale, floor in zip(scales, floors, strict=True):
            scale[torch.argsort(scale, descending=True, stable=True)[:floor]] = math.inf
        order = torch.argsort(torch.cat(scales), stable=True)
        sizes = [chain.channels for chain in self._chains]
        most = sum(sizes) - sum(floors)

        def without(smallest: int) -> dict[str, Tensor]:
            stays = torch.ones(sum(sizes), dtype=torch.bool)
            stays[order[:smallest]] = False
            parts = stays.split(sizes)
            return {c.norm: p.nonzero().reshape(-1) for c, p in zip(self._chains, parts, strict=True)}

        if self.keep is None:
            return without(min(round(self.prune * sum(sizes)), most))
        shell, every = _shell(module), _count(module)

        def params(smallest: int) -> int:
            trial = copy.deepcopy(shell)
            cut_(trial, self._chains, without(smallest))
            return _count(trial)

        # The more channels go, the fewer parameters are left: the least number that suffices.
        target = self.keep * every
        if params(most) > target:
            raise UsageError(
                f"method.keep: {self.keep} of {every:,} parameters cannot be had by cutting channels; with a "
                f"tenth of every layer's left there are still {params(most):,}; keep more"
            )
        low, high = 0, most
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if params(middle) <= target else (middle + 1, high)
        return without(high)

    def _mask(self, choice: Mapping[str, Tensor]) -> Tensor:
        masks = []
        for chain in self._chains:
            mask = torch.zeros(chain.channels, dtype=torch.bool)
            mask[choice[chain.norm]] = True
            masks.append(mask)
        return torch.cat(masks)

    @property
    def _apart(self) -> float:
        """The largest share of the channels in which two of the queue differ."""
        pairs = itertools.combinations(self.queue, 2)
        return max((float((some ^ other).float().mean()) for some, other in pairs), default=0.0)

    # ---- drawing ------------------------------------------------------------------------------------

    def _draw_(self, run: Run, choice: dict[str, Tensor]) -> None:
        started, module = time.perf_counter(), run.module
        before, settled = _count(module), len(self.queue) == QUEUE and self._apart < self.epsilon
        carry_(run.optimizer, cut_(module, self._chains, choice))
        if run.sharding == "ddp":  # which knows the parameters it was built with
            run.model = run.wrap(module)
        run.note(
            "ticket",
            epoch=run.epoch,
            params_before=before,
            params=_count(module),
            channels_before=sum(chain.channels for chain in self._chains),
            channels=sum(len(index) for index in choice.values()),
            apart=self._apart,
            settled=settled,
            seconds=time.perf_counter() - started,
        )
        self.kept, self.queue = choice, []

    # ---- resuming -----------------------------------------------------------------------------------

    def state_dict(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        queue = {f"{_QUEUE}{place}": mask for place, mask in enumerate(self.queue)}
        kept = {_KEPT + name: index for name, index in self.kept.items()}
        return {"seen": self._seen}, {**queue, **kept}

    def load_state_dict(self, data: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        self._seen = int(data["seen"])
        places = sum(name.startswith(_QUEUE) for name in tensors)
        self.queue = [tensors[f"{_QUEUE}{place}"].bool().cpu() for place in range(places)]
        self.kept = {
            name.removeprefix(_KEPT): index.cpu() for name, index in tensors.items() if name.startswith(_KEPT)
        }

    def rebuild_(self, module: nn.Module) -> None:
        self.build_(module)
        cut_(module, self._chains, self.kept)


@torch.no_grad()
def _scales(module: nn.Module, chain: Chain) -> Tensor:
    scale: Any = module.get_submodule(chain.norm).weight
    sizes: Tensor = scale.detach().abs().float().cpu().clone()
    return sizes


def _shell(module: nn.Module) -> nn.Module:
    """The network without its values, to be cut for trial."""
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = buffer.to("meta")
    return copy.deepcopy(module, memo)


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
