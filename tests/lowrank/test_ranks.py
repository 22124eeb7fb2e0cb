from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from takifugu.errors import RankError
from takifugu.lowrank.ranks import EVBMF, Budget, Energy, Fixed, Matrix, Ratio, StableRank, rule_for

NOTHING = {"params": 0.0, "macs": 0.0, "bytes": 0.0}


def matrix(
    m: int, n: int, s: object = None, layer: str = "layer", count: int = 1, macs: float = 1.0
) -> Matrix:
    values = np.ones((count, min(m, n))) if s is None else np.atleast_2d(np.asarray(s, dtype=float))
    return Matrix(layer, "weight", m, n, count, lambda: values, {"params": 1.0, "macs": macs, "bytes": 4.0})


def rank(rule: object, *matrices: Matrix, rest: float = 0.0) -> list[int | None]:
    return rule_for(rule)(list(matrices), {"params": rest, "macs": rest, "bytes": rest})


@pytest.mark.parametrize(
    ("ratio", "m", "n", "expected"),
    [
        (0.25, 512, 4608, 128),
        (0.25, 3, 100, 1),
        (0.1, 30, 30, 3),
        (1.0, 7, 5, 5),
        (0.25, 2, 2, 1),
        (0.3, 10, 20, 3),
    ],
)
def test_ratio_counts_as_the_paper_does(ratio: float, m: int, n: int, expected: int) -> None:
    assert rank(ratio, matrix(m, n)) == [expected]


@settings(max_examples=100, deadline=None)
@given(s=st.lists(st.floats(0, 10), min_size=1, max_size=12), kept=st.floats(0.01, 1.0))
def test_energy_is_the_least_rank_that_keeps_enough(s: list[float], kept: float) -> None:
    s = sorted(s, reverse=True)
    (r,) = rank(Energy(kept), matrix(len(s), len(s), s))
    energy = np.square(s)
    assert energy[:r].sum() >= kept * energy.sum() * (1 - 1e-9)
    assert r == 1 or energy[: r - 1].sum() < kept * energy.sum()


def test_stable_rank() -> None:
    assert rank("stable", matrix(4, 4, [2, 2, 2, 2])) == [4]
    assert rank("stable", matrix(4, 4, [2, 0, 0, 0])) == [1]
    assert rank("stable", matrix(4, 4, [2, 1, 1, 0])) == [2]  # (4 + 1 + 1) / 4 = 1.5, rounded up
    assert rank(StableRank(scale=2.0), matrix(4, 4, [2, 1, 1, 0])) == [3]
    assert rank("stable", matrix(2, 2, [[1, 0], [1, 1]], count=2)) == [2]  # of two gates the larger
    assert rank("stable", matrix(3, 3, [0, 0, 0])) == [1]


@pytest.mark.parametrize("true_rank", [1, 5, 20])
@pytest.mark.parametrize("shape", [(60, 60), (60, 200)])
def test_evbmf_finds_the_rank_under_noise(true_rank: int, shape: tuple[int, int]) -> None:
    generator = np.random.default_rng(0)
    signal = generator.normal(size=(shape[0], true_rank)) @ generator.normal(size=(true_rank, shape[1]))
    W = signal + 0.3 * generator.normal(size=shape)
    assert rank(EVBMF(), matrix(*shape, np.linalg.svd(W, compute_uv=False))) == [true_rank]


def test_evbmf_sees_nothing_in_noise() -> None:
    W = np.random.default_rng(0).normal(size=(50, 120))
    assert rank("evbmf", matrix(50, 120, np.linalg.svd(W, compute_uv=False))) == [1]
    assert rank("evbmf", matrix(5, 5, np.zeros(5))) == [1]


@pytest.mark.parametrize(("multiple", "expected"), [(1, 25), (8, 24), (16, 32), (64, 64), (128, 100)])
def test_rounding_to_a_multiple_stays_within_the_limit(multiple: int, expected: int) -> None:
    assert rank(Ratio(0.25, multiple=multiple), matrix(100, 300)) == [expected]


@settings(max_examples=100, deadline=None)
@given(
    data=st.data(),
    share=st.floats(0.15, 1.0),
    multiple=st.sampled_from([1, 4]),
    unit=st.sampled_from(["params", "macs", "bytes"]),
)
def test_a_budget_is_kept_and_used(data: st.DataObject, share: float, multiple: int, unit: str) -> None:
    sizes = data.draw(st.lists(st.tuples(st.integers(8, 40), st.integers(8, 40)), min_size=1, max_size=5))
    matrices = [
        matrix(
            m, n, np.sort(np.random.default_rng(i).exponential(size=min(m, n)))[::-1], f"l{i}", macs=1.0 + i
        )
        for i, (m, n) in enumerate(sizes)
    ]
    rest = 37.0
    dense = rest + sum(m.size * m.unit_cost[unit] for m in matrices)
    try:
        ranks = rank(Budget(**{unit: share}, multiple=multiple), *matrices, rest=rest)
    except RankError as error:
        assert "cannot be met" in str(error)
        least = rest + sum(m.params_per_rank * min(multiple, m.limit) * m.unit_cost[unit] for m in matrices)
        assert least > share * dense
        return
    cost = [m.size if r is None else r * m.params_per_rank for m, r in zip(matrices, ranks, strict=True)]
    priced = [c * m.unit_cost[unit] for c, m in zip(cost, matrices, strict=True)]
    assert rest + sum(priced) <= share * dense * (1 + 1e-12)
    # Used up: no factorized matrix below break-even could still take its next step.
    left = share * dense - rest - sum(priced)
    for m, r in zip(matrices, ranks, strict=True):
        if r is not None and r + multiple <= m.size // m.params_per_rank:
            assert multiple * m.params_per_rank * m.unit_cost[unit] > left


def test_a_budget_goes_where_the_energy_is() -> None:
    flat, steep = matrix(40, 40, np.ones(40), "flat"), matrix(40, 40, 0.3 ** np.arange(40), "steep")
    ranks = rank(Budget(params=1600), flat, steep)
    assert ranks[0] > ranks[1] * 2


def test_a_budget_of_everything_leaves_all_dense() -> None:
    assert rank(Budget(params=1.0), matrix(10, 10, layer="a"), matrix(8, 8, layer="b")) == [None, None]


def test_patterns_first_match_decides() -> None:
    rule = rule_for({"layers.0.*": 2, "layers.*": 0.5, "*.fc": Fixed(3)})
    names = ["layers.0.fc", "layers.1.fc", "head.fc", "other"]
    assert rule([matrix(10, 10, layer=name) for name in names], NOTHING) == [2, 5, 3, None]


def test_a_budget_by_pattern_counts_the_others_as_they_are() -> None:
    a, b = matrix(20, 20, layer="a"), matrix(20, 20, layer="b")
    ranks = rank({"a": Budget(params=500), "b": 0.5}, a, b)  # b's 400 dense parameters count
    assert ranks == [2, 10]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (0, "rank 0 is less than 1"),
        (-3, "rank -3 is less than 1"),
        (True, "rank=True is a bool; rank=1 is one, rank=1.0 is full rank"),
        (0.0, r"rank ratio 0.0 is not in \(0, 1\]"),
        (1.5, r"rank ratio 1.5 is not in \(0, 1\]"),
        (math.nan, "rank ratio nan"),
        (math.inf, "rank ratio inf"),
        ("fast", "rank 'fast' is not understood"),
        (None, "rank=None is a NoneType"),
        ({}, "an empty dict of ranks"),
        ({"nothing": 2}, "rank pattern 'nothing' matches no layer"),
        (11, r"rank 11 exceeds min\(10, 12\) for 'layer'; use at most 10 or leave the layer out with where="),
    ],
)
def test_bad_ranks(bad: object, message: str) -> None:
    with pytest.raises(RankError, match=message):
        rank(bad, matrix(10, 12))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Budget(), "exactly one of"),
        (lambda: Budget(params=0.5, macs=0.5), "exactly one of"),
        (lambda: Budget(params=-1), "must be positive"),
        (lambda: Budget(params=1.5), "use an int for an amount"),
        (lambda: Ratio(0.5, multiple=0), "multiple=0 must be a positive int"),
        (lambda: Ratio(0.5, multiple=2.5), "multiple=2.5 must be a positive int"),
        (lambda: Fixed(2.5), "rank 2.5 is not a whole number"),
        (lambda: Fixed(True), "rank True is not a whole number"),
        (lambda: Ratio("x"), "rank ratio 'x' is not in"),
        (lambda: Energy(None), "energy kept None"),
        (lambda: Budget(params="1"), "budget params='1' must be positive"),
        (lambda: Energy(0.0), "energy kept 0.0"),
        (lambda: StableRank(scale=0.0), "scale 0.0"),
    ],
)
def test_bad_rules(make, message: str) -> None:
    with pytest.raises(RankError, match=message):
        make()


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0.25", Ratio(0.25)), ("64", Fixed(64)), ("stable", StableRank()), ("evbmf", EVBMF()), ("energy:0.9", Energy(0.9)),
     ("params:0.3", Budget(params=0.3)), ("bytes:4000000", Budget(bytes=4_000_000)), ("1.0", Ratio(1.0))],
)  # fmt: skip
def test_rules_as_text(text: str, expected: object) -> None:
    assert rule_for(text) == expected
