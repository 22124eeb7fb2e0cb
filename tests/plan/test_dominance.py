import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from takifugu.plan.dominance import undominated


def by_definition(rows: list[tuple[int, int, int]]) -> list[int]:
    def beats(i: int, j: int) -> bool:
        le = all(x <= y for x, y in zip(rows[i], rows[j], strict=True))
        return le and (rows[i] != rows[j] or i < j)

    return [j for j in range(len(rows)) if not any(beats(i, j) for i in range(len(rows)) if i != j)]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6), st.integers(0, 6)), max_size=60))
def test_matches_the_definition(rows: list[tuple[int, int, int]]) -> None:
    columns = np.array(rows, dtype=float).reshape(-1, 3).T
    assert undominated(*columns).tolist() == by_definition(rows)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.just(3), st.integers(0, 9), st.integers(0, 9)), min_size=60, max_size=90))
def test_many_equal_ones_are_sorted_otherwise(rows: list[tuple[int, int, int]]) -> None:
    assert undominated(*np.array(rows, dtype=float).T).tolist() == by_definition(rows)


def test_large_fronts_take_the_sweep() -> None:
    """Rows near a plane: most of them survive, so that the staircase itself is at work."""
    rng = np.random.default_rng(0)
    points = rng.integers(0, 60, (1400, 2))
    rows = [
        (int(a), int(b), int(130 - a - b + noise))
        for (a, b), noise in zip(points, rng.integers(0, 3, 1400), strict=True)
    ]
    columns = np.array(rows, dtype=float).T
    kept = undominated(*columns).tolist()
    assert kept == by_definition(rows)
    assert len(kept) > 300
