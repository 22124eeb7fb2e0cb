"""The whole-round bound: against complete enumeration, and its inequality checked point by point."""

import math

import numpy as np
import pytest
from benchmarks.plan_instances import instance
from generator import small_problem
from oracle import enumerate_plans
from test_bounds import HARD, offers_of
from whole_seconds import whole_problem

from takifugu.plan import certificate
from takifugu.plan.certificate import certify
from takifugu.plan.certificate_grid import step_points, that_matter
from takifugu.plan.curves import Exponential, Power
from takifugu.plan.families import prefixes
from takifugu.plan.fleet import Fleet
from takifugu.plan.parts import Parts
from takifugu.plan.potentials import Prices
from takifugu.plan.prices import around, search
from takifugu.plan.problem import Problem
from takifugu.plan.relaxation import label_multipliers, relaxed_offers, share_grid
from takifugu.plan.values import Charges, Terrain, thinned


@pytest.mark.parametrize("relaxed", [True, False], ids=["fractional", "enumerated"])
@pytest.mark.parametrize(
    "force", [HARD, (), ("power", "gain"), ("gain", "steep_gain"), ("labels", "parts")], ids=str
)
def test_never_above_the_optimum(relaxed: bool, force: tuple[str, ...]) -> None:
    tight = []
    for seed in range(30):
        data = small_problem(9000 + seed, force=force)
        truth = enumerate_plans(data)
        if not 0 < truth.energy < math.inf:
            continue
        problem = Problem.from_dict(data)
        terrain = Terrain(problem, offers_of(problem, relaxed), 60)
        rounds = (0.0, 1.0) if problem.max_rounds else (0.0,)
        prices = [Prices(s, r) for s in (0.0, 0.3, 3.0) for r in rounds]  # any prices give a bound
        values = terrain.estimate(prices)
        bounds = []
        for k, price in enumerate(prices):
            most = truth.energy + price.per_second * problem.deadline_s
            most += price.per_round * (problem.max_rounds or 0)
            for cells in (40, 120):
                found = certify(terrain, values, k, 1.3 * most, [cells] * len(problem.versions))
                bounds.append(float(found.from_start(problem)[0]))
                assert bounds[-1] <= truth.energy * (1 + 1e-9)
        tight.append(max(bounds) / truth.energy)
    assert len(tight) >= 5
    assert np.mean(tight) > 0.3  # a bound of zero would pass the rest


@pytest.mark.parametrize("seed", [0, 3, 5, 16, 60])
def test_no_round_gains_more_than_it_costs(seed: int) -> None:
    """On fleets too large to enumerate: the certificate's inequality, for thousands of real node sets."""
    problem = instance(seed)
    fleet = Fleet.of(problem)
    versions = range(len(problem.versions))
    z = label_multipliers(fleet, [0])
    terrain = Terrain(problem, [relaxed_offers(fleet, v, z, share_grid(fleet)) for v in versions], 100)
    priced = around(terrain, search(terrain))
    prices = priced.values.prices[priced.best]
    limits = prices.per_second * problem.deadline_s + prices.per_round * (problem.max_rounds or 0)
    found = certify(
        terrain, priced.values, priced.best, 1.3 * (priced.energy_j + limits), [200] * len(versions)
    )
    rng = np.random.default_rng(seed)
    index = problem.version_index
    for v in versions:
        grid = found.grids[v]
        family = prefixes(fleet, v, z)
        assert family is not None
        rows = rng.choice(len(family.share), min(400, len(family.share)), replace=False)
        cost = family.energy_j[rows] + prices.per_second * family.time_s[rows] + prices.per_round
        loss = np.concatenate([rng.uniform(grid[0], grid[-1], 200), grid, np.nextafter(grid[1:], 0)])[:, None]
        after = problem.versions[v].curve.step(loss, family.share[rows][None, :])
        gain = found.at(v, loss) - found.at(v, after)
        assert (gain <= cost * (1 + 1e-9) + 1e-9 * priced.energy_j).all()
        assert (gain / cost).max() > 0.5 or found.at(v, grid[-1:])[0] == pytest.approx(found.value[v][0][-1])
        for s in problem.switches:
            if index[s.source] == v:
                fee = s.energy_j + prices.per_second * s.time_s
                land = problem.versions[index[s.target]].curve.step(
                    loss + s.loss_jump, np.linspace(0.02, 1.0, 30)[None, :]
                )
                assert np.isfinite(land).all()
                # A switch and the dearest-saving round after it: at least what the value says.
                other = prefixes(fleet, index[s.target], z)
                assert other is not None
                some = rng.choice(len(other.share), min(100, len(other.share)), replace=False)
                after = problem.versions[index[s.target]].curve.step(
                    loss + s.loss_jump, other.share[some][None, :]
                )
                paid = other.energy_j[some] + prices.per_second * other.time_s[some] + prices.per_round
                left = fee + paid + found.at(index[s.target], after)
                assert (found.at(v, loss) <= left * (1 + 1e-9) + 1e-9 * priced.energy_j).all()


@pytest.mark.parametrize("curve", [
    Exponential(floor=0.2, data_gain=0.05, data_exponent=0.5, rate=0.9),
    Exponential(floor=0.2, data_gain=0.0, data_exponent=0.5, rate=3.0),
    Exponential(floor=0.2, data_gain=0.3, data_exponent=2.0, rate=0.1),
    Power(floor=0.2, data_gain=0.05, data_exponent=0.5, scale=1.5, exponent=0.7),
    Power(floor=0.1, data_gain=0.2, data_exponent=1.5, scale=40.0, exponent=2.0),
], ids=str)  # fmt: skip
def test_pull_bounds_the_slope_in_data_and_rounds_are_concave_in_the_loss(curve: Exponential | Power) -> None:
    rng = np.random.default_rng(1)
    loss = rng.uniform(0.15, 3.0, 300)[:, None]
    low = np.sort(rng.uniform(0.01, 1.0, 40))[None, :]
    high = low * rng.uniform(1.0, 1.5, 40)
    least, most = curve.pull(loss, low, high)
    for part in np.linspace(0.0, 1.0, 7):
        share = low + part * (high - low)
        slope = -(curve.step(loss, share * (1 + 1e-6)) - curve.step(loss, share)) / (share * 1e-6)
        assert (slope >= least * (1 - 1e-4) - 1e-6).all()
        assert (slope <= most * (1 + 1e-4) + 1e-6).all()
    middle = curve.step(0.5 * (loss + loss.T), np.float64(0.4))
    ends = 0.5 * (curve.step(loss, np.float64(0.4)) + curve.step(loss.T, np.float64(0.4)))
    assert (middle >= ends - 1e-12).all()


def test_steps_of_the_value_get_points_of_their_own_where_nothing_without_steps_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two rounds matter near this target, a cheap one and, for a little more data, a much dearer one."""
    problem = instance(89)
    terrain = Terrain(problem, Parts(problem).offers, 150)
    values = terrain.estimate([Prices(30.0, 204.0)])
    cells, start = [400] * len(problem.versions), np.array([problem.start_loss])
    monkeypatch.setattr(certificate, "that_matter", lambda *_: {2})

    def of_the_third() -> float:
        return float(certify(terrain, values, 0, 4e5, cells).at(2, start)[0])

    wanted = float(values.at(2, start)[0])
    monkeypatch.setattr(certificate, "_LOOKS", 0)
    assert of_the_third() > 0.98 * wanted  # what has no steps is nearly as high here
    monkeypatch.setattr(certificate, "_flowing", lambda way, *_: np.zeros(len(way.arrivals.grid)))
    assert of_the_third() < 0.96 * wanted
    monkeypatch.setattr(certificate, "_LOOKS", 3)
    assert of_the_third() > 0.98 * wanted


def test_a_step_lies_where_a_round_lands_on_the_step_below() -> None:
    curve = Exponential(floor=0.2, data_gain=0.0, data_exponent=0.5, rate=0.5)
    grid = np.concatenate([[0.5, 0.5 + 1e-8], np.linspace(0.51, 2.0, 50)])
    # Every round costs 1 and the value is how many are needed: steps lie where n rounds lead down to 0.5.
    needed = np.maximum(np.ceil(np.log((grid - 0.2) / 0.3) / 0.5), 0.0)
    close = Charges(*(np.ones(1) for _ in range(5)))
    in_cell = np.where(np.diff(needed) > 0, 1.5, 1.0)[:, None]
    points = step_points(curve, grid, needed, in_cell, close)
    exact = 0.2 + 0.3 * np.exp(0.5 * np.arange(1, 1 + len(points) // 2))
    assert len(exact) == 3
    np.testing.assert_allclose(points[::2], exact, rtol=1e-12)
    assert (points[1::2] > exact).all()
    np.testing.assert_allclose(points[1::2], exact, atol=1e-7)


@pytest.mark.parametrize("seed", [0, 85])
def test_versions_that_do_not_matter_are_not_looked_at_closely(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = instance(seed)
    parts = Parts(problem)
    terrain = Terrain(problem, parts.offers, 200)
    priced = around(terrain, parts.prices)
    assert len(that_matter(terrain, priced.values, priced.best)) < len(problem.versions)
    prices = priced.values.prices[priced.best]
    most = 1.3 * (priced.energy_j + prices.per_second * problem.deadline_s + prices.per_round * 300)
    cells = [300] * len(problem.versions)

    def bound() -> float:
        return float(certify(terrain, priced.values, priced.best, most, cells).from_start(problem)[0])

    quick = bound()
    monkeypatch.setattr(certificate, "that_matter", lambda *_: set(range(len(problem.versions))))
    assert quick == pytest.approx(bound(), rel=1e-4)


@pytest.mark.parametrize("count", [60, 61, 62])
def test_no_share_is_free_when_intervals_are_merged(count: int) -> None:
    """The first interval begins with no data at no cost; with its upper end's price lost, all of it was free."""
    high = np.linspace(0.01, 1.0, count)
    low = np.concatenate([[0.0], high[:-1]])
    few = thinned(Charges(low, high, low**2, high**2, high**2))
    assert len(few.high) < count / 2
    assert few.right.min() > 0.0
    assert (few.left <= few.right).all()
    assert few.high[-1] == 1.0


def test_where_there_are_few_node_sets_steps_cost_the_certificate_little(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three nodes and ninety rounds: steps all the way up, of which a repair takes much."""
    problem = Problem.from_dict(whole_problem(1))
    terrain = Terrain(problem, Parts(problem).offers, 150)
    values = terrain.estimate([Prices(0.3)])
    start = np.array([problem.start_loss])

    def found() -> float:
        return float(certify(terrain, values, 0, 1e4, [800] * len(problem.versions)).at(0, start)[0])

    wanted = float(values.at(0, start)[0])
    assert found() > 0.99 * wanted
    monkeypatch.setattr(certificate, "_flowing", lambda way, *_: np.zeros(len(way.arrivals.grid)))
    assert found() < 0.98 * wanted
