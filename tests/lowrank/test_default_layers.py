"""Which layers `where=None` factorizes, the reason of each that stays dense, and what it warns of."""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

import takifugu as tk
from takifugu.errors import RankError, TakifuguWarning
from takifugu.lowrank.factorized import Factorized


def mlp(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(sizes):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def names(structure: tk.Structure) -> list[str]:
    return [spec.name for spec in structure]


def reasons(report: tk.FactorReport) -> dict[str, str]:
    return {layer.name: layer.reason for layer in report.layers if layer.reason is not None}


def test_output_and_first_layer_stay_dense_and_say_why() -> None:
    model = mlp(64, 256, 256, 10)
    report = tk.factorize_(model, 0.25)
    assert names(report.structure) == ["2"]
    assert reasons(report)["0"].startswith("the first layer stays dense by default; name it with where=")
    assert reasons(report)["4"].startswith("the output layer stays dense by default; name it with where=")
    again = tk.factorize_(model, 0.25)
    assert names(again.structure) == ["2"], "a second call does not turn to the first layer"


def test_the_first_layer_is_taken_if_no_other_remains() -> None:
    assert names(tk.choose(mlp(64, 256, 10), 0.25)) == ["0"]
    frozen = mlp(64, 256, 256, 10)
    frozen[2].requires_grad_(False)
    assert names(tk.choose(frozen, 0.25)) == ["0"]


def test_a_single_layer_is_the_output_layer() -> None:
    with pytest.warns(TakifuguWarning, match="no layer becomes low-rank, 0% of the model's parameters"):
        report = tk.factorize_(nn.Sequential(nn.Linear(64, 64)), 0.25)
    assert report.structure.is_dense


@pytest.mark.parametrize(
    ("layer", "kind"), [(nn.LSTM(64, 64), "lstm"), (nn.MultiheadAttention(64, 4), "attention")]
)
def test_layers_that_are_neither_linear_nor_conv_are_no_ends(layer: nn.Module, kind: str) -> None:
    alone = tk.choose(nn.Sequential(layer), 0.25)
    assert [spec.kind for spec in alone] == [kind]
    between = nn.ModuleDict({"in": nn.Linear(64, 64), "layer": layer, "out": nn.Linear(64, 8)})
    assert names(tk.choose(between, 0.25)) == ["layer"]


def test_ranks_below_eight_stay_dense_unless_they_are_integers() -> None:
    model = mlp(64, 64, 31, 64, 64, 10)
    report = tk.factorize_(model, 0.25)
    assert names(report.structure) == ["6"]
    assert reasons(report)["2"].startswith("its rank would be 7, below 8; give an int as rank")
    assert tk.choose(mlp(64, 64, 64, 10), 4)["2"].rank == {"weight": 4}
    assert tk.choose(mlp(64, 64, 64, 10), {"2": 4})["2"].rank == {"weight": 4}
    with pytest.warns(TakifuguWarning, match="its rank would be 6, below 8"):
        assert tk.choose(mlp(64, 64, 64, 10), {"2": 0.1}).is_dense


@pytest.mark.parametrize("options", [{"where": tk.everything}, {"force": True}], ids=["everything", "force"])
def test_everything_and_force_take_all_layers(options: dict) -> None:
    assert names(tk.choose(mlp(64, 31, 31, 10), 0.1, **options)) == ["0", "2", "4"]


def test_a_where_of_the_users_is_taken_at_its_word() -> None:
    model = mlp(64, 256, 256, 10)
    assert names(tk.choose(model, 0.25, where=["0", "4"])) == ["0", "4"]
    assert tk.choose(model, 0.25, where="4")["4"].rank == {"weight": 2}


class HeadFirst(nn.Module):
    """Registers its head before its body, and runs an auxiliary head in the middle as well."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 8)
        self.last = nn.Linear(64, 64)
        self.middle = nn.Linear(64, 64)
        self.first = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        early = self.middle(self.first(x))
        return self.head(early) + self.head(self.last(early))


def test_execution_order_counts_where_an_example_is_given() -> None:
    x = torch.zeros(2, 64)
    model = HeadFirst()
    report = tk.factorize_(model, 0.25, example_input=x)
    assert names(report.structure) == ["last", "middle"]
    assert "first layer" in reasons(report)["first"]
    assert "output layer" in reasons(report)["head"]
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert names(tk.choose(HeadFirst(), 0.25)) == ["last", "middle"]
    assert "first" in reasons(tk.factorize_(HeadFirst(), 0.25)), "in registration order it is the output"
    optimizer = AdamW((switched := HeadFirst()).parameters())
    tk.WarmStart(rank=0.25, warmup=0, example_input=x)(switched, optimizer, epoch=0)
    assert names(tk.structure_of(switched)) == ["last", "middle"]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(90, 64)
        self.inner = mlp(64, 64, 64, 64)
        self.head = nn.Linear(64, 90, bias=False)
        self.head.weight = self.embed.weight


def test_tied_weights_stay_dense_with_the_output_layer() -> None:
    report = tk.factorize_(Tied(), 0.25)
    assert names(report.structure) == ["inner.2", "inner.4"]
    assert reasons(report)["embed"].startswith("an embedding stays dense by default")
    everything = tk.choose(Tied(), 0.25, where=tk.everything)
    assert everything["head"].tie == "embed"
    looped = mlp(64, 64, 64, 64)
    looped[2].weight = looped[4].weight
    report = tk.factorize_(looped, 0.25)
    assert names(report.structure) == ["0"], "what is tied to the output layer does not remain either"
    assert reasons(report)["2"] == "shares its weight with '4', which stays dense"


def test_a_rank_for_one_layer_by_its_name_counts_as_naming_it() -> None:
    model = mlp(64, 256, 256, 10)
    assert names(tk.choose(model, {"4": 5, "*": 0.25})) == ["2", "4"]
    with pytest.raises(RankError, match=r"'4\*' matches only layers that stay as they are; '4': the output"):
        tk.choose(model, {"4*": 5, "2": 0.25})


@pytest.mark.parametrize("unit", ["params", "bytes", "macs"])
def test_a_budget_holds_although_small_ranks_are_refused(unit: str) -> None:
    model = mlp(16, 128, 128, 128, 8, 8, 10)
    report = tk.factorize_(model, tk.ranks.Budget(**{unit: 0.4}), example_input=torch.zeros(1, 16))
    ranks = {layer.name: layer.rank["weight"] for layer in report.factorized}
    assert ranks.keys() == {"2", "4"}
    assert min(ranks.values()) >= 8
    before, after = {
        "params": (report.params_before, report.params),
        "bytes": (report.gradient_bytes_before, report.gradient_bytes),
        "macs": (report.macs_before, report.macs),
    }[unit]
    assert 0.35 * before < after <= 0.4 * before
    assert "factors of rank 8 would cost more" in reasons(report)["6"]
    with pytest.raises(RankError, match=r"cannot be met.*by default the least rank is 8"):
        tk.choose(model, tk.ranks.Budget(params=0.11), rerank=True)


def test_stages_keep_to_the_same_layers() -> None:
    model = mlp(64, 256, 256, 10)
    optimizer = AdamW(model.parameters())
    warm = tk.WarmStart(stages=[(0, 0.5), (1, 0.25), (2, 0.02), (3, None)])
    with pytest.warns(TakifuguWarning):
        warm(model, optimizer, epoch=0)  # says now that 0.02 is too little
    found = [tk.structure_of(model)]
    for epoch in (1, 2, 3):
        warm(model, optimizer, epoch=epoch)
        found.append(tk.structure_of(model))
    assert [[(s.name, s.rank["weight"]) for s in structure] for structure in found] == [
        [("2", 128)],
        [("2", 64)],
        [("2", 64)],
        [],
    ]


# ---- the warning ----------------------------------------------------------------------------------------


class OwnForward(nn.Linear):
    """As Falcon's layers are."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T


def test_a_small_share_is_a_warning_with_the_share_and_the_largest_reasons() -> None:
    layers = [
        nn.Linear(64, 64),
        *(OwnForward(256, 256) for _ in range(3)),
        nn.Linear(64, 64),
        nn.Linear(64, 8),
    ]
    model = nn.ModuleList(layers)
    with pytest.warns(TakifuguWarning) as caught:
        tk.factorize_(model, 0.25)
    text = str(caught[0].message)
    assert text.startswith("only 1 of 6 layers, 2.0% of the model's parameters, become low-rank. ")
    assert "'1' and 2 more: OwnForward has a forward of its own" in text
    assert caught[0].filename == __file__
    with pytest.warns(
        TakifuguWarning, match="only 1 of 4 layers, 2.0% of the parameters that where= matches"
    ):
        tk.factorize_(nn.ModuleList(layers[:4]), 0.25, where="*")


def test_one_layer_of_many_by_name_is_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tk.factorize_(mlp(64, 512, 512, 512, 10), 0.25, where="0")


def test_full_rank_without_force_is_a_warning() -> None:
    with pytest.warns(TakifuguWarning, match="'2': its factors would cost more"):
        tk.factorize_(mlp(64, 64, 64, 10), 1.0)


def test_a_warm_start_warns_before_the_warm_up() -> None:
    model = mlp(64, 16, 16, 10)
    optimizer = AdamW(model.parameters())
    warm = tk.WarmStart(rank=0.25, warmup=3)
    with pytest.warns(TakifuguWarning, match="no layer becomes low-rank") as caught:
        warm(model, optimizer, epoch=0)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warm(model, optimizer, epoch=1)


class FusedExperts(nn.Module):
    """As Transformers keeps Mixtral's experts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(8, 128, 64))
        self.down_proj = nn.Parameter(torch.randn(8, 64, 64))
        self.bias = nn.Parameter(torch.zeros(8, 64))


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.head = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 8)
        self.experts = FusedExperts()
        self.places = nn.Parameter(torch.zeros(1, 16, 64))


def test_fused_experts_are_listed_as_left_dense() -> None:
    with pytest.warns(TakifuguWarning, match="'experts': fused 3-D expert weights"):
        report = tk.factorize_(Mixture(), 0.25)
    left = {layer.name: layer for layer in report.left_dense}
    assert left.keys() == {"first", "head", "experts"}
    assert dict(left["experts"].shapes) == {"gate_up_proj": (8, 128, 64), "down_proj": (8, 64, 64)}
    assert "fused 3-D expert weights" in str(report)
    assert report.to_dict()["layers"][-1]["params"] == 8 * (128 + 64 + 1) * 64
    only_inner = tk.factorize_(Mixture(), 0.25, where="inner")
    assert [layer.name for layer in only_inner.layers] == ["inner"]


def test_mixtrals_experts_are_listed() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, num_local_experts=4, vocab_size=100,
    )  # fmt: skip
    model = transformers.MixtralForCausalLM(config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TakifuguWarning)
        report = tk.factorize_(model, 0.25)
    experts = [layer for layer in report.left_dense if layer.kind == "experts"]
    assert [layer.name for layer in experts] == [f"model.layers.{i}.mlp.experts" for i in range(2)]
    assert isinstance(model.model.layers[1].self_attn.q_proj, Factorized)
    assert "output layer" in reasons(report)["lm_head"]
