"""Rank rules: from the matrices of a model to the rank each gets.

`Ratio`, `Fixed`, `Energy`, `StableRank` and `EVBMF` look at one matrix at a time; `Budget` spreads
a total over all of them; `ByPattern` chooses a rule by layer name. A rule is any object with the
`__call__` of `RankRule`; wherever a rank is asked for, a float means `Ratio`, an int `Fixed`, a
dict `ByPattern`.
"""

from __future__ import annotations

import fnmatch
import heapq
import math
import numbers
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from takifugu.errors import RankError, TakifuguWarning, near_misses
from takifugu.numbers import is_number

Spectrum = npt.NDArray[np.float64]
Unit = Literal["params", "macs", "bytes"]


@dataclass(frozen=True)
class Matrix:
    """`count` matrices (groups or gates) of size m x n that get one rank."""

    layer: str
    name: str
    m: int
    n: int
    count: int
    spectrum: Callable[[], Spectrum]
    """Singular values, descending, (count, min(m, n)); computed when asked for."""
    unit_cost: Mapping[Unit, float]
    """What one parameter of this matrix costs: 1 parameter, its applications per sample, its bytes."""
    macs_per_rank: float = 0.0
    """MACs of the factors, per rank, beyond those of their parameters."""

    def cost_per_rank(self, unit: Unit) -> float:
        beyond = self.macs_per_rank if unit == "macs" else 0.0
        return self.unit_cost[unit] * self.params_per_rank + beyond

    @property
    def limit(self) -> int:
        return min(self.m, self.n)

    @property
    def size(self) -> int:
        return self.count * self.m * self.n

    @property
    def params_per_rank(self) -> int:
        return self.count * (self.m + self.n)

    @property
    def label(self) -> str:
        return f"'{self.layer}'" if self.name == "weight" else f"'{self.layer}' ({self.name})"


Ranks = list[int | None]
"""One per matrix; None leaves the layer dense."""


class RankRule(ABC):
    """Maps all matrices that are up for choice to their ranks. `rest` is what everything else costs."""

    @abstractmethod
    def __call__(self, matrices: Sequence[Matrix], rest: Mapping[Unit, float]) -> Ranks: ...


class _OneByOne(RankRule):
    """A rule that looks at one matrix at a time; `multiple` rounds to what hardware likes."""

    multiple: int

    def __call__(self, matrices: Sequence[Matrix], rest: Mapping[Unit, float]) -> Ranks:
        return [_to_multiple(self.rank(matrix), self.multiple, matrix.limit) for matrix in matrices]

    @abstractmethod
    def rank(self, matrix: Matrix) -> int: ...

    def __post_init__(self) -> None:
        _check_multiple(self.multiple)


@dataclass(frozen=True)
class Ratio(_OneByOne):
    """A share of the full rank: `max(1, floor(ratio * min(m, n)))`. The paper's rule, with 0.25."""

    ratio: float
    multiple: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (is_number(self.ratio) and 0 < self.ratio <= 1):
            raise RankError(
                f"rank ratio {self.ratio!r} is not in (0, 1]; use a float like 0.25, or an int for a count"
            )

    def rank(self, matrix: Matrix) -> int:
        # The small addition keeps 0.1 * 30 from falling to 2.
        return max(1, math.floor(self.ratio * matrix.limit + 1e-9))


@dataclass(frozen=True)
class Fixed(_OneByOne):
    """The same rank for every matrix."""

    count: int
    multiple: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.count, bool) or not isinstance(self.count, int):
            raise RankError(f"rank {self.count!r} is not a whole number; use an int, or a ratio in (0, 1]")
        if self.count < 1:
            raise RankError(f"rank {self.count} is less than 1; use a positive int, or a ratio in (0, 1]")

    def rank(self, matrix: Matrix) -> int:
        if self.count > matrix.limit:
            raise RankError(
                f"rank {self.count} exceeds min({matrix.m}, {matrix.n}) for {matrix.label}; "
                f"use at most {matrix.limit} or leave the layer out with where="
            )
        return self.count


@dataclass(frozen=True)
class Energy(_OneByOne):
    """The least rank that keeps a share of the squared singular values."""

    kept: float
    multiple: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (is_number(self.kept) and 0 < self.kept <= 1):
            raise RankError(f"energy kept {self.kept!r} is not in (0, 1]; use a share like 0.9")

    def rank(self, matrix: Matrix) -> int:
        energy = (matrix.spectrum() ** 2).sum(axis=0)
        reached = np.cumsum(energy) >= self.kept * energy.sum() * (1 - 1e-12)
        return int(np.argmax(reached)) + 1


@dataclass(frozen=True)
class StableRank(_OneByOne):
    """`||W||_F^2 / ||W||_2^2`, rounded up: Cuttlefish's rank; of several gates or groups the largest.

    `scales`, by "layer/matrix", go on top of `scale`: what makes a layer full rank when training starts.
    """

    scale: float = 1.0
    multiple: int = 1
    scales: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (is_number(self.scale) and self.scale > 0):
            raise RankError(f"scale {self.scale!r} of the stable rank must be positive")

    def rank(self, matrix: Matrix) -> int:
        energy = matrix.spectrum() ** 2
        largest = energy[:, 0]
        stable = np.where(largest > 0, energy.sum(axis=1) / np.where(largest > 0, largest, 1), 1.0)
        scale = self.scale * self.scales.get(f"{matrix.layer}/{matrix.name}", 1.0)
        return min(matrix.limit, max(1, math.ceil(scale * float(stable.max()) - 1e-9)))


@dataclass(frozen=True)
class EVBMF(_OneByOne):
    """The rank that stands out of the noise, by empirical variational Bayes.

    The analytic solution of Nakajima, Sugiyama, Babacan and Tomioka (JMLR 14, 2013): singular
    values above a threshold are signal; the noise variance is the one that maximizes the evidence.
    """

    multiple: int = 1

    def rank(self, matrix: Matrix) -> int:
        ranks = [_evbmf_rank(s, matrix.limit, max(matrix.m, matrix.n)) for s in matrix.spectrum()]
        return max(1, *ranks)


@dataclass(frozen=True)
class Budget(RankRule):
    """A total for the whole model, in parameters, MACs or bytes, spread where it keeps most.

    An int is an amount, a float in (0, 1] a share of what the dense model costs. Every matrix starts
    at rank `least`; then the rank that keeps the largest share of its layer's energy per unit of cost is
    added, again and again. A matrix whose factors reach the dense weight's cost may go dense.
    """

    params: float | None = None
    macs: float | None = None
    bytes: float | None = None
    multiple: int = 1
    least: int = 1

    def __post_init__(self) -> None:
        given = {unit: v for unit in ("params", "macs", "bytes") if (v := getattr(self, unit)) is not None}
        if len(given) != 1:
            raise RankError("a budget takes exactly one of params=, macs= or bytes=")
        (unit, amount), *_ = given.items()
        if not is_number(amount) or amount <= 0:
            raise RankError(f"budget {unit}={amount!r} must be positive")
        if isinstance(amount, float) and amount > 1 and not amount.is_integer():
            raise RankError(f"budget {unit}={amount!r}: use an int for an amount, a float for a share")
        _check_multiple(self.multiple)
        if isinstance(self.least, bool) or not isinstance(self.least, int) or self.least < 1:
            raise RankError(f"least={self.least!r} must be a positive int")

    def start(self, matrix: Matrix) -> int:
        """Return the rank a matrix starts at: the first multiple from `least` on, at most the full rank."""
        return min(-(-self.least // self.multiple) * self.multiple, matrix.limit)

    def affords(self, matrix: Matrix, least: int) -> bool:
        """Return whether factors of rank `least` exist and cost no more than the dense matrix."""
        start = replace(self, least=max(self.least, least)).start(matrix)
        return least == 1 or (start >= least and start * matrix.params_per_rank <= matrix.size)

    @property
    def unit(self) -> Unit:
        return "params" if self.params is not None else "macs" if self.macs is not None else "bytes"

    def __call__(self, matrices: Sequence[Matrix], rest: Mapping[Unit, float]) -> Ranks:
        unit = self.unit
        price = [matrix.cost_per_rank(unit) for matrix in matrices]
        dense = [matrix.unit_cost[unit] * matrix.size for matrix in matrices]
        total = self._total(rest[unit] + sum(dense))
        ranks = [self.start(matrix) for matrix in matrices]
        spent = rest[unit] + sum(cost * rank for cost, rank in zip(price, ranks, strict=True))
        if spent > total:
            raise RankError(
                f"budget {unit}={total:,.0f} cannot be met: the rest of the model and the least ranks "
                f"already need {spent:,.0f}; raise the budget, or let more layers take part with where="
                + ("" if self.least == 1 else f" (by default the least rank is {self.least})")
            )
        energy = [_relative_energy(matrix) for matrix in matrices]
        # Factors that would cost more than the dense weight are never chosen.
        ceiling = [
            max(rank, min(matrix.limit, matrix.size // matrix.params_per_rank))
            for rank, matrix in zip(ranks, matrices, strict=True)
        ]

        def offer(index: int) -> tuple[float, int, int] | None:
            """The next step for a matrix: (minus energy per cost, index, ranks to add)."""
            step = min(self.multiple, ceiling[index] - ranks[index])
            if step <= 0:
                return None
            gain = float(energy[index][ranks[index] : ranks[index] + step].sum())
            return -gain / (price[index] * step), index, step

        offers = [o for o in map(offer, range(len(matrices))) if o is not None]
        heapq.heapify(offers)
        while offers:
            _, index, step = heapq.heappop(offers)
            cost = price[index] * step
            if spent + cost > total:
                continue  # a cheaper matrix may still fit
            ranks[index] += step
            spent += cost
            following = offer(index)
            if following is not None:
                heapq.heappush(offers, following)
        return self._dense_where_affordable(matrices, ranks, ceiling, price, dense, total - spent)

    def _total(self, dense_total: float) -> float:
        amount = {"params": self.params, "macs": self.macs, "bytes": self.bytes}[self.unit]
        assert amount is not None
        is_share = isinstance(amount, float) and amount <= 1
        return amount * dense_total if is_share else float(amount)

    @staticmethod
    def _dense_where_affordable(
        matrices: Sequence[Matrix],
        ranks: list[int],
        ceiling: list[int],
        price: list[float],
        dense: list[float],
        left: float,
    ) -> Ranks:
        """Layers all of whose matrices are at the ceiling go dense while the remainder lasts."""
        chosen: Ranks = list(ranks)
        layers: dict[str, list[int]] = {}
        for index, matrix in enumerate(matrices):
            layers.setdefault(matrix.layer, []).append(index)
        for members in layers.values():
            extra = sum(dense[i] - price[i] * ranks[i] for i in members)
            if all(ranks[i] >= ceiling[i] for i in members) and extra <= left:
                left -= max(extra, 0.0)
                for i in members:
                    chosen[i] = None
        return chosen


class ByPattern(RankRule):
    """A rule by layer name: the first pattern that matches decides; a layer none matches stays dense."""

    def __init__(self, rules: Mapping[str, Any]) -> None:
        if not rules:
            raise RankError("an empty dict of ranks; give at least one pattern, such as {'*': 0.25}")
        self.rules = {pattern: rule_for(rank) for pattern, rank in rules.items()}

    def __call__(self, matrices: Sequence[Matrix], rest: Mapping[Unit, float]) -> Ranks:
        ranks: Ranks = [None] * len(matrices)
        taken = [self._pattern(matrix.layer) for matrix in matrices]
        names = list(dict.fromkeys(matrix.layer for matrix in matrices))
        for pattern, rule in self.rules.items():
            members = [index for index, choice in enumerate(taken) if choice == pattern]
            if not members:
                if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
                    raise RankError(f"rank pattern {pattern!r} matches no layer{near_misses(pattern, names)}")
                continue
            others = [m for index, m in enumerate(matrices) if index not in set(members)]
            beside = {unit: rest[unit] + sum(m.size * m.unit_cost[unit] for m in others) for unit in rest}
            for index, rank in zip(members, rule([matrices[i] for i in members], beside), strict=True):
                ranks[index] = rank
        return ranks

    def _pattern(self, layer: str) -> str | None:
        return next((pattern for pattern in self.rules if fnmatch.fnmatchcase(layer, pattern)), None)

    def __repr__(self) -> str:
        return f"ByPattern({self.rules!r})"


def rule_of(rule: RankRule, layer: str) -> RankRule | None:
    """Return the rule that decides about this layer; None if no pattern matches it."""
    if not isinstance(rule, ByPattern):
        return rule
    pattern = rule._pattern(layer)
    return None if pattern is None else rule_of(rule.rules[pattern], layer)


def follows_from_shapes(rule: RankRule) -> bool:
    """Return whether the rule looks at shapes only, so that its ranks are known before training."""
    if isinstance(rule, ByPattern):
        return all(map(follows_from_shapes, rule.rules.values()))
    return isinstance(rule, Ratio | Fixed)


def with_least(rule: RankRule, least: int) -> RankRule:
    """Return the rule with every budget's smallest rank raised to `least`."""
    if isinstance(rule, ByPattern):
        return ByPattern({pattern: with_least(part, least) for pattern, part in rule.rules.items()})
    return replace(rule, least=max(rule.least, least)) if isinstance(rule, Budget) else rule


_NAMED: dict[str, Callable[[], RankRule]] = {"stable": StableRank, "evbmf": EVBMF}


def rule_for(rank: Any) -> RankRule:
    """The rule a user's `rank=` means."""
    if isinstance(rank, RankRule):
        return rank
    if isinstance(rank, bool):
        raise RankError(f"rank={rank} is a bool; rank=1 is one, rank=1.0 is full rank")
    if isinstance(rank, numbers.Integral):
        if rank == 1:
            warnings.warn(
                "rank=1 is a rank of one; use rank=1.0 for the full rank, or ranks.Fixed(1) if one is meant",
                TakifuguWarning,
                stacklevel=4,  # the caller of factorize_ or choose
            )
        return Fixed(int(rank))
    if isinstance(rank, numbers.Real):
        return Ratio(float(rank))
    if isinstance(rank, Mapping):
        return ByPattern(rank)
    if isinstance(rank, str):
        return _from_text(rank)
    raise RankError(
        f"rank={rank!r} is a {type(rank).__name__}; use a float ratio, an int, a rule of "
        "takifugu.ranks, or a dict from layer-name pattern to any of these"
    )


def _from_text(text: str) -> RankRule:
    """Rules as they are written on a command line: 0.25, 64, stable, evbmf, energy:0.9, params:0.3."""
    name, _, argument = text.partition(":")
    try:
        if not argument and name in _NAMED:
            return _NAMED[name]()
        if argument and name == "energy":
            return Energy(float(argument))
        if argument and name in ("params", "macs", "bytes"):
            return Budget(**{name: _number(argument)})  # type: ignore[arg-type]
        return rule_for(_number(text))
    except ValueError:
        raise RankError(
            f"rank {text!r} is not understood; use 0.25, 64, stable, evbmf, energy:0.9, params:0.3, "
            "macs:0.5 or bytes:4000000"
        ) from None


def _number(text: str) -> int | float:
    return int(text) if text.lstrip("+-").isdigit() else float(text)


def _check_multiple(multiple: int) -> None:
    if isinstance(multiple, bool) or not isinstance(multiple, int) or multiple < 1:
        raise RankError(f"multiple={multiple!r} must be a positive int")


def _to_multiple(rank: int, multiple: int, limit: int) -> int:
    """The nearest multiple, at least one of them, at most the full rank."""
    if multiple == 1:
        return rank
    return min(limit, max(1, round(rank / multiple)) * multiple)


def _relative_energy(matrix: Matrix) -> Spectrum:
    energy: Spectrum = (matrix.spectrum() ** 2).sum(axis=0)
    return energy / max(float(energy.sum()), np.finfo(np.float64).tiny)


def _evbmf_rank(s: Spectrum, L: int, M: int) -> int:
    """Legend as in the paper: L <= M the sides, alpha = L/M, x the scaled squared singular values."""
    from scipy.optimize import minimize_scalar

    energy = s**2
    if energy.sum() <= 0:
        return 1
    alpha = L / M
    tau_bar = 2.5129 * math.sqrt(alpha)
    x_bar = (1 + tau_bar) * (1 + alpha / tau_bar)

    def negative_evidence(log_variance: float) -> float:
        # The paper's psi_0 + psi_1; log(variance) is in it through log(x).
        variance = math.exp(log_variance)
        x = energy / (M * variance)
        signal, noise = x[x > x_bar], np.maximum(x[x <= x_bar], 1e-300)
        tau = 0.5 * (signal - (1 + alpha) + np.sqrt((signal - (1 + alpha)) ** 2 - 4 * alpha))
        return float(
            np.sum(noise - np.log(noise))
            + np.sum(signal - tau)
            + np.sum(np.log((tau + 1) / signal))
            + alpha * np.sum(np.log(tau / alpha + 1))
        )

    # At most `most` components can stand out; the others bound the noise from below.
    most = max(0, min(math.ceil(L / (1 + alpha)) - 1, L - 1))
    highest = energy.sum() / (L * M)
    lowest = max(energy[most] / (M * x_bar), energy[most:].mean() / M, highest * 1e-12)
    if lowest >= highest:
        variance = highest
    else:
        found = minimize_scalar(
            negative_evidence, bounds=(math.log(lowest), math.log(highest)), method="bounded"
        )
        variance = math.exp(found.x)
    return max(1, int(np.sum(s > math.sqrt(M * variance * x_bar))))
