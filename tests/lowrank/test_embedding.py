from __future__ import annotations

import pytest
import torch
from layer_checks import assert_factor_gradients, factorized
from torch import nn

import takifugu as tk
from takifugu.lowrank.layers import kind_of


@pytest.mark.parametrize("padding", [None, 0])
@pytest.mark.parametrize("ratio", [1.0, 0.5])
def test_look_ups_are_rows_of_the_product(padding: int | None, ratio: float) -> None:
    dense = nn.Embedding(11, 6, padding_idx=padding).double()
    layer = factorized(dense, ratio=ratio)
    tokens = torch.tensor([[0, 3, 3], [10, 1, 0]])
    again = layer.to_dense()
    assert type(again) is nn.Embedding
    assert again.padding_idx == padding
    torch.testing.assert_close(layer(tokens), again(tokens))
    if ratio == 1.0:
        torch.testing.assert_close(layer(tokens), dense(tokens))
    if padding is None:
        assert_factor_gradients(layer, dense, tokens)


def test_padding_gets_no_gradient_and_stays_zero() -> None:
    layer = factorized(nn.Embedding(5, 4, padding_idx=2), ratio=0.5)
    layer(torch.tensor([2, 1])).sum().backward()
    assert layer.u.weight.grad[2].abs().sum() == 0
    assert layer.u.weight.grad[1].abs().sum() > 0
    assert layer(torch.tensor([2])).abs().max() < 1e-6


def test_max_norm_is_refused() -> None:
    dense = nn.Embedding(5, 4, max_norm=1.0)
    assert "max_norm" in kind_of(dense).obstacle(dense, "uv")


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.decoder = nn.Linear(8, 12)
        self.decoder.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.embedding(tokens))


def test_a_tied_decoder_shares_the_factors_and_unties_nothing() -> None:
    model = Tied().double()
    tokens = torch.tensor([1, 5, 7])
    expected = model(tokens)
    report = tk.factorize_(model, rank=1.0, where=["embedding", "decoder"], force=True)
    assert report.structure["decoder"].tie == "embedding"
    assert model.decoder.u.weight is model.embedding.u.weight
    assert model.decoder.v.weight is model.embedding.v
    torch.testing.assert_close(model(tokens), expected)
    assert sum(p.numel() for p in model.parameters()) == 12 * 8 + 8 * 8 + 12
    tk.densify_(model)
    assert model.decoder.weight is model.embedding.weight
    torch.testing.assert_close(model(tokens), expected)


def test_by_default_a_tied_decoder_stays_dense_and_says_why() -> None:
    model = nn.Sequential(nn.Linear(12, 12), Tied(), nn.Linear(12, 64), nn.Linear(64, 12))
    report = tk.factorize_(model, rank=8)
    assert [layer.name for layer in report.factorized] == ["2"]
    left = {layer.name: layer.reason for layer in report.left_dense}
    assert left["1.decoder"] == "shares its weight with '1.embedding', which stays dense"
    assert left["1.embedding"].startswith("an embedding stays dense by default")
    assert model[1].decoder.weight is model[1].embedding.weight


def test_tied_factors_survive_saving_and_reranking(tmp_path) -> None:
    model = Tied()
    tk.factorize_(model, rank=0.5, where="*")
    tk.save(model, tmp_path / "m.safetensors")
    fresh = tk.load(tmp_path / "m.safetensors", Tied())
    assert fresh.decoder.u.weight is fresh.embedding.u.weight
    tokens = torch.arange(12)
    assert torch.equal(fresh(tokens), model(tokens))
    tk.factorize_(model, rank=0.25, where="*", rerank=True)
    assert model.decoder.v.weight is model.embedding.v
    assert model.embedding.rank == model.decoder.rank == {"weight": 2}


def test_a_structure_with_a_tie_does_not_tie_what_is_not_tied() -> None:
    model = Tied()
    structure = tk.choose(model, 0.5, where="*")
    untied = Tied()
    untied.decoder.weight = nn.Parameter(untied.decoder.weight.detach().clone())
    with pytest.raises(
        tk.TakifuguError, match="'decoder' is tied to 'embedding' in the structure, but not in this"
    ):
        tk.apply_(untied, structure)
    assert type(untied.embedding) is nn.Embedding
