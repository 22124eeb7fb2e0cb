"""Translation of a few made-up sentences: batches, losses and BLEU against plain loops and sacrebleu itself."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from takifugu.errors import DataError, UsageError
from takifugu.train.tasks import translation
from takifugu.train.tasks.base import Place
from takifugu.train.tasks.translation import TranslationTask, translate
from takifugu.zoo.transformer import Transformer, transformer
from takifugu.zoo.translation import BEGIN, END, PAD, Pairs, Ragged, Translation

WORDS = 20


class Letters:
    """Stands in for a tokenizer: token 4 is "a", 5 is "b" and so on, each a word."""

    def get_vocab_size(self) -> int:
        return WORDS

    def decode_batch(self, sentences: list[list[int]], skip_special_tokens: bool) -> list[str]:
        assert skip_special_tokens
        return [" ".join(chr(ord("a") + t - 4) for t in s if t > 3) for s in sentences]


def pairs(count: int, seed: int) -> Pairs:
    draws = torch.Generator().manual_seed(seed)

    def sentence() -> list[int]:
        length = int(torch.randint(1, 12, (1,), generator=draws))
        return torch.randint(4, WORDS, (length,), generator=draws).tolist()

    sources, targets = [sentence() for _ in range(count)], [sentence() for _ in range(count)]
    return Pairs(
        Ragged.of([[*s, END] for s in sources]),
        Ragged.of([[BEGIN, *t, END] for t in targets]),
        tuple(Letters().decode_batch(targets, True)),
    )


def corpus(count: int = 53) -> Translation:
    return Translation(pairs(count, 0), pairs(17, 1), pairs(19, 2), Letters())


@pytest.fixture
def data() -> Translation:
    return corpus()


@pytest.fixture
def model() -> Transformer:
    torch.manual_seed(3)
    return transformer(vocabulary=WORDS, width=16, heads=2, layers=1, feed_forward=32, dropout=0.0)


def test_what_a_run_reads_of_it(data: Translation) -> None:
    task = TranslationTask(data, batch_size=4, seed=0)
    assert task.model_options() == {"vocabulary": WORDS, "pad": PAD}
    assert (task.unit, task.headline, task.higher_is_better) == ("sentences", "bleu", True)


def rows(batch: translation.Batch) -> list[tuple[tuple[int, ...], ...]]:
    """Source and target of each sentence, without padding."""
    source, prefix = batch.inputs
    target = torch.cat([prefix[:, :1], batch.targets], dim=1)
    return [
        (tuple(s[s != PAD].tolist()), tuple(t[t != PAD].tolist()))
        for s, t in zip(source, target, strict=True)
    ]


@settings(max_examples=40, deadline=None)
@given(
    count=st.integers(3, 60), batch_size=st.integers(1, 9), world=st.integers(1, 3), epoch=st.integers(0, 3)
)
def test_an_epoch_sees_every_pair_once(count: int, batch_size: int, world: int, epoch: int) -> None:
    data = corpus(count)
    all_places = torch.arange(count)
    source, target = data.train.source.padded(all_places), data.train.target.padded(all_places)
    wanted = Counter(rows(translation.Batch((source, target[:, :-1]), target[:, 1:], count)))
    seen: Counter[object] = Counter()
    tasks = [
        TranslationTask(data, batch_size=batch_size, seed=5, place=Place(r, world)) for r in range(world)
    ]
    assert len({task.steps for task in tasks}) == 1
    for step in range(tasks[0].steps):
        batches = [task.batch(epoch, step) for task in tasks]
        assert len({batch.samples for batch in batches}) == 1
        for batch in batches:
            assert 1 <= batch.samples == len(batch.targets) <= batch_size
            seen.update(rows(batch))
    extra = -count % world  # as many come twice as are missing for all to have the same
    assert sum(seen.values()) == count + extra
    assert not wanted - seen
    assert sum((seen - wanted).values()) == extra


def test_batches_are_found_by_epoch_and_step(data: Translation) -> None:
    task, again = (TranslationTask(data, batch_size=8, seed=0) for _ in range(2))
    other = TranslationTask(data, batch_size=8, seed=1)
    order = [(2, 3), (0, 1), (5, 0), (2, 3)]
    found = [rows(task.batch(*place)) for place in order]
    assert found[0] == found[3]
    assert found[:3] == [rows(again.batch(*place)) for place in reversed(order[:3])][::-1]
    assert rows(task.batch(0, 1)) != rows(task.batch(1, 1))
    assert rows(task.batch(0, 1)) != rows(other.batch(0, 1))


def test_batches_need_little_padding_and_come_in_no_order_of_length(
    data: Translation, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = corpus(600)
    task = TranslationTask(data, batch_size=10, seed=0)
    batches = [task.batch(0, step) for step in range(task.steps)]
    filled = sum(int((b.targets != PAD).sum()) for b in batches) / sum(b.targets.numel() for b in batches)
    assert filled > 0.9
    monkeypatch.setattr(translation, "POOL_BATCHES", 1)
    unsorted = [TranslationTask(data, batch_size=10, seed=0).batch(0, step) for step in range(task.steps)]
    assert (
        sum(int((b.targets != PAD).sum()) for b in unsorted) / sum(b.targets.numel() for b in unsorted) < 0.7
    )
    lengths = [b.targets.shape[1] for b in batches]
    assert lengths != sorted(lengths)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_loss_and_gradient_are_those_of_the_sentences_one_by_one(
    data: Translation, model: Transformer, smoothing: float
) -> None:
    task = TranslationTask(data, batch_size=8, seed=0, label_smoothing=smoothing)
    batch = task.batch(0, 0)
    assert (batch.targets == PAD).any()  # or the test shows little
    loss, carry = task.loss(model, batch, None)
    assert carry is None
    loss.backward()
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    total, words = torch.zeros(()), 0
    for source, target in rows(batch):
        logits = model(torch.tensor([source]), torch.tensor([target[:-1]]))[0]
        chances = logits.log_softmax(-1)
        for t, wanted in enumerate(target[1:]):
            total = total - (1 - smoothing) * chances[t, wanted] - smoothing * chances[t].mean()
            words += 1
    (total / words).backward()
    torch.testing.assert_close(loss.detach(), (total / words).detach())
    for a, b in zip(found, (p.grad for p in model.parameters() if p.grad is not None), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_more_padding_changes_nothing(data: Translation, model: Transformer) -> None:
    task = TranslationTask(data, batch_size=6, seed=0, label_smoothing=0.1)
    batch = task.batch(0, 2)
    longer = translation.Batch(
        tuple(F.pad(t, (0, 3), value=PAD) for t in batch.inputs),
        F.pad(batch.targets, (0, 3), value=PAD),
        batch.samples,
    )
    torch.testing.assert_close(task.loss(model, batch, None)[0], task.loss(model, longer, None)[0])


def slowly(model: Transformer, source: list[int]) -> list[int]:
    """One sentence, the whole forward pass again for every token."""
    tokens = [BEGIN]
    for _ in range(min(len(source) - 1 + 50, model.positions.table.shape[0] - 1)):
        logits = model(torch.tensor([source]), torch.tensor([tokens]))[0, -1]
        logits[[PAD, BEGIN]] = -torch.inf
        tokens.append(int(logits.argmax()))
        if tokens[-1] == END:
            return tokens[1:-1]
    return tokens[1:]


@pytest.mark.parametrize("max_length", [256, 9])
def test_translations_are_those_of_a_sentence_alone(data: Translation, max_length: int) -> None:
    lengths = set()
    for seed in range(3):
        torch.manual_seed(seed)
        model = transformer(
            vocabulary=WORDS, width=16, heads=2, layers=1, feed_forward=32, max_length=max_length
        )
        model.eval()
        with torch.no_grad():
            # Ending must be neither sure nor out of the question.
            model.embedding.weight[END] *= 1.5
            source = data.test.source.padded(torch.arange(19))[:, : max_length - 1]
            found = translate(model, source)
            assert found == [slowly(model, row[row != PAD].tolist()) for row in source]
        lengths |= {len(tokens) for tokens in found}
    assert len(lengths) > 1


def test_bleu_is_sacrebleus(data: Translation, model: Transformer) -> None:
    sacrebleu = pytest.importorskip("sacrebleu")
    task = TranslationTask(data, batch_size=4, seed=0)
    model.eval()
    with torch.no_grad():
        scores = task.scores(task.evaluate(model, "test"))
        sources = [s[s != PAD].tolist() for s in data.test.source.padded(torch.arange(19))]
        texts = data.decode([slowly(model, source) for source in sources])
    wanted = sacrebleu.corpus_bleu(texts, [list(data.test.references)])
    assert scores["bleu"] == pytest.approx(wanted.score)
    assert set(scores) == {"loss", "perplexity", "bleu"}


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(*[st.lists(st.sampled_from("ab.,Ä"), max_size=8).map(" ".join)] * 2), min_size=1, max_size=9
    ),
    st.integers(0, 9),
)
def test_bleu_adds_up_over_any_division(sentences: list[tuple[str, str]], cut: int) -> None:
    sacrebleu = pytest.importorskip("sacrebleu")
    systems, references = (list(side) for side in zip(*sentences, strict=True))
    parts = [
        translation.bleu_sums(systems[:cut], references[:cut]),
        translation.bleu_sums(systems[cut:], references[cut:]),
    ]
    summed = {name: sum(part[name] for part in parts) for name in parts[0]}
    assert translation.bleu(summed) == pytest.approx(sacrebleu.corpus_bleu(systems, [references]).score)


@pytest.mark.parametrize("world", [2, 3, 20])
def test_evaluations_of_several_processes_add_up(data: Translation, model: Transformer, world: int) -> None:
    pytest.importorskip("sacrebleu")
    model.eval()
    big = Translation(pairs(world, 0), data.validation, data.test, data.tokenizer)
    with torch.no_grad():
        alone = TranslationTask(data, batch_size=4, seed=0).evaluate(model, "test")
        shares = [
            TranslationTask(big, batch_size=1, seed=0, place=Place(rank, world)).evaluate(model, "test")
            for rank in range(world)
        ]
    assert {name: sum(s[name] for s in shares) for name in alone} == pytest.approx(alone, rel=1e-5)
    assert alone["words"] == float((data.test.target.lengths - 1).sum())


def test_validation_finds_bleu_only_where_asked(data: Translation, model: Transformer) -> None:
    pytest.importorskip("sacrebleu")
    model.eval()
    with torch.no_grad():
        task = TranslationTask(data, batch_size=4, seed=0, label_smoothing=0.1)
        plain = TranslationTask(data, batch_size=4, seed=0, bleu_on=("validation",))
        assert set(task.scores(task.evaluate(model, "validation"))) == {"loss", "perplexity"}
        assert "bleu" in plain.scores(plain.evaluate(model, "validation"))
        # Smoothing is for training: it would make losses of different recipes incomparable.
        assert task.evaluate(model, "validation")["loss"] == plain.evaluate(model, "validation")["loss"]


def test_mistakes(data: Translation) -> None:
    with pytest.raises(UsageError, match="bleu_on: 'train' is not a part"):
        TranslationTask(data, batch_size=4, seed=0, bleu_on=("train",))
    with pytest.raises(DataError, match="2 pairs for 3 processes"):
        TranslationTask(corpus(2), batch_size=4, seed=0, place=Place(0, 3))
