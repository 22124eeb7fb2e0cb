"""Learning-rate schedules as pure functions of where a run stands: there is no state to save or lose.

A schedule says by what factor the recipe's rate is multiplied. Where it depends on how well training goes
(`plateau`), the history of validation losses is part of where the run stands.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from takifugu.errors import UsageError, near_misses
from takifugu.numbers import is_number


@dataclass(frozen=True)
class Moment:
    """A step of a run: how many came before it in its cycle, and how it all went so far."""

    step: int
    steps_per_epoch: int
    epochs: int
    history: Sequence[float] = ()
    """Validation losses of the cycle's finished epochs."""

    @property
    def epoch(self) -> float:
        return self.step / self.steps_per_epoch

    @property
    def share(self) -> float:
        """Of the whole cycle, from 0 to below 1."""
        return self.step / (self.steps_per_epoch * self.epochs)


@dataclass(frozen=True, kw_only=True)
class Schedule(ABC):
    """Options are the fields; `warmup` epochs rise linearly from the share `warmup_from` of the rate."""

    kind: ClassVar[str]
    warmup: float = 0.0
    warmup_from: float = 0.1

    def __post_init__(self) -> None:
        if not 0 <= self.warmup_from <= 1:
            raise UsageError(f"warmup_from: {self.warmup_from!r} is not a share from 0 to 1")

    def factor(self, now: Moment) -> float:
        """What the learning rate is multiplied by at this step."""
        rising = 1.0
        if now.epoch < self.warmup:
            rising = self.warmup_from + (1 - self.warmup_from) * now.epoch / self.warmup
        return rising * self.shape(now)

    @abstractmethod
    def shape(self, now: Moment) -> float:
        """The factor without the warm-up."""


@dataclass(frozen=True, kw_only=True)
class Constant(Schedule):
    kind = "constant"

    def shape(self, now: Moment) -> float:
        return 1.0


@dataclass(frozen=True, kw_only=True)
class Steps(Schedule):
    """Times `factor_each` at every one of the epochs `at`."""

    kind = "steps"
    at: tuple[float, ...] = ()
    factor_each: float = 0.1

    def shape(self, now: Moment) -> float:
        return float(self.factor_each ** sum(now.epoch >= epoch for epoch in self.at))


@dataclass(frozen=True, kw_only=True)
class Cosine(Schedule):
    """Half a cosine from 1 down to the share `final`."""

    kind = "cosine"
    final: float = 0.0

    def shape(self, now: Moment) -> float:
        return _between(1.0, self.final, now.share)


@dataclass(frozen=True, kw_only=True)
class OneCycle(Schedule):
    """Up from the share `initial` during the first `rise` of the run, then down to `final`, by cosines."""

    kind = "one-cycle"
    rise: float = 0.3
    initial: float = 0.04
    final: float = 4e-6

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.rise < 1:
            raise UsageError(f"rise: {self.rise!r} is not a share between 0 and 1")

    def shape(self, now: Moment) -> float:
        if now.share < self.rise:
            return _between(self.initial, 1.0, now.share / self.rise)
        return _between(1.0, self.final, (now.share - self.rise) / (1 - self.rise))


@dataclass(frozen=True, kw_only=True)
class InverseSqrt(Schedule):
    """Linear to 1 over `warmup_steps` steps, then falling with the square root of the step."""

    kind = "inverse-sqrt"
    warmup_steps: int = 4000

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.warmup_steps < 1:
            raise UsageError(f"warmup_steps: {self.warmup_steps!r} is not at least 1")

    def shape(self, now: Moment) -> float:
        step = now.step + 1
        return min(step / self.warmup_steps, math.sqrt(self.warmup_steps / step))


@dataclass(frozen=True, kw_only=True)
class Plateau(Schedule):
    """Times `factor_each` after every epoch whose validation loss is not the best so far."""

    kind = "plateau"
    factor_each: float = 0.25

    def shape(self, now: Moment) -> float:
        best, stalls = math.inf, 0
        for loss in now.history:
            stalls += not loss < best
            best = min(best, loss)
        return float(self.factor_each**stalls)


_KINDS: Mapping[str, type[Schedule]] = {
    kind.kind: kind for kind in (Constant, Steps, Cosine, OneCycle, InverseSqrt, Plateau)
}


def schedule_for(table: Mapping[str, Any], where: str = "schedule") -> Schedule:
    """A recipe's `[schedule]`: its kind and options, checked."""
    kind = table.get("kind", "constant")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise UsageError(
            f"{where}.kind: {kind!r} is not known{near_misses(str(kind), _KINDS)}; one of {', '.join(_KINDS)}"
        )
    accepted = {field.name for field in fields(_KINDS[kind])}
    options: dict[str, Any] = {}
    for name, value in table.items():
        if name == "kind":
            continue
        if name not in accepted:
            raise UsageError(
                f"{where}.{name}: {kind} has no such option{near_misses(name, accepted)}; "
                f"accepted: {', '.join(sorted(accepted))}"
            )
        options[name] = _checked(f"{where}.{name}", name, value)
    try:
        return _KINDS[kind](**options)
    except UsageError as error:
        raise UsageError(f"{where}.{error}") from None


def _checked(where: str, name: str, value: Any) -> Any:
    if name == "at":
        if not isinstance(value, list | tuple) or not all(_is_amount(item) for item in value):
            raise UsageError(f"{where}: {value!r} is not a list of epochs such as [150, 250]")
        return tuple(value)
    if name == "warmup_steps":
        if not isinstance(value, int) or isinstance(value, bool):
            raise UsageError(f"{where}: {value!r} is not a whole number of steps")
    elif not _is_amount(value):
        raise UsageError(f"{where}: {value!r} is not a number of at least 0")
    return value


def _is_amount(value: Any) -> bool:
    return is_number(value) and value >= 0


def _between(start: float, end: float, share: float) -> float:
    """Along half a cosine."""
    return end + (start - end) * (1 + math.cos(math.pi * min(1.0, share))) / 2
