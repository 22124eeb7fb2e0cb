"""What is chosen, what is left dense and why, and what is refused; the model is never touched."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import takifugu as tk
from takifugu.errors import LayerError, RankError, TakifuguError, TakifuguWarning, UsageError
from takifugu.lowrank.factorized import Factorized
from takifugu.structure import Structure


def net() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(4, 16, 3),
        nn.BatchNorm2d(16),
        nn.Flatten(),
        nn.Linear(16 * 36, 32),
        nn.ReLU(),
        nn.Linear(32, 10),
    )


X = torch.zeros(2, 4, 8, 8)


def snapshot(model: nn.Module) -> tuple[object, ...]:
    """Everything a failed or pure call must leave alone."""
    return (
        [(name, id(module), module.training) for name, module in model.named_modules()],
        {name: (id(p), p.detach().clone(), p.requires_grad) for name, p in model.named_parameters()},
        {name: b.clone() for name, b in model.named_buffers()},
    )


def assert_untouched(model: nn.Module, before: tuple[object, ...]) -> None:
    modules, parameters, buffers = snapshot(model)
    assert modules == before[0]
    assert parameters.keys() == before[1].keys()
    for name, (identity, value, needs) in parameters.items():
        old = before[1][name]
        assert (identity, needs) == (old[0], old[2])
        assert torch.equal(value.nan_to_num(), old[1].nan_to_num())
    assert all(torch.equal(value, before[2][name]) for name, value in buffers.items())


def reasons(report: tk.FactorReport) -> dict[str, str | None]:
    return {layer.name: layer.reason for layer in report.layers}


def test_choose_touches_nothing_and_agrees_with_factorize() -> None:
    model = net().train()
    model[3].eval()
    before, state = snapshot(model), torch.get_rng_state()
    options = {"rank": tk.ranks.Energy(0.8), "example_input": X}
    structure = tk.choose(model, **options)
    assert_untouched(model, before)
    assert torch.equal(torch.get_rng_state(), state)
    report = tk.factorize_(model, **options)
    assert report.structure == structure == tk.structure_of(model)


def test_ranks_count_per_group() -> None:
    model = nn.Sequential(nn.Conv2d(32, 64, 3, groups=4), nn.Linear(8, 8))
    structure = tk.choose(model, 0.25, where="0")
    assert structure["0"].rank == {"weight": 4}  # a quarter of min(16, 8 * 9)


@pytest.mark.parametrize(
    ("where", "chosen"),
    [
        (None, ["3"]),
        (tk.everything, ["0", "3", "5"]),
        ("3", ["3"]),
        (["0", "5"], ["0", "5"]),
        ("[35]", ["3", "5"]),
        (lambda name, module: isinstance(module, nn.Conv2d), ["0"]),
    ],
)
def test_where(where: object, chosen: list[str]) -> None:
    assert [spec.name for spec in tk.choose(net(), 0.25, where)] == chosen


def test_embeddings_are_opt_in() -> None:
    model = nn.ModuleDict({"e": nn.Embedding(100, 32), "fc": nn.Linear(32, 32), "head": nn.Linear(32, 3)})
    assert [spec.name for spec in tk.choose(model, 0.25)] == ["fc"]
    assert [spec.name for spec in tk.choose(model, 0.25, force=True)] == ["fc", "head"]
    assert [spec.name for spec in tk.choose(model, 0.25, where=tk.everything)] == ["e", "fc", "head"]
    with pytest.raises(UsageError, match="opt-in; name them with where="):
        tk.choose(nn.ModuleList([nn.Embedding(100, 32)]), 0.25)


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("conv1", "where='conv1' matches no layer that can be factorized; did you mean 'conv'"),
        (["conv", "fz"], "where='fz' matches no layer that can be factorized; did you mean 'fc'"),
        ("norm", "where='norm' matches 'norm', a BatchNorm2d, which cannot be factorized"),
        (
            "block",
            r"matches 'block', a Sequential, which cannot be factorized; for the layers inside it use 'block\.\*'",
        ),
        (
            "attention.out_proj",
            "names a part of 'attention', which is factorized as a whole; name 'attention'",
        ),
        (lambda name, module: False, "where= matches none of the 4 layers that can be factorized"),
        ([3], r"where= takes name patterns or a function"),
        ([], "where= is an empty list, which matches nothing"),
        (3, r"where= takes name patterns or a function .*, got 3; use a string such as"),
        (True, r"where= takes name patterns .*, got True"),
        ({"fc": True}, r"where= takes name patterns .*, got \{'fc': True\}"),
        (iter(["fc"]), r"where= takes name patterns .*, got <list_iterator"),
        (b"fc", r"where= takes name patterns .*, got b'fc'"),
        (re.compile(b"fc"), r"where= takes name patterns .*; use a string or re.compile"),
        (re.compile("f"), r"where=re.compile\('f'\) matches no whole name .*named like 'conv'"),
        (["fc", re.compile(".*norm")], r"where=re.compile\('.\*norm'\) matches no whole name"),
        (nn.Linear(4, 4), "not a module; give the module's name"),
        (
            lambda name: True,
            r"<lambda> does not take these two arguments; use where=lambda name, module: \.\.\.",
        ),
        (str.isupper, r"isupper does not take these two arguments"),
        (lambda a, b, c: True, "does not take these two arguments"),
        (nn.Linear, "not a class; use where=lambda name, module: isinstance"),
    ],
)
def test_matching_nothing_names_near_misses(where: object, message: str) -> None:
    model = nn.ModuleDict(
        {
            "conv": nn.Conv2d(4, 4, 3),
            "norm": nn.BatchNorm2d(4),
            "block": nn.Sequential(nn.Linear(4, 4)),
            "attention": nn.MultiheadAttention(8, 2),
            "fc": nn.Linear(4, 4),
        }
    )
    before = snapshot(model)
    with pytest.raises(UsageError, match=message):
        tk.factorize_(model, 0.25, where)
    assert_untouched(model, before)


def test_models_without_or_consisting_of_a_layer() -> None:
    with pytest.raises(UsageError, match="Sequential has no layer that can be factorized"):
        tk.factorize_(nn.Sequential(nn.ReLU()), 0.5)
    with pytest.raises(UsageError, match=r"the model itself is a Linear .* put it in an nn.Sequential"):
        tk.factorize_(nn.Linear(4, 4), 0.5)


@pytest.mark.parametrize("rank", [0, -1, 11, float("nan"), 2.0, True, "quick", {"none*": 2}])
def test_bad_ranks_leave_the_model_alone(rank: object) -> None:
    model = net()
    before = snapshot(model)
    with pytest.raises(RankError):
        tk.factorize_(model, rank, where=tk.everything)
    assert_untouched(model, before)


def test_factors_that_cost_more_stay_dense_unless_forced() -> None:
    with pytest.warns(TakifuguWarning, match="no layer becomes low-rank, 0% of the parameters"):
        report = tk.factorize_(net(), 1.0, where=tk.everything)
    assert reasons(report)["5"] == "its factors would cost more (420 parameters) than the dense weight (320)"
    assert not report.structure.layers
    forced = tk.factorize_(net(), 1.0, force=True)
    assert [layer.rank for layer in forced.layers] == [{"weight": 16}, {"weight": 32}, {"weight": 10}]


def weight_normed() -> nn.Module:
    return parametrizations.weight_norm(nn.Linear(16, 16))


def spectral_normed() -> nn.Module:
    return parametrizations.spectral_norm(nn.Linear(16, 16))


def old_weight_normed() -> nn.Module:
    with pytest.warns(FutureWarning, match="weight_norm"):
        return nn.utils.weight_norm(nn.Linear(16, 16))


def pruned() -> nn.Module:
    return prune.l1_unstructured(nn.Linear(16, 16), "weight", 0.5)


def frozen() -> nn.Module:
    return nn.Linear(16, 16).requires_grad_(False)


class OwnForward(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


def zero_attention() -> nn.Module:
    return nn.MultiheadAttention(16, 2, add_zero_attn=True)


def tied_within() -> nn.Module:
    layer = nn.LSTM(16, 16, num_layers=2)
    layer.weight_hh_l1 = layer.weight_hh_l0
    return layer


class OwnCall(nn.Linear):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return super().__call__(x) * 2


def with_mask() -> nn.Module:
    layer = nn.Linear(16, 16)
    layer.register_buffer("mask", torch.ones(16))
    return layer


def with_child() -> nn.Module:
    layer = nn.Linear(16, 16)
    layer.gate = nn.Linear(2, 2)
    return layer


class ByTen(nn.Module):
    def forward(self, W: torch.Tensor) -> torch.Tensor:
        return 10 * W


def self_made() -> nn.Module:
    layer = nn.Linear(16, 16)
    parametrize.register_parametrization(layer, "weight", ByTen())
    return layer


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (weight_normed, "its weight is parametrized; remove the parametrization first"),
        (spectral_normed, "its weight is parametrized; remove the parametrization first"),
        (self_made, "its weight is parametrized; remove the parametrization first"),
        (old_weight_normed, "its weight is computed from other parameters"),
        (pruned, "its weight is computed from other parameters"),
        (frozen, "frozen (requires_grad=False); force=True factorizes it all the same"),
        (lambda: OwnForward(16, 16), "OwnForward has a forward of its own"),
        (lambda: OwnCall(16, 16), "OwnCall has a forward of its own"),
        (with_mask, "it also holds 'mask', which would be lost"),
        (with_child, "it also holds 'gate.weight', which would be lost"),
        (lambda: nn.LazyLinear(16), "its shape is not known yet (a lazy module)"),
        (zero_attention, "add_zero_attn is not supported"),
        (tied_within, "two of its matrices are one parameter"),
        pytest.param(
            lambda: nn.Linear(0, 16),
            "its weight has no elements",
            marks=pytest.mark.filterwarnings("ignore:Initializing zero-element tensors"),
        ),
        (lambda: nn.Embedding(16, 16, max_norm=1.0), "max_norm renormalizes dense rows"),
        (
            lambda: nn.Linear(16, 16, dtype=torch.complex64),
            "its weight is not a plain float tensor (torch.complex64",
        ),
    ],
)
def test_layers_that_stay_dense_say_why(make, reason: str) -> None:
    model = nn.Sequential(make(), nn.Linear(16, 256))
    odd = model[0]
    report = tk.factorize_(model, 0.25, where="*")
    assert model[0] is odd
    assert isinstance(model[1], Factorized)
    assert reasons(report)["0"].startswith(reason)
    assert reason.split("(")[0] in str(report)


def test_a_frozen_layer_can_be_forced_and_stays_frozen() -> None:
    model = nn.Sequential(frozen())
    tk.factorize_(model, 0.25, force=True)
    assert [p.requires_grad for p in model.parameters()] == [False] * 3
    tk.densify_(model)
    assert not model[0].weight.requires_grad


def test_a_plain_subclass_is_as_good_as_its_base() -> None:
    class Named(nn.Linear):
        pass

    model = nn.Sequential(Named(16, 16))
    tk.factorize_(model, 0.25, where="0")
    assert isinstance(model[0], Factorized)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("rank", [0.25, "stable"])
def test_nan_weights_are_an_error_that_names_the_layer(value: float, rank: object) -> None:
    model = net()
    with torch.no_grad():
        model[5].weight[3, 4] = value
    before = snapshot(model)
    with pytest.raises(LayerError, match="weight of '5' contains NaN or infinity"):
        tk.factorize_(model, rank, where=tk.everything)
    assert_untouched(model, before)


def test_already_factorized_layers_are_kept_unless_reranked() -> None:
    model = net()
    tk.factorize_(model, 0.5, where="3")
    report = tk.factorize_(model, 0.25, where=tk.everything)
    assert reasons(report)["3"] == "already factorized (rank 16); pass rerank=True to change it"
    assert {spec.name: spec.rank["weight"] for spec in report.structure} == {"0": 4, "3": 16, "5": 2}
    again = tk.factorize_(model, 0.1, where=tk.everything, rerank=True)
    assert {spec.name: spec.rank["weight"] for spec in again.structure} == {"0": 1, "3": 3, "5": 1}


def test_schemes_by_pattern_and_for_what_they_suit() -> None:
    model = nn.Sequential(nn.Conv2d(16, 16, 3), nn.Conv2d(16, 16, 1), nn.Linear(16, 16))
    structure = tk.choose(model, 0.25, tk.everything, scheme="tucker2")
    assert [spec.scheme for spec in structure] == ["tucker2", "tucker2", "uv"]
    assert structure["0"].rank == {"out": 4, "in": 4}
    report = tk.factorize_(copy.deepcopy(model), 0.25, tk.everything, scheme="separable")
    assert "separable scheme needs" in reasons(report)["1"]
    mixed = tk.choose(model, 0.25, tk.everything, scheme={"0": "1x1-kxk"})
    assert [spec.scheme for spec in mixed] == ["1x1-kxk", "kxk-1x1", "uv"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scheme": "tuker2"}, "unknown scheme 'tuker2'; did you mean 'tucker2'"),
        ({"scheme": {"zz*": "tucker2"}}, r"scheme pattern 'zz\*' matches no layer"),
        ({"scheme": "fastest"}, "pass example_input="),
        ({"svd": "magic"}, "unknown svd 'magic'; one of 'exact', 'randomized'"),
        ({"rank": tk.ranks.Budget(macs=0.5)}, "a budget in MACs depends on the input; pass example_input="),
        ({"only_if_faster": torch.zeros(2, 3, 8, 8)}, "the model does not run on the example input"),
        ({"example_input": "text"}, "the model does not run on the example input"),
    ],
)
def test_bad_options(options: dict, message: str) -> None:
    model = net()
    before = snapshot(model)
    with pytest.raises(TakifuguError, match=message):
        tk.factorize_(model, **options)
    assert_untouched(model, before)


def test_a_budget_refuses_schemes_it_cannot_price() -> None:
    with pytest.raises(RankError, match="a budget cannot price the scheme 'tucker2' of '0'"):
        tk.choose(net(), tk.ranks.Budget(params=0.5), tk.everything, scheme="tucker2")


@pytest.mark.parametrize("unit", ["params", "macs", "bytes"])
def test_a_budget_holds_for_the_whole_model(unit: str) -> None:
    model = net()
    report = tk.factorize_(model, tk.ranks.Budget(**{unit: 0.5}), tk.everything, example_input=X)
    before, after = {
        "params": (report.params_before, report.params),
        "macs": (report.macs_before, report.macs),
        "bytes": (report.gradient_bytes_before, report.gradient_bytes),
    }[unit]
    assert 0.4 * before < after <= 0.5 * before


def test_a_module_used_in_two_places_is_replaced_in_both() -> None:
    shared = nn.Linear(16, 16)
    model = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared), "c": nn.Linear(16, 16)})
    tk.factorize_(model, 0.25, where="*")
    assert isinstance(model["a"], Factorized)
    assert model["a"] is model["b"][0]
    assert [spec.name for spec in tk.structure_of(model)] == ["a", "c"]
    tk.densify_(model)
    assert type(model["a"]) is nn.Linear
    assert model["a"] is model["b"][0]


def test_meta_models_have_shapes_to_choose_by_but_no_values() -> None:
    with torch.device("meta"):
        model = net()
    assert len(tk.choose(model, 0.25, tk.everything)) == 3
    with pytest.raises(LayerError, match="'0' is on the meta device and has no values to decompose"):
        tk.choose(model, "stable", tk.everything)


@pytest.mark.parametrize(
    ("where", "names"),
    [
        (re.compile(r"blocks\.\d\.fc1"), ["blocks.0.fc1", "blocks.1.fc1"]),
        ([re.compile(r".*\.1\..*"), "head"], ["blocks.1.fc1", "blocks.1.fc2", "head"]),
        (("head",), ["head"]),
        ({"head"}, ["head"]),
        (lambda name, module=None, *, more=0: name == "head", ["head"]),
        (functools.partial(lambda wanted, name, module: name == wanted, "head"), ["head"]),
    ],
    ids=["compiled", "mixed", "tuple", "set", "defaults", "partial"],
)
def test_patterns_may_be_compiled_and_mixed(where: object, names: list[str]) -> None:
    block = nn.ModuleDict({"fc1": nn.Linear(16, 16), "fc2": nn.Linear(16, 16)})
    model = nn.ModuleDict({"blocks": nn.ModuleList([block, copy.deepcopy(block)]), "head": nn.Linear(16, 16)})
    assert [spec.name for spec in tk.choose(model, 4, where)] == names  # type: ignore[arg-type]


def test_an_error_inside_the_users_function_is_theirs() -> None:
    def where(name: str, module: nn.Module) -> bool:
        raise TypeError("my own mistake")

    with pytest.raises(TypeError, match="my own mistake"):
        tk.choose(nn.Sequential(nn.Linear(16, 16)), 4, where)


@pytest.mark.parametrize("name", ["example_input", "only_if_faster"])
def test_flags_are_no_examples(name: str) -> None:
    model = nn.Sequential(nn.Linear(16, 16))
    for call in (
        lambda value: tk.factorize_(model, 4, **{name: value}),
        lambda value: tk.WarmStart(4, **{name: value}),
    ):
        with pytest.raises(
            UsageError, match=rf"{name}= takes an example input, not True; pass a batch as the"
        ):
            call(True)
        with pytest.raises(UsageError, match=rf"{name}= takes an example input, not False; leave it out"):
            call(False)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (3, r"expected a model \(a torch.nn.Module\), got a int"),
        ([nn.Linear(4, 4)], "got a list"),
        ({"weight": torch.zeros(2, 2)}, "got a dict"),
        (None, "got a NoneType"),
        (nn.Linear, r"expected a model, got the class Linear; create one: Linear\(...\)"),
    ],
    ids=["int", "list", "dict", "None", "class"],
)
def test_what_is_not_a_model(model: Any, message: str, tmp_path: Path) -> None:
    saved = tmp_path / "good.safetensors"
    tk.save(nn.Sequential(nn.Linear(4, 4)), saved)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    calls: list[Callable[[], object]] = [
        lambda: tk.factorize_(model, 0.25),
        lambda: tk.choose(model, 0.25),
        lambda: tk.apply_(model, Structure()),
        lambda: tk.densify_(model),
        lambda: tk.structure_of(model),
        lambda: tk.save(model, tmp_path / "m.safetensors"),
        lambda: tk.WarmStart(0.25)(model, optimizer, epoch=0),
    ]
    if model is not None:  # load(path, None) builds a zoo network
        calls.append(lambda: tk.load(saved, model))
    for call in calls:
        with pytest.raises(UsageError, match=message):
            call()


@pytest.mark.parametrize("rank", [1, "1", {"*": 1}], ids=str)
def test_a_rank_of_one_is_questioned(rank: Any) -> None:
    model = nn.Sequential(nn.Linear(16, 16))
    with pytest.warns(
        TakifuguWarning, match=r"rank=1 is a rank of one; use rank=1.0 for the full rank, or ran"
    ):
        assert tk.choose(model, rank, where="0")["0"].rank == {"weight": 1}


def test_a_rank_of_one_is_questioned_once_by_a_warm_start() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    with pytest.warns(TakifuguWarning, match="rank=1 is a rank of one"):
        warm = tk.WarmStart(1, warmup=0, where="0")
    warm(model, torch.optim.SGD(model.parameters(), lr=0.1), epoch=0)
    assert warm.report.structure["0"].rank == {"weight": 1}


@pytest.mark.parametrize("rank", [tk.ranks.Fixed(1), 1.0, 2], ids=str)
def test_other_ranks_are_not_questioned(rank: Any) -> None:
    tk.choose(nn.Sequential(nn.Linear(16, 16)), rank, where="0", force=True)
