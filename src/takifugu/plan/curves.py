"""Loss curves: what one round of training does to the loss.

A curve is any object with `step(loss, share)`, where `share` is the effective part q/Q of the fleet's
samples. Every guarantee of the planner rests on three properties of that map, and the tests check
them: it never decreases when the loss it starts from grows (monotone), it never pulls two losses
apart (non-expansive), and more data never gives a higher loss.

A curve that is the time-1 flow of an ordinary differential equation may also offer `speed(loss, share)`,
the rate at which the loss falls. Lower bounds from the continuous relaxation need it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@runtime_checkable
class Curve(Protocol):
    def step(self, loss: Floats, share: Floats) -> Floats:
        """The loss after one round; arguments broadcast."""


def step_one(curve: Curve, loss: float, share: float) -> float:
    """The loss after one round. Plans are walked along round by round, thousands of times, so a curve may
    have a quick way for plain numbers."""
    quick = getattr(curve, "step_one", None)
    if quick is not None:
        return float(quick(loss, share))
    return float(curve.step(np.float64(loss), np.float64(share)))  # type: ignore[arg-type]


@runtime_checkable
class FlowCurve(Curve, Protocol):
    convex_in_data: bool
    """Whether `speed` is convex in `share` (a tighter bound can then be used)."""

    def speed(self, loss: Floats, share: Floats) -> Floats:
        """How fast the loss falls, per round, at this loss: `share` times something that never falls with
        the share. One over it must be convex in the loss."""

    def steepness(self, loss: Floats, share: Floats) -> Floats:
        """The derivative of the speed's logarithm in the loss."""


@dataclass(frozen=True)
class _DataCurve:
    """What both built-in curves share: an asymptote that rises when little data is used."""

    kind: ClassVar[str]
    concave_in_loss: ClassVar[bool] = True
    floor: float
    data_gain: float
    data_exponent: float

    def asymptote(self, share: Floats) -> Floats:
        if self.data_gain == 0.0:
            return np.full_like(share, self.floor)
        with np.errstate(over="ignore", divide="ignore"):
            rise = np.power(1.0 / share, self.data_exponent) - 1.0
        return np.asarray(self.floor + self.data_gain * rise)

    def _asymptote_one(self, share: float) -> float:
        """Infinity where there is no data, or hardly any."""
        if self.data_gain == 0.0:
            return self.floor
        try:
            return self.floor + self.data_gain * (math.pow(1.0 / share, self.data_exponent) - 1.0)
        except (OverflowError, ZeroDivisionError):
            return math.inf

    @property
    def convex_in_data(self) -> bool:
        # docs/decisions/101: the second derivative is non-negative exactly when the exponent is at most 1.
        return self.data_gain == 0.0 or self.data_exponent <= 1.0

    def parameters(self) -> dict[str, float]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True)
class Exponential(_DataCurve):
    kind = "exponential"
    rate: float

    def step(self, loss: Floats, share: Floats) -> Floats:
        return self.repeated(loss, share, np.float64(1.0))  # type: ignore[arg-type]

    def repeated(self, loss: Floats, share: Floats, rounds: Floats) -> Floats:
        """Return the loss after so many equal rounds, in one formula: the curve is a flow."""
        a = self.asymptote(np.asarray(share, dtype=float))
        above = np.maximum(loss - a, 0.0)
        moved = a + above * np.exp(-self.rate * share * rounds)
        return np.where(loss > a, np.minimum(moved, loss), loss)

    def step_one(self, loss: float, share: float) -> float:
        a = self._asymptote_one(share)
        return min(a + (loss - a) * math.exp(-self.rate * share), loss) if loss > a else loss

    def speed(self, loss: Floats, share: Floats) -> Floats:
        a = self.asymptote(np.asarray(share, dtype=float))
        return np.asarray(self.rate * share * np.maximum(loss - a, 0.0))

    def steepness(self, loss: Floats, share: Floats) -> Floats:
        with np.errstate(divide="ignore"):
            return np.asarray(1.0 / np.maximum(loss - self.asymptote(np.asarray(share, dtype=float)), 0.0))


@dataclass(frozen=True)
class Power(_DataCurve):
    kind = "power"
    scale: float
    exponent: float

    def step(self, loss: Floats, share: Floats) -> Floats:
        return self.repeated(loss, share, np.float64(1.0))  # type: ignore[arg-type]

    def repeated(self, loss: Floats, share: Floats, rounds: Floats) -> Floats:
        """Return the loss after so many equal rounds, in one formula: the curve is a flow."""
        share = np.asarray(share, dtype=float)
        a = self.asymptote(share)
        above = np.maximum(loss - a, 0.0)
        # u -> (u^(-1/e) + share)^(-e), in logarithms: exponents from 0.05 to 20 would overflow.
        with np.errstate(divide="ignore", invalid="ignore"):
            back = -np.log(above / self.scale) / self.exponent
            moved = a + self.scale * np.exp(-self.exponent * np.logaddexp(back, np.log(share * rounds)))
        return np.where(above > 0.0, np.minimum(moved, loss), loss)

    def step_one(self, loss: float, share: float) -> float:
        a = self._asymptote_one(share)
        if not loss > a or share <= 0.0:
            return loss
        above = (loss - a) / self.scale
        if above == 0.0:  # too small for a number
            return a
        back, more = -math.log(above) / self.exponent, math.log(share)
        together = max(back, more) + math.log1p(math.exp(-abs(back - more)))
        return min(a + self.scale * math.exp(-self.exponent * together), loss)

    def speed(self, loss: Floats, share: Floats) -> Floats:
        share = np.asarray(share, dtype=float)
        above = np.maximum(loss - self.asymptote(share), 0.0)
        with np.errstate(divide="ignore", over="ignore"):
            pull = np.exp(np.log(above / self.scale) / self.exponent)
        return np.where(above > 0.0, self.exponent * share * above * pull, 0.0)

    def steepness(self, loss: Floats, share: Floats) -> Floats:
        above = np.maximum(loss - self.asymptote(np.asarray(share, dtype=float)), 0.0)
        with np.errstate(divide="ignore"):
            return np.asarray((1.0 + 1.0 / self.exponent) / above)


# A new curve is one class above and one line here (and its parameters in files.py).
CURVES: dict[str, type[Exponential] | type[Power]] = {c.kind: c for c in (Exponential, Power)}


def make(kind: str, parameters: Mapping[str, Any]) -> Exponential | Power:
    """Builds a curve from the fields of a problem file."""
    return CURVES[kind](**{"data_gain": 0.0, "data_exponent": 0.5, **parameters})


Shape = tuple[bool, float, float]
"""How compiled loops know a curve: whether it is a power, its rate or scale, its exponent."""


def shape_of(curve: Curve) -> Shape | None:
    """Nothing, if it is neither of the two kinds."""
    if type(curve) is Power:
        return True, float(curve.scale), float(curve.exponent)
    return (False, float(curve.rate), 1.0) if type(curve) is Exponential else None


def asymptotes(curve: Curve, share: Floats) -> Floats:
    """Of a curve that has a shape."""
    assert isinstance(curve, Exponential | Power)
    return curve.asymptote(share)
