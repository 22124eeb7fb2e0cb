"""Which pilots there are: who trains which version for how many rounds, and what a run goes on from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from takifugu.errors import DataError
from takifugu.measure.trajectories import FRESH, SEEN, SWITCHED
from takifugu.train.ladder import DENSE
from takifugu.train.round import Samples

WARMUP = "warmup"
_LEAST_SHARE = 0.1
"""Of a team with less than this pilots are not longer still."""

_TOGETHER = 4
"""Rounds of everyone after those of a small team: two or three until its bias is gone, and one to see."""


def fresh(version: str) -> str:
    """The name of a version's pilot from the start."""
    return WARMUP if version == DENSE else f"{version}-fresh"


def switched(version: str) -> str:
    """The name of a low-rank version's pilot after the warm-up, on all nodes."""
    return f"{version}-0"


@dataclass(frozen=True)
class Subset:
    """Some of the nodes: the amount of data they have together, and how far their label mix is off."""

    nodes: tuple[str, ...]
    share: float
    imbalance: float


@dataclass(frozen=True)
class Length:
    """How long pilots are, in rounds of everyone."""

    rounds: int
    warmup: int
    fresh: int
    by_share: bool
    """Whether a team with half the data goes half the way a round (the fleet's weights, decision 204)."""

    def of(self, team: Subset) -> int:
        """By the fleet's weights half the data goes half the way a round: as many more rounds show as much.
        Shorter ones would end before a small team's loss stops falling, which is what they are to tell."""
        return round(self.rounds / max(team.share, _LEAST_SHARE)) if self.by_share else self.rounds


@dataclass(frozen=True)
class Course:
    """One run of a pilot."""

    run: str
    version: str
    team: Subset
    rounds: int
    begins: str
    after: str = ""
    rounds_before: int = 0


def courses(
    versions: Sequence[str], everyone: Subset, teams: Sequence[Subset], length: Length
) -> tuple[Course, ...]:
    """All runs; without `length.fresh` everything branches from the end of the warm-up."""
    found = [Course(WARMUP, DENSE, everyone, length.warmup, FRESH)]
    for version in versions:
        begins = SEEN if version == DENSE else SWITCHED
        if length.fresh == 0:
            for index, team in enumerate(teams):
                rounds = length.of(team)
                found.append(
                    Course(f"{version}-{index}", version, team, rounds, begins, WARMUP, length.warmup)
                )
            continue
        if version == DENSE:
            rounds = length.rounds
        else:
            found.append(Course(fresh(version), version, everyone, length.fresh, FRESH))
            rounds = max(min(3, length.rounds), length.rounds // 2)
        found.append(Course(switched(version), version, everyone, rounds, begins, WARMUP, length.warmup))
        small = [team for team in teams if set(team.nodes) != set(everyone.nodes)]
        for index, team in enumerate(small, start=1):
            found += _joined(f"{version}-{index}", version, team, everyone, length)
    return tuple(found)


def _joined(run: str, version: str, team: Subset, everyone: Subset, length: Length) -> Iterator[Course]:
    """A small team from the start, and twice, on the way and at its end, everyone after it."""
    whole = length.of(team)
    half = max(1, whole // 2)
    yield Course(run, version, team, half, FRESH)
    yield Course(f"{run}-joined", version, everyone, _TOGETHER, SEEN, run, half)
    if whole > half:
        yield Course(f"{run}-on", version, team, whole - half, SEEN, run, half)
        yield Course(f"{run}-on-joined", version, everyone, _TOGETHER, SEEN, f"{run}-on", whole)


# ---- which nodes ------------------------------------------------------------------------------------------


def subset_of(shares: Mapping[str, Samples], classes: int, nodes: Sequence[str]) -> Subset:
    """What these nodes have together, against the whole fleet."""
    histograms = {name: np.array(samples.histogram(classes), dtype=float) for name, samples in shares.items()}
    fleet = sum(histograms.values(), np.zeros(classes))
    used = sum((histograms[name] for name in nodes), np.zeros(classes))
    imbalance = 0.5 * float(np.abs(used / used.sum() - fleet / fleet.sum()).sum())
    return Subset(tuple(sorted(nodes)), float(used.sum() / fleet.sum()), imbalance)


def _first(shares: Mapping[str, Samples], classes: int, amount: float, order: Sequence[str]) -> Subset:
    """As many of the order as come nearest to the amount."""
    sizes = np.cumsum([len(shares[name]) for name in order])
    count = 1 + int(np.argmin(np.abs(sizes - amount * sizes[-1])))
    return subset_of(shares, classes, order[:count])


def subsets(
    shares: Mapping[str, Samples],
    classes: int,
    amounts: Sequence[float],
    seed: int,
    leading: Sequence[str] = (),
) -> tuple[Subset, ...]:
    """Nodes for each amount of data, largest first.

    The first of `leading`, as those are what plans are made of. Without it, and for an amount given once
    more, by turns ill balanced and well balanced teams, so that the amount and the balance of the data can
    be told apart.
    """
    if not shares:
        raise DataError("there are no nodes to run pilots on; give at least one")
    rng = np.random.default_rng([seed, 2])
    names = sorted(shares)
    sizes = np.array([len(shares[name]) for name in names])
    found: list[Subset] = []
    for turn, amount in enumerate(sorted(amounts, reverse=True)):
        if amount * sizes.sum() >= sizes.sum() - 0.5:
            chosen = [subset_of(shares, classes, names)]
        else:
            tries = []
            for _ in range(64):
                order = rng.permutation(len(names))
                # As many of a random order as come nearest to the amount, but at least one.
                count = 1 + int(np.argmin(np.abs(np.cumsum(sizes[order]) - amount * sizes.sum())))
                tries.append(subset_of(shares, classes, [names[i] for i in order[:count]]))
            off = min(abs(one.share - amount) for one in tries)
            near = [one for one in tries if abs(one.share - amount) <= off + 0.1 * amount]
            # The least amount ill balanced: the cheapest small teams are what a plan is tempted by, and
            # if their pilots were better balanced than they are, it would fall for it.
            sign = 1.0 if (len(amounts) - turn) % 2 == 0 else -1.0
            chosen = sorted(near, key=lambda one: (sign * one.imbalance, one.nodes))
            if leading:
                chosen.insert(0, _first(shares, classes, amount, leading))
        fresh = next((one for one in chosen if one not in found), None)
        if fresh is not None:
            found.append(fresh)
    return tuple(found)
