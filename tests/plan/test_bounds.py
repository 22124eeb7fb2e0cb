"""The lower bounds against complete enumeration, with the features that make bounds go wrong."""

import math
from typing import Any

import numpy as np
import pytest
from benchmarks.plan_instances import instance
from generator import small_problem
from oracle import enumerate_plans
from whole_seconds import least_energy, whole_problem

from takifugu.plan.bounds import best_dual, start_bound
from takifugu.plan.fleet import Fleet
from takifugu.plan.options import enumerate_options
from takifugu.plan.potentials import Landscape
from takifugu.plan.problem import Problem
from takifugu.plan.relaxation import exact_offers, label_multipliers, relaxed_offers, share_grid
from takifugu.plan.rounds import Prices
from takifugu.plan.solve import Solver

HARD = ("labels", "idle", "windows", "late", "memory", "cap")


def offers_of(problem: Problem, relaxed: bool) -> list[Any]:
    fleet = Fleet.of(problem)
    versions = range(len(problem.versions))
    if relaxed:
        z = label_multipliers(fleet, list(versions))
        return [relaxed_offers(fleet, v, z, share_grid(fleet)) for v in versions]
    options = [enumerate_options(fleet, v) for v in versions]
    return [exact_offers(o) if len(o) else None for o in options]


@pytest.mark.parametrize("relaxed", [True, False], ids=["fractional", "enumerated"])
@pytest.mark.parametrize(
    "force", [HARD, (), ("power", "gain"), ("gain", "steep_gain"), ("labels", "parts")], ids=str
)
def test_bound_is_never_above_the_optimum(relaxed: bool, force: tuple[str, ...]) -> None:
    tight = []
    for seed in range(40):
        data = small_problem(9000 + seed, force=force)
        truth = enumerate_plans(data)
        if not 0 < truth.energy < math.inf:
            continue
        problem = Problem.from_dict(data)
        offers = offers_of(problem, relaxed)
        for cells in (30, 120):  # any grid gives a bound
            land = Landscape.of(problem, offers, cells)
            dual = best_dual(land, land)
            assert dual.bound_j <= truth.energy * (1 + 1e-9)
            for per_second in (0.0, 0.3, 3.0):  # any prices, not only the best
                for per_round in (0.0, 1.0) if problem.max_rounds else (0.0,):
                    bound = start_bound(land, land.potential(Prices(per_second, per_round)))
                    assert bound <= truth.energy * (1 + 1e-9)
        assert not dual.guide.hopeless(
            problem.version_index[problem.start_version],
            np.array([problem.start_loss]),
            np.array([problem.start_time_s]),
            0,
        )[0]
        tight.append(dual.bound_j / truth.energy)
    assert len(tight) >= 5
    assert np.mean(tight) > 0.15  # a bound of zero would pass the rest


@pytest.mark.parametrize("force", [("labels", "parts"), ("idle",), ("labels", "idle")], ids=str)
def test_relaxed_offers_beat_every_node_set(force: tuple[str, ...]) -> None:
    """For any price of time, no achievable set is cheaper per progress than the best offer."""
    for seed in range(25):
        problem = Problem.from_dict(small_problem(4000 + seed, force=force))
        fleet = Fleet.of(problem)
        for v, version in enumerate(problem.versions):
            options = enumerate_options(fleet, v)
            if not len(options):
                continue
            offers = offers_of(problem, relaxed=True)[v]
            curve = version.curve
            for price in (0.0, 0.5, 5.0):
                cost, share = offers.priced(price, 0.0, 1.0, curve.convex_in_data)
                for loss in (0.7, 1.2, 2.0):
                    with np.errstate(divide="ignore"):
                        best = (cost / curve.speed(np.float64(loss), share)).min()
                        real = (options.energy_j + price * options.time_s) / curve.speed(
                            np.float64(loss), options.share
                        )
                    assert (real >= best * (1 - 1e-9)).all()


def test_two_one_label_nodes_are_worth_more_together() -> None:
    """Label balance is not submodular; the relaxation must not assume that it is."""
    node = {
        "flops_per_s": 1.0,
        "joules_per_flop": 1.0,
        "up_bytes_per_s": 1.0,
        "down_bytes_per_s": 1.0,
        "latency_s": 0.0,
        "joules_per_byte": 0.0,
        "samples": 1000,
    }
    problem = Problem.from_dict(
        {
            "format": 1,
            "target": {"loss": 0.5, "deadline_s": 1e6},
            "start": {"version": "m", "loss": 2.0},
            "data": {"label_weight": 1.0},
            "versions": [
                {
                    "name": "m",
                    "train_flops_per_sample": 1.0,
                    "payload_bytes": 0.0,
                    "curve": {"kind": "exponential", "floor": 0.1, "rate": 1.0},
                }
            ],
            "nodes": [
                {**node, "name": "a", "labels": [1000, 0]},
                {**node, "name": "b", "labels": [0, 1000]},
            ],
        }
    )
    fleet = Fleet.of(problem)
    alone, both = fleet.shares(np.array([[1000.0, 0.0], [1000.0, 1000.0]])) * 2000
    assert alone == pytest.approx(500)
    assert both == pytest.approx(2000)


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_it_is_close_where_rounds_are_many(seed: int) -> None:
    """Ninety rounds of three nodes: cutting them short saves a plan hardly anything, so a bound that were too
    high would show."""
    data = whole_problem(seed)
    for node in data["nodes"]:
        node.pop("available", None)
    truth_j = least_energy(data)
    problem = Problem.from_dict(data)
    land = Landscape.of(problem, offers_of(problem, relaxed=False), 300)
    bound_j = best_dual(land, land).bound_j
    assert 0.94 * truth_j < bound_j <= truth_j * (1 + 1e-6)


@pytest.mark.parametrize("seed", [0, 5, 17, 86, 88])
def test_a_plan_pays_no_less_than_what_it_is_told_on_its_way(seed: int) -> None:
    """On fleets too large to enumerate, with switches one way and both ways: from each state of a good plan."""
    problem = instance(seed)
    solver = Solver(problem, 0.05, None, lambda _: None)
    solver.thorough = False
    result = solver.run()
    assert result.plan is not None
    land = Landscape(problem, tuple(solver.offers), solver.ground)
    prices = solver.prices
    told = land.potential(prices)
    rounds = result.plan.rounds
    paid = [r.energy_j + prices.per_second * r.time_s + prices.per_round for r in rounds]
    left = np.cumsum(paid[::-1])[::-1]
    states = [(problem.start_version, problem.start_loss), *((r.version, r.loss) for r in rounds[:-1])]
    for (version, loss), to_pay in zip(states, left, strict=True):
        here = float(told.at(problem.version_index[version], np.array([loss]))[0])
        assert 0.0 < here <= to_pay * (1 + 1e-9)
    whole = float(told.at(problem.version_index[problem.start_version], np.array([problem.start_loss]))[0])
    assert whole > 0.9 * left[0]
