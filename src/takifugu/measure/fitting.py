"""Observed rounds -> a loss curve, how sure we are of it, and how well it holds on rounds it has not seen.

A curve is fitted to whole trajectories: from the first loss of a run all later ones are predicted, and those
errors are made small. (A fit to single steps looks better and predicts worse: a step's small bias adds up.)
Which family it is, exponential or power, is decided by the later rounds, predicted from the earlier ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from takifugu.errors import DataError
from takifugu.plan.curves import CURVES, Exponential, Power, make

Floats = NDArray[np.float64]

LABEL_WEIGHTS = (0.0, 0.25, 0.5, 0.75, 1.0)

_PRIOR = 0.02
"""How much a parameter that the data say nothing about is held near its usual value."""

_FLOOR_PRIOR = 0.3
"""Likewise for the floor, and stronger: nothing is told less by early rounds, and nothing matters more."""

_FLOOR_AT = 0.55
"""Where the floor usually is, as a part of the lowest loss that pilots of a tenth of a run have seen."""

_EXPONENT_PRIOR = 0.1
"""Likewise for both exponents. With a weaker one a few noisy rounds pass for a steep curve that is nearly at
its floor, and one bad small team for a cliff beyond which data cost nothing."""

_KINSHIP = 0.15
"""Likewise, near the value of the reference version."""

_DOUBT = 2.0
"""As many times better an exponential must predict the later rounds to be preferred."""

_FURTHEST = 4.0
"""As many times the first loss is the most that hesitation may look like."""

_ENOUGH = 8
"""As many later rounds tell a version's family by themselves."""


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

    def effective_share(self, label_weight: float) -> float:
        return self.share * (1.0 - label_weight * self.imbalance)


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
    families = _families(observations, label_weights[0])
    trials = {weight: _solve_all(observations, weight, families) for weight in label_weights}
    # Slightly in favour of small weights: where they explain as much, they ask for less.
    cost = {
        weight: sum(s.cost for s in found.values()) * (1 + 0.01 * weight) for weight, found in trials.items()
    }
    weight = min(cost, key=lambda w: (cost[w], w))
    solutions = trials[weight]
    if weight != label_weights[0]:
        families = _families(observations, weight)
        solutions = _solve_all(observations, weight, families)
    fits: dict[str, Fit] = {}
    reference: tuple[_Solution, ...] = ()
    for name, rounds in observations.items():
        runs = _Runs.of(name, rounds, weight)
        drawn = tuple(_resampled(solutions[name], runs, reference, seed, i) for i in range(samples))
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


def as_if_from(
    curve: Exponential | Power, first_loss: float, shares: Sequence[float], arrived: float
) -> float:
    """The loss from which the curve arrives, after these rounds, where a run from `first_loss` did.

    Above `first_loss` by what the network hesitated; never below it, and no more than a few times of it.
    """
    low, high = first_loss, _FURTHEST * first_loss
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if predict(curve, middle, shares)[-1] < arrived else (low, middle)
    return low


# ---- trajectories ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Runs:
    """Trajectories side by side: `losses` and `share` are (rounds, runs), short runs padded."""

    first: Floats
    losses: Floats
    share: Floats
    seen: NDArray[np.bool_]

    @classmethod
    def of(cls, name: str, observations: Sequence[Observation], label_weight: float) -> _Runs:
        by_run: dict[str, list[Observation]] = {}
        for one in observations:
            share = one.effective_share(label_weight)
            values = (one.loss_before, one.loss_after, share)
            if not np.isfinite(values).all() or not 0 < one.share <= 1 + 1e-9 or share < 0:
                raise DataError(
                    f"{name}: run {one.run!r}, round {one.round} has a loss or share out of range"
                )
            by_run.setdefault(one.run, []).append(one)
        if len(observations) < 3:
            raise DataError(
                f"{name}: {len(observations)} observed rounds are too few for a curve; run longer pilots"
            )
        runs = [
            _after_hesitation(sorted(rounds, key=lambda o: o.round)) for _, rounds in sorted(by_run.items())
        ]
        longest = max(map(len, runs))
        shape = (longest, len(runs))
        losses, shares, seen = np.zeros(shape), np.ones(shape), np.zeros(shape, dtype=bool)
        for column, rounds in enumerate(runs):
            rows = slice(len(rounds))
            losses[rows, column] = [o.loss_after for o in rounds]
            # An effective share of nothing at all would be a division by zero.
            shares[rows, column] = [max(o.effective_share(label_weight), 1e-6) for o in rounds]
            seen[rows, column] = True
        return cls(np.array([rounds[0].loss_before for rounds in runs]), losses, shares, seen)

    def until(self, part: float) -> _Runs:
        """The first part of each run; the others' rounds count as not seen."""
        kept = np.ceil(self.seen.sum(axis=0) * part)
        return replace(self, seen=self.seen & (np.arange(len(self.losses))[:, None] < kept))

    @property
    def weight(self) -> Floats:
        """Later rounds say more about rounds to come: they weigh up to four times as much as the first."""
        count = np.maximum(self.seen.sum(axis=0), 1)
        age = np.maximum(count - 1 - np.arange(len(self.losses))[:, None], 0) / count
        return np.asarray(0.25**age)

    @property
    def least(self) -> float:
        return float(self.losses[self.seen].min())

    @property
    def spread(self) -> float:
        return float(max(self.first.max() - self.least, 1e-3 * abs(self.first.max()), 1e-9))

    @property
    def scale(self) -> Floats:
        """What an error is measured against: the loss itself, as 0.01 matters more at 0.1 than at 2.3."""
        return np.maximum(np.abs(self.losses), 0.02 * self.spread)


def _after_hesitation(rounds: list[Observation]) -> list[Observation]:
    """Fresh networks often hesitate before their loss falls. No curve here does: they fall fastest at once.
    Cut at the steepest round, what comes after is fitted as it is, not with the delay made up for; the delay
    itself goes into the loss that a plan starts from (`as_if_from`)."""
    falls = [one.loss_before - one.loss_after for one in rounds]
    steepest = max(range(len(falls)), key=falls.__getitem__)
    if not 0 < steepest < len(falls) - 1 or falls[steepest] < 1.3 * max(falls[0], 0.0):
        return rounds
    return rounds[steepest:]


class _Space:
    """A family's parameters as a vector within bounds: floor and gain as they are, others as logarithms."""

    def __init__(self, kind: str, runs: _Runs, like: _Solution | None = None) -> None:
        self.kind = kind
        shape = ("rate",) if kind == "exponential" else ("scale", "exponent")
        shares = runs.share[runs.seen]
        # From one amount of data nothing can be said about others.
        self.data = bool(shares.max() / shares.min() > 1.05)
        self.names = ("floor", *shape, *(("data_gain", "data_exponent") if self.data else ()))
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
        }
        strength, floor_strength = _PRIOR, _FLOOR_PRIOR
        if like is not None and like.space.kind == kind:
            strength = floor_strength = _KINSHIP
            usual |= dict(zip(like.space.names, like.point, strict=True))
        # Pulls on the floor and the gain are relative to how far the loss may still fall.
        whole = max(least - bottom, 1e-9)
        pull = {"floor": floor_strength / whole, "data_gain": strength / whole}
        if strength == _PRIOR:
            pull |= {"exponent": _EXPONENT_PRIOR, "data_exponent": _EXPONENT_PRIOR}
        self.held = [
            (i, usual[n], pull.get(n, strength)) for i, n in enumerate(self.names) if usual[n] is not None
        ]
        self._scale = usual["scale"]
        self._floors = (bottom + 0.2 * (least - bottom), bottom + 0.9 * (least - bottom))
        self._gain = 0.05 * spread

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
        return make(self.kind, {name: float(v[0, 0]) for name, v in self.values(point[None]).items()})

    def trajectories(self, points: Floats, runs: _Runs) -> Floats:
        """Predicted losses (P, rounds, runs). The formulas of `plan.curves`, for many parameters at once."""
        p = self.values(points)
        loss = np.broadcast_to(runs.first, (len(points), len(runs.first)))
        found = np.empty((len(points), *runs.losses.shape))
        for row, share in enumerate(runs.share):
            a = p["floor"] + p["data_gain"] * (np.power(1.0 / share, p["data_exponent"]) - 1.0)
            above = np.maximum(loss - a, 0.0)
            if self.kind == "exponential":
                moved = a + above * np.exp(-p["rate"] * share)
            else:
                with np.errstate(divide="ignore", invalid="ignore"):
                    back = -np.log(above / p["scale"]) / p["exponent"]
                    moved = a + p["scale"] * np.exp(-p["exponent"] * np.logaddexp(back, np.log(share)))
            loss = np.where(above > 0.0, np.minimum(moved, loss), loss)
            found[:, row] = loss
        return found

    def residuals(self, points: Floats, runs: _Runs) -> Floats:
        """(P, residuals): relative errors of all rounds seen, and the weak pull towards usual values."""
        errors = (self.trajectories(points, runs) - runs.losses) / runs.scale * runs.weight
        pulls = [strength * (points[:, i] - usual) for i, usual, strength in self.held]
        return np.concatenate([errors[:, runs.seen], np.array(pulls).T], axis=1)


# ---- fitting -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Solution:
    space: _Space
    point: Floats
    cost: float

    @property
    def curve(self) -> Exponential | Power:
        return self.space.curve(self.point)

    def predicted(self, runs: _Runs) -> Floats:
        found: Floats = self.space.trajectories(self.point[None], runs)[0]
        return found


def _solve(
    kind: str,
    runs: _Runs,
    start: Floats | None = None,
    tries: int = 50,
    like: _Solution | None = None,
) -> _Solution:
    """The best of several descents, or one from `start`; near `like` where the data leave it open."""
    space = _Space(kind, runs, like)

    def residuals(x: Floats) -> Floats:
        found: Floats = space.residuals(x[None], runs)[0]
        return found

    def jacobian(x: Floats) -> Floats:
        step = 1e-6 * np.maximum(np.abs(x), 0.1)
        step = np.where(x + step > space.high, -step, step)
        found = space.residuals(np.concatenate([x[None], x + np.diag(step)]), runs)
        return np.asarray(((found[1:] - found[0]) / step[:, None]).T)

    best: _Solution | None = None
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
            best = _Solution(space, result.x, float(result.cost))
    assert best is not None
    return best


@dataclass(frozen=True)
class _Family:
    kind: str
    error: float | None
    """Median relative error on the later rounds."""


def _families(observations: Mapping[str, Sequence[Observation]], weight: float) -> dict[str, _Family]:
    """The family of each version: its own where enough later rounds tell, else the reference's."""
    found: dict[str, _Family] = {}
    early_fits: dict[str, _Solution] = {}
    reference: str | None = None
    for name, rounds in observations.items():
        runs = _Runs.of(name, rounds, weight)
        early = runs.until(0.65)
        later = runs.seen & ~early.seen
        if early.seen.sum() < 4 or not later.any():
            kind = reference or min(CURVES, key=lambda kind, runs=runs: _solve(kind, runs).cost)  # type: ignore[misc]
            found[name], reference = _Family(kind, None), reference or kind
            continue
        errors = {}
        for kind in CURVES:
            solution = _solve(kind, early, like=early_fits.get(kind))
            early_fits.setdefault(kind, solution)
            errors[kind] = np.abs((solution.predicted(runs) - runs.losses) / runs.scale)[later]
        # The mean decides (it sees the few rounds that went far off), the median is what is told. In doubt it
        # is the power: its tail is long, while an exponential takes what was seen last for nearly the end.
        mean = {k: float(e.mean()) * (_DOUBT if k == "exponential" else 1.0) for k, e in errors.items()}
        kind = min(mean, key=mean.__getitem__)
        if reference is not None and later.sum() < _ENOUGH:
            kind = reference
        found[name], reference = _Family(kind, float(np.median(errors[kind]))), reference or kind
    return found


def _solve_all(
    observations: Mapping[str, Sequence[Observation]], weight: float, families: Mapping[str, _Family]
) -> dict[str, _Solution]:
    found: dict[str, _Solution] = {}
    for name, rounds in observations.items():
        like = next(iter(found.values()), None)
        found[name] = _solve(families[name].kind, _Runs.of(name, rounds, weight), like=like)
    return found


def _fit(solution: _Solution, error: float | None, runs: _Runs, drawn: Sequence[_Solution]) -> Fit:
    predicted = solution.predicted(runs)
    away = (runs.losses - predicted)[runs.seen]
    around = runs.losses[runs.seen] - runs.losses[runs.seen].mean()
    r2 = 1.0 - float((away**2).sum() / max(float((around**2).sum()), 1e-300))
    goodness = Goodness(int(runs.seen.sum()), len(runs.first), r2, error)
    return Fit(solution.curve, tuple(one.curve for one in drawn), goodness)


def _resampled(
    solution: _Solution, runs: _Runs, reference: Sequence[_Solution], seed: int, index: int
) -> _Solution:
    """A fit to the predicted losses plus residuals of all runs, in blocks: neighbouring rounds err together.

    Joint by index: the draws depend on the seed, the index and the runs' layout alone, so that versions whose
    pilots went side by side are disturbed alike; and a version leans on the reference's sample of that index.
    """
    rng = np.random.default_rng([seed, index])
    predicted = solution.predicted(runs)
    residual = np.where(runs.seen, (runs.losses - predicted) / runs.scale, 0.0)
    freedom = max(1, int(runs.seen.sum()) - len(solution.point))
    inflated = residual * np.sqrt(runs.seen.sum() / freedom)
    rounds, columns = residual.shape
    noise = np.zeros_like(residual)
    block = min(3, rounds)
    lengths = runs.seen.sum(axis=0)
    for column in range(columns):
        for row in range(0, rounds, block):
            source = int(rng.integers(columns))
            begin = int(rng.integers(max(1, int(lengths[source]) - block + 1)))
            sign = 1.0 if rng.random() < 0.5 else -1.0  # a fit leaves no bias to preserve
            piece = inflated[begin : begin + block, source][: rounds - row]
            noise[row : row + len(piece), column] = sign * piece
    losses = predicted + noise * runs.scale
    if runs.least >= 0.0:  # no noise makes a loss negative that cannot be
        losses = np.maximum(losses, 0.1 * predicted)
    disturbed = replace(runs, losses=np.where(runs.seen, losses, runs.losses))
    like = reference[index] if reference else None
    return _solve(solution.space.kind, disturbed, start=solution.point, tries=15, like=like)
