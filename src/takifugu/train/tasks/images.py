"""Image classification: top-1 and top-5."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from takifugu.errors import DataError
from takifugu.train.partition import validation_split
from takifugu.train.seeds import derived
from takifugu.train.tasks import options_of
from takifugu.train.tasks.base import Batch, Carry, Place, Sums, Task
from takifugu.zoo import augment, datasets

if TYPE_CHECKING:
    from takifugu.train.recipe import Recipe

EVALUATED_AT_ONCE = 256


class Images(Protocol):
    """Where images come from: memory, or files that are decoded when they are needed."""

    labels: Tensor

    def inputs(self, places: Tensor, seed: int | None) -> Tensor:
        """The images there, as the network is fed them; augmented by the seed, or as they are for None."""


class TensorImages:
    """Images in memory, bytes or floats. Bytes are normalized batch by batch: a quarter of the memory."""

    def __init__(
        self,
        images: Tensor,
        labels: Tensor,
        mean: tuple[float, ...] = (0.0,),
        deviation: tuple[float, ...] = (1.0,),
        scale: float = 1.0,
        augmented: bool = False,
    ) -> None:
        self.images, self.labels, self.augmented = images, labels, augmented
        self.mean, self.deviation, self.scale = mean, deviation, scale

    def inputs(self, places: Tensor, seed: int | None) -> Tensor:
        images = self.images[places]
        if seed is not None and self.augmented:
            images = augment.crop_and_flip(images, seed)
        return augment.normalize(images, self.mean, self.deviation, self.scale)


class ImageTask(Task):
    unit = "images"
    headline = "top1"
    higher_is_better = True

    def __init__(
        self,
        parts: Mapping[str, Images],
        classes: int,
        shape: tuple[int, ...],
        *,
        batch_size: int,
        seed: int,
        place: Place = Place(),  # noqa: B008
        label_smoothing: float = 0.0,
    ) -> None:
        """`parts` are "train", "validation" and "test"; the last two may be the same."""
        super().__init__(batch_size, seed, place)
        self.parts, self.classes, self.shape = parts, classes, shape
        self.label_smoothing = label_smoothing
        samples = len(parts["train"].labels)
        if samples < place.world:
            raise DataError(f"{samples} training images for {place.world} processes; use fewer --workers")
        self._mine = -(-samples // place.world)
        self._order = lru_cache(maxsize=2)(self._drawn_order)

    def model_options(self) -> dict[str, Any]:
        options: dict[str, Any] = {"classes": self.classes, "inputs": math.prod(self.shape)}
        if len(self.shape) == 3:
            options |= {"in_channels": self.shape[0], "image_size": self.shape[1]}
        return options

    @property
    def steps(self) -> int:
        whole, rest = divmod(self._mine, self.batch_size)
        # A single image left over joins the batch before it: batch norm could not train on it.
        return max(1, whole + (rest > 1))

    def batch(self, epoch: int, step: int) -> Batch:
        train = self.parts["train"]
        start = step * self.batch_size
        end = start + self.batch_size if step < self.steps - 1 else self._mine
        places = self._order(epoch)[start:end]
        inputs = train.inputs(places, self.batch_seed(epoch, step))
        return Batch((inputs,), train.labels[places], len(places))

    def loss(self, model: nn.Module, batch: Batch, carry: Carry) -> tuple[Tensor, Carry]:
        outputs = model(*batch.inputs)
        return cross_entropy(outputs, batch.targets, label_smoothing=self.label_smoothing), None

    def evaluate(self, model: nn.Module, part: str) -> Sums:
        images = self.parts[part]
        device = next(model.parameters()).device
        sums = {"loss": 0.0, "top1": 0.0, "top5": 0.0, "samples": 0.0}
        mine = torch.arange(len(images.labels))[self.place.rank :: self.place.world]
        for places in mine.split(EVALUATED_AT_ONCE) if len(mine) else ():
            labels = images.labels[places].to(device)
            outputs = model(images.inputs(places, None).to(device)).float()
            best = outputs.topk(min(5, self.classes), dim=1).indices == labels[:, None]
            sums["loss"] += float(cross_entropy(outputs, labels, reduction="sum"))
            sums["top1"] += float(best[:, 0].sum())
            sums["top5"] += float(best.any(dim=1).sum())
            sums["samples"] += len(labels)
        return sums

    def scores(self, sums: Mapping[str, float]) -> dict[str, float]:
        return {name: sums[name] / sums["samples"] for name in ("loss", "top1", "top5")}

    def _drawn_order(self, epoch: int) -> Tensor:
        """This process's images in the order of the epoch; the first come again where they do not divide."""
        shuffle = torch.Generator().manual_seed(derived(self.seed, "order", epoch))
        order = torch.randperm(len(self.parts["train"].labels), generator=shuffle)
        missing = self._mine * self.place.world - len(order)
        return torch.cat([order, order[:missing]])[self.place.rank :: self.place.world]


def image_task(recipe: Recipe, data_dir: Path | None, place: Place) -> ImageTask:
    """Of a recipe's `[data]`: which images train, which are held back, and which test."""
    table = recipe.data
    options_of(table, {})
    train = _read(table.name, data_dir, "train")
    if table.augment and train.images.dim() != 4:
        raise DataError(
            f"data.augment: crops and flips images (channels, height, width); samples of {table.name} "
            f"have the shape {tuple(train.images.shape[1:])}; set it false"
        )
    labels = train.labels.numpy()
    places = torch.arange(len(labels))
    if table.limit is not None and table.limit < len(labels):
        # The part that a split of this share would hold back: every label keeps its weight.
        places = torch.from_numpy(validation_split(labels, table.limit / len(labels), recipe.seed + 1)[1])
    held = places[:0]
    if table.validation:
        kept, back = validation_split(labels[places.numpy()], table.validation, recipe.seed)
        places, held = places[torch.from_numpy(kept)], places[torch.from_numpy(back)]

    parts = {"train": _part(train, places, table.augment)}
    if table.name != "digits" and ":" not in table.name:
        test = _read(table.name, data_dir, "test")
        parts["test"] = _part(test, torch.arange(len(test.labels)))
        parts["validation"] = _part(train, held) if table.validation else parts["test"]
    elif table.validation:
        parts["validation"] = parts["test"] = _part(train, held)
    else:
        raise DataError(f"{table.name} has no test part; hold some of it back: data.validation = 0.2")
    return ImageTask(
        parts,
        train.classes,
        tuple(train.images.shape[1:]),
        batch_size=table.batch_size,
        seed=recipe.seed,
        place=place,
        label_smoothing=table.label_smoothing,
    )


def _read(name: str, folder: Path | None, part: str) -> datasets.RawImages:
    if ":" not in name:
        return datasets.load_raw(name, folder, part)
    own = datasets.load(name, folder, part)
    return datasets.RawImages(own.inputs, own.labels, own.classes, scale=1.0)


def _part(raw: datasets.RawImages, places: Tensor, augmented: bool = False) -> TensorImages:
    return TensorImages(raw.images[places], raw.labels[places], raw.mean, raw.deviation, raw.scale, augmented)
