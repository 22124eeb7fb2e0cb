from __future__ import annotations

from pathlib import Path

import pytest
import torch

from takifugu.errors import DataError, UsageError
from takifugu.measure.machine import Turns
from takifugu.structure import Structure
from takifugu.train import costs as costs_module
from takifugu.train.costs import Costs, Speedup, StepTimes, check_costs, time_steps
from takifugu.train.ladder import Rung, ladder
from takifugu.train.round import RoundSpec, Samples
from takifugu.zoo.small import mlp

RUNGS = [Rung("dense", Structure(), 400.0, 0, 0), Rung("low", Structure(), 100.0, 0, 0)]
COSTS = Costs({"low": Speedup(1.25, 0.01, 4.0, 100)}, 1, 32)
NODE = {"name": "n", "flops_per_s": 4e4, "joules_per_flop": 0.01, "source": "measured"}


def test_ratios_are_those_of_the_turns() -> None:
    turns = Turns({"dense": [0.8, 1.6, 0.8], "low": [0.5, 1.0, 0.5]})
    found = Costs.of(StepTimes(turns, 8, 32, 1), RUNGS)
    assert found.speedups["low"].measured == pytest.approx(1.6)
    assert found.speedups["low"].flops == 4.0
    assert found.rounded(0.25).speedups["low"].measured == 1.5
    assert "low 1.60 (+-0.0%; by FLOPs 4.00)" in found.describe()
    assert "1 thread, batches of 32" in found.describe()


def test_a_node_without_figures_gets_its_dense_ones_scaled() -> None:
    filled = COSTS.fill(NODE, RUNGS)
    assert filled["samples_per_s"] == pytest.approx({"dense": 100.0, "low": 125.0})
    assert filled["joules_per_sample"] == pytest.approx({"dense": 4.0, "low": 3.2})
    assert filled["source"] == "estimated"


def test_own_figures_stay() -> None:
    own = {**NODE, "samples_per_s": {"dense": 50.0, "low": 200.0}}
    filled = COSTS.fill(own, RUNGS)
    assert filled["samples_per_s"] == own["samples_per_s"]
    assert filled["joules_per_sample"] == pytest.approx({"dense": 4.0, "low": 1.0})  # power stays the same
    whole = {**own, "joules_per_sample": {"dense": 1.0, "low": 0.9}}
    assert COSTS.fill(whole, RUNGS) == whole
    assert COSTS.fill({**NODE, "samples_per_s": {"dense": 50.0}}, RUNGS)["samples_per_s"]["low"] == 62.5


def test_they_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "a" / "costs.json"
    COSTS.save(path)
    assert Costs.load(path) == COSTS
    path.write_text("{}")
    with pytest.raises(DataError, match="costs.json: is damaged .*delete the file"):
        Costs.load(path)
    with pytest.raises(UsageError, match="costs 'flop' is not known; one of measured, flops"):
        check_costs("flop")


def test_steps_are_timed_for_real(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank of 16 in place of 1024: no machine is slower with it at this size."""
    monkeypatch.setattr(costs_module, "EACH_S", 0.1)
    model = mlp(inputs=16, width=1024, depth=2)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    samples = Samples(torch.randn(40, 16), torch.randint(0, 10, (40,)))
    rungs = ladder(model, [1 / 64], ["3"], samples.inputs[:2], 64)
    times = time_steps(model, rungs, samples, RoundSpec(64, {"kind": "sgd", "lr": 0.1}), 5.0)
    found = Costs.of(times, rungs).speedups["r0.015625"]
    assert found.measured > 1.2
    assert found.count >= 5
    assert times.threads == torch.get_num_threads()
    assert sum(times.turns.seconds["dense"]) > 0.1
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
