"""Probing a model on an example input changes nothing in it, whatever the model is made of."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from every_kind import CASES, Case
from fingerprint import Fingerprint
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import takifugu as tk
from takifugu.errors import UsageError
from takifugu.lowrank import probe

WIDTH = 16

# Where no layer is faster, nothing becomes low-rank, and a warning says so: how fast layers are is not the point here.
pytestmark = pytest.mark.filterwarnings("ignore:no layer becomes low-rank")


def X() -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))


def random_states() -> tuple[Any, ...]:
    state = np.random.get_state()
    return torch.get_rng_state().tolist(), random.getstate(), (state[0], state[1].tolist(), *state[2:])


class Chain(nn.Module):
    """Applies its modules in the order of `order`; aliases and shared parameters as given."""

    def __init__(self, layers: list[nn.Module], order: list[int], aliases: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([layers[i] for i in order])
        for i in range(aliases):
            setattr(self, f"alias{i}", self.layers[i % len(order)])
        self.first = self.layers  # a container under two names

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def layer(kind: str) -> nn.Module:
    return {
        "linear": lambda: nn.Linear(WIDTH, WIDTH),
        "prelu": lambda: nn.PReLU(WIDTH),
        "norm": lambda: nn.BatchNorm1d(WIDTH),
        "dropout": lambda: nn.Dropout(0.5),
        "block": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)),
    }[kind]()


PROBES: dict[str, Callable[[nn.Module], Any]] = {
    "example_input": lambda model: tk.choose(model, 0.5, where="*", example_input=X()),
    "only_if_faster": lambda model: tk.choose(model, 0.5, where="*", only_if_faster=X()),
    "budget": lambda model: tk.choose(model, tk.ranks.Budget(macs=0.9), where="*", example_input=X()),
    "macs": lambda model: probe.macs(model, [], X()),
    "fastest": lambda model: tk.choose(model, 0.5, where="*", scheme="fastest", example_input=X()),
}


@settings(max_examples=30, deadline=None)
@given(
    kinds=st.lists(st.sampled_from(["linear", "prelu", "norm", "dropout", "block"]), min_size=1, max_size=4),
    order=st.lists(st.integers(0, 3), min_size=1, max_size=6),
    aliases=st.integers(0, 3),
    tied=st.booleans(),
    training=st.booleans(),
    how=st.sampled_from(["macs", "example_input", "budget"]),
)
def test_no_pattern_of_sharing_is_changed_by_a_probe(
    kinds: list[str], order: list[int], aliases: int, tied: bool, training: bool, how: str
) -> None:
    layers = [nn.Linear(WIDTH, WIDTH), *map(layer, kinds)]
    if tied:
        twin = nn.Linear(WIDTH, WIDTH)
        twin.weight = layers[0].weight  # type: ignore[assignment]
        layers.append(twin)
    model = Chain(layers, [0, *(i % len(layers) for i in order), len(layers) - 1], aliases).train(training)
    before, states = Fingerprint(model), random_states()
    PROBES[how](model)
    before.assert_same()
    assert random_states() == states


@pytest.mark.parametrize("how", PROBES)
def test_a_module_that_is_registered_twice_keeps_its_weights(how: str) -> None:
    shared = nn.Linear(WIDTH, WIDTH)
    model = nn.Sequential(shared, nn.ReLU(), shared, nn.Linear(WIDTH, WIDTH))
    before = Fingerprint(model)
    PROBES[how](model)
    before.assert_same()


def test_factorize_and_warm_start_keep_the_values_of_modules_registered_twice() -> None:
    def build() -> nn.Sequential:
        torch.manual_seed(3)
        norm, slope = nn.BatchNorm1d(WIDTH), nn.PReLU(WIDTH)
        layers = (nn.Linear(WIDTH, WIDTH), norm, slope, nn.Linear(WIDTH, WIDTH), norm, slope)
        return nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH))

    plain, probed, warm = build(), build(), build()
    tk.factorize_(plain, 0.5, where=["0", "3"])
    tk.factorize_(probed, 0.5, where=["0", "3"], example_input=X())
    optimizer = torch.optim.SGD(warm.parameters(), lr=0.1)
    tk.WarmStart(0.5, warmup=0, where=["0", "3"], example_input=X())(warm, optimizer, epoch=0)
    for other in (probed, warm):
        assert {p.device.type for p in other.parameters()} == {"cpu"}
        assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), other.parameters(), strict=True))


class Busy(nn.Module):
    """A forward pass that leaves traces wherever it can."""

    def __init__(self, fails: bool = False, needs_data: bool = False) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)
        self.words = nn.Embedding(5, WIDTH, max_norm=0.1)
        self.register_buffer("calls", torch.zeros(()))
        self.scale = torch.ones(1)  # a plain tensor
        self.cache: dict[str, Tensor] = {}
        self.seen: list[Tensor] = []
        self.fails, self.needs_data = fails, needs_data

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.latest = x
        self.cache["x"] = x
        self.seen.append(x)
        with torch.no_grad():
            self.fc.weight.div_(self.fc.weight.norm())
        x.mul_(2)
        torch.rand(1), random.random(), np.random.rand()
        self.register_buffer("extra", x.detach())
        self.fc.register_forward_hook(lambda *_: None)
        if self.needs_data:
            float(x.sum())  # not possible on the meta device
            self.scale.add_(1)
        if self.fails:
            raise KeyError("no such thing")
        return self.fc(x) + self.words(torch.arange(4, device=x.device))


@pytest.mark.parametrize("needs_data", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_what_a_forward_pass_leaves_behind_is_removed(training: bool, needs_data: bool) -> None:
    model, x = Busy(needs_data=needs_data).train(training), X()
    before, states, scale = Fingerprint(model), random_states(), model.scale
    tk.choose(model, tk.ranks.Budget(macs=0.9), where="fc", example_input=x)
    tk.choose(model, 0.5, where="fc", only_if_faster=x)
    before.assert_same()
    assert random_states() == states
    assert model.scale is scale
    assert float(scale) == 1
    assert torch.equal(x, X())


@pytest.mark.parametrize("needs_data", [False, True])
def test_a_forward_pass_that_fails_leaves_nothing_behind(needs_data: bool) -> None:
    model = Busy(fails=True, needs_data=needs_data).train()
    before, states = Fingerprint(model), random_states()
    for options in ({"example_input": X()}, {"only_if_faster": X()}):
        with pytest.raises(UsageError, match="does not run on the example input: 'no such thing'"):
            tk.factorize_(model, 0.5, where="fc", **options)
    before.assert_same()
    assert random_states() == states


def test_lazy_modules_are_not_initialised() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LazyLinear(4))
    with pytest.raises(
        UsageError, match=r"'1.weight' has no shape yet \(a lazy module\).*run the model once"
    ):
        tk.factorize_(model, 0.5, where="0", example_input=X())
    assert type(model[1]) is nn.LazyLinear
    assert type(model[0]) is nn.Linear


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
@pytest.mark.parametrize("factorized", [False, True])
def test_both_ways_to_count_agree(case: Case, factorized: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = case.factorized() if factorized else case.build()
    names, example = ["layer", "head"], case.example()
    with probe.untouched(model):
        on_shapes = probe._macs_on_meta(model, names, example)

    def unable(*_: object) -> None:
        raise RuntimeError("Tensor.item() cannot be called on meta tensors")

    monkeypatch.setattr(probe, "_macs_on_meta", unable)
    assert probe.macs(model, names, example) == on_shapes
    assert set(on_shapes) == {"layer", "head", ""}


def test_fused_encoders_are_counted_the_same_either_way(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 4, 32, batch_first=True), 2)
    x = torch.randn(2, 5, WIDTH)
    projections, products = 2 * 5 * (4 * WIDTH * WIDTH + 2 * WIDTH * 32), 2 * 2 * 5 * 5 * WIDTH
    assert probe.macs(encoder, [], x) == {"": 2 * (projections + products)}
    monkeypatch.setattr(probe, "_macs_on_meta", lambda *_: 1 / 0)
    assert probe.macs(encoder, [], x) == {"": 2 * (projections + products)}
    assert torch.backends.mha.get_fastpath_enabled()


# ---- layers that are used more than once ------------------------------------------------------------------


def test_all_calls_of_a_layer_are_counted() -> None:
    shared = nn.Linear(WIDTH, WIDTH, bias=False)
    model = nn.Sequential(
        shared, shared, nn.Linear(WIDTH, 8, bias=False), shared.__class__(8, WIDTH, bias=False)
    )
    report = tk.factorize_(model, 4, where="*", example_input=X(), force=True)
    macs = {told.name: (told.macs_before, told.macs) for told in report.layers}
    assert macs["0"] == (2 * 4 * WIDTH * WIDTH, 2 * 4 * 4 * 2 * WIDTH)
    assert report.macs_before == sum(before for before, _ in macs.values())
    assert report.macs == sum(after for _, after in macs.values())


class Tied(nn.Module):
    """A word table and a decoder with the same weight, and two tied layers in between."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(40, 32)
        self.up, self.again, self.other = (nn.Linear(32, 32, bias=False) for _ in range(3))
        self.again.weight = self.up.weight
        self.decoder = nn.Linear(32, 40, bias=False)
        self.decoder.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.again(torch.tanh(self.up(self.words(x))))
        return self.decoder(self.other(self.other(hidden)))


@pytest.mark.parametrize(
    ("where", "share"),
    [
        (["up", "again", "other"], 0.5),
        (["up", "again", "other"], 0.9),
        (["words", "decoder"], 0.9),
        ("*", 0.5),
        ("*", 0.8),
    ],
    ids=str,
)
def test_a_budget_in_macs_counts_tied_and_repeated_layers(where: Any, share: float) -> None:
    model, x = Tied(), torch.randint(0, 40, (2, 6))
    report = tk.factorize_(model, tk.ranks.Budget(macs=share), where, example_input=x, force=True)
    assert report.macs_before == 12 * (4 * 32 * 32 + 32 * 40)
    assert report.macs <= share * report.macs_before
    # One more rank of the cheapest layer would not have fitted: the budget is not left unused either.
    assert report.macs > share * report.macs_before - 12 * 2 * 64 - 12 * (2 * 32 + 40)


def test_a_budget_in_macs_says_which_layer_is_not_reached() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    with pytest.raises(UsageError, match="does not reach 'unused', so a budget in MACs cannot price it"):
        tk.choose(Half(), tk.ranks.Budget(macs=0.5), where="*", example_input=X())
