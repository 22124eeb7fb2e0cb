from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from takifugu.engine.world import NO_SPREAD, Spread, World, uniform
from takifugu.errors import RunError, UsageError
from takifugu.plan.problem import Problem


def fleet(nodes: int = 5, **extra) -> Problem:
    node = {
        "flops_per_s": 1e9,
        "joules_per_flop": 1e-9,
        "up_bytes_per_s": 1e6,
        "down_bytes_per_s": 2e6,
        "latency_s": 0.01,
        "joules_per_byte": 1e-6,
        "idle_watts": 0.5,
        "samples": 100,
    }
    return Problem.from_dict(
        {
            "format": 1,
            "target": {"loss": 0.5, "deadline_s": 1000.0},
            "start": {"version": "dense", "loss": 2.3},
            "versions": [
                {
                    "name": "dense",
                    "train_flops_per_sample": 1e6,
                    "payload_bytes": 1e5,
                    "curve": {"kind": "exponential", "floor": 0.1, "rate": 0.5},
                }
            ],
            "nodes": [{"name": f"n{i}", **node, **extra} for i in range(nodes)],
        }
    )


def test_as_profile_is_the_formula_of_the_problem_file() -> None:
    world = World.as_profile(fleet())
    got = world.outcome(7, "n2", "dense", 40)
    assert got.status == "ok"
    assert got.time_s == pytest.approx(1e6 * 40 / 1e9 + 1e5 / 2e6 + 1e5 / 1e6 + 2 * 0.01, rel=1e-12)
    assert got.energy_j == pytest.approx(1e6 * 40 * 1e-9 + 2 * 1e5 * 1e-6, rel=1e-12)
    assert got.bytes == 2e5


@given(st.integers(0, 2**40), st.integers(1, 500))
def test_outcomes_depend_on_what_they_are_for_and_nothing_else(seed: int, number: int) -> None:
    problem = fleet(4)
    world, again = World.draw(problem, seed), World.draw(problem, seed)
    forth = [world.outcome(number, f"n{i}", "dense", 50) for i in range(4)]
    back = [again.outcome(number, f"n{i}", "dense", 50) for i in reversed(range(4))]
    assert forth == back[::-1]
    alone = World.draw(fleet(1), seed).outcome(number, "n0", "dense", 50)
    assert alone == forth[0]


def test_the_draws_have_the_distribution_they_are_said_to_have() -> None:
    problem = fleet(3000)
    world = World.draw(problem, 3, Spread(0.1, 0.2, 0.3, 0.0))
    logs = {
        name: [math.log(getattr(world.nodes[n.name], name) / getattr(n, name)) for n in problem.nodes]
        for name in ("flops_per_s", "up_bytes_per_s", "joules_per_flop", "joules_per_byte")
    }
    for name, wanted in zip(logs, (0.1, 0.2, 0.3, 0.3), strict=True):
        assert statistics.stdev(logs[name]) == pytest.approx(wanted, rel=0.06), name
        assert abs(statistics.fmean(logs[name])) < 4 * wanted / math.sqrt(3000), name
    assert abs(statistics.correlation(logs["flops_per_s"], logs["up_bytes_per_s"])) < 0.08


def test_the_fleets_bias_does_not_average_out() -> None:
    problem = fleet(1000)
    means = []
    for seed in range(60):
        nodes = World.draw(problem, seed, Spread(0.1, 0.1, 0.1, 0.2)).nodes.values()
        means.append(statistics.fmean(math.log(n.flops_per_s / 1e9) for n in nodes))
    assert statistics.stdev(means) == pytest.approx(0.2, rel=0.3)


def test_faults_come_as_often_as_asked_for() -> None:
    world = World.draw(fleet(100), 1, NO_SPREAD, dropout=0.05, slowdown=0.2)
    fates = [world.outcome(r, f"n{i}", "dense", 100) for r in range(1, 101) for i in range(100)]
    count = {s: sum(f.status == s for f in fates) for s in ("ok", "slow", "dropped")}
    assert count["dropped"] == pytest.approx(500, abs=90)
    assert count["slow"] == pytest.approx(2000, abs=160)
    ok = next(f for f in fates if f.status == "ok")
    compute = 0.1
    for fate in fates:
        if fate.status == "slow":
            assert 1.5 <= (fate.time_s - (ok.time_s - compute)) / compute <= 3.0
            assert fate.energy_j == ok.energy_j
        if fate.status == "dropped":
            assert fate.bytes == ok.bytes / 2
            assert fate.energy_j < ok.energy_j


def test_measured_rates_are_the_ones_that_vary() -> None:
    problem = fleet(1, samples_per_s={"dense": 10.0}, joules_per_sample={"dense": 3.0})
    world = World.draw(problem, 5, dropout=0.0, slowdown=0.0)
    node = world.nodes["n0"]
    got = world.outcome(1, "n0", "dense", 20)
    assert node.samples_per_s["dense"] != 10.0
    assert got.time_s == pytest.approx(
        20 / node.samples_per_s["dense"]
        + 1e5 / node.up_bytes_per_s
        + 1e5 / node.down_bytes_per_s
        + 2 * node.latency_s
    )
    assert got.energy_j == pytest.approx(20 * node.joules_per_sample["dense"] + 2e5 * node.joules_per_byte)


def test_it_can_be_drawn_again_from_its_description() -> None:
    world = World.draw(fleet(), 9, Spread().times(2.0), 0.1, 0.2)
    told = world.to_dict()
    spread = Spread(**told.pop("spread"))
    assert World.draw(fleet(), spread=spread, **told) == world


def test_uniform_is_inside_and_the_same_everywhere() -> None:
    assert uniform("fate", 0, 1, "n0") == 0.026340923405357264  # sha256 of "fate/0/1/n0"
    assert all(0.0 < uniform(i) < 1.0 for i in range(1000))


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(UsageError, match=r"dropout 1\.5 is not a share"):
        World.draw(fleet(), 0, dropout=1.5)
    with pytest.raises(UsageError, match="add up to more than 1"):
        World.draw(fleet(), 0, dropout=0.6, slowdown=0.6)
    with pytest.raises(UsageError, match="spread speed = -1"):
        Spread(speed=-1.0)
    with pytest.raises(RunError, match="no node 'x'"):
        World.as_profile(fleet()).outcome(1, "x", "dense", 1)
