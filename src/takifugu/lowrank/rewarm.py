"""A second, short learning-rate warm-up after the switch.

The rate is scaled for the time of `optimizer.step()` only and put back afterwards, so that any scheduler sees
the rate it has set itself, also those that compute the next one from the last.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from takifugu.errors import UsageError


class Rewarm:
    """After `begin_()` the learning rate rises from a share `start` of it, over `steps` optimizer steps."""

    def __init__(self, steps: int, start: float = 0.1) -> None:
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
            raise UsageError(f"a re-warm-up of {steps!r} steps; use a number of optimizer steps from 0 on")
        if not 0 <= start <= 1:
            raise UsageError(f"a re-warm-up from {start!r} of the learning rate; use a share from 0 to 1")
        self.steps, self.start = steps, start
        self.done: int | None = None
        """Steps since the switch; None when there is nothing to do."""
        self._optimizer: Optimizer | None = None
        self._handles: list[Any] = []
        self._rates: list[Any] = []

    @property
    def factor(self) -> float:
        """What the next step's learning rate is multiplied by."""
        if self.done is None:
            return 1.0
        return self.start + (1 - self.start) * (self.done + 1) / (self.steps + 1)

    def follow_(self, optimizer: Optimizer) -> None:
        """Watches this optimizer's steps from now on."""
        if self.steps == 0 or optimizer is self._optimizer:
            return
        for handle in self._handles:
            handle.remove()
        self._optimizer = optimizer
        self._handles = [
            optimizer.register_step_pre_hook(lambda *_: self._before_(optimizer)),
            optimizer.register_step_post_hook(lambda *_: self._after_(optimizer)),
        ]

    def begin_(self) -> None:
        self.done = 0 if self.steps else None

    def _before_(self, optimizer: Optimizer) -> None:
        if self.done is None:
            return
        if self._rates:  # the last step raised an error before it came to put them back
            self._put_back_(optimizer)
        self._rates = [_copied(group["lr"]) for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            _set_(group, group["lr"] * self.factor)

    def _after_(self, optimizer: Optimizer) -> None:
        if self.done is None:
            return
        self._put_back_(optimizer)
        self.done = self.done + 1 if self.done + 1 < self.steps else None

    def _put_back_(self, optimizer: Optimizer) -> None:
        for group, rate in zip(optimizer.param_groups, self._rates, strict=True):
            _set_(group, rate)
        self._rates = []

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        done = state.get("done")
        self.done = None if done is None or int(done) >= self.steps else int(done)


def _copied(rate: Any) -> Any:
    return rate.clone() if isinstance(rate, Tensor) else rate


def _set_(group: dict[str, Any], rate: Any) -> None:
    """A rate that is a tensor stays the same tensor: compiled optimizers hold on to it."""
    if isinstance(group["lr"], Tensor):
        group["lr"].copy_(rate)
    else:
        group["lr"] = rate
