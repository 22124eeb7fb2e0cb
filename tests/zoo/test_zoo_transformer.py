"""The translation model, in small: ties, masks, positions, learning."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from takifugu import zoo
from takifugu.errors import UsageError

PAD = 2
SMALL = {
    "vocabulary": 30,
    "width": 16,
    "heads": 4,
    "layers": 2,
    "feed_forward": 32,
    "dropout": 0.0,
    "pad": PAD,
    "max_length": 24,
}


def small(**options: object) -> nn.Module:
    torch.manual_seed(0)
    return zoo.build("transformer-multi30k", **{**SMALL, **options})


def pair(batch_size: int = 3, length: int = 8) -> tuple[Tensor, Tensor]:
    source, target = zoo.example("transformer-multi30k", batch_size, length=length, vocabulary=30, pad=PAD)
    return source, target


def padded(tokens: Tensor, extra: int) -> Tensor:
    return F.pad(tokens, (0, extra), value=PAD)


def test_embedding_and_output_are_one() -> None:
    model = small()
    assert model.output.weight is model.embedding.weight
    assert (twin := copy.deepcopy(model)).output.weight is twin.embedding.weight
    assert sum(p.shape == (30, 16) for p in model.parameters()) == 1


def test_positions_are_neither_trained_nor_saved() -> None:
    model = small()
    assert not any("positions" in name for name, _ in model.named_parameters())
    assert not any("positions" in name for name in model.state_dict())


@pytest.mark.parametrize("width", [6, 9])
def test_positions_are_sinusoids(width: int) -> None:
    table = small(width=width, heads=3).positions.table
    for position in (0, 1, 17):
        for column in range(width):
            angle = position / 10_000 ** ((column - column % 2) / width)
            expected = math.cos(angle) if column % 2 else math.sin(angle)
            assert float(table[position, column]) == pytest.approx(expected, abs=1e-5)


def test_positions_come_back_after_meta() -> None:
    with torch.device("meta"):
        model = zoo.build("transformer-multi30k", **SMALL)
    positions = model.positions.to_empty(device="cpu")
    positions.reset_parameters()
    assert torch.equal(positions.table, small().positions.table)


def test_the_future_does_not_leak() -> None:
    model = small().eval()
    source, target = pair()
    before = model(source, target)
    changed = target.clone()
    changed[:, 5] = (target[:, 5] + 7) % 20 + 3  # another word, not padding
    assert (changed[:, 5] != target[:, 5]).all()
    after = model(source, changed)
    torch.testing.assert_close(after[:, :5], before[:, :5])
    assert not torch.allclose(after[:, 5:], before[:, 5:])


def test_more_padding_changes_nothing() -> None:
    model = small().eval()
    source, target = pair()
    before = model(source, target)
    torch.testing.assert_close(model(padded(source, 5), target), before)
    torch.testing.assert_close(model(source, padded(target, 5))[:, :8], before)


def test_padded_source_content_is_not_seen() -> None:
    model = small().eval()
    source, target = pair()
    source = source.clone()
    source[0, 5:] = PAD
    source[1, :3] = PAD
    before = model(source, target)
    memory, visible = model.encode(source)
    assert torch.equal(visible, source != PAD)
    noisy = torch.where(visible[..., None], memory, torch.randn_like(memory))
    torch.testing.assert_close(model.decode(target, noisy, visible), before)
    # The encoder does not see it either: another vector for the padding word moves its own logit alone.
    with torch.no_grad():
        model.embedding.weight[PAD] += 1.0
    words = [word for word in range(30) if word != PAD]
    torch.testing.assert_close(model(source, target)[..., words], before[..., words])


def test_padding_in_front_of_a_target_is_not_seen() -> None:
    model = small().eval()
    source, target = pair()
    target = target.clone()
    target[:, :3] = PAD
    before = model(source, target)
    with torch.no_grad():
        model.embedding.weight[PAD] += 1.0
    words = [word for word in range(30) if word != PAD]
    torch.testing.assert_close(model(source, target)[:, 3:, words], before[:, 3:, words])


def test_nothing_but_padding_is_still_finite() -> None:
    model = small()
    masks: list[Tensor] = []
    for stack in (model.encoder, model.decoder):
        stack.register_forward_pre_hook(
            lambda module, args: masks.extend(a for a in args if a.dtype == torch.bool)
        )
    source, target = pair()
    source[0], target[1] = PAD, PAD
    logits = model(source, target)
    logits.sum().backward()
    assert logits.isfinite().all()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    # Some attention kernels survive a row with nothing to look at, others do not: there must be none.
    assert len(masks) == 3
    assert all(mask.any(dim=-1).all() for mask in masks)


def test_sentences_do_not_mix() -> None:
    model = small().eval()
    source, target = pair()
    torch.testing.assert_close(model(source[1:2], target[1:2]), model(source, target)[1:2])


def test_attention_agrees_with_torchs() -> None:
    layer = small().encoder.layers[0].attention.eval()
    reference = nn.MultiheadAttention(16, 4, bias=False, batch_first=True).eval()
    with torch.no_grad():
        reference.in_proj_weight.copy_(torch.cat([layer.q.weight, layer.k.weight, layer.v.weight]))
        reference.out_proj.weight.copy_(layer.out.weight)
    x, memory = torch.randn(2, 5, 16), torch.randn(2, 7, 16)
    visible = torch.ones(2, 7, dtype=torch.bool)
    visible[0, 4:] = False
    expected, _ = reference(x, memory, memory, key_padding_mask=~visible)
    torch.testing.assert_close(layer(x, memory, visible[:, None, None, :]), expected)


def test_too_long_a_sequence_is_refused() -> None:
    source, target = pair(length=25)
    with pytest.raises(UsageError, match="a sequence of 25 tokens exceeds max_length 24; shorten it"):
        small()(source, target)


def test_dropout_only_in_training() -> None:
    model = small(dropout=0.5)
    assert not torch.equal(model(*pair()), model(*pair()))
    model.eval()
    assert torch.equal(model(*pair()), model(*pair()))


def test_learns_a_tiny_batch_and_decodes_it() -> None:
    model = small()
    source, target = pair(batch_size=2, length=6)
    target[:, 0] = 0  # every sentence starts with the same word
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(60):
        logits = model(source, target[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.2 * losses[0]

    model.eval()
    memory, visible = model.encode(source)
    decoded = target[:, :1]
    for _ in range(5):
        logits = model.decode(decoded, memory, visible)
        decoded = torch.cat([decoded, logits[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(decoded, target)
