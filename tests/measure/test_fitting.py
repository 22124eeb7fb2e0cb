"""Curves from noisy trajectories that known curves made."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from takifugu.errors import DataError
from takifugu.measure.fitting import fit, fit_versions, predict
from takifugu.measure.space import Space
from takifugu.measure.trajectories import FRESH, SEEN, SWITCHED, Observation, Runs
from takifugu.plan.curves import Exponential, Power

EXPONENTIAL = Exponential(floor=0.3, data_gain=0.08, data_exponent=0.5, rate=0.35)
POWER = Power(floor=0.1, data_gain=0.05, data_exponent=0.6, scale=2.0, exponent=1.2)


def _observed(curve, shares=(1.0, 0.5, 0.25), rounds=14, noise=0.0, seed=0, first=2.3):
    rng = np.random.default_rng(seed)
    found = []
    for share in shares:
        true = [first, *predict(curve, first, [share] * rounds)]
        seen = [first, *(loss * (1 + noise * rng.standard_normal()) for loss in true[1:])]
        found += [Observation(f"{share}", r + 1, seen[r], seen[r + 1], share) for r in range(rounds)]
    return found


def _run(name, curve, shares, first, rounds_before=0, *, begins=SEEN, after="", seen_first=None, shown=0.0):
    """A run as a curve makes it. `seen_first`: the loss that is shown first; `shown`: what is added to others."""
    losses = [
        first if seen_first is None else seen_first,
        *(x + shown for x in predict(curve, first, shares)),
    ]
    return [
        Observation(name, r + 1, losses[r], losses[r + 1], share, 0.0, begins, after)
        for r, share in enumerate(shares)
    ]


@pytest.mark.parametrize("curve", [EXPONENTIAL, POWER], ids=lambda c: c.kind)
def test_hesitation_goes_into_the_start_and_not_into_the_curve(curve) -> None:
    """Three rounds at the first loss, then the curve: the fit is the curve's, and the start makes up for them."""
    losses = [2.3, 2.299, 2.298, 2.297, *predict(curve, 2.297, [1.0] * 20)]
    seen = [Observation("a", r, losses[r], losses[r + 1], 1.0, 0.0, FRESH) for r in range(23)]
    found = fit(seen, samples=0)
    start = found.begun.fresh
    assert 2.4 < start <= 4 * 2.3
    # The prompt start is far from the curve's; where the run goes on, they meet.
    told = predict(found.curve, start, [1.0] * 40)
    np.testing.assert_allclose(told[8:23], losses[9:], rtol=0.06)
    np.testing.assert_allclose(told[-1], predict(curve, 2.297, [1.0] * 37)[-1], rtol=0.1)
    # As a run that does not say what it begins with, it is cut, and the curve is the same as ever.
    plain = fit([Observation("a", o.round, o.loss_before, o.loss_after, 1.0) for o in seen], samples=0)
    assert plain.begun.fresh is None
    np.testing.assert_allclose(
        predict(plain.curve, 2.3, [1.0] * 40), predict(curve, 2.3, [1.0] * 40), rtol=0.05
    )


def test_what_a_switch_breaks_and_mends_at_once_is_no_jump() -> None:
    """Seen after the switch: far above; a round later it is where a jump of 0.05 would have led."""
    whole = [1.0] * 20
    dense = _run("warmup", POWER, [1.0] * 6, 2.3, begins=FRESH)
    warm = dense[-1].loss_after
    dense += _run("dense-0", POWER, whole, warm, after="warmup")
    low = Power(floor=0.14, data_gain=0.0, data_exponent=0.5, scale=2.0, exponent=1.1)
    alone = _run("low-fresh", low, [1.0] * 26, 2.3, begins=FRESH)
    branch = _run(
        "low-0", low, [1.0] * 12, warm + 0.05, begins=SWITCHED, after="warmup", seen_first=warm + 0.9
    )
    found = fit_versions({"dense": dense, "low": [*alone, *branch]}, samples=2)
    low_fit = found.versions["low"]
    assert low_fit.begun.switched - warm == pytest.approx(0.05, abs=0.04)
    start = found.versions["dense"].begun.fresh  # one for all versions
    assert 2.3 <= start < 3.5
    assert low_fit.begun.fresh is None
    told = predict(low_fit.curve, start, [1.0] * 40)
    np.testing.assert_allclose(told[2:], predict(low, 2.3, [1.0] * 40)[2:], rtol=0.05)
    # Where nothing was trained from the start, what was seen has to do.
    assert fit_versions({"dense": dense, "low": branch}, samples=0).versions["low"].begun.switched is None


def test_low_rank_from_the_start_arrives_when_it_did_though_a_plan_pays_a_jump_for_it() -> None:
    """A switch after the warm-up costs 0.5, and the fresh model has nothing to lose. A problem has one jump
    for both, so the curve has to make up for it: otherwise plans that begin low-rank look a tenth worse than they are."""
    true = {
        name: Exponential(floor, 0.0, 0.5, rate)
        for name, floor, rate in (("dense", 0.12, 0.165), ("low", 0.14, 0.15))
    }
    dense = _run("warmup", true["dense"], [1.0] * 6, 2.3, begins=FRESH)
    warm = dense[-1].loss_after
    dense += _run("dense-0", true["dense"], [1.0] * 20, warm, after="warmup")
    alone = _run("low-fresh", true["low"], [1.0] * 26, 2.3, begins=FRESH)
    branch = _run("low-0", true["low"], [1.0] * 12, warm + 0.5, begins=SWITCHED, after="warmup")
    found = fit_versions({"dense": dense, "low": [*alone, *branch]}, samples=0)
    start, fitted = found.versions["dense"].begun.fresh, found.versions["low"]
    jump = fitted.begun.switched - warm
    assert jump > 0.4
    told, shown = predict(fitted.curve, start + jump, [1.0] * 20), [one.loss_after for one in alone]
    np.testing.assert_allclose(told[2:], shown[2:20], rtol=0.06)
    told = predict(fitted.curve, warm + jump, [1.0] * 12)
    np.testing.assert_allclose(told, [one.loss_after for one in branch], rtol=0.06)


def test_a_small_team_is_worth_what_everyone_makes_of_it() -> None:
    """Its own rounds show a loss half as high again; those after the others have joined do not."""
    true = Power(floor=0.1, data_gain=0.03, data_exponent=0.5, scale=2.0, exponent=1.2)
    seen = _run("all", true, [1.0] * 25, 2.3, begins=FRESH)
    for team, share in (("half", 0.5), ("third", 0.3)):
        count = round(15 / share)
        seen += _run(team, true, [share] * count, 2.3, begins=FRESH, shown=0.25)
        there = predict(true, 2.3, [share] * count)[-1]
        seen += _run(f"{team}-joined", true, [1.0] * 4, there, after=team, seen_first=there + 0.25)
    found = fit(seen, samples=0)
    for shares in ([0.5] * 30 + [1.0] * 5, [0.3] * 40 + [1.0] * 3, [1.0] * 20):
        assert predict(found.curve, found.begun.fresh, shares)[-1] == pytest.approx(
            predict(true, 2.3, shares)[-1], rel=0.12
        )  # not nearer: a fifth of what the team shows counts on purpose (docs/decisions/205)
    # They are not what it is judged by, either.
    assert found.goodness.r2 > 0.98
    assert found.goodness.held_out_error < 0.08
    # Without the rounds together there is nothing else to go by, and the team looks worse than it is.
    without = fit([o for o in seen if not o.run.endswith("joined")], samples=0)
    shares = [0.3] * 40 + [1.0] * 3
    assert predict(without.curve, without.begun.fresh, shares)[-1] > 1.5 * predict(true, 2.3, shares)[-1]


def test_a_run_goes_on_where_another_ended() -> None:
    """In one piece or in two: the same losses are compared, once each."""
    shares = [0.4] * 10 + [1.0] * 5
    first = _run("a", POWER, shares[:10], 2.3, begins=FRESH)
    then = _run("b", POWER, shares[10:], first[-1].loss_after, after="a")
    runs = Runs.of("x", [*first, *then], 0.0)
    assert runs.seen.sum() == 15
    assert runs.losses.shape == (15, 2)
    np.testing.assert_allclose(runs.losses[:, 1], predict(POWER, 2.3, shares))
    assert runs.seen[:, 1].tolist() == [False] * 10 + [True] * 5
    assert runs.alone.tolist() == [True, False]
    assert (runs.begun(runs_begun := fit([*first, *then], samples=0).begun).first == runs_begun.fresh).all()


@pytest.mark.parametrize("curve", [EXPONENTIAL, POWER], ids=lambda c: c.kind)
def test_exact_trajectories_give_the_curve_back(curve) -> None:
    found = fit(_observed(curve, rounds=25), samples=0)
    assert found.curve.kind == curve.kind
    assert found.goodness.r2 > 0.9995  # the pulls on exponents are felt a little
    assert found.goodness.held_out_error < 0.01
    # Parameters trade off against each other; what matters is the prediction, also on an amount never seen.
    for share in (1.0, 0.7, 0.35):
        wanted = predict(curve, 2.0, [share] * 40)
        np.testing.assert_allclose(predict(found.curve, 2.0, [share] * 40), wanted, rtol=0.03)


@pytest.mark.parametrize("curve", [EXPONENTIAL, POWER], ids=lambda c: c.kind)
@pytest.mark.parametrize("seed", range(3))
def test_noisy_trajectories_predict_a_held_out_amount(curve, seed: int) -> None:
    found = fit(_observed(curve, noise=0.03, seed=seed), samples=0)
    wanted = predict(curve, 2.3, [0.35] * 14)
    # Where noise hides which family it is, a power is taken, for its long tail: there it costs a little.
    np.testing.assert_allclose(predict(found.curve, 2.3, [0.35] * 14), wanted, rtol=0.1)
    assert found.goodness.r2 > 0.97


def test_the_family_is_told_by_the_later_rounds() -> None:
    for curve in (EXPONENTIAL, Power(floor=0.02, data_gain=0.0, data_exponent=0.5, scale=2.0, exponent=0.6)):
        kinds = [fit(_observed(curve, rounds=30, noise=0.01, seed=s), samples=0).curve.kind for s in range(3)]
        assert kinds == [curve.kind] * 3


def test_a_round_gone_astray_has_not_the_last_word() -> None:
    rounds = _observed(EXPONENTIAL, noise=0.01)
    astray = [
        Observation(
            o.run,
            o.round,
            o.loss_before,
            o.loss_after * (6 if (o.run, o.round) == ("0.5", 9) else 1),
            o.share,
        )
        for o in rounds
    ]
    found = fit(astray, samples=0)
    np.testing.assert_allclose(
        predict(found.curve, 2.3, [1.0] * 14), predict(EXPONENTIAL, 2.3, [1.0] * 14), rtol=0.08
    )


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 1000),
    runs=st.integers(1, 3),
    rounds=st.integers(3, 8),
    offset=st.sampled_from([-2.0, 0.0]),
)
def test_whatever_is_observed_the_curve_is_allowed(seed: int, runs: int, rounds: int, offset: float) -> None:
    """Even noise without any trend gives a curve that a problem file may hold."""
    rng = np.random.default_rng(seed)
    seen = []
    for run in range(runs):
        losses = rng.uniform(0.05, 2.5, rounds + 1) + offset
        share = float(rng.uniform(0.1, 1.0))
        seen += [Observation(str(run), r, losses[r], losses[r + 1], share) for r in range(rounds)]
    found = fit(seen, samples=2)
    for curve in (found.curve, *found.samples):
        p = curve.parameters()
        assert type(curve) is type(found.curve)
        assert all(np.isfinite(v) for v in p.values())
        assert p["data_gain"] >= 0
        assert p["data_exponent"] >= 0
        assert p.get("rate", 1) > 0
        assert p.get("scale", 1) > 0
        assert 0.05 <= p.get("exponent", 1) <= 20


def test_one_amount_says_nothing_about_others() -> None:
    found = fit(_observed(EXPONENTIAL, shares=(1.0,)), samples=0)
    assert found.curve.data_gain == 0.0
    assert found.goodness.runs == 1


def test_the_vectorized_formulas_are_those_of_the_planner() -> None:
    parts = [0.25] * 4 + [1.0] * 3 + [0.5] * 2
    seen = [*_observed(POWER, rounds=6), *_run("parts", POWER, parts, 2.0)]
    runs = Runs.of("x", seen, 0.0)
    for kind in ("exponential", "power"):
        space = Space(kind, runs)
        points = np.array(list(space.starts()))
        together = space.trajectories(points, runs)
        for point, rows in zip(points, together, strict=True):
            curve = space.curve(point)
            for column in range(len(runs.first)):
                wanted = predict(curve, runs.first[column], runs.share[:, column])
                np.testing.assert_allclose(rows[:, column], wanted, rtol=1e-10)


def test_samples_spread_with_the_noise_and_are_reproducible() -> None:
    def spread(noise: float) -> float:
        found = fit(_observed(EXPONENTIAL, noise=noise), samples=12)
        assert found == fit(_observed(EXPONENTIAL, noise=noise), samples=12)
        return float(np.std([predict(c, 2.3, [0.5] * 20)[-1] for c in found.samples]))

    assert spread(0.05) > 2 * spread(0.005) > 0


def test_samples_usually_cover_the_truth() -> None:
    inside = 0
    for seed in range(6):
        found = fit(_observed(EXPONENTIAL, noise=0.03, seed=seed), samples=12)
        ends = sorted(predict(c, 2.3, [0.5] * 20)[-1] for c in found.samples)
        width = ends[-1] - ends[0]
        inside += ends[0] - 0.5 * width <= predict(EXPONENTIAL, 2.3, [0.5] * 20)[-1] <= ends[-1] + 0.5 * width
    assert inside >= 5


def test_the_label_weight_is_found_for_all_versions_together() -> None:
    def seen(curve, weight: float):
        found = []
        for run, (amount, tv) in enumerate([(1.0, 0.0), (0.5, 0.5), (0.5, 0.1), (0.3, 0.7), (0.25, 0.3)]):
            share = amount * (1 - weight * tv)
            losses = [2.3, *predict(curve, 2.3, [share] * 12)]
            found += [Observation(str(run), r, losses[r], losses[r + 1], amount, tv) for r in range(12)]
        return found

    for weight in (0.0, 0.5, 1.0):
        found = fit_versions({"dense": seen(EXPONENTIAL, weight), "low": seen(POWER, weight)}, samples=0)
        assert found.label_weight == weight
        assert set(found.versions) == {"dense", "low"}
    assert fit_versions({"dense": _observed(EXPONENTIAL)}, samples=0).label_weight == 0.0


def test_too_little_and_too_strange() -> None:
    with pytest.raises(DataError, match="2 observed rounds are too few"):
        fit(_observed(EXPONENTIAL, shares=(1.0,), rounds=2))
    with pytest.raises(DataError, match="run 'x', round 3 has a loss or share out of range"):
        fit([*_observed(EXPONENTIAL), Observation("x", 3, 1.0, float("nan"), 0.5)])
    with pytest.raises(DataError, match="out of range"):
        fit([*_observed(EXPONENTIAL), Observation("x", 3, 1.0, 1.0, 0.0)])
