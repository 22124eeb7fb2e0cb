from __future__ import annotations

import numpy as np
import pytest
from benchmarks.plan_instances import instance

from takifugu.plan.compiled import trails
from takifugu.plan.curves import Exponential, Power, step_one
from takifugu.plan.parts import Parts
from takifugu.plan.plan import meets_limits, replay
from takifugu.plan.prices import around
from takifugu.plan.rollout import Guideposts
from takifugu.plan.values import Terrain


@pytest.mark.parametrize("seed", [4, 12, 60, 63])
def test_compiled_or_not_the_same_plans_are_found(seed: int) -> None:
    """Labels, parts, idle power, caps and switches both ways among them; one by one in Python is the oracle."""
    problem = instance(seed)
    assert all(node.available is None for node in problem.nodes)
    parts = Parts(problem)
    values = around(Terrain(problem, parts.offers, 120), parts.prices).values
    quick, slow = (Guideposts(problem, parts.families, values) for _ in range(2))
    assert quick._quick is not None
    slow._quick = None
    found = 0
    for caution in (0.0, 0.002, 0.012, 0.08):
        ours, theirs = quick.follow(caution), slow.follow(caution)
        assert (ours is None) == (theirs is None)
        if ours is None or theirs is None:
            continue
        found += 1
        assert [(r.version, r.row) for r in ours.rounds] == [(r.version, r.row) for r in theirs.rounds]
        assert ours.energy_j == pytest.approx(theirs.energy_j, rel=1e-12)
        plan = replay(problem, ours.decisions())
        assert plan is not None
        assert meets_limits(problem, plan)
        assert plan.energy_j == pytest.approx(ours.energy_j)
        assert plan.time_s == pytest.approx(ours.time_s)
        assert [r.loss for r in plan.rounds] == pytest.approx([r.loss for r in ours.rounds])
    assert found


def test_one_round_is_that_of_the_curves() -> None:
    rng = np.random.default_rng(0)
    for _ in range(300):
        floor, gain, exponent = rng.uniform(0.0, 0.4), rng.choice([0.0, 0.1]), rng.uniform(0.1, 2.0)
        loss, share = float(rng.uniform(0.0, 3.0)), float(rng.choice([0.0, 1e-9, rng.uniform()]))
        for curve in (
            Exponential(floor, gain, exponent, rate=float(rng.uniform(0.01, 5.0))),
            Power(
                floor,
                gain,
                exponent,
                scale=float(rng.uniform(0.1, 9.0)),
                exponent=float(rng.uniform(0.05, 20)),
            ),
        ):
            power = isinstance(curve, Power)
            pace = curve.scale if isinstance(curve, Power) else curve.rate
            with np.errstate(divide="ignore"):
                lowest = float(curve.asymptote(np.array([share]))[0])
            told = trails.after_round(power, pace, curve.exponent if power else 1.0, loss, share, lowest)
            assert told == pytest.approx(step_one(curve, loss, share), rel=1e-12, abs=1e-15)


def test_many_rounds_are_those_of_the_curves() -> None:
    loss, share = np.linspace(0.05, 3.0, 40), np.concatenate([[0.0, 1e-9], np.linspace(0.01, 1.0, 30)])
    for curve in (Exponential(0.2, 0.05, 0.5, rate=0.8), Power(0.2, 0.05, 0.5, scale=2.0, exponent=0.7)):
        power = isinstance(curve, Power)
        pace = curve.scale if isinstance(curve, Power) else curve.rate
        with np.errstate(divide="ignore"):
            lowest = curve.asymptote(share)
        told = trails.after_rounds(power, pace, 0.7 if power else 1.0, loss, share, lowest)
        one_by_one = [[step_one(curve, float(a), float(x)) for x in share] for a in loss]
        np.testing.assert_allclose(told, one_by_one, rtol=1e-12)
