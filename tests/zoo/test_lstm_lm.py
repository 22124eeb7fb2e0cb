"""The language model, in small."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from takifugu import zoo

SMALL = {"vocabulary": 20, "hidden": 16, "dropout": 0.0}


def small(**options: object) -> nn.Module:
    torch.manual_seed(0)
    return zoo.build("lstm-wikitext2", **{**SMALL, **options})


def test_embedding_and_decoder_are_one() -> None:
    model = small()
    assert model.decoder.weight is model.embedding.weight
    assert (twin := copy.deepcopy(model)).decoder.weight is twin.embedding.weight


def test_initial_values() -> None:
    model = small(vocabulary=200)
    weight = model.embedding.weight.detach()
    assert 0.09 < float(weight.abs().max()) <= 0.1
    assert not model.decoder.bias.any()


def test_state_carries_the_past() -> None:
    model = small(layers=3).eval()
    (tokens,) = zoo.example("lstm-wikitext2", 2, vocabulary=20, length=10)
    whole, (h, c) = model(tokens)
    assert whole.shape == (10, 2, 20)
    assert h.shape == c.shape == (3, 2, 16)
    first, state = model(tokens[:6])
    second, _ = model(tokens[6:], state)
    torch.testing.assert_close(torch.cat([first, second]), whole)


def test_dropout_only_in_training() -> None:
    model = small(dropout=0.5)
    (tokens,) = zoo.example("lstm-wikitext2", 2, vocabulary=20)
    assert not torch.equal(model(tokens)[0], model(tokens)[0])
    model.eval()
    assert torch.equal(model(tokens)[0], model(tokens)[0])


def test_one_layer_does_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        small(layers=1, dropout=0.5)


@pytest.mark.parametrize("layers", [1, 2])
def test_learns_a_tiny_batch(layers: int) -> None:
    model = small(layers=layers)
    (tokens,) = zoo.example("lstm-wikitext2", 2, vocabulary=20, length=9)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    losses = []
    for _ in range(40):
        logits, _ = model(tokens[:-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]
