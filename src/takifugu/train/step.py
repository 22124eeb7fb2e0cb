"""One training step, the same for a node's round, a pilot and `takifugu train`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from takifugu.errors import TrainingError


def training_step_(
    optimizer: Optimizer,
    forward: Callable[[], Tensor],
    *,
    check: Callable[[float], None],
    scaler: Any = None,
    between_: Callable[[], None] | None = None,
) -> float:
    """Forward, backward and the optimizer's step; returns the loss.

    Args:
        forward: the mean loss of the batch.
        check: is shown the loss after the backward pass (under DDP all processes have to come that far) and
            raises if training cannot go on; the weights are then still those before the step.
        scaler: a `torch.amp.GradScaler`, for fp16.
        between_: works on the unscaled gradients before the step: clipping, extra decay.
    """
    try:
        loss = forward()
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        raise TrainingError(
            "batch normalization cannot train on a single sample; give it at least two, "
            "and use a batch size above 1"
        ) from None
    value = float(loss.detach())
    optimizer.zero_grad(set_to_none=True)
    if scaler is None:
        loss.backward()
    else:
        scaler.scale(loss).backward()
    check(value)
    if between_ is not None:
        if scaler is not None:
            scaler.unscale_(optimizer)
        between_()
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()
    return value
