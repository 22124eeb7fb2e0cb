"""Lottery tickets: iterative magnitude pruning with rewinding.

Train, drop the smallest of the weights that are left, put the others back to where they were early on, train
again; `rounds` times. The run has `rounds + 1` cycles of all its epochs; what the last one trains is the
ticket.

A pruned weight is a zero in a tensor that stays as large as it was: memory, computation and communication do
not shrink. Counted are the parameters that are left.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from takifugu.errors import UsageError
from takifugu.train.methods.base import Method, Run
from takifugu.train.methods.options import require_alone, require_count, require_share

PRUNE = 0.2
ROUNDS = 4
"""Ours: 0.8 to the power of 4 leaves 41 % of the weights, about the size of the paper's low-rank VGG-19."""

_MASK, _REWIND = "mask/", "rewind/"


class LotteryTicket(Method):
    """Options:

    rounds: how often weights are pruned; 4.
    prune: the share of the remaining weights that each round prunes; 0.2.
    keep: instead of prune: the share of all the model's parameters that is left in the end.
    rewind: the weights return to those at the beginning of this epoch; 0 is the initialization.

    Magnitudes are compared across all layers. Weights of convolutions and Linears are pruned, but not
    those of the last Linear, nor those shared with another kind of module (an embedding). All else stays.
    """

    def __init__(
        self,
        *,
        rounds: int = ROUNDS,
        prune: float | None = None,
        keep: float | None = None,
        rewind: int = 0,
    ) -> None:
        self.rounds = require_count("rounds", rounds, 1, "prunings")
        require_alone("keep", keep, prune=prune)
        self.prune = PRUNE if prune is None else require_share("prune", prune, "the remaining weights")
        self.keep = None if keep is None else require_share("keep", keep, "the model's parameters")
        self.rewind = require_count("rewind", rewind, 0, "epochs")
        self.cycles = self.rounds + 1
        self.pruned = 0
        """Rounds behind."""
        self.masks: dict[str, Tensor] = {}
        """By parameter name: True where a weight is left. Empty before the first pruning."""
        self._start: dict[str, Tensor] = {}
        """Weights and buffers to return to, on the CPU; empty until that epoch."""

    def parameters(self, module: nn.Module) -> int:
        """Those that are left."""
        gone = sum(int((~mask).sum()) for mask in self.masks.values())
        return super().parameters(module) - gone

    def before_epoch_(self, run: Run) -> None:
        if run.sharding == "fsdp":
            raise UsageError(
                "method.kind: lottery-ticket compares all weights with each other, which FSDP2 keeps in "
                "shards; use sharding none or ddp"
            )
        if run.cycle == 0 and run.epoch == 0:
            if self.rewind >= run.epochs:
                raise UsageError(
                    f"method.rewind: epoch {self.rewind} is never reached; the run has {run.epochs} a cycle"
                )
            self._left_after(run.module, self.rounds)  # a keep that cannot be had is told before training
        if run.cycle == 0 and run.epoch == self.rewind and not self._start:
            self._start = {name: _copied(value) for name, value in run.module.state_dict().items()}
        if run.cycle > self.pruned:  # not again when a run that resumes within an epoch announces it anew
            self._prune_(run.module, self.pruned + 1)
            # All its epochs are trained from there, also if the weights are those of a later epoch: every
            # cycle has the same schedule, and the learning rate's warm-up if there is one.
            run.module.load_state_dict(self._start)
            self._drop_(run.module)
            run.new_optimizer_()
            every = _count(run.module)
            left = every - sum(int((~mask).sum()) for mask in self.masks.values())
            run.note("pruned", round=self.pruned, rounds=self.rounds, params_before=every, params=left)

    def before_step_(self, module: nn.Module) -> None:
        # A gradient that leads nowhere must not count when gradients are clipped by their norm.
        for parameter, mask in self._masked(module):
            if parameter.grad is not None:
                parameter.grad.mul_(mask)

    def after_step_(self, module: nn.Module) -> None:
        # Whatever momentum or decay moved a pruned weight, it is zero again before anything reads it. What
        # the optimizer keeps for it does not matter: its state of one weight has no influence on another.
        self._drop_(module)

    # ---- pruning ------------------------------------------------------------------------------------

    def _left_after(self, module: nn.Module, rounds: int) -> int:
        """How many of the prunable weights are left."""
        weights = prunable(module)
        total = sum(weight.numel() for weight in weights.values())
        if self.keep is None:
            share = (1 - self.prune) ** rounds
        else:
            every = _count(module)
            left = self.keep * every - (every - total)
            if left < 1:
                raise UsageError(
                    f"method.keep: {self.keep} of {every:,} parameters are {int(self.keep * every):,}, but "
                    f"{every - total:,} are never pruned (the last Linear, biases, norms); keep more"
                )
            share = (left / total) ** (rounds / self.rounds)
        return max(1, round(share * total))

    @torch.no_grad()
    def _prune_(self, module: nn.Module, rounds: int) -> None:
        weights = prunable(module)
        left = self._left_after(module, rounds)
        sizes = [
            # Below every magnitude where pruned already: a weight that happens to be 0 is not one of those.
            weight.abs().float().masked_fill(~self.masks[name].to(weight.device), -1.0).reshape(-1)
            if name in self.masks
            else weight.abs().float().reshape(-1)
            for name, weight in weights.items()
        ]
        order = torch.argsort(torch.cat(sizes), descending=True, stable=True)
        kept = torch.zeros(len(order), dtype=torch.bool, device=order.device)
        kept[order[:left]] = True
        parts = kept.split([weight.numel() for weight in weights.values()])
        self.masks = {
            name: part.reshape(weight.shape).clone()
            for (name, weight), part in zip(weights.items(), parts, strict=True)
        }
        self.pruned = rounds

    @torch.no_grad()
    def _drop_(self, module: nn.Module) -> None:
        for parameter, mask in self._masked(module):
            parameter.mul_(mask)

    def _masked(self, module: nn.Module) -> list[tuple[nn.Parameter, Tensor]]:
        pairs = []
        for name in self.masks:
            parameter = module.get_parameter(name)
            if self.masks[name].device != parameter.device:  # once, after a checkpoint was read
                self.masks[name] = self.masks[name].to(parameter.device)
            pairs.append((parameter, self.masks[name]))
        return pairs

    # ---- resuming -----------------------------------------------------------------------------------

    def state_dict(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        masks = {_MASK + name: mask.cpu() for name, mask in self.masks.items()}
        start = {_REWIND + name: value for name, value in self._start.items()}
        return {"pruned": self.pruned}, {**masks, **start}

    def load_state_dict(self, data: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        self.pruned = int(data["pruned"])
        if self.pruned > self.rounds:
            raise UsageError(f"method.rounds: {self.rounds}, but the checkpoint has {self.pruned} behind it")
        self.masks = {
            name.removeprefix(_MASK): mask.bool() for name, mask in tensors.items() if name.startswith(_MASK)
        }
        self._start = {
            name.removeprefix(_REWIND): v for name, v in tensors.items() if name.startswith(_REWIND)
        }


def prunable(module: nn.Module) -> dict[str, nn.Parameter]:
    """The weights that may be pruned, by name."""
    layers = {n: m for n, m in module.named_modules() if isinstance(m, nn.Linear | _ConvNd)}
    last = next((name for name in reversed(layers) if isinstance(layers[name], nn.Linear)), None)
    elsewhere = {
        id(parameter)
        for name, other in module.named_modules()
        if name not in layers or name == last
        for parameter in other.parameters(recurse=False)
    }
    found: dict[str, nn.Parameter] = {}
    for name, layer in layers.items():
        weight = layer.weight
        if isinstance(weight, nn.Parameter) and id(weight) not in elsewhere:
            elsewhere.add(id(weight))  # tied Linears are one weight
            found[f"{name}.weight"] = weight
    if not found:
        raise UsageError(
            f"method.kind: {type(module).__name__} has no convolution or Linear but its last "
            "whose weights could be pruned"
        )
    return found


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _copied(value: Tensor) -> Tensor:
    return value.detach().cpu().clone(memory_format=torch.contiguous_format)
