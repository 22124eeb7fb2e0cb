"""Averages against the plain way: make every model dense, average, truncate by SVD."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import pytest
import torch
from every_kind import CASES, Case
from torch import Tensor, nn

import takifugu as tk
from takifugu.errors import UsageError
from takifugu.lowrank.averaging import average
from takifugu.lowrank.factorized import Factorized

WITH_PAIRS = [case for case in CASES.values() if case.scheme != "tucker2"]


@dataclass
class Sent:
    state: dict[str, Tensor]
    samples: int


def _sent(model: nn.Module, samples: int, seed: int, noise: float = 0.3) -> Sent:
    generator = torch.Generator().manual_seed(seed)
    state = {
        name: t + noise * torch.randn(t.shape, generator=generator) if t.is_floating_point() else t + seed
        for name, t in model.state_dict().items()
    }
    return Sent(state, samples)


def _layer(model: nn.Module) -> Factorized:
    layer = model.get_submodule("layer")
    assert isinstance(layer, Factorized)
    return layer


def _dense_mean(model: nn.Module, updates: list[Sent]) -> dict[str, Tensor]:
    """The mean of the products, formed in full."""
    total = sum(update.samples for update in updates)
    mean: dict[str, Tensor] = {}
    for update in updates:
        one = copy.deepcopy(model)
        one.load_state_dict(update.state)
        for name, weight in _layer(one).dense_weights(precise=True).items():
            mean[name] = mean.get(name, 0) + weight.detach() * (update.samples / total)
    return mean


def _distance(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    away = sum(float((found[name] - wanted[name]).square().sum()) for name in wanted)
    size = sum(float(wanted[name].square().sum()) for name in wanted)
    return (away / size) ** 0.5


@pytest.mark.parametrize("case", WITH_PAIRS, ids=lambda case: case.name)
def test_products_are_the_truncated_svd_of_the_dense_mean(case: Case) -> None:
    model = case.factorized(rank=0.4).double()
    updates = [_sent(model, samples, seed) for seed, samples in enumerate((10, 30, 5))]
    averaged = average(model, updates, "products")

    mean = _dense_mean(model, updates)
    best = {}
    layer = _layer(model)
    unfoldings = layer.unfoldings(layer.dense_shell("meta"), layer.scheme)
    lost = total = 0.0
    for unfolding in unfoldings:
        for index, block in enumerate(unfolding.unfold(mean)):
            U, s, V_t = torch.linalg.svd(block, full_matrices=False)
            r = layer.rank[unfolding.name]
            best[f"{unfolding.name}{index}"] = (U[:, :r] * s[:r]) @ V_t[:r]
            lost, total = lost + float(s[r:].square().sum()), total + float(s.square().sum())

    result = copy.deepcopy(model)
    result.load_state_dict(averaged.state)
    ours = {name: weight.detach() for name, weight in _layer(result).dense_weights(precise=True).items()}
    found = {
        f"{unfolding.name}{index}": block
        for unfolding in unfoldings
        for index, block in enumerate(unfolding.unfold(ours))
    }
    assert _distance(found, best) < 1e-10
    assert averaged.truncation == pytest.approx((lost / total) ** 0.5, rel=1e-9)
    assert averaged.truncation == pytest.approx(_distance(ours, mean), rel=1e-9)
    assert averaged.truncation > 1e-3
    assert averaged.notes == ()
    # What is not factorized is the plain mean.
    plain = average(model, updates, "factors")
    assert torch.equal(averaged.state["head.weight"], plain.state["head.weight"])


@pytest.mark.parametrize("case", CASES.values(), ids=lambda case: case.name)
def test_factors_say_how_far_they_are_from_the_mean_product(case: Case) -> None:
    model = case.factorized(rank=0.4).double()
    updates = [_sent(model, samples, seed) for seed, samples in enumerate((10, 30, 5))]
    averaged = average(model, updates, "factors")
    result = copy.deepcopy(model)
    result.load_state_dict(averaged.state)
    ours = {name: weight.detach() for name, weight in _layer(result).dense_weights(precise=True).items()}
    assert averaged.truncation == pytest.approx(_distance(ours, _dense_mean(model, updates)), rel=1e-6)
    weights = [10 / 45, 30 / 45, 5 / 45]
    for name, tensor in averaged.state.items():
        wanted = sum(w * update.state[name] for w, update in zip(weights, updates, strict=True))
        torch.testing.assert_close(tensor, wanted)


@pytest.mark.parametrize("case", CASES.values(), ids=lambda case: case.name)
def test_equal_updates_average_to_themselves_either_way(case: Case) -> None:
    model = case.factorized(rank=0.4)
    update = _sent(model, 7, seed=3)
    inputs = case.example()
    outputs = []
    for how in ("factors", "products"):
        averaged = average(model, [update, update, update], how)
        assert averaged.truncation < 1e-7
        result = copy.deepcopy(model).eval()
        result.load_state_dict(averaged.state)
        outputs.append(result(*inputs))
    one = copy.deepcopy(model).eval()
    one.load_state_dict(update.state)
    for output in outputs:
        torch.testing.assert_close(output, one(*inputs), rtol=1e-4, atol=1e-5)


def test_tucker_says_that_it_was_averaged_by_factors() -> None:
    model = CASES["conv2d-tucker2"].factorized()
    averaged = average(model, [_sent(model, 1, 0), _sent(model, 1, 1)], "products")
    assert len(averaged.notes) == 1
    assert "'layer'" in averaged.notes[0]
    assert "averaged by factors" in averaged.notes[0]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(30, 12)
        self.decoder = nn.Linear(12, 30)
        self.decoder.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.words(x))


def test_tied_layers_stay_tied() -> None:
    model = Tied()
    tk.factorize_(model, 0.5, where=["words", "decoder"], force=True)
    updates = []
    for seed in range(3):
        one = copy.deepcopy(model)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for p in one.parameters():
                p.add_(torch.randn(p.shape, generator=generator) * 0.1)
        updates.append(Sent(one.state_dict(), 5))
    averaged = average(model, updates, "products")
    model.load_state_dict(averaged.state)
    words, decoder = model.get_submodule("words"), model.get_submodule("decoder")
    mean = sum(u.state["words.u.weight"] @ u.state["words.v"] for u in updates) / 3
    U, s, V_t = torch.linalg.svd(mean.double())
    r = words.rank["weight"]
    best = (U[:, :r] * s[:r]) @ V_t[:r]
    for layer in (words, decoder):
        torch.testing.assert_close(
            layer.dense_weights(precise=True)["weight"].detach(), best, rtol=1e-4, atol=1e-5
        )


def test_of_counts_the_largest_is_kept() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    updates = [_sent(model, 1, 2), _sent(model, 9, 5)]
    state = average(model, updates, "factors").state
    assert int(state["1.num_batches_tracked"]) == 5
    wanted = 0.1 * updates[0].state["1.running_mean"] + 0.9 * updates[1].state["1.running_mean"]
    torch.testing.assert_close(state["1.running_mean"], wanted)


def test_the_model_is_not_touched() -> None:
    model = CASES["linear"].factorized()
    before = copy.deepcopy(model.state_dict())
    average(model, [_sent(model, 1, 0), _sent(model, 1, 1)], "products")
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_mistakes_are_named() -> None:
    model = CASES["linear"].factorized()
    good = _sent(model, 1, 0)
    with pytest.raises(UsageError, match="nothing to average"):
        average(model, [])
    with pytest.raises(UsageError, match="averaging 'median' is not known; one of 'factors', 'products'"):
        average(model, [good], "median")
    with pytest.raises(UsageError, match="one must be above 0"):
        average(model, [Sent(good.state, 0)])
    short = {name: t for name, t in good.state.items() if name != "head.bias"}
    with pytest.raises(UsageError, match="update 1: 'head.bias' is missing"):
        average(model, [good, Sent(short, 1)])
    wide = {**good.state, "head.bias": torch.zeros(99)}
    with pytest.raises(UsageError, match=r"update 1: 'head.bias' is \(99,\)"):
        average(model, [good, Sent(wide, 1)])
