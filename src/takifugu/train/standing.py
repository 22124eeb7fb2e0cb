"""Where a training run stands, as plain numbers."""

from __future__ import annotations

from dataclasses import dataclass, field


class Interrupted(Exception):
    """The run was asked to stop, and its state is saved."""


@dataclass
class Standing:
    """Where a run stands."""

    cycle: int = 0
    epoch: int = 0
    step: int = 0
    """Within the epoch."""
    steps: int = 0
    """Since the beginning of the run."""
    loss_sum: float = 0.0
    samples: int = 0
    """Of the epoch so far, on this process; `loss_sum` is the sum of the batches' losses."""
    seconds: float = 0.0
    """Of training, without evaluation, since the beginning; and of the epoch so far:"""
    epoch_seconds: float = 0.0
    waited_seconds: float = 0.0
    """Of those, spent waiting for the next batch."""
    sent_bytes: int = 0
    history: list[float] = field(default_factory=list)
    """Validation losses of the cycle's finished epochs."""


@dataclass(frozen=True)
class Tick:
    """What a progress bar wants to know after a step."""

    standing: Standing
    loss: float
    learning_rate: float
    parameters: int
