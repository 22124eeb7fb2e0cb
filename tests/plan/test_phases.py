"""Time in phases: the bound against complete enumeration, at any prices, and where it is worth having."""

import json
import math
from functools import partial
from pathlib import Path

import benchmarks
import numpy as np
import pytest
from benchmarks.plan_instances import instance
from generator import small_problem
from oracle import enumerate_plans
from test_bounds import HARD, offers_of

from takifugu.plan.parts import Parts
from takifugu.plan.phase_prices import best_prices, cheapest_path
from takifugu.plan.phases import PhasedTerrain, PhasePrices, Phases
from takifugu.plan.prices import around
from takifugu.plan.problem import Problem
from takifugu.plan.values import Terrain


@pytest.mark.parametrize(
    "force", [HARD, ("windows",), ("windows", "power", "gain"), ("windows", "labels", "parts")], ids=str
)
def test_never_above_the_optimum_at_any_prices(force: tuple[str, ...]) -> None:
    tight, several = [], 0
    for seed in range(25):
        data = small_problem(12000 + seed, force=force)
        truth = enumerate_plans(data)
        if not 0 < truth.energy < math.inf:
            continue
        problem = Problem.from_dict(data)
        parts = Parts(problem)
        offers = offers_of(problem, relaxed=True)
        rng = np.random.default_rng(seed)
        bounds = []
        for most in (2, 5):
            phases = Phases.of(problem, partial(parts.relaxed, parts.multipliers), most)
            several += len(phases) > 1
            terrain = PhasedTerrain(phases, offers, 60)
            unit = truth.energy / (problem.time_limit - problem.start_time_s)
            rates = [np.zeros(len(phases)), *(unit * rng.exponential(1.0, len(phases)) for _ in range(3))]
            rates.append(unit * np.where(rng.random(len(phases)) < 0.5, 0.0, 3.0))
            prices = [PhasePrices(r, float(rng.choice([0.0, 0.1 * truth.energy]))) for r in rates]
            prices = [p if problem.max_rounds else PhasePrices(p.per_second, 0.0) for p in prices]
            values = terrain.estimate(prices)
            for k, p in enumerate(prices):
                most_j = 1.3 * (truth.energy + phases.limits_j(p))
                found = terrain.certified(values, k, most_j, 60)
                bounds.append(float(terrain.from_start(found, [p])[0]))
                assert bounds[-1] <= truth.energy * (1 + 1e-9)
        tight.append(max(bounds) / truth.energy)
    assert len(tight) >= 5
    assert several >= 5
    assert np.mean(tight) > 0.2  # a bound of zero would pass the rest


def test_it_sees_what_the_bound_without_phases_does_not() -> None:
    """A fleet a quarter of which comes late: the other bound lets them train from the beginning."""
    seed = 89
    problem = instance(seed)
    parts = Parts(problem)
    terrain = Terrain(problem, parts.offers, 100)
    without_j = around(terrain, parts.prices).energy_j  # an estimate: no bound of that kind is higher
    phases = Phases.of(problem, partial(parts.relaxed, parts.multipliers), 5)
    phased = PhasedTerrain(phases, parts.offers, 100)
    prices, gain = best_prices(phased, parts.prices, without_j)
    assert gain > 1.05
    values = phased.estimate([prices])
    found = phased.certified(values, 0, 1.3 * (1.2 * without_j + phases.limits_j(prices)), 300)
    bound_j = float(phased.from_start(found, [prices])[0])
    results = Path(benchmarks.__file__).parent / "results"
    best_known_j = json.loads((results / "plan_best_known.json").read_text())[str(seed)]
    assert 1.03 * without_j < bound_j < best_known_j
    # Every round of the cheapest path takes time of some phase, and no phase is before another's end.
    path = cheapest_path(phased, values, prices)
    assert (path.seconds >= 0).all()
    assert path.rounds > 0
