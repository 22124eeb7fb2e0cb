"""Time in phases: the bound against complete enumeration, at any prices, and where it is worth having."""

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import benchmarks
import numpy as np
import pytest
from benchmarks.plan_instances import instance
from generator import small_problem
from oracle import enumerate_plans
from test_bounds import HARD, offers_of
from whole_seconds import least_energy, whole_problem

from takifugu.plan.curves import step_one
from takifugu.plan.fleet import earliest_start
from takifugu.plan.parts import Parts
from takifugu.plan.phase_borders import Border, Focus
from takifugu.plan.phase_cuts import Mask, Phases
from takifugu.plan.phase_guide import ProvenGuide
from takifugu.plan.phases import PhasedTerrain
from takifugu.plan.potentials import Prices
from takifugu.plan.prices import around
from takifugu.plan.problem import Problem
from takifugu.plan.relaxation import Offers
from takifugu.plan.solve import Solver, solve
from takifugu.plan.values import Terrain

SMALL = 14


def listed_rounds(problem: Problem) -> Callable[[Mask], list[Offers | None]]:
    """All node sets of those who are there."""
    solver = Solver(problem, 0.01, None, lambda _: None)
    assert solver.complete
    return solver.rounds_of


def bound_at_random(
    problem: Problem, truth_j: float, phases: Phases, rng: np.random.Generator, listed: bool
) -> float:
    """The bound with prices, and what matters, drawn at random."""
    unit = truth_j / (problem.time_limit - problem.start_time_s)
    rates = np.unique(unit * np.append(rng.exponential(1.0, 4), rng.choice([0.0, 3.0])))
    per_round = float(rng.choice([0.0, 0.1 * truth_j])) if problem.max_rounds else 0.0
    terrain = PhasedTerrain(
        phases, offers_of(problem, relaxed=not listed), [Prices(float(r), per_round) for r in rates], 60
    )
    focus = []
    for _ in range(len(phases)):
        some = rng.choice(len(rates), rng.integers(1, 4), replace=False)
        low, high = np.sort(rng.uniform(problem.loss_limit, problem.start_loss, 2))
        focus.append(Focus(tuple(sorted(int(k) for k in some)), (float(low), float(high))))
    most_j = 1.3 * truth_j + per_round * (problem.max_rounds or 0)
    return terrain.bound_j(terrain.certified(terrain.estimate(), focus, 60, most_j))


@pytest.mark.parametrize("listed", [False, True], ids=["fractional", "enumerated"])
@pytest.mark.parametrize(
    "force", [HARD, ("windows",), ("windows", "power", "gain"), ("windows", "labels", "parts")], ids=str
)
def test_never_above_the_optimum_at_any_prices(force: tuple[str, ...], listed: bool) -> None:
    tight, several = [], 0
    for seed in range(SMALL):
        data = small_problem(12000 + seed, force=force)
        truth = enumerate_plans(data)
        if not 0 < truth.energy < math.inf:
            continue
        problem = Problem.from_dict(data)
        parts = Parts(problem)
        rounds = listed_rounds(problem) if listed else partial(parts.relaxed, parts.multipliers)
        rng = np.random.default_rng(seed)
        bounds = []
        for most in (2, 5):
            span_s = problem.time_limit - problem.start_time_s
            longest_s = float(rng.choice([np.inf, 0.02, 0.1, 0.3])) * span_s
            least_s = float(rng.choice([0.0, 0.02, 0.1])) * span_s
            phases = Phases.of(problem, rounds, most, longest_s, least_s)
            several += len(phases) > 1
            for _ in range(3):
                bound_j = bound_at_random(problem, truth.energy, phases, rng, listed)
                assert bound_j <= truth.energy * (1 + 1e-9)
                bounds.append(bound_j)
        tight.append(max(bounds) / truth.energy)
    assert len(tight) >= 5
    assert several >= 5
    assert np.mean(tight) > 0.2  # a bound of zero would pass the rest


@pytest.mark.parametrize("seed", [1, 2, 4])
def test_never_above_the_optimum_of_many_rounds(seed: int) -> None:
    """Ninety samples, a few at a time: the bound comes close, so that it would show if it were too high."""
    data = whole_problem(seed)
    truth_j = least_energy(data)
    problem = Problem.from_dict(data)
    parts = Parts(problem)
    unit = truth_j / (problem.time_limit - problem.start_time_s)
    bounds = []
    for longest_s, least_s in ((np.inf, 0.0), (8.0, 8.0)):
        phases = Phases.of(problem, partial(parts.relaxed, parts.multipliers), 4, longest_s, least_s)
        prices = [Prices(rate) for rate in (0.0, *(unit * np.geomspace(0.1, 3.0, 4)).tolist())]
        terrain = PhasedTerrain(phases, parts.relaxed(parts.multipliers), prices, 120)
        focus = [Focus(tuple(range(5)), (problem.loss_limit, 2.3))] * len(phases)
        bounds.append(terrain.bound_j(terrain.certified(terrain.estimate(), focus, 150, 1.3 * truth_j)))
        assert bounds[-1] <= truth_j * (1 + 1e-6)
    assert max(bounds) > 0.9 * truth_j
    result = solve(problem, tolerance=0.01)
    assert result.energy_j == pytest.approx(truth_j, rel=0.01)
    assert result.lower_bound_j is not None
    assert result.lower_bound_j <= truth_j * (1 + 1e-6)


def all_rounds(problem: Problem) -> list[tuple[int, dict[int, int]]]:
    """Every version with every set of nodes."""
    nodes = range(len(problem.nodes))
    teams = [t for n in range(1, len(problem.nodes) + 1) for t in itertools.combinations(nodes, n)]
    return [
        (v, {i: problem.nodes[i].samples for i in team})
        for v in range(len(problem.versions))
        for team in teams
    ]


def left_to_pay(terrain: PhasedTerrain, proven: Any, version: int, loss: float, clock: float) -> float:
    return float(terrain.left(proven, version, np.array([loss]), np.array([clock]))[0])


@pytest.mark.parametrize("shape", [{}, {"every_s": 9}, {"nodes": 3, "leaving_s": (3, 1)}], ids=str)
def test_no_round_gains_more_than_it_costs_whatever_the_clock(shape: dict[str, Any]) -> None:
    """From any state no round, with or without a switch, within a phase or across borders, takes more off what
    is left to pay than it costs: that is all the proof needs."""
    across = checked = 0
    for seed in (0, 1):
        data = whole_problem(seed, **{"nodes": 2, "needed": 60, **shape})
        problem = Problem.from_dict(data)
        parts, rng = Parts(problem), np.random.default_rng(seed)
        fleet, switch_s = parts.fleet, problem.switches[0].time_s
        span_s = problem.time_limit - problem.start_time_s
        unit = 40.0 / span_s
        for longest_s, least_s in ((np.inf, 0.0), (6.0, 6.0), (6.0, 0.0)):
            phases = Phases.of(problem, partial(parts.relaxed, parts.multipliers), 6, longest_s, least_s)
            prices = [Prices(rate) for rate in (0.0, *(unit * np.geomspace(0.3, 6.0, 3)).tolist())]
            terrain = PhasedTerrain(phases, parts.relaxed(parts.multipliers), prices, 80)
            focus = [
                Focus(tuple(sorted(rng.choice(4, rng.integers(1, 4), replace=False).tolist())), (0.3, 1.8))
                for _ in range(len(phases))
            ]
            proven = terrain.certified(terrain.estimate(), focus, 80, 200.0)
            left_of = partial(left_to_pay, terrain, proven)
            for version, used in all_rounds(problem):
                cost = fleet.round_cost(version, used)
                windows = fleet.common_windows(used)
                for _ in range(300):
                    border = float(rng.choice(phases.bounds))
                    clock = float(np.clip(border + rng.uniform(-15, 5), 0.0, span_s))
                    source = int(rng.integers(0, version + 1))
                    ready_s, fee_j = (clock, 0.0) if source == version else (clock + switch_s, 2.0)
                    start = earliest_start(windows, ready_s, cost.time_s)
                    if start is None or start + cost.time_s > problem.time_limit:
                        continue
                    # Also from just above the target, where a round meets it after its phase has ended.
                    highest = 2.3 if rng.random() < 0.6 else 1.25 * problem.loss_limit
                    loss = float(rng.uniform(problem.loss_limit, highest))
                    after = step_one(problem.versions[version].curve, loss, cost.share)
                    end = start + cost.time_s
                    left = 0.0 if after <= problem.loss_limit else left_of(version, after, end)
                    here = left_of(source, loss, clock)
                    assert here <= fee_j + cost.energy_j + max(left, 0.0) + 1e-6
                    checked += 1
                    first, last = (np.searchsorted(phases.bounds, t, side="right") for t in (clock, end))
                    across += bool(first != last)
    assert checked > 1000
    assert across > 300


@pytest.mark.parametrize("listed", [False, True], ids=["fractional", "enumerated"])
def test_no_round_across_a_border_leads_from_high_to_low(listed: bool) -> None:
    """Where prices may change at a border, no round that reaches over it may pass from one side to the other."""
    below = checked = 0
    for seed in range(6):
        problem = Problem.from_dict(whole_problem(seed))
        parts = Parts(problem)
        fleet = parts.fleet
        rounds = listed_rounds(problem) if listed else partial(parts.relaxed, parts.multipliers)
        phases, rng = Phases.of(problem, rounds, 6), np.random.default_rng(seed)
        for phase in range(len(phases) - 1):
            terrain = Terrain(problem, phases.offers[phase], 60)
            border = Border(phases, phase, terrain, [Prices()], 0, np.zeros(1), {})
            lows = rng.uniform(problem.loss_limit, 1.5, len(problem.versions)).tolist()
            highs = border._one_round_above(lows)
            around = [phases.bounds[phase : phase + 2], phases.bounds[phase + 1 : phase + 3]]
            for version, used in all_rounds(problem):
                windows = [problem.nodes[i].windows for i in used]
                if not all(any(a < e and b > s for a, b in row) for row in windows for s, e in around):
                    continue
                curve, share = problem.versions[version].curve, fleet.round_cost(version, used).share
                for source in range(version + 1):
                    after = step_one(curve, highs[source] * (1 + 1e-9), share)
                    assert after > lows[version]
                    checked += 1
                below += step_one(curve, 0.98 * highs[version], share) < lows[version]
    assert checked > 50
    assert below > 5  # it is no higher than it has to be


def test_it_sees_what_the_bound_without_phases_does_not() -> None:
    """Nodes come late and leave for a while: the other bound lets them train all the time."""
    seed = 50
    problem = instance(seed)
    parts = Parts(problem)
    terrain = Terrain(problem, parts.offers, 100)
    without_j = around(terrain, parts.prices).energy_j  # an estimate: no bound of that kind is higher
    result = solve(problem, tolerance=0.01)
    assert "bound by phases" in result.solver
    assert result.lower_bound_j is not None
    assert result.plan is not None
    assert result.lower_bound_j > 1.005 * without_j
    assert result.status == "within_tolerance"
    results = Path(benchmarks.__file__).parent / "results"
    best_known_j = json.loads((results / "plan_best_known.json").read_text())[str(seed)]
    assert result.lower_bound_j < best_known_j


def test_a_small_fleet_that_comes_and_goes_is_proven(example: Path) -> None:
    """All node sets can be listed; without phases the proof ended 5% below. The exact search is told no more
    than what a plan has still to pay, but more than without phases."""
    problem = Problem.load(example)
    late = ((0.4 * problem.deadline_s, 2.0 * problem.deadline_s),)
    nodes = [replace(n, available=late) if n.name in ("phone-01", "phone-02") else n for n in problem.nodes]
    problem = replace(problem, nodes=tuple(nodes))
    solver = Solver(problem, 0.01, None, lambda _: None)
    result = solver.run()
    assert result.status == "within_tolerance"
    assert "bound by phases" in result.solver
    plan = result.plan
    assert plan is not None
    rates = solver.prices.per_second * np.geomspace(0.1, 10.0, 15)
    phases = Phases.of(problem, solver.rounds_of, 4)
    terrain = PhasedTerrain(phases, solver.offers, [Prices(float(rate)) for rate in rates], 150)
    focus = [Focus(tuple(range(15)), (problem.loss_limit, problem.start_loss))] * len(phases)
    proven = terrain.certified(terrain.estimate(), focus, 300, 1.3 * plan.energy_j)
    guide = ProvenGuide.of(solver.dual.guide, terrain, proven)
    first = (problem.start_version, problem.start_loss, problem.start_time_s, 0.0)
    states = [first, *((r.version, r.loss, r.start_s + r.time_s, r.energy_j) for r in plan.rounds[:-1])]
    left, above = plan.energy_j, 0
    for done, (version, loss, clock, energy_j) in enumerate(states):
        left -= energy_j
        state = (problem.version_index[version], np.array([loss]), np.array([clock]), done)
        told = float(guide.energy_to_go(*state)[0])
        assert told <= left * (1 + 1e-9)
        above += told > float(solver.dual.guide.energy_to_go(*state)[0]) * (1 + 1e-3)
    assert above > 5
