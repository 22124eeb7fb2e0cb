from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import takifugu as tk
from takifugu.errors import LayerError, StructureError, UsageError
from takifugu.lowrank import surgery
from takifugu.lowrank.factorized import Factorized
from takifugu.structure import LayerSpec, Structure


def net() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.ReLU(),
        nn.ConvTranspose2d(8, 6, 2),
        nn.Flatten(),
        nn.Linear(6 * 49, 20),
        nn.Linear(20, 5),
    ).double()


X = torch.randn(2, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def test_full_rank_changes_nothing_and_densify_brings_the_very_model_back() -> None:
    model = net()
    expected, biases = model(X), [p for n, p in model.named_parameters() if "bias" in n]
    report = tk.factorize_(model, 1.0, force=True)
    assert len(report.factorized) == 4
    torch.testing.assert_close(model(X), expected, rtol=1e-9, atol=1e-9)
    dense = tk.densify_(model)
    assert [type(m) for m in model] == [type(m) for m in net()]
    assert dense.largest < 1e-15
    assert "4 layers dense again" in str(dense)
    torch.testing.assert_close(model(X), expected, rtol=1e-9, atol=1e-9)
    assert all(
        a is b for a, b in zip(biases, [p for n, p in model.named_parameters() if "bias" in n], strict=True)
    )


@settings(max_examples=15, deadline=None)
@given(ratio=st.floats(0.05, 1.0), seed=st.integers(0, 50))
def test_factorize_and_densify_is_the_best_approximation(ratio: float, seed: int) -> None:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(12, 18), nn.Linear(18, 6)).double()
    weights = [layer.weight.detach().clone() for layer in model]
    report = tk.factorize_(model, ratio, force=True)
    tk.densify_(model)
    for layer, W, told in zip(model, weights, report.layers, strict=True):
        U, s, V_t = torch.linalg.svd(W, full_matrices=False)
        r = told.rank["weight"]
        torch.testing.assert_close(layer.weight.detach(), U[:, :r] * s[:r] @ V_t[:r], rtol=1e-7, atol=1e-9)
        assert told.error == pytest.approx(float(s[r:].norm() / s.norm()), abs=1e-7)


def test_apply_goes_from_any_structure_to_any_other() -> None:
    model = net()
    half, quarter = tk.choose(model, 0.5, tk.everything), tk.choose(model, 0.25, where=["0", "4"])
    dense_again = copy.deepcopy(model)
    tk.apply_(model, half)
    assert tk.structure_of(model) == half
    product = model[4].weight.detach().clone()
    tk.apply_(model, quarter)  # two re-ranked, two back to dense
    assert tk.structure_of(model) == quarter
    assert [isinstance(m, Factorized) for m in model] == [True, False, False, False, True, False]
    # Re-ranked from what it was: the best approximation of the product, not of the first weight.
    U, s, V_t = torch.linalg.svd(product, full_matrices=False)
    r = quarter["4"].rank["weight"]
    torch.testing.assert_close(model[4].weight.detach(), U[:, :r] * s[:r] @ V_t[:r], rtol=1e-7, atol=1e-9)
    tk.apply_(model, half)  # and up again: nothing more is lost
    torch.testing.assert_close(model[4].weight.detach(), U[:, :r] * s[:r] @ V_t[:r], rtol=1e-7, atol=1e-9)
    tk.apply_(model, Structure())
    assert [type(m) for m in model] == [type(m) for m in dense_again]


def test_applying_what_is_there_touches_nothing() -> None:
    model = net()
    tk.factorize_(model, 0.5, where=tk.everything)
    modules, parameters = list(model), [id(p) for p in model.parameters()]
    assert tk.apply_(model, tk.structure_of(model)) == {}
    assert list(model) == modules
    assert [id(p) for p in model.parameters()] == parameters


def test_re_ranking_upwards_leaves_no_dead_direction() -> None:
    model = nn.Sequential(nn.Linear(16, 16))
    tk.factorize_(model, 2, where="0")
    tk.factorize_(model, 6, where="0", rerank=True)
    model(torch.randn(8, 16)).square().sum().backward()
    layer = model[0]
    moving = (layer.u.weight.grad.norm(dim=0) > 0) | (layer.v.weight.grad.norm(dim=1) > 0)
    assert moving.all()


SPEC = LayerSpec("4", "linear", "uv", {"weight": 4}, {"weight": (20, 294)})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "44"}, "Sequential has no layer '44'; did you mean '4'"),
        ({"kind": "conv2d"}, "layer '4' is a linear in this model and a conv2d in the structure"),
        ({"kind": "liner"}, "unknown layer kind 'liner'; did you mean 'linear'"),
        ({"scheme": "tucker2"}, "layer '4': unknown scheme 'tucker2' for a linear; one of uv"),
        ({"rank": {"weight": 21}}, "layer '4': rank 21 of weight is not within 1..20"),
        ({"rank": {"q": 2}}, r"ranks are given for \['q'\], needed for \['weight'\]"),
        (
            {"shapes": {"weight": (20, 20)}},
            r"layer '4' has weights .*\(20, 294\).* in this model, .*\(20, 20\)",
        ),
    ],
)
def test_structures_that_do_not_fit(changes: dict, message: str) -> None:
    model = net()
    modules = list(model)
    good = tk.choose(model, 0.5, where="0")["0"]
    bad = LayerSpec(**{**vars(SPEC), **changes})
    with pytest.raises(StructureError, match=message):
        tk.apply_(model, Structure((good, bad)))
    assert list(model) == modules


def test_a_failure_in_the_middle_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = net()
    modules, calls = list(model), []
    exact = surgery.DECOMPOSERS["exact"]

    def third_time_unlucky(W: torch.Tensor, r: int):
        calls.append(1)
        if len(calls) == 3:
            raise MemoryError("out of memory")
        return exact(W, r)

    monkeypatch.setitem(surgery.DECOMPOSERS, "exact", third_time_unlucky)
    with pytest.raises(MemoryError):
        tk.factorize_(model, 0.5, where=tk.everything)
    assert len(calls) == 3
    assert list(model) == modules


def test_parametrized_layers_cannot_be_forced_by_a_structure() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    structure = tk.choose(model, 0.25, where="0")
    nn.utils.parametrizations.weight_norm(model[0])
    with pytest.raises(
        (LayerError, StructureError), match="layer '0' cannot be factorized: its weight is param"
    ):
        tk.apply_(model, structure)


def test_densify_without_factors() -> None:
    with pytest.raises(UsageError, match="has no factorized layer; there is nothing to densify"):
        tk.densify_(net())


def test_randomized_svd_is_close() -> None:
    model, other = net(), None
    other = copy.deepcopy(model)
    exact_errors = [layer.error for layer in tk.factorize_(model, 0.5, tk.everything).layers]
    errors = [layer.error for layer in tk.factorize_(other, 0.5, tk.everything, svd="randomized").layers]
    assert errors == pytest.approx(exact_errors, rel=0.02)


def test_training_goes_on() -> None:
    model = net()
    tk.factorize_(model, 0.5, where=tk.everything)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(15):
        loss = (model(X) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is not None for p in model.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0]


@pytest.mark.parametrize("layers", [["0", "1"], ["1"]], ids=str)
@pytest.mark.parametrize("factorized", [False, True])
def test_a_structure_without_the_tie_does_not_untie(layers: list[str], factorized: bool) -> None:
    untied = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    structure = tk.choose(untied, 0.25, where=layers)
    model = copy.deepcopy(untied)
    model[1].weight = model[0].weight
    if factorized:
        tk.factorize_(model, 0.5, where="*")
    modules = list(model)
    with pytest.raises(StructureError, match="shares its weight with '[01]' in this model, but not in the"):
        tk.apply_(model, structure)
    assert list(model) == modules
    tk.apply_(model, tk.choose(model, 0.25, where="*", rerank=True))
    assert model[0].u.weight is model[1].u.weight
    tk.apply_(model, Structure())
    assert model[0].weight is model[1].weight
