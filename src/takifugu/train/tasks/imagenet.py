"""ImageNet: images are decoded from their files when they are needed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from takifugu.errors import DataError, UsageError
from takifugu.train.tasks import options_of
from takifugu.train.tasks.base import Place
from takifugu.train.tasks.images import ImageTask
from takifugu.zoo.imagenet import open_imagenet

if TYPE_CHECKING:
    from takifugu.train.recipe import Recipe


def imagenet_task(recipe: Recipe, data_dir: Path | None, place: Place) -> ImageTask:
    """Of a recipe's `[data]`; its options are `size`, of the images, and `threads`, which decode them."""
    table = recipe.data
    options = options_of(table, {"size": int, "threads": int}, unused=("validation", "limit"))
    if not table.augment:
        raise UsageError("data.augment: ImageNet's training images are always cropped at random; set it true")
    train, held = (open_imagenet(data_dir, part, **options) for part in ("train", "test"))
    if odd := sorted(set(train.classes) ^ set(held.classes)):
        # A label is the place of its folder among all: one that is missing would shift those behind it.
        where = "train" if odd[0] in train.classes else "val"
        raise DataError(
            f"ImageNet: the class {odd[0]!r} is only in {where}; both parts need the same folders"
        )
    return ImageTask(
        {"train": train, "validation": held, "test": held},
        len(train.classes),
        (3, train.size, train.size),
        batch_size=table.batch_size,
        seed=recipe.seed,
        place=place,
        label_smoothing=table.label_smoothing,
    )
