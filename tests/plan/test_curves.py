"""The three properties that every guarantee rests on."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from takifugu.plan.curves import CURVES, Curve, Exponential, FlowCurve, Power, make, step_one

share = st.floats(0.001, 1.0)
loss = st.floats(0.0, 20.0)
common = {
    "floor": st.floats(0.0, 1.0),
    "data_gain": st.one_of(st.just(0.0), st.floats(0.0, 2.0)),
    "data_exponent": st.floats(0.0, 3.0),
}
exponential = st.fixed_dictionaries({**common, "rate": st.floats(0.01, 10.0)}).map(
    lambda p: make("exponential", p)
)
power = st.fixed_dictionaries(
    {**common, "scale": st.floats(0.01, 10.0), "exponent": st.floats(0.05, 20.0)}
).map(lambda p: make("power", p))
curve = st.one_of(exponential, power)


def step(c: Curve, x: float, s: float) -> float:
    return float(c.step(np.float64(x), np.float64(s)))  # type: ignore[arg-type]


@settings(max_examples=400, deadline=None)
@given(curve, loss, loss, share)
def test_monotone_and_non_expansive(c: Curve, a: float, b: float, s: float) -> None:
    low, high = sorted((a, b))
    after = step(c, high, s) - step(c, low, s)
    assert after >= -1e-12 * max(high, 1)
    assert after <= (high - low) + 1e-9 * max(high, 1)


@settings(max_examples=400, deadline=None)
@given(curve, loss, share, share)
def test_more_data_never_hurts(c: Curve, x: float, s: float, t: float) -> None:
    less, more = sorted((s, t))
    assert step(c, x, more) <= step(c, x, less) + 1e-12 * max(x, 1)


@settings(max_examples=300, deadline=None)
@given(curve, loss, share)
def test_a_round_never_raises_the_loss_and_stops_at_the_asymptote(c: FlowCurve, x: float, s: float) -> None:
    a = float(c.asymptote(np.asarray(s)))  # type: ignore[attr-defined]
    after = step(c, x, s)
    assert after <= x
    if x <= a:
        assert after == x
    else:
        assert after >= a - 1e-12 * max(abs(a), 1)


@settings(max_examples=400, deadline=None)
@given(curve, loss, st.one_of(share, st.just(0.0), st.floats(1e-300, 1e-3)))
def test_one_number_or_many_it_is_the_same_round(c: Curve, x: float, s: float) -> None:
    assert step_one(c, x, s) == pytest.approx(step(c, x, s), rel=1e-12, abs=1e-300)


def test_a_curve_needs_no_quick_way() -> None:
    class Halves:
        def step(self, loss: np.ndarray, share: np.ndarray) -> np.ndarray:
            return np.asarray(loss * 0.5**share)

    assert step_one(Halves(), 2.0, 1.0) == 1.0


@settings(max_examples=300, deadline=None)
@given(curve, st.floats(0.1, 10.0), st.floats(0.1, 10.0), share)
def test_rounds_are_concave_in_the_loss(c: Exponential | Power, x: float, y: float, s: float) -> None:
    assert c.concave_in_loss
    middle, ends = step(c, 0.5 * (x + y), s), 0.5 * (step(c, x, s) + step(c, y, s))
    assert middle >= ends * (1 - 1e-9)


@settings(max_examples=150, deadline=None)
@given(curve, st.floats(0.1, 10.0), share)
def test_a_round_is_the_time_one_flow_of_its_speed(c: FlowCurve, x: float, s: float) -> None:
    """Many small Euler steps of `speed` arrive where `step` does."""
    y, steps = x, 1000
    for _ in range(steps):
        y -= float(c.speed(np.float64(y), np.float64(s))) / steps  # type: ignore[arg-type]
    start = float(c.speed(np.float64(x), np.float64(s)))  # type: ignore[arg-type]
    if start < 50:  # Euler is too coarse for steeper starts
        assert y == pytest.approx(step(c, x, s), abs=0.02 * max(x - step(c, x, s), 1e-3))


@settings(max_examples=300, deadline=None)
@given(curve, st.floats(0.05, 10.0), st.tuples(share, share, share))
def test_speed_is_convex_in_data_where_it_says_so(c: FlowCurve, x: float, parts: tuple[float, ...]) -> None:
    low, middle, high = sorted(parts)
    if not c.convex_in_data or high - low < 1e-6:
        return
    f = [float(c.speed(np.float64(x), np.float64(s))) for s in (low, middle, high)]  # type: ignore[arg-type]
    chord = f[0] + (f[2] - f[0]) * (middle - low) / (high - low)
    assert f[1] <= chord + 1e-9 * max(chord, 1e-9)


def test_formulas_by_hand() -> None:
    c = make("exponential", {"floor": 0.2, "rate": 0.9, "data_gain": 0.05})
    a = 0.2 + 0.05 * (2**0.5 - 1)
    assert step(c, 2.3, 0.5) == pytest.approx(a + (2.3 - a) * np.exp(-0.45))
    c = make("power", {"floor": 0.1, "scale": 2.0, "exponent": 0.5})
    assert step(c, 1.1, 1.0) == pytest.approx(0.1 + 2 * ((0.5) ** -2 + 1) ** -0.5)


def test_registry_lists_both() -> None:
    assert set(CURVES) == {"exponential", "power"}
