"""Language modelling: the next word, over long streams of text."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from takifugu.errors import DataError
from takifugu.train.tasks import options_of
from takifugu.train.tasks.base import Batch, Carry, Place, Sums, Task
from takifugu.zoo.language import Language, load_language
from takifugu.zoo.options import require_counts

if TYPE_CHECKING:
    from takifugu.train.recipe import Recipe


class LanguageTask(Task):
    """The text is cut into as many streams as all processes train at once, and read in windows.

    A stream goes on from window to window and the model's state with it, so nothing is shuffled: every epoch
    reads the same windows in the same order.
    """

    unit = "words"
    headline = "perplexity"
    higher_is_better = False

    def __init__(
        self,
        data: Language,
        *,
        batch_size: int,
        seed: int,
        place: Place = Place(),  # noqa: B008
        bptt: int = 35,
        evaluation_streams: int = 10,
    ) -> None:
        """`batch_size` counts the streams of each process, `bptt` the words of a window. Evaluations cut
        their text into `evaluation_streams` whatever the batch size, so that their figures compare."""
        super().__init__(batch_size, seed, place)
        require_counts(batch_size=batch_size, bptt=bptt, evaluation_streams=evaluation_streams)
        self.data, self.bptt, self.evaluation_streams = data, bptt, evaluation_streams
        streams = _streams(data.train, batch_size * place.world, "training")
        self._train = streams[:, place.rank * batch_size : (place.rank + 1) * batch_size].contiguous()

    def model_options(self) -> dict[str, Any]:
        return {"vocabulary": len(self.data.words)}

    @property
    def steps(self) -> int:
        return _windows(self._train, self.bptt)

    def batch(self, epoch: int, step: int) -> Batch:
        inputs, targets = _window(self._train, step, self.bptt)
        return Batch((inputs,), targets, targets.numel())

    def loss(self, model: nn.Module, batch: Batch, carry: Carry) -> tuple[Tensor, Carry]:
        logits, state = model(*batch.inputs, carry)
        loss = cross_entropy(logits.flatten(0, 1), batch.targets.flatten())
        return loss, tuple(part.detach() for part in state)

    def evaluate(self, model: nn.Module, part: str) -> Sums:
        text = {"validation": self.data.validation, "test": self.data.test}[part]
        streams = _streams(text, self.evaluation_streams, part)[:, self.place.rank :: self.place.world]
        sums = {"loss": 0.0, "words": 0.0}
        if not streams.shape[1]:  # more processes than streams
            return sums
        device = next(model.parameters()).device
        streams, state = streams.to(device), None
        for step in range(_windows(streams, self.bptt)):
            inputs, targets = _window(streams, step, self.bptt)
            logits, state = model(inputs, state)
            total = cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum")
            sums["loss"] += float(total)
            sums["words"] += targets.numel()
        return sums

    def scores(self, sums: Mapping[str, float]) -> dict[str, float]:
        loss = sums["loss"] / sums["words"]
        return {"loss": loss, "perplexity": perplexity(loss)}


def perplexity(loss: float) -> float:
    """Infinite where the loss is beyond what a float's exponential can say."""
    return math.exp(loss) if loss < 700 else math.inf


def _streams(text: Tensor, count: int, part: str) -> Tensor:
    """(time, streams): each stream a piece of the text; what does not divide is left out at the end."""
    length = len(text) // count
    if length < 2:
        raise DataError(
            f"the {part} part has {len(text)} words, too few for {count} streams of two; use a smaller batch"
        )
    return text[: length * count].view(count, length).t().contiguous()


def _windows(streams: Tensor, size: int) -> int:
    return -(-(len(streams) - 1) // size)


def _window(streams: Tensor, step: int, size: int) -> tuple[Tensor, Tensor]:
    """The words, and the words that follow them. The last window may be shorter."""
    begin = step * size
    end = min(begin + size, len(streams) - 1)
    return streams[begin:end], streams[begin + 1 : end + 1]


def language_task(recipe: Recipe, data_dir: Path | None, place: Place) -> LanguageTask:
    """Of a recipe's `[data]`; its options are `bptt` and `vocabulary` (the most frequent words only)."""
    table = recipe.data
    options = options_of(
        table, {"bptt": int, "vocabulary": int}, unused=("augment", "validation", "label_smoothing")
    )
    data = load_language(data_dir, vocabulary=options.pop("vocabulary", None), limit=table.limit)
    return LanguageTask(data, batch_size=table.batch_size, seed=recipe.seed, place=place, **options)
