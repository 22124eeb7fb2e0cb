"""Prices of time, rounds and labels: none of them is part of a proof, all of them make bounds close."""

import numpy as np
import pytest
from benchmarks.plan_instances import instance

from takifugu.plan import parts as module
from takifugu.plan import relaxation
from takifugu.plan.curves import Floats
from takifugu.plan.label_prices import cheapest_rounds
from takifugu.plan.parts import Parts
from takifugu.plan.prices import around, search
from takifugu.plan.relaxation import round_multipliers
from takifugu.plan.rounds import Prices
from takifugu.plan.values import Terrain


def test_both_prices_are_looked_for_together() -> None:
    """A cap and a deadline that both bind: no pair of a fine grid is clearly better."""
    parts = Parts(instance(97))
    terrain = Terrain(parts.problem, parts.offers, 60)
    top = search(terrain)
    assert top.per_second > 0
    assert top.per_round > 0
    rows = [
        Prices(top.per_second * f, top.per_round * g)
        for f in np.geomspace(0.1, 10.0, 25)
        for g in np.geomspace(0.1, 10.0, 25)
    ]
    heights = terrain.estimate([top, *rows]).from_start(parts.problem)
    assert heights[0] >= heights.max() * (1 - 1e-3)


def test_cuts_raise_what_the_cheapest_rounds_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = instance(20)
    estimates = []
    monkeypatch.setattr(module, "_RAISES", 0)  # lines below rounds of whole nodes would do it, too
    for cuts in (0, 2):
        monkeypatch.setattr(module, "_CUTS", cuts)
        parts = Parts(problem)
        terrain = Terrain(problem, parts.offers, 200)
        estimates.append(around(terrain, parts.prices).energy_j)
    assert estimates[1] > 1.01 * estimates[0]


def test_multipliers_of_a_round_suit_that_round() -> None:
    parts = Parts(instance(20))
    terrain = Terrain(parts.problem, parts.offers, 100)
    rounds = cheapest_rounds(parts.problem, parts.offers, around(terrain, parts.prices))
    assert rounds
    zero = np.zeros_like(parts.multipliers[:1])
    parts.lines = {}
    version, share, time_s = rounds[0]
    plain, sharp = (
        parts.relaxed(z)[version] for z in (zero, round_multipliers(parts.fleet, zero, rounds[:1]))
    )
    assert plain is not None
    assert sharp is not None
    row, column = np.searchsorted(plain.time_s, time_s * (1 - 1e-12)), np.searchsorted(plain.share, share)
    assert sharp.tangent_j[row, column] > 1.02 * plain.tangent_j[row, column]
    assert (sharp.left_j >= plain.left_j * (1 - 1e-12)).all()
    assert set(np.unique(sharp.needed(0.0, 1.0))) <= {0, 1}


@pytest.mark.parametrize("rate", [3.0, 300.0])
def test_merged_round_times_are_split_until_nothing_is_lost(
    rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = instance(3, nodes=200)
    apart = Parts(problem).offers[1]
    monkeypatch.setattr(relaxation, "THRESHOLDS", 64)
    parts = Parts(problem)
    parts.prices = Prices(rate)
    assert apart is not None

    def least(offers: relaxation.Offers) -> tuple[Floats, Floats]:
        timed = rate * offers.time_s[:, None]
        return (offers.tangent_j + timed).min(axis=0), (offers.left_j + timed).min(axis=0)

    merged = parts.offers[1]
    assert merged is not None
    assert len(merged.time_s) == 64
    assert (least(merged)[0] < least(apart)[0] * (1 - 1e-4)).any()
    for _ in range(6):
        before = least(parts.offers[1])[1]  # type: ignore[arg-type]
        parts.split_(3)
        now = parts.offers[1]
        assert now is not None
        assert (np.diff(now.time_s) > 0).all()
        assert (now.slowest_s[1:] > now.until_s[:-1]).all()  # type: ignore[index]
        assert (least(now)[1] >= before * (1 - 1e-12)).all()
        for bound, truth in zip(least(now), least(apart), strict=True):
            assert (bound <= truth * (1 + 1e-12)).all()
    assert least(now)[0] == pytest.approx(least(apart)[0], rel=1e-9)
