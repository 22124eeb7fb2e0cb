"""Relaxed offers against every node set there is: none may cost less than they say."""

from typing import Any

import numpy as np
import pytest
from generator import small_problem
from oracle import Move, all_moves

from takifugu.plan import relaxation
from takifugu.plan.curves import Floats
from takifugu.plan.fleet import Fleet
from takifugu.plan.problem import Problem
from takifugu.plan.relaxation import Offers, label_multipliers, relaxed_offers, share_grid

FORCED = [(), ("labels",), ("labels", "parts"), ("labels", "idle", "memory"), ("parts", "idle")]


def small_fleet(seed: int, force: tuple[str, ...]) -> dict[str, Any]:
    """Sometimes with twins, so that round times of two nodes are the same."""
    data = small_problem(seed, force=force)
    if seed % 3 == 0:
        data["nodes"].append({**data["nodes"][0], "name": "twin"})
    return data


def some_multipliers(fleet: Fleet, versions: int, seed: int) -> Floats:
    known = label_multipliers(fleet, list(range(versions)))
    if fleet.mix is None:
        return known
    more = np.random.default_rng(seed).uniform(-1.0, 1.0, (3, known.shape[1]))
    return np.concatenate([known, more])


def in_threes(times: Floats, most: int, favoured_s: Floats | None) -> tuple[Floats, Floats]:
    """Round times, three merged into one."""
    distinct = np.unique(times)
    return distinct[::3], np.append(distinct[2::3][: len(distinct[3::3])], distinct[-1])


def check_offers(offers: Offers, moves: list[Move]) -> list[float]:
    """What the offers say of each achievable round is no more than it costs; as parts of that."""
    assert offers.until_s is not None
    assert (offers.tangent_j >= offers.left_j).all()
    with np.errstate(invalid="ignore"):  # what no round reaches costs infinity, and so does all beyond
        assert (~(np.diff(offers.left_j, axis=1) < 0)).all()
    close = []
    for move in moves:
        row = int(np.searchsorted(offers.until_s, move.slowest * (1 - 1e-12)))
        column = int(np.searchsorted(offers.share, move.share * (1 - 1e-12)))
        assert offers.time_s[row] <= move.time * (1 + 1e-12)
        before = offers.share[column - 1] if column else 0.0
        part = (move.share - before) / (offers.share[column] - before)
        left, right = offers.left_j[row, column], offers.tangent_j[row, column]
        said = left if right == left else left + part * (right - left)
        assert said <= move.energy * (1 + 1e-9) + 1e-12
        close.append(said / max(move.energy, 1e-12))
    return close


@pytest.mark.parametrize("merged", [False, True], ids=["", "merged"])
@pytest.mark.parametrize("force", FORCED, ids=str)
def test_no_round_costs_less_than_its_offer(
    force: tuple[str, ...], merged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if merged:
        monkeypatch.setattr(relaxation, "_ladder", in_threes)
    close = []
    for seed in range(40):
        data = small_fleet(6000 + seed, force)
        problem = Problem.from_dict(data)
        fleet = Fleet.of(problem)
        z = some_multipliers(fleet, len(problem.versions), seed)
        for v, version in enumerate(data["versions"]):
            offers = relaxed_offers(fleet, v, z, share_grid(fleet, 40 if seed % 2 else 320))
            moves = all_moves(data, version)
            assert (offers is None) == (not moves)
            if offers is not None:
                close += check_offers(offers, moves)
    assert len(close) > 200
    assert np.mean(close) > 0.7  # offers of nothing would pass the rest


def test_the_slowest_is_paid_for_whatever_the_share() -> None:
    """A round as long as one node takes has that node in it, also where hardly any data is asked for."""
    problem = Problem.from_dict(small_problem(6001, force=("labels", "parts", "idle")))
    fleet = Fleet.of(problem)
    offers = relaxed_offers(fleet, 0, label_multipliers(fleet, [0]), share_grid(fleet))
    assert offers is not None
    who, crowd = fleet.crowd(0)
    assert len(who)
    for row, time_s in enumerate(offers.time_s - problem.overhead_s):
        i, k = np.argwhere(np.isclose(crowd.level_s, time_s, rtol=1e-12))[0]
        alone = crowd.fixed_j[i] + crowd.sample_j[i] * crowd.levels[i, k] + problem.overhead_j
        assert offers.left_j[row, 0] == pytest.approx(alone)
