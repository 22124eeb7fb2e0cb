from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from takifugu.errors import UsageError
from takifugu.lowrank.surgery import apply_, structure_of
from takifugu.train.ladder import ladder, optimizer_copies
from takifugu.zoo.small import cnn, mlp


def test_the_rungs_of_a_linear_network_by_hand() -> None:
    model = nn.Sequential(nn.Linear(64, 32, bias=False), nn.ReLU(), nn.Linear(32, 10, bias=False))
    dense, half, quarter = ladder(model, [0.25, 0.5], None, torch.randn(4, 64), batch=16)
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
    rungs = ladder(model, [0.5, 0.25, 0.125], None, torch.randn(1, 1, 8, 8), batch=8)
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
    names = [rung.name for rung in ladder(model, [1.0, 0.29, 0.28, 0.27, 0.29], None, torch.randn(2, 16), 4)]
    assert names == ["dense", "r0.29"]  # full rank costs more than dense; the others give the same ranks


def test_wrong_ratios() -> None:
    for ratio in (0.0, 1.5, -1.0, float("nan")):
        with pytest.raises(UsageError, match="is not above 0 and at most 1"):
            ladder(mlp(inputs=16), [ratio], None, torch.randn(2, 16), 4)


def test_optimizers_copies() -> None:
    assert [optimizer_copies("sgd"), optimizer_copies("sgd", 0.9), optimizer_copies("adamw")] == [0, 1, 2]
