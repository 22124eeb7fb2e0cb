"""The parameters of a curve as a vector within bounds, with pulls towards where they usually are.

What pilots leave open, something else has to settle; docs/decisions/203 says what, and why.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from takifugu.measure.trajectories import Begun, Floats, Runs
from takifugu.plan.curves import Exponential, Power, make

_PRIOR = 0.02
"""How much a parameter that the data say nothing about is held near its usual value."""

_FLOOR_PRIOR = 0.2
"""Likewise for the floor, and stronger: nothing is told less by early rounds, and nothing matters more."""

_FLOOR_AT = 0.5
"""Where the floor usually is, as a part of the lowest loss that pilots of a tenth of a run have seen."""

_EXPONENT_PRIOR = 0.1
"""Likewise for both exponents. With a weaker one a few noisy rounds pass for a steep curve that is nearly at
its floor, and one bad small team for a cliff beyond which data cost nothing."""

_KINSHIP = 0.3
"""Likewise, near the value of the reference version."""


class Space:
    """A family's parameters as a vector within bounds: floor and gain as they are, others as logarithms."""

    def __init__(
        self,
        kind: str,
        runs: Runs,
        like: Point | None = None,
        unknown: Mapping[str, tuple[float, float]] | None = None,
    ) -> None:
        """Near `like` where the data leave it open. `unknown`: first losses to be found ("fresh",
        "switched"), and between which bounds."""
        self.kind = kind
        unknown = unknown or {}
        shape = ("rate",) if kind == "exponential" else ("scale", "exponent")
        shares = runs.share[runs.seen]
        # From one amount of data nothing can be said about others.
        self.data = bool(shares.max() / shares.min() > 1.05)
        self.names = ("floor", *shape, *(("data_gain", "data_exponent") if self.data else ()), *unknown)
        spread, least = runs.spread, runs.least
        # A loss that was never negative will not become so.
        bottom = 0.0 if least >= 0 and runs.first.min() >= 0 else least - spread
        bounds = {
            "floor": (bottom, max(least, bottom + 1e-9)),
            "rate": (np.log(1e-4), np.log(50.0)),
            "scale": (np.log(spread * 1e-3), np.log(spread * 1e4)),
            "exponent": (np.log(0.05), np.log(20.0)),
            "data_gain": (0.0, spread),
            "data_exponent": (np.log(0.05), np.log(1.0)),
            **{name: (np.log(low), np.log(high)) for name, (low, high) in unknown.items()},
        }
        self.low, self.high = np.array([bounds[name] for name in self.names]).T
        usual = {
            # Where losses do not bend yet, the floor could be anywhere below: neither at the end nor at once.
            "floor": bottom + _FLOOR_AT * (least - bottom),
            "rate": np.log(0.3),
            "scale": np.log(spread),
            "exponent": np.log(1.0),
            "data_gain": None,
            "data_exponent": np.log(0.5),
            **{name: bounds[name][0] for name in unknown},
        }
        strength, floor_strength = _PRIOR, _FLOOR_PRIOR
        if like is not None and like.space.kind == kind:
            strength = floor_strength = _KINSHIP
            usual |= dict(zip(like.space.names, like.values, strict=True))
        # Pulls on the floor and the gain are relative to how far the loss may still fall.
        whole = max(least - bottom, 1e-9)
        pull = {"floor": floor_strength / whole, "data_gain": strength / whole}
        pull |= dict.fromkeys(unknown, _PRIOR)
        if strength == _PRIOR:
            pull |= {"exponent": _EXPONENT_PRIOR, "data_exponent": _EXPONENT_PRIOR}
        self.held = [
            (i, usual[n], pull.get(n, strength)) for i, n in enumerate(self.names) if usual[n] is not None
        ]
        self._scale = usual["scale"]
        self._floors = (bottom + 0.2 * (least - bottom), bottom + 0.9 * (least - bottom))
        self._gain = 0.05 * spread
        self._before = unknown["switched"][0] if "switched" in unknown else 0.0
        self._unknown = {name: 0.5 * (low + high) for name, (low, high) in bounds.items() if name in unknown}

    def starts(self) -> Iterator[Floats]:
        for floor in self._floors:
            for speed in (0.1, 0.8):
                guess = {
                    "floor": floor,
                    "rate": np.log(speed),
                    "scale": self._scale,
                    "exponent": np.log(0.4 if speed < 0.5 else 2.0),
                    "data_gain": self._gain,
                    "data_exponent": np.log(0.5),
                    **self._unknown,
                }
                start = np.array([guess[name] for name in self.names], dtype=float)
                margin = 1e-6 * (self.high - self.low)
                yield np.clip(start, self.low + margin, self.high - margin)

    def values(self, points: Floats) -> dict[str, Floats]:
        """Columns of parameters for the points (P, n), each (P, 1)."""
        found = {"data_gain": np.zeros((len(points), 1)), "data_exponent": np.full((len(points), 1), 0.5)}
        for index, name in enumerate(self.names):
            column = points[:, index : index + 1]
            found[name] = column if name in ("floor", "data_gain") else np.exp(column)
        if "exponent" in found:  # the exponential of a logarithm may miss by a digit
            found["exponent"] = np.clip(found["exponent"], 0.05, 20.0)
        return found

    def curve(self, point: Floats) -> Exponential | Power:
        found = {name: float(v[0, 0]) for name, v in self.values(point[None]).items()}
        return make(self.kind, {name: v for name, v in found.items() if name not in self._unknown})

    def begun(self, point: Floats) -> Begun:
        found = {name: float(v[0, 0]) for name, v in self.values(point[None]).items()}
        return Begun(found.get("fresh"), found.get("switched"))

    def trajectories(self, points: Floats, runs: Runs) -> Floats:
        """Predicted losses (P, rounds, runs): the formulas of `plan.curves`, for many parameters at once.
        Both curves are flows, so rounds on the same share need no walk: n are one with n times the data."""
        p = {name: column[:, :, None] for name, column in self.values(points).items()}  # (P, 1, 1)
        loss = np.broadcast_to(runs.first, (len(points), 1, len(runs.first)))
        if "fresh" in p:
            loss = np.where(runs.fresh, p["fresh"], loss)
        if "switched" in p:
            # To begin with a version is to switch to it at the very start, and a plan pays for that, too.
            loss = np.where(runs.fresh, loss + p["switched"] - self._before, loss)
            loss = np.where(runs.switched, p["switched"], loss)
        found = np.empty((len(points), *runs.losses.shape))
        for stretch in runs.stretches:
            a = p["floor"] + p["data_gain"] * (np.power(1.0 / stretch.share, p["data_exponent"]) - 1.0)
            above = np.maximum(loss - a, 0.0)
            data = stretch.rounds * stretch.share
            if self.kind == "exponential":
                moved = a + above * np.exp(-p["rate"] * data)
            else:
                with np.errstate(divide="ignore", invalid="ignore"):
                    back = -np.log(above / p["scale"]) / p["exponent"]
                    moved = a + p["scale"] * np.exp(-p["exponent"] * np.logaddexp(back, np.log(data)))
            moved = np.where(above > 0.0, np.minimum(moved, loss), loss)
            found = np.where(stretch.inside, moved, found)
            last = np.take_along_axis(
                moved, np.broadcast_to(stretch.last, (len(points), *stretch.last.shape)), 1
            )
            loss = np.where(stretch.inside.any(axis=0), last, loss)
        return found

    def residuals(self, points: Floats, runs: Runs) -> Floats:
        """(P, residuals): relative errors of all rounds seen, and the weak pull towards usual values."""
        errors = (self.trajectories(points, runs) - runs.losses) / runs.scale * runs.weight
        pulls = [strength * (points[:, i] - usual) for i, usual, strength in self.held]
        return np.concatenate([errors[:, runs.seen], np.array(pulls).T], axis=1)


@dataclass(frozen=True)
class Point:
    """A place in a space."""

    space: Space
    values: Floats
    cost: float

    @property
    def curve(self) -> Exponential | Power:
        return self.space.curve(self.values)

    @property
    def begun(self) -> Begun:
        return self.space.begun(self.values)

    def predicted(self, runs: Runs) -> Floats:
        found: Floats = self.space.trajectories(self.values[None], runs)[0]
        return found
