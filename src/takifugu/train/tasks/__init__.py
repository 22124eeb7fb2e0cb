"""Which task a recipe's `[data]` is, and its data read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from takifugu.errors import DataError, UsageError, near_misses
from takifugu.train.tasks.base import Place, Task
from takifugu.zoo import datasets

if TYPE_CHECKING:
    from takifugu.train.recipe import Recipe

Maker = Callable[["Recipe", "Path | None", Place], Task]


def task_for(recipe: Recipe, data_dir: Path | None, place: Place) -> Task:
    """Reads the data; a name nobody knows is an error that lists those there are."""
    check_data(recipe.data.name)
    return _KINDS.get(recipe.data.name, _images)(recipe, data_dir, place)


def check_data(name: str) -> None:
    if name not in names() and ":" not in name:
        raise UsageError(
            f"data.name: {name!r} is not known{near_misses(name, names())}; one of {', '.join(names())}, "
            "or package.module:function"
        )


def names() -> tuple[str, ...]:
    return (*datasets.names(), *_KINDS)


def _images(recipe: Recipe, data_dir: Path | None, place: Place) -> Task:
    import torch

    from takifugu.train.partition import validation_split
    from takifugu.train.tasks.images import ImageTask, TensorImages

    table = recipe.data
    if table.options:
        raise UsageError(f"data.options.{next(iter(table.options))}: {table.name} has no such option")
    train = _read(table.name, data_dir, "train")
    labels = train.labels.numpy()
    places = torch.arange(len(labels))
    if table.limit is not None and table.limit < len(labels):
        # The part that a split of this share would hold back: every label keeps its weight.
        places = torch.from_numpy(validation_split(labels, table.limit / len(labels), recipe.seed + 1)[1])
    held = places[:0]
    if table.validation:
        kept, back = validation_split(labels[places.numpy()], table.validation, recipe.seed)
        places, held = places[torch.from_numpy(kept)], places[torch.from_numpy(back)]

    def part(raw: datasets.RawImages, chosen: torch.Tensor | None, augmented: bool = False) -> TensorImages:
        images, of = (raw.images, raw.labels) if chosen is None else (raw.images[chosen], raw.labels[chosen])
        return TensorImages(images, of, raw.mean, raw.deviation, raw.scale, augmented)

    parts = {"train": part(train, places, table.augment)}
    if table.name != "digits" and ":" not in table.name:
        parts["test"] = part(_read(table.name, data_dir, "test"), None)
        parts["validation"] = part(train, held) if table.validation else parts["test"]
    elif table.validation:
        parts["validation"] = parts["test"] = part(train, held)
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


def _imagenet(recipe: Recipe, data_dir: Path | None, place: Place) -> Task:
    raise NotImplementedError


def _language(recipe: Recipe, data_dir: Path | None, place: Place) -> Task:
    raise NotImplementedError


def _translation(recipe: Recipe, data_dir: Path | None, place: Place) -> Task:
    raise NotImplementedError


_KINDS: Mapping[str, Maker] = {
    "imagenet": _imagenet,
    "wikitext-2": _language,
    "multi30k": _translation,
}
