"""The speed gate and the 'fastest' scheme: what the clock says decides. The clock is replaced here."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

import takifugu as tk
from takifugu.lowrank import probe
from takifugu.lowrank.conv import FactorizedConv2d
from takifugu.lowrank.factorized import Factorized

X = torch.zeros(2, 8, 8, 8)


def net() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.Flatten(), nn.Linear(1024, 32)
    )


def timed_by(seconds, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Lets `seconds(entrant name, module)` be the stopwatch; returns the list of races run."""
    races: list[tuple[str, ...]] = []

    def race(variants, args, kwargs, **_):
        races.append(tuple(variants))
        assert all(isinstance(a, torch.Tensor) for a in args)
        return {name: seconds(name, module) for name, module in variants.items()}

    monkeypatch.setattr(probe, "race", race)
    return races


@pytest.mark.filterwarnings("ignore:only 1 of 2 layers:takifugu.errors.TakifuguWarning")
def test_what_is_not_faster_stays_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    convs = (nn.Conv2d, FactorizedConv2d)
    timed_by(lambda name, m: 2.0 if (name == "dense") == isinstance(m, convs) else 1.0, monkeypatch)
    model = net()
    report = tk.factorize_(model, 0.25, tk.everything, only_if_faster=X)
    told = {
        layer.name: (layer.rank, layer.reason, layer.dense_s, layer.factorized_s) for layer in report.layers
    }
    assert told["0"] == ({"weight": 4}, None, 2.0, 1.0)
    assert told["3"] == (None, "its factors are not faster", 1.0, 2.0)
    assert isinstance(model[0], Factorized)
    assert type(model[3]) is nn.Linear
    assert "2e+03 / 1e+03" in str(report)


@pytest.mark.filterwarnings("ignore:only 1 of 2 layers:takifugu.errors.TakifuguWarning")
def test_the_fastest_scheme_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    races = timed_by(lambda name, m: {"tucker2": 0.5}.get(name, 1.0), monkeypatch)
    report = tk.factorize_(net(), 0.25, tk.everything, scheme="fastest", example_input=X)
    assert races[0] == ("kxk-1x1", "1x1-kxk", "tucker2", "separable")
    assert report.structure["0"].scheme == "tucker2"
    assert report.structure["3"].scheme == "uv"
    with_gate = tk.factorize_(net(), 0.25, tk.everything, scheme="fastest", only_if_faster=X)
    assert "dense" in races[-1]
    assert with_gate.layers[0].dense_s == 1.0


def test_layers_the_example_does_not_reach_stay_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    timed_by(lambda name, m: 2.0 if name == "dense" else 1.0, monkeypatch)

    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    report = tk.factorize_(Half(), 0.25, tk.everything, only_if_faster=torch.zeros(2, 16))
    assert [layer.reason for layer in report.layers] == [None, "not reached by the example input"]


@pytest.mark.filterwarnings("ignore:no layer becomes low-rank:takifugu.errors.TakifuguWarning")
def test_measuring_leaves_no_trace() -> None:
    model = net().train()
    model[3].weight.grad = torch.ones_like(model[3].weight)
    example = torch.randn(2, 8, 8, 8)
    before, state = {n: b.clone() for n, b in model.named_buffers()}, torch.get_rng_state()
    tk.choose(model, 0.25, tk.everything, only_if_faster=example)
    assert all(torch.equal(b, before[n]) for n, b in model.named_buffers())
    assert all(module.training for module in model.modules())
    assert all(not module._forward_pre_hooks for module in model.modules())
    assert torch.equal(model[3].weight.grad, torch.ones_like(model[3].weight))
    assert all(p.grad is None for n, p in model.named_parameters() if n != "3.weight")
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)


def test_a_real_race_ranks_a_big_product_behind_a_small_one() -> None:
    big, small = nn.Linear(1024, 1024), nn.Linear(1024, 8)
    times = probe.race({"big": big, "small": small}, (torch.randn(256, 1024),), {})
    assert times["small"] < times["big"]


def test_calls_of_all_shapes_can_be_raced_and_counted() -> None:
    lstm = nn.LSTM(4, 6)
    packed = pack_padded_sequence(torch.randn(5, 3, 4), [5, 4, 2])
    assert probe.race({"a": lstm}, (packed,), {})["a"] > 0
    attention = nn.MultiheadAttention(8, 2)
    x = torch.randn(4, 2, 8)
    options = {"key": x, "value": x, "need_weights": False}
    assert probe.race({"a": attention}, (x,), options)["a"] > 0
    assert probe.macs(nn.Linear(6, 5), [], torch.zeros(7, 6)) == {"": 7 * 6 * 5}
    assert probe.macs(nn.Conv2d(3, 4, 3, padding=1), [], torch.zeros(2, 3, 8, 8))[""] == 2 * 64 * 3 * 4 * 9
    assert probe.macs(lstm, [], (packed,))[""] == packed.data.shape[0] * 24 * (4 + 6)


@pytest.mark.parametrize("form", ["tensor", "tuple", "list", "dict"])
def test_examples_as_tensor_tuple_or_dict(form: str) -> None:
    x = torch.zeros(2, 16)
    example = {"tensor": x, "tuple": (x,), "list": [x], "dict": {"input": x}}[form]
    report = tk.factorize_(nn.Sequential(nn.Linear(16, 16)), 0.25, "0", example_input=example)
    assert (report.macs_before, report.macs) == (2 * 256, 2 * 128)


@pytest.mark.filterwarnings("ignore:no layer becomes low-rank:takifugu.errors.TakifuguWarning")
def test_a_layer_without_a_backward_pass_can_be_raced() -> None:
    model = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 16)).requires_grad_(False)
    words = torch.zeros(2, 3, dtype=torch.long)
    report = tk.factorize_(model, where="0", force=True, only_if_faster=words)
    assert report.layers[0].dense_s > 0
