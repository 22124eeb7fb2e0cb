"""Observed rounds -> a loss curve, how sure we are of it, and how well it holds on rounds it has not seen.

A curve is fitted to whole trajectories: from the first loss of a run all later ones are predicted, and those
errors are made small. (A fit to single steps looks better and predicts worse: a step's small bias adds up.)
Which family it is, exponential or power, is decided by the later rounds, predicted from the earlier ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from scipy.optimize import least_squares

from takifugu.errors import DataError
from takifugu.measure.space import Point, Space
from takifugu.measure.trajectories import FRESH, NOTHING, SWITCHED, Begun, Floats, Observation, Runs
from takifugu.plan.curves import CURVES, Exponential, Power

LABEL_WEIGHTS = (0.0, 0.25, 0.5, 0.75, 1.0)

_DOUBT = 4.0
"""As many times better an exponential must predict the later rounds to be preferred."""

_ENOUGH = 8
"""As many later rounds tell a version's family by themselves."""

_FURTHEST = 4.0
"""As many times the first loss is the most that hesitation may look like."""

_BLOCK = 3
"""Rounds whose errors go together in a sample."""


@dataclass(frozen=True)
class Goodness:
    """How well a curve describes what it was fitted to, and what it was not."""

    rounds: int
    runs: int
    r2: float
    """Share of the losses' variance that the predicted trajectories explain."""
    held_out_error: float | None
    """Median relative error on the last rounds of each run, predicted from the others; None: too few."""


@dataclass(frozen=True)
class Fit:
    curve: Exponential | Power
    samples: tuple[Exponential | Power, ...]
    """The same family; drawn by bootstrap, joint with other versions' by index."""
    goodness: Goodness
    begun: Begun = NOTHING
    """The losses its runs began with as the curve sees it; none where those that were seen will do."""


@dataclass(frozen=True)
class Fits:
    versions: Mapping[str, Fit]
    label_weight: float


def fit_versions(
    observations: Mapping[str, Sequence[Observation]],
    label_weights: Sequence[float] = LABEL_WEIGHTS,
    samples: int = 20,
    seed: int = 0,
) -> Fits:
    """A curve for each version, and one label weight for all of them: the one that fits best together.

    The first version (the dense one) is the reference: versions of one model learn alike, so what a version's
    own rounds leave open is taken from it.
    """
    if not observations:
        raise DataError("there are no observed rounds to fit curves to; run pilots first")
    if all(o.imbalance == 0.0 for rounds in observations.values() for o in rounds):
        label_weights = label_weights[:1]  # nothing to tell them apart by
    unknown = _unknown(observations)
    families = _families(observations, label_weights[0], unknown)
    trials = {weight: _solve_all(observations, weight, families, unknown) for weight in label_weights}
    # Slightly in favour of small weights: where they explain as much, they ask for less.
    cost = {
        weight: sum(s.cost for s in found.values()) * (1 + 0.01 * weight) for weight, found in trials.items()
    }
    weight = min(cost, key=lambda w: (cost[w], w))
    solutions = trials[weight]
    if weight != label_weights[0]:
        families = _families(observations, weight, unknown)
        solutions = _solve_all(observations, weight, families, unknown)
    fits: dict[str, Fit] = {}
    reference: tuple[Point, ...] = ()
    start = next(iter(solutions.values())).begun
    for name, rounds in observations.items():
        runs = Runs.of(name, rounds, weight).begun(start)
        drawn = tuple(
            _resampled(solutions[name], runs, reference, unknown[name], seed, i) for i in range(samples)
        )
        fits[name] = _fit(solutions[name], families[name].error, runs, drawn)
        reference = reference or drawn
    return Fits(fits, weight)


def fit(
    observations: Sequence[Observation], label_weight: float = 0.0, samples: int = 20, seed: int = 0
) -> Fit:
    """The curve of one version."""
    return fit_versions({"the version": observations}, (label_weight,), samples, seed).versions["the version"]


def predict(curve: Exponential | Power, first_loss: float, shares: Sequence[float]) -> list[float]:
    """The losses after each of these rounds."""
    losses, loss = [], np.asarray(first_loss, dtype=float)
    for share in shares:
        loss = curve.step(loss, np.asarray(share, dtype=float))
        losses.append(float(loss))
    return losses


# ---- first losses ------------------------------------------------------------------------------------------

Unknown = Mapping[str, tuple[float, float]]


def _unknown(observations: Mapping[str, Sequence[Observation]]) -> dict[str, Unknown]:
    """Which first losses each version's fit is to find, and between which bounds.

    Fresh: of the reference, for all versions, as a plan starts from one loss whatever it begins with. From
    what was seen up to a few times of it: a network that hesitates begins as if from further away.
    Switched: of a version that was trained from the start, too. From the loss before the switch (a jump is
    never negative) up to the loss after it: what a switch breaks mends faster than it was learnt.
    """
    found: dict[str, Unknown] = {}
    last = {one.run: one.loss_after for rounds in observations.values() for one in rounds}
    for place, (name, rounds) in enumerate(observations.items()):
        bounds: dict[str, tuple[float, float]] = {}
        first = {one.run: one for one in reversed(rounds)}
        fresh = [one.loss_before for one in first.values() if one.begins == FRESH]
        broken = [one for one in first.values() if one.begins == SWITCHED]
        if place == 0 and fresh and min(fresh) > 0:
            bounds["fresh"] = (max(fresh), _FURTHEST * max(fresh))
        if fresh and broken and (before := last.get(broken[0].after, 0.0)) > 0:
            bounds["switched"] = (before, max(broken[0].loss_before, 1.001 * before))
        found[name] = bounds
    return found


# ---- fitting -----------------------------------------------------------------------------------------------


def _solve(
    kind: str,
    runs: Runs,
    start: Floats | None = None,
    tries: int = 50,
    like: Point | None = None,
    unknown: Unknown | None = None,
) -> Point:
    """The best of several descents, or one from `start`; near `like` where the data leave it open."""
    space = Space(kind, runs, like, unknown)

    def residuals(x: Floats) -> Floats:
        found: Floats = space.residuals(x[None], runs)[0]
        return found

    def jacobian(x: Floats) -> Floats:
        step = 1e-6 * np.maximum(np.abs(x), 0.1)
        step = np.where(x + step > space.high, -step, step)
        found = space.residuals(np.concatenate([x[None], x + np.diag(step)]), runs)
        return np.asarray(((found[1:] - found[0]) / step[:, None]).T)

    best: Point | None = None
    starts = space.starts() if start is None else [np.clip(start, space.low + 1e-12, space.high - 1e-12)]
    for guess in starts:
        # soft_l1 at 5%: a round that went astray has a say, not the last word.
        result = least_squares(
            residuals,
            guess,
            jacobian,
            bounds=(space.low, space.high),
            loss="soft_l1",
            f_scale=0.05,
            max_nfev=tries,
        )
        if best is None or result.cost < best.cost:
            best = Point(space, result.x, float(result.cost))
    assert best is not None
    return best


def _cost(runs: Runs, unknown: Unknown, kind: str) -> float:
    return _solve(kind, runs, unknown=unknown).cost


@dataclass(frozen=True)
class _Family:
    kind: str
    error: float | None
    """Median relative error on the later rounds."""


def _families(
    observations: Mapping[str, Sequence[Observation]], weight: float, unknown: Mapping[str, Unknown]
) -> dict[str, _Family]:
    """The family of each version: its own where enough later rounds tell, else the reference's."""
    found: dict[str, _Family] = {}
    early_fits: dict[str, Point] = {}
    reference: str | None = None
    for name, rounds in observations.items():
        runs = Runs.of(name, rounds, weight)
        early = runs.until(0.65)
        later = runs.counted & ~early.seen
        if early.seen.sum() < 4 or not later.any():
            kind = reference or min(CURVES, key=partial(_cost, runs, unknown[name]))
            found[name], reference = _Family(kind, None), reference or kind
            continue
        errors = {}
        for kind in CURVES:
            like = early_fits.get(kind)
            start = like.begun if like is not None else NOTHING
            solution = _solve(kind, early.begun(start), like=like, unknown=unknown[name])
            early_fits.setdefault(kind, solution)
            told = solution.predicted(runs.begun(start))
            errors[kind] = np.abs((told - runs.losses) / runs.scale)[later]
        # The mean decides (it sees the few rounds that went far off), the median is what is told. In doubt it
        # is the power: its tail is long, while an exponential takes what was seen last for nearly the end.
        mean = {k: float(e.mean()) * (_DOUBT if k == "exponential" else 1.0) for k, e in errors.items()}
        kind = min(mean, key=mean.__getitem__)
        if reference is not None and later.sum() < _ENOUGH:
            kind = reference
        found[name], reference = _Family(kind, float(np.median(errors[kind]))), reference or kind
    return found


def _solve_all(
    observations: Mapping[str, Sequence[Observation]],
    weight: float,
    families: Mapping[str, _Family],
    unknown: Mapping[str, Unknown],
) -> dict[str, Point]:
    found: dict[str, Point] = {}
    for name, rounds in observations.items():
        like = next(iter(found.values()), None)
        runs = Runs.of(name, rounds, weight).begun(like.begun if like is not None else NOTHING)
        found[name] = _solve(families[name].kind, runs, like=like, unknown=unknown[name])
    return found


def _fit(solution: Point, error: float | None, runs: Runs, drawn: Sequence[Point]) -> Fit:
    predicted = solution.predicted(runs)
    away = (runs.losses - predicted)[runs.counted]
    around = runs.losses[runs.counted] - runs.losses[runs.counted].mean()
    r2 = 1.0 - float((away**2).sum() / max(float((around**2).sum()), 1e-300))
    goodness = Goodness(int(runs.seen.sum()), len(runs.first), r2, error)
    return Fit(solution.curve, tuple(one.curve for one in drawn), goodness, solution.begun)


def _resampled(
    solution: Point, runs: Runs, reference: Sequence[Point], unknown: Unknown, seed: int, index: int
) -> Point:
    """A fit to the predicted losses plus residuals of all runs, in blocks: neighbouring rounds err together.

    Joint by index: the draws depend on the seed, the index and the runs' layout alone, so that versions whose
    pilots went side by side are disturbed alike; and a version leans on the reference's sample of that index.
    """
    rng = np.random.default_rng([seed, index])
    predicted = solution.predicted(runs)
    residual = np.where(runs.seen, (runs.losses - predicted) / runs.scale, 0.0)
    freedom = max(1, int(runs.seen.sum()) - len(solution.values))
    inflated = residual * np.sqrt(runs.seen.sum() / freedom)
    noise = np.zeros_like(residual)
    seen = [np.flatnonzero(column) for column in runs.seen.T]
    for column, rows in enumerate(seen):
        for place in range(0, len(rows), _BLOCK):
            source = int(rng.integers(len(seen)))
            begin = int(rng.integers(max(1, len(seen[source]) - _BLOCK + 1)))
            sign = 1.0 if rng.random() < 0.5 else -1.0  # a fit leaves no bias to preserve
            piece = inflated[seen[source][begin : begin + _BLOCK], source][: len(rows) - place]
            noise[rows[place : place + len(piece)], column] = sign * piece
    losses = predicted + noise * runs.scale
    if runs.least >= 0.0:  # no noise makes a loss negative that cannot be
        losses = np.maximum(losses, 0.1 * predicted)
    disturbed = replace(runs, losses=np.where(runs.seen, losses, runs.losses))
    like = reference[index] if reference else None
    return _solve(solution.space.kind, disturbed, start=solution.values, tries=15, like=like, unknown=unknown)
