"""How a run makes its model small. The base class is dense training; a method overrides what it needs.

A method is one file beside this one and a line in `takifugu.train.methods`. The loop calls it at the points
below, on every process alike; whatever it decides must follow from what all processes share (the weights, the
epoch), so that they stay the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer


class Run(Protocol):
    """What a method sees of the run it belongs to."""

    model: nn.Module
    """What trains: the plain model, or it in a wrapper. Whoever changes the plain one wraps it anew."""
    optimizer: Optimizer
    sharding: str
    """none, ddp or fsdp."""

    @property
    def cycle(self) -> int: ...

    @property
    def epoch(self) -> int:
        """Within the cycle, from 0."""

    @property
    def epochs(self) -> int:
        """Of a cycle."""

    @property
    def module(self) -> nn.Module:
        """The plain model under `model`; not for fsdp."""

    def wrap(self, module: nn.Module) -> nn.Module:
        """A plain model as this run trains it."""

    def new_optimizer_(self) -> None:
        """Starts the optimizer anew on the model's parameters, without any state."""

    def note(self, event: str, **fields: Any) -> None:
        """Tells the user, and the run's metrics, of something that happened."""


class Method:
    """Dense training, from beginning to end."""

    cycles: int = 1
    """How often the run trains all its epochs; the schedule begins anew each time."""

    def build_(self, module: nn.Module) -> None:
        """Changes a fresh model before anything wraps it, at the start of a run."""

    def attach_(self, run: Run) -> None:
        """Model and optimizer are there, at the start of a run or where it goes on: the place for hooks."""

    def before_epoch_(self, run: Run) -> None:
        """The epoch `run.epoch` of `run.cycle` is about to begin. The place to change the model."""

    def before_step_(self, module: nn.Module) -> None:
        """Gradients are there (unscaled), the optimizer's step is about to come."""

    def after_step_(self, module: nn.Module) -> None:
        """The weights have changed."""

    def parameters(self, module: nn.Module) -> int:
        """How many the model has, as this method counts."""
        return sum(p.numel() for p in module.parameters())

    # ---- resuming -----------------------------------------------------------------------------------

    def state_dict(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """What a checkpoint must keep: plain data (JSON), and tensors."""
        return {}, {}

    def load_state_dict(self, data: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """The reverse, on a new method, before `rebuild_`."""

    def rebuild_(self, module: nn.Module) -> None:
        """Brings a fresh model to the shapes of the checkpoint's, without `build_`; its low-rank structure
        and its weights are put in afterwards."""
