"""Lines below rounds of whole nodes, against every node set there is."""

import itertools
from typing import Any

import numpy as np
import pytest
from benchmarks.plan_instances import instance
from numpy.typing import NDArray
from oracle import all_moves
from test_relaxation import check_offers, in_threes, small_fleet, some_multipliers

from takifugu.plan import parts as module
from takifugu.plan import relaxation
from takifugu.plan.compiled.whole_nodes import least_of_whole_nodes
from takifugu.plan.curves import Floats
from takifugu.plan.fleet import Fleet
from takifugu.plan.parts import Parts
from takifugu.plan.prices import around
from takifugu.plan.problem import Problem
from takifugu.plan.relaxation import relaxed_offers, share_grid
from takifugu.plan.values import Terrain
from takifugu.plan.whole_nodes import WholeNodes, raised

Sets = tuple[Floats, Floats, Floats, NDArray[np.int64], NDArray[np.int64]]


def some_sets(seed: int) -> Sets:
    """Costs, sizes and leanings of a few nodes, and from which choice on each can be the slowest one."""
    rng = np.random.default_rng(seed)
    nodes, parts, labels = 6, int(rng.integers(1, 4)), 3
    size = np.arange(parts + 1) / parts * rng.uniform(0.05, 0.3, (nodes, 1))
    cost = (rng.uniform(0.0, 1.0, (nodes, 1)) + rng.uniform(3.0, 12.0, (nodes, 1)) * size) * (size > 0)
    mix = rng.dirichlet(np.full(labels, 0.4), nodes)
    lean = 0.5 * (mix - mix.mean(axis=0))
    last = rng.integers(1, parts + 1, nodes)
    slow = last + 1 - (rng.random(nodes) < 0.4) * rng.integers(1, parts + 1, nodes)
    slow[0] = min(slow[0], last[0])  # at least one of them can
    return cost, size, lean, np.maximum(slow, 1), last


def by_hand(sets: Sets, slope: float) -> float:
    cost, size, lean, slow, last = sets
    everyone = np.arange(len(cost))
    values = []
    for pick in itertools.product(*(range(most + 1) for most in last)):
        if not (np.array(pick) >= slow).any():
            continue
        amount = size[everyone, pick]
        effective = amount.sum() - np.abs(lean.T @ amount).sum()
        values.append(cost[everyone, pick].sum() - slope * effective)
    return min(values)


@pytest.mark.parametrize("seed", range(60))
def test_branch_and_bound_finds_the_least_set_and_may_stop_at_any_time(seed: int) -> None:
    sets, starts = some_sets(seed), np.zeros((1, 3))
    if seed % 3 == 0:
        sets[0][: seed // 3 % 7] = 0.0  # nodes without energy, up to all of them
    for slope in (0.5, 3.0, 10.0, 25.0):
        truth = by_hand(sets, slope)
        bound, found, pick, looks = least_of_whole_nodes(*sets, slope, starts, np.inf, 1e-9, 10_000)
        assert found == pytest.approx(truth, abs=1e-9)
        assert truth - 2e-9 <= bound <= truth + 1e-12
        assert looks < 1000
        assert (pick >= sets[3]).any()
        assert (pick <= sets[4]).all()
        for most in (1, 2, 3, 5):
            bound, found, _, looks = least_of_whole_nodes(*sets, slope, starts, np.inf, 1e-9, most)
            assert looks <= most + 1
            assert bound <= truth + 1e-12 <= found + 2e-12
        bound, *_ = least_of_whole_nodes(*sets, slope, starts, truth - 0.1, 1e-9, 10_000)
        assert bound == pytest.approx(truth - 0.1)  # no further than it has to be


@pytest.mark.parametrize("branches", [1, 3, 400])
@pytest.mark.parametrize("force", [("labels",), ("labels", "parts"), ("labels", "idle", "memory")], ids=str)
@pytest.mark.parametrize("merged", [False, True], ids=["", "merged"])
def test_no_round_costs_less_than_its_lines(
    force: tuple[str, ...], branches: int, merged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if merged:
        monkeypatch.setattr(relaxation, "_ladder", in_threes)
    higher = []
    for seed in range(25):
        data = small_fleet(7000 + seed, force)
        problem = Problem.from_dict(data)
        fleet, rng = Fleet.of(problem), np.random.default_rng(seed)
        z = some_multipliers(fleet, len(problem.versions), seed)
        for v, version in enumerate(data["versions"]):
            offers = relaxed_offers(fleet, v, z, share_grid(fleet, 40))
            if offers is None:
                continue
            moves = all_moves(data, version)
            typical = float(np.median([m.energy / m.share for m in moves]))
            whole = WholeNodes(fleet, v, offers, z[:2], branches=branches)
            for part in rng.uniform(0.3, 3.0, 4):
                whole.at(typical * part, float(rng.choice([0.0, 1.0, 5.0])))
            whole.between(0.5 * typical, 2.0 * typical, 1.0)
            found = raised(offers, whole.lines)
            assert found is not None
            check_offers(found, moves)
            assert (found.left_j >= offers.left_j).all()
            higher.append((found.left_j > offers.left_j * (1 + 1e-9)).mean())
            # What holds for all of the fleet holds for a part of it.
            there = rng.random(len(data["nodes"])) < 0.7
            some = raised(relaxed_offers(fleet, v, z, share_grid(fleet, 40), there), whole.lines)
            if some is not None:
                inside = (members(data, version) <= there).all(axis=1)
                check_offers(some, [m for m, ok in zip(moves, inside, strict=True) if ok])
    assert merged or np.mean(higher) > 0.005


def members(data: dict[str, Any], version: dict[str, Any]) -> NDArray[np.bool_]:
    """[move, node]: who takes part in each of all moves."""
    need = version.get("memory_bytes", 0.0)
    fits = np.array([n.get("memory_bytes", np.inf) >= need for n in data["nodes"]])
    picks = np.array(list(itertools.product(range(data["data"]["parts"] + 1), repeat=len(fits)))) > 0
    return picks[picks.any(axis=1) & (picks <= fits).all(axis=1)]


def test_the_grid_has_points_where_lines_meet() -> None:
    fleet = Fleet.of(instance(20))
    plain = share_grid(fleet)
    marks = np.array([plain[0] / 2, plain[7], plain[8] * (1 + 1e-9), 0.30001, 0.30001 + 1e-9, 0.7777, 1.0])
    grid = share_grid(fleet, marks=marks)
    assert np.setdiff1d(grid, plain).tolist() == [plain[0] / 2, 0.30001, 0.7777]
    assert np.setdiff1d(plain, grid).tolist() == []
    parts = Parts(instance(20))
    offers = parts.offers[0]
    assert offers is not None
    assert len(parts.marks) > 20
    assert np.abs(offers.share[:, None] - parts.marks).min(axis=0).max() < 1e-6


def test_lines_raise_the_estimate_where_labels_count(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, estimates = instance(20), []
    for raises in (0, 2):
        monkeypatch.setattr(module, "_RAISES", raises)
        parts = Parts(problem)
        estimates.append(around(Terrain(problem, parts.offers, 200), parts.prices).energy_j)
        assert bool(parts.lines) == bool(raises)
    assert estimates[1] > 1.008 * estimates[0]


def test_rounds_on_the_lines_are_real_and_sweeps_may_use_them() -> None:
    parts = Parts(instance(20))
    assert parts.offers
    assert parts.teams
    for version, teams in parts.teams.items():
        options = parts.family_options(10)[version]
        assert options is not None
        for team in teams:
            cost = parts.fleet.round_cost(version, dict(team))
            slack = [
                cost.energy_j - (line.start_j + line.slope * cost.share)
                for line in parts.lines[version]
                if line.slowest_s <= cost.slowest_s <= line.until_s
            ]
            assert min(slack) >= -1e-9 * cost.energy_j
            no_worse = (options.time_s <= cost.time_s * (1 + 1e-9)) & (
                options.share >= cost.share * (1 - 1e-9)
            )
            assert (options.energy_j[no_worse] <= cost.energy_j * (1 + 1e-9)).any()
    shares = [parts.fleet.round_cost(v, dict(t)).share for v, teams in parts.teams.items() for t in teams]
    assert sum(np.isclose(parts.marks, share).any() for share in shares) > 0.3 * len(shares)
