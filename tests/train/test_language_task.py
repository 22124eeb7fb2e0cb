"""Language modelling on a short text: windows, streams, losses, and evaluations against plain loops."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from takifugu.errors import DataError, UsageError
from takifugu.train.tasks.base import Place
from takifugu.train.tasks.language import LanguageTask
from takifugu.zoo.language import Language
from takifugu.zoo.lstm_lm import LSTMLanguageModel, lstm_lm


def text(length: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 13, (length,), generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def data() -> Language:
    return Language(tuple("abcdefghijklm"), text(211, 0), text(97, 1), text(83, 2))


@pytest.fixture
def model() -> LSTMLanguageModel:
    torch.manual_seed(0)
    return lstm_lm(vocabulary=13, hidden=6, layers=2, dropout=0.0)


def test_what_a_run_reads_of_it(data: Language) -> None:
    task = LanguageTask(data, batch_size=4, seed=0)
    assert task.model_options() == {"vocabulary": 13}
    assert (task.unit, task.headline, task.higher_is_better) == ("words", "perplexity", False)


@settings(max_examples=60, deadline=None)
@given(length=st.integers(12, 120), batch=st.integers(1, 3), world=st.integers(1, 2), bptt=st.integers(1, 9))
def test_windows_tile_the_text(length: int, batch: int, world: int, bptt: int) -> None:
    numbers = torch.arange(length)
    data = Language(("w",), numbers, numbers, numbers)
    seen: Counter[int] = Counter()
    steps = set()
    for rank in range(world):
        task = LanguageTask(data, batch_size=batch, seed=0, place=Place(rank, world), bptt=bptt)
        steps.add(task.steps)
        before = None
        for step in range(task.steps):
            found = task.batch(0, step)
            (inputs,) = found.inputs
            assert inputs.shape == found.targets.shape
            assert inputs.shape[0] == bptt or step == task.steps - 1
            assert found.samples == inputs.numel()
            assert torch.equal(found.targets, inputs + 1)
            if before is not None:
                assert torch.equal(inputs[0], before + 1)  # the stream goes on
            before = inputs[-1]
            seen.update(inputs.flatten().tolist())
    assert len(steps) == 1
    column = length // (batch * world)
    assert sorted(seen) == [n for n in range(column * batch * world) if n % column != column - 1]
    assert set(seen.values()) == {1}


def test_batches_are_found_by_place_alone(data: Language) -> None:
    task, other = (LanguageTask(data, batch_size=3, seed=seed, bptt=5) for seed in (0, 1))
    assert torch.equal(task.batch(7, 4).targets, task.batch(0, 4).targets)
    assert torch.equal(task.batch(0, 4).targets, other.batch(3, 4).targets)


def test_losses_with_carried_states_are_those_of_one_long_pass(
    data: Language, model: LSTMLanguageModel
) -> None:
    task = LanguageTask(data, batch_size=3, seed=0, bptt=5)
    model.train()
    carry, weighted = None, 0.0
    for step in range(task.steps):
        batch = task.batch(0, step)
        loss, carry = task.loss(model, batch, carry)
        assert carry is not None
        assert not any(part.requires_grad for part in carry)
        weighted += float(loss.detach()) * batch.samples
    streams = data.train[: 70 * 3].view(3, 70)
    total = sum(
        F.cross_entropy(model(stream[:-1, None])[0][:, 0], stream[1:], reduction="sum") for stream in streams
    )
    assert weighted == pytest.approx(float(torch.as_tensor(total).detach()), rel=1e-5)


def test_a_gradient_is_that_of_the_words_one_by_one(data: Language, model: LSTMLanguageModel) -> None:
    task = LanguageTask(data, batch_size=2, seed=0, bptt=7)
    batch = task.batch(0, 3)
    loss, _ = task.loss(model, batch, None)
    loss.backward()
    found = model.lstm.weight_ih_l0.grad
    assert found is not None
    found = found.clone()
    model.zero_grad()
    logits, _ = model(*batch.inputs)
    words = [
        -logits[t, b].log_softmax(-1)[batch.targets[t, b]]
        for t in range(logits.shape[0])
        for b in range(logits.shape[1])
    ]
    torch.stack(words).mean().backward()
    torch.testing.assert_close(found, model.lstm.weight_ih_l0.grad)


def test_evaluation_is_one_pass_over_the_streams(data: Language, model: LSTMLanguageModel) -> None:
    task = LanguageTask(data, batch_size=4, seed=0, bptt=6, evaluation_streams=5)
    model.eval()
    with torch.no_grad():
        sums = task.evaluate(model, "validation")
        streams = data.validation[:95].view(5, 19)
        total = sum(F.cross_entropy(model(s[:-1, None])[0][:, 0], s[1:], reduction="sum") for s in streams)
        scores = task.scores(sums)
        assert sums["words"] == 90
        assert sums["loss"] == pytest.approx(float(total), rel=1e-5)
        assert scores["loss"] == pytest.approx(float(total) / 90, rel=1e-5)
        assert scores["perplexity"] == pytest.approx(math.exp(scores["loss"]))
        assert task.evaluate(model, "test")["words"] == 75  # 5 streams of 16 words


@pytest.mark.parametrize("world", [2, 3, 7])
def test_evaluations_of_several_processes_add_up(
    data: Language, model: LSTMLanguageModel, world: int
) -> None:
    model.eval()
    with torch.no_grad():
        alone = LanguageTask(data, batch_size=2, seed=0, bptt=6, evaluation_streams=5).evaluate(model, "test")
        shares = [
            LanguageTask(
                data, batch_size=2, seed=0, place=Place(rank, world), bptt=6, evaluation_streams=5
            ).evaluate(model, "test")
            for rank in range(world)
        ]
    assert {name: sum(s[name] for s in shares) for name in alone} == pytest.approx(alone, rel=1e-5)


def test_a_hopeless_model_has_an_infinite_perplexity(data: Language) -> None:
    task = LanguageTask(data, batch_size=2, seed=0)
    assert task.scores({"loss": 1e6, "words": 1.0})["perplexity"] == math.inf


def test_mistakes(data: Language) -> None:
    with pytest.raises(DataError, match="training part has 211 words, too few for 106 streams"):
        LanguageTask(data, batch_size=53, seed=0, place=Place(0, 2))
    with pytest.raises(UsageError, match="'bptt'"):
        LanguageTask(data, batch_size=2, seed=0, bptt=0)
