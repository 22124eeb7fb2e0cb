"""Observed rounds as trajectories: what a curve is held against.

A run of pilots may go on from another one. Then its trajectory begins where that one began: the curve is led
through all rounds, also those that were told already, and only the run's own are compared. What a run begins
with is seen, or it is the fresh model, or a model that was just switched; of the last two the loss that
counts is not the one that was seen (docs/decisions/205), and a fit is free to find it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from takifugu.errors import DataError

Floats = NDArray[np.float64]

SEEN, FRESH, SWITCHED = "seen", "fresh", "switched"

ALONE = 0.08
"""What a round of a small team counts that others join later: its loss shows the labels it lacks, which come
back within two rounds, more than what it has learnt. The rounds after others have joined tell the latter."""


@dataclass(frozen=True)
class Observation:
    """One round as it was seen. `share` is the part of the fleet's samples that was used."""

    run: str
    round: int
    loss_before: float
    loss_after: float
    share: float
    imbalance: float = 0.0
    """Total variation between the label mix of what was used and the fleet's."""
    begins: str = SEEN
    """What the run begins with: a loss as it was seen, the fresh model, or a model that was just switched."""
    after: str = ""
    """The run that this one goes on from."""

    def effective_share(self, label_weight: float) -> float:
        return self.share * (1.0 - label_weight * self.imbalance)


@dataclass(frozen=True)
class Begun:
    """The losses that count, for runs that begin with the fresh model and for those after a switch."""

    fresh: float | None = None
    switched: float | None = None


NOTHING = Begun()


@dataclass(frozen=True)
class Stretch:
    """Of each run the n-th stretch of rounds on the same share."""

    inside: NDArray[np.bool_]
    """(rounds, runs)"""
    rounds: Floats
    """How many of the stretch are done after each round; 1 outside of it."""
    share: Floats
    """(runs)"""
    last: NDArray[np.int64]
    """(1, runs): the last of its rows."""


@dataclass(frozen=True)
class Runs:
    """Trajectories side by side: `losses` and `share` are (rounds, runs), short runs padded."""

    first: Floats
    losses: Floats
    share: Floats
    seen: NDArray[np.bool_]
    """Which rounds are compared: not the padding, not what another run has told, not hesitation."""
    alone: NDArray[np.bool_]
    """Runs of small teams that others join later."""
    fresh: NDArray[np.bool_]
    switched: NDArray[np.bool_]

    @classmethod
    def of(cls, name: str, observations: Sequence[Observation], label_weight: float) -> Runs:
        own: dict[str, list[Observation]] = {}
        for one in observations:
            share = one.effective_share(label_weight)
            values = (one.loss_before, one.loss_after, share)
            if not np.isfinite(values).all() or not 0 < one.share <= 1 + 1e-9 or share < 0:
                raise DataError(
                    f"{name}: run {one.run!r}, round {one.round} has a loss or share out of range"
                )
            own.setdefault(one.run, []).append(one)
        if len(observations) < 3:
            raise DataError(
                f"{name}: {len(observations)} observed rounds are too few for a curve; run longer pilots"
            )
        own = {run: sorted(rounds, key=lambda o: o.round) for run, rounds in sorted(own.items())}
        lines = [_line(own, run) for run in own]
        shape = (max(len(line.rounds) for line in lines), len(lines))
        losses, shares, seen = np.zeros(shape), np.ones(shape), np.zeros(shape, dtype=bool)
        for column, line in enumerate(lines):
            rows = slice(len(line.rounds))
            losses[rows, column] = [o.loss_after for o in line.rounds]
            # An effective share of nothing at all would be a division by zero.
            shares[rows, column] = [max(o.effective_share(label_weight), 1e-6) for o in line.rounds]
            shares[len(line.rounds) :, column] = shares[len(line.rounds) - 1, column]
            seen[line.told : len(line.rounds), column] = True
        return cls(
            np.array([line.rounds[0].loss_before for line in lines]),
            losses,
            shares,
            seen,
            np.array([_is_joined(own, run) for run in own]),
            np.array([line.begins == FRESH for line in lines]),
            np.array([line.begins == SWITCHED for line in lines]),
        )

    def begun(self, begun: Begun) -> Runs:
        """The same with these losses at the beginning."""
        first = self.first
        if begun.fresh is not None:
            first = np.where(self.fresh, begun.fresh, first)
        if begun.switched is not None:
            first = np.where(self.switched, begun.switched, first)
        return replace(self, first=first)

    @cached_property
    def stretches(self) -> tuple[Stretch, ...]:
        changes = np.vstack([np.zeros_like(self.seen[:1]), np.diff(self.share, axis=0) != 0.0])
        number = np.cumsum(changes, axis=0)
        rows = np.arange(len(number))[:, None]
        found = []
        for one in range(int(number.max()) + 1):
            inside = number == one
            begins, last = np.argmax(inside, axis=0), len(rows) - 1 - np.argmax(inside[::-1], axis=0)
            rounds = np.where(inside, rows - begins + 1.0, 1.0)
            share = np.take_along_axis(self.share, begins[None], 0)[0]
            found.append(Stretch(inside, rounds, share, last[None]))
        return tuple(found)

    def until(self, part: float) -> Runs:
        """The first part of each run; the others' rounds count as not seen."""
        kept = np.ceil(self.seen.sum(axis=0) * part)
        return replace(self, seen=self.seen & (np.cumsum(self.seen, axis=0) <= kept))

    @cached_property
    def weight(self) -> Floats:
        """Later rounds say more about rounds to come: they weigh up to four times as much as the first."""
        count = np.maximum(self.seen.sum(axis=0), 1)
        age = np.maximum(count - np.cumsum(self.seen, axis=0), 0) / count
        return np.asarray(0.25**age * np.where(self.alone, ALONE, 1.0))

    @cached_property
    def counted(self) -> NDArray[np.bool_]:
        """The rounds that a curve is judged by."""
        return self.seen & ~self.alone

    @cached_property
    def least(self) -> float:
        return float(self.losses[self.seen].min())

    @cached_property
    def spread(self) -> float:
        return float(max(self.first.max() - self.least, 1e-3 * abs(self.first.max()), 1e-9))

    @cached_property
    def scale(self) -> Floats:
        """What an error is measured against: the loss itself, as 0.01 matters more at 0.1 than at 2.3."""
        return np.maximum(np.abs(self.losses), 0.02 * self.spread)


@dataclass(frozen=True)
class _Line:
    """A run from the very beginning; the first `told` rounds are not compared."""

    rounds: Sequence[Observation]
    told: int
    begins: str


def _line(own: Mapping[str, Sequence[Observation]], run: str) -> _Line:
    rounds = own[run]
    begins, after = rounds[0].begins, rounds[0].after
    if begins == SEEN and after in own:
        before = _line(own, after)
        return _Line([*before.rounds, *rounds], len(before.rounds), before.begins)
    waited = _hesitation(rounds)
    if begins == FRESH:  # the curve is led through, so that it arrives where the run did
        return _Line(rounds, waited, begins)
    return _Line(rounds[waited:], 0, begins)


def _hesitation(rounds: Sequence[Observation]) -> int:
    """Fresh networks often hesitate before their loss falls. No curve here does: they fall fastest at once.
    So what comes before the steepest round is not compared."""
    falls = [one.loss_before - one.loss_after for one in rounds]
    steepest = max(range(len(falls)), key=falls.__getitem__)
    if not 0 < steepest < len(falls) - 1 or falls[steepest] < 1.3 * max(falls[0], 0.0):
        return 0
    return steepest


def _is_joined(own: Mapping[str, Sequence[Observation]], run: str) -> bool:
    return any(
        rounds[0].after == run and rounds[0].share > own[run][0].share * (1 + 1e-9) for rounds in own.values()
    )
