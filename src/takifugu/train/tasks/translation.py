"""Translation: the next token of the target sentence, given the source; judged by BLEU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from takifugu.errors import DataError, UsageError
from takifugu.train.seeds import derived
from takifugu.train.tasks import options_of
from takifugu.train.tasks.base import Batch, Carry, Place, Sums, Task
from takifugu.train.tasks.language import perplexity
from takifugu.zoo.options import require_counts
from takifugu.zoo.transformer import Transformer
from takifugu.zoo.translation import BEGIN, END, PAD, Pairs, Translation, load_translation

if TYPE_CHECKING:
    from takifugu.train.recipe import Recipe

EVALUATED_AT_ONCE = 128
POOL_BATCHES = 50
"""Pairs are sorted by length among those of so many batches: little padding, and batches still mix."""
LONGER_BY = 50
"""A translation is cut off when it has so many tokens more than its source."""
ORDERS = 4
"""BLEU counts runs of up to so many words."""


class TranslationTask(Task):
    unit = "sentences"
    headline = "bleu"
    higher_is_better = True

    def __init__(
        self,
        data: Translation,
        *,
        batch_size: int,
        seed: int,
        place: Place = Place(),  # noqa: B008
        label_smoothing: float = 0.0,
        bleu_on: Sequence[str] = ("test",),
    ) -> None:
        """`bleu_on`: the parts whose evaluations translate every sentence, which takes long; of the others
        only the loss and the perplexity are found."""
        super().__init__(batch_size, seed, place)
        require_counts(batch_size=batch_size)
        if unknown := set(bleu_on) - {"validation", "test"}:
            raise UsageError(f"bleu_on: {unknown.pop()!r} is not a part; use validation and test")
        if len(data.train) < place.world:
            raise DataError(f"{len(data.train)} pairs for {place.world} processes; use fewer")
        self.data, self.label_smoothing, self.bleu_on = data, label_smoothing, tuple(bleu_on)
        self._batches = lru_cache(maxsize=2)(self._drawn_batches)

    def model_options(self) -> dict[str, Any]:
        return {"vocabulary": self.data.vocabulary, "pad": PAD}

    # ---- training ------------------------------------------------------------------------------------------

    @property
    def steps(self) -> int:
        return -(-len(self.data.train) // (self.batch_size * self.place.world))

    def batch(self, epoch: int, step: int) -> Batch:
        places = self._batches(epoch)[step]
        source, target = self._padded(self.data.train, places)
        return Batch((source, target[:, :-1]), target[:, 1:], len(places))

    def loss(self, model: nn.Module, batch: Batch, carry: Carry) -> tuple[Tensor, Carry]:
        logits = model(*batch.inputs)
        return _loss(logits, batch.targets, label_smoothing=self.label_smoothing), None

    def _drawn_batches(self, epoch: int) -> list[Tensor]:
        """This process's pairs for every step of the epoch.

        All processes draw the same: what they do at the same step is of like length, and none waits long.
        Where the pairs do not divide among them, the first of the order come again at its end.
        """
        draws = torch.Generator().manual_seed(derived(self.seed, "order", epoch))
        rank, world = self.place.rank, self.place.world
        order = torch.randperm(len(self.data.train), generator=draws)
        order = torch.cat([order, order[: -len(order) % world]])
        together = self.batch_size * world
        lengths = self.data.train.target.lengths * 1000 + self.data.train.source.lengths
        batches: list[Tensor] = []
        for pool in order.split(together * POOL_BATCHES):
            batches += pool[lengths[pool].argsort(stable=True)].split(together)
        mixed = torch.randperm(len(batches), generator=draws).tolist()
        return [batches[i][rank::world] for i in mixed]

    @staticmethod
    def _padded(pairs: Pairs, places: Tensor) -> tuple[Tensor, Tensor]:
        return pairs.source.padded(places, PAD), pairs.target.padded(places, PAD)

    # ---- evaluation ----------------------------------------------------------------------------------------

    def evaluate(self, model: nn.Module, part: str) -> Sums:
        pairs = {"validation": self.data.validation, "test": self.data.test}[part]
        device = next(model.parameters()).device
        sums = {"loss": 0.0, "words": 0.0}
        translations: list[str] = []
        # By length: little padding. Every process takes sentences of all lengths.
        mine = pairs.source.lengths.argsort(stable=True)[self.place.rank :: self.place.world]
        for places in mine.split(EVALUATED_AT_ONCE) if len(mine) else ():
            source, target = (tokens.to(device) for tokens in self._padded(pairs, places))
            logits = model(source, target[:, :-1])
            sums["loss"] += float(_loss(logits.float(), target[:, 1:], reduction="sum"))
            sums["words"] += float((target[:, 1:] != PAD).sum())
            if part in self.bleu_on:
                translations += self.data.decode(translate(cast(Transformer, model), source))
        if part in self.bleu_on:
            references = [pairs.references[place] for place in mine.tolist()]
            sums |= bleu_sums(translations, references)
        return sums

    def scores(self, sums: Mapping[str, float]) -> dict[str, float]:
        loss = sums["loss"] / sums["words"]
        scores = {"loss": loss, "perplexity": perplexity(loss)}
        if "bleu_system" in sums:
            scores["bleu"] = bleu(sums)
        return scores


def translate(model: Transformer, source: Tensor) -> list[list[int]]:
    """The likeliest next token, again and again, for padded sources (N, S); tokens without marks.

    A sentence that has ended leaves the batch. How long one may get depends on its own source alone, so that
    its translation does not depend on its company.
    """
    longest = (source != PAD).sum(1) + LONGER_BY - 1  # the source has an end mark
    longest = longest.clamp(max=model.positions.table.shape[0] - 1)
    memory, visible = model.encode(source)
    found: list[list[int]] = [[] for _ in source]
    row = torch.arange(len(source), device=source.device)
    prefix = torch.full((len(source), 1), BEGIN, device=source.device)
    while len(row):
        logits = model.decode(prefix, memory, visible, last=True)[:, -1]
        logits[:, [PAD, BEGIN]] = -torch.inf  # no target has them
        token = logits.argmax(1)
        prefix = torch.cat([prefix, token[:, None]], dim=1)
        over = (token == END) | (prefix.shape[1] - 1 >= longest)
        if bool(over.any()):
            for place, tokens in zip(row[over].tolist(), prefix[over, 1:].tolist(), strict=True):
                found[place] = tokens[:-1] if tokens[-1] == END else tokens
            row, prefix, longest = row[~over], prefix[~over], longest[~over]
            memory, visible = memory[~over], visible[~over]
    return found


def _loss(logits: Tensor, targets: Tensor, **options: Any) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=PAD, **options)


# ---- BLEU, as sums that add up over processes --------------------------------------------------------------


def bleu_sums(translations: Sequence[str], references: Sequence[str]) -> Sums:
    """What BLEU is made of: matching and existing runs of words of each order, and both lengths in words."""
    names = _bleu_names()
    if not translations:
        return dict.fromkeys(names, 0.0)
    found = _bleu_class()().corpus_score(list(translations), [list(references)])
    values = (*found.counts, *found.totals, found.sys_len, found.ref_len)
    return {name: float(value) for name, value in zip(names, values, strict=True)}


def bleu(sums: Mapping[str, float]) -> float:
    values = [int(sums[name]) for name in _bleu_names()]
    # The smoothing is sacrebleu's default for a corpus.
    found = _bleu_class().compute_bleu(
        values[:ORDERS], values[ORDERS:-2], values[-2], values[-1], smooth_method="exp"
    )
    return float(found.score)


def _bleu_names() -> tuple[str, ...]:
    orders = range(1, ORDERS + 1)
    matching, existing = (f"bleu_matching_{n}" for n in orders), (f"bleu_existing_{n}" for n in orders)
    return (*matching, *existing, "bleu_system", "bleu_reference")


def _bleu_class() -> Any:
    try:
        from sacrebleu.metrics.bleu import BLEU
    except ImportError:
        raise UsageError("BLEU is computed by sacrebleu; pip install 'takifugu[train]'") from None
    return BLEU


def translation_task(recipe: Recipe, data_dir: Path | None, place: Place) -> TranslationTask:
    """Of a recipe's `[data]`; its option is `vocabulary`, the number of byte-pair tokens."""
    table = recipe.data
    options = options_of(table, {"vocabulary": int}, unused=("augment", "validation"))
    data = load_translation(data_dir, limit=table.limit, **options)
    return TranslationTask(
        data,
        batch_size=table.batch_size,
        seed=recipe.seed,
        place=place,
        label_smoothing=table.label_smoothing,
    )
