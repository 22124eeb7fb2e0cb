from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn

from takifugu.errors import TakifuguWarning, UsageError
from takifugu.lowrank.default_layers import everything
from takifugu.lowrank.surgery import apply_, structure_of
from takifugu.train.ladder import ladder, optimizer_copies
from takifugu.zoo.small import cnn, mlp


def test_the_rungs_of_a_linear_network_by_hand() -> None:
    model = nn.Sequential(nn.Linear(64, 32, bias=False), nn.ReLU(), nn.Linear(32, 10, bias=False))
    dense, half, quarter = ladder(model, [0.25, 0.5], everything, torch.randn(4, 64), batch=16)
    assert [dense.name, half.name, quarter.name] == ["dense", "r0.5", "r0.25"]
    # Two FLOPs a MAC; forward, gradient of the weight, gradient of the input (which the first layer has not).
    assert dense.train_flops_per_sample == 2 * (2 * 64 * 32 + 3 * 32 * 10)
    assert half.train_flops_per_sample == 2 * (2 * 64 * 16 + 3 * (16 * 32 + 32 * 5 + 5 * 10))
    assert dense.payload_bytes == 4 * (64 * 32 + 32 * 10)
    assert quarter.payload_bytes == 4 * (8 * (64 + 32) + 2 * (32 + 10))
    # Weights, gradients and one momentum, and at least the inputs and activations of the batch.
    assert dense.memory_bytes >= 3 * dense.payload_bytes + 4 * 16 * (64 + 32)
    assert dense.memory_bytes < 3 * dense.payload_bytes + 4 * 16 * 4 * (64 + 32 + 10)


def test_structures_apply_and_the_model_is_untouched() -> None:
    model = cnn(width=8)
    before = copy.deepcopy(model.state_dict())
    rungs = ladder(model, [0.5, 0.25, 0.125], everything, torch.randn(1, 1, 8, 8), batch=8)
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())
    flops = [rung.train_flops_per_sample for rung in rungs]
    assert flops == sorted(flops, reverse=True)
    for rung in rungs:
        version = copy.deepcopy(model)
        apply_(version, rung.structure)
        assert structure_of(version) == rung.structure
        assert rung.payload_bytes == sum(4 * t.numel() for t in version.state_dict().values())


def test_rungs_equal_to_a_neighbour_are_dropped() -> None:
    model = mlp(inputs=16, width=12, depth=1)
    with pytest.warns(TakifuguWarning, match="no layer becomes low-rank"):  # of the largest ratio
        rungs = ladder(model, [1.0, 0.29, 0.28, 0.27, 0.29], everything, torch.randn(2, 16), 4)
    # Full rank costs more than dense; the others give the same ranks.
    assert [rung.name for rung in rungs] == ["dense", "r0.29"]


def test_by_default_first_and_output_layer_stay_dense_in_every_version() -> None:
    model = mlp(inputs=64, width=64, depth=3)
    rungs = ladder(model, [0.5, 0.4, 0.25, 0.125, 0.1], None, torch.randn(2, 64), 4)
    # Half the rank of a square layer costs as much as the dense one; a tenth of 64 is below 8.
    assert [rung.name for rung in rungs] == ["dense", "r0.4", "r0.25", "r0.125"]
    assert [[spec.name for spec in rung.structure] for rung in rungs[1:]] == [["3", "5"]] * 3


def test_a_smaller_ratio_that_makes_a_larger_model_is_dropped() -> None:
    sizes = (16, 128, 40, 128, 128, 10)
    model = nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(sizes)), nn.Linear(10, 10))
    rungs = ladder(model, [0.2, 0.15], None, torch.randn(2, 16), 4)
    # At 0.15 the layers of 40 get rank 6 and stay dense.
    assert [rung.name for rung in rungs] == ["dense", "r0.2"]


def test_wrong_ratios() -> None:
    for ratio in (0.0, 1.5, -1.0, float("nan")):
        with pytest.raises(UsageError, match="is not above 0 and at most 1"):
            ladder(mlp(inputs=16), [ratio], None, torch.randn(2, 16), 4)


def test_optimizers_copies() -> None:
    assert [optimizer_copies("sgd"), optimizer_copies("sgd", 0.9), optimizer_copies("adamw")] == [0, 1, 2]
