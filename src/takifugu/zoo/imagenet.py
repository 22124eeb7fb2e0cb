"""ImageNet as a folder of JPEG files, decoded when they are needed, several at a time.

Nobody may hand ImageNet on, so nothing is downloaded: the folder is the one that most programs use, with
`train/<class>/*.JPEG` and `val/<class>/*.JPEG`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from takifugu.errors import DataError, UsageError
from takifugu.zoo.augment import normalize
from takifugu.zoo.datasets import data_folder
from takifugu.zoo.options import require_counts

NAME = "imagenet"
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
PARTS = {"train": "train", "test": "val"}
ENDINGS = (".jpeg", ".jpg", ".png")
AREAS, SHAPES, TRIES = (0.08, 1.0), (3 / 4, 4 / 3), 10
"""A random crop has this share of the image's area and this width by height; so many are tried."""
SHOWN_SHARE = 224 / 256
"""How much of the shorter side is seen in evaluation: 256 pixels are made of it, and 224 of them kept."""


class ImageNet:
    """A part of ImageNet. Labels follow the classes' folders in alphabetical order, as is usual."""

    def __init__(
        self, paths: Sequence[Path], labels: Tensor, classes: Sequence[str], size: int = 224, threads: int = 4
    ) -> None:
        self.paths, self.labels, self.classes, self.size = tuple(paths), labels, tuple(classes), size
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="imagenet")

    def __len__(self) -> int:
        return len(self.paths)

    def batch(self, indices: Tensor | Sequence[int], seed: int, train: bool) -> Tensor:
        """The images there as bytes (N, 3, size, size). `train`: random crops and flips, by the seed."""
        places = [int(i) for i in indices]
        # All that is random is drawn before the threads start: their order does not matter.
        draws = np.random.default_rng(seed)
        crops, flips = draws.random((len(places), TRIES, 4)), draws.random(len(places)) < 0.5
        jobs = [
            self._pool.submit(
                _decoded, self.paths[p], self.size, crops[i] if train else None, train and flips[i]
            )
            for i, p in enumerate(places)
        ]
        images = np.stack([job.result() for job in jobs]) if jobs else np.empty((0, self.size, self.size, 3))
        return torch.from_numpy(images.astype(np.uint8, copy=False)).permute(0, 3, 1, 2).contiguous()

    def inputs(self, places: Tensor, seed: int | None) -> Tensor:
        """The images as networks are fed them: augmented by the seed, or as they are for None."""
        return normalize(self.batch(places, seed or 0, train=seed is not None), MEAN, DEVIATION)

    def close(self) -> None:
        self._pool.shutdown()


def open_imagenet(
    folder: str | Path | None = None, part: str = "train", *, size: int = 224, threads: int = 4
) -> ImageNet:
    """Lists the files of a part, "train" or "test" (the folder `val`: the real test part has no labels)."""
    if part not in PARTS:
        raise UsageError(f"part {part!r} of ImageNet; one of {', '.join(PARTS)}")
    require_counts(size=size, threads=threads)
    _pillow()
    place = data_folder(folder) / NAME / PARTS[part]
    classes = sorted(entry.name for entry in _entries(place) if entry.is_dir())
    paths: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        files = sorted(e.name for e in _entries(place / name) if e.name.lower().endswith(ENDINGS))
        paths += [place / name / file for file in files]
        labels += [label] * len(files)
    if not paths:
        raise DataError(f"{place} has no folders with JPEG files in them; {_layout(place.parent)}")
    return ImageNet(paths, torch.tensor(labels), classes, size, threads)


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            return list(found)
    except OSError as error:
        reason = (
            "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror})"
        )
        raise DataError(f"{folder} {reason}; {_layout(folder.parent)}") from None


def _layout(folder: Path) -> str:
    return (
        "ImageNet cannot be downloaded: get it from image-net.org and lay it out as train/<class>/*.JPEG and "
        f"val/<class>/*.JPEG in {folder}, or name another folder with --data-dir or TAKIFUGU_DATA"
    )


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError:
        raise DataError("ImageNet's files are decoded by pillow; pip install 'takifugu[imagenet]'") from None
    return Image


def _decoded(path: Path, size: int, crop: NDArray[np.float64] | None, flip: bool) -> NDArray[np.uint8]:
    """One image, (size, size, 3). A crop and its resizing are one step, which reads no pixel outside it."""
    image_module = _pillow()
    try:
        with image_module.open(path) as file:
            image = file.convert("RGB")  # some are grey, some are CMYK
    except (OSError, SyntaxError, ValueError) as error:
        raise DataError(f"{path}: cannot be decoded ({error}); get the file again") from None
    width, height = image.size
    box = shown_box(width, height) if crop is None else random_box(width, height, crop)
    image = image.resize((size, size), image_module.Resampling.BILINEAR, box=box)
    pixels = np.asarray(image)
    return pixels[:, ::-1] if flip else pixels


Box = tuple[float, float, float, float]
"""Left, upper, right, lower."""


def shown_box(width: int, height: int) -> Box:
    """The square in the middle that evaluations look at."""
    side = min(width, height) * SHOWN_SHARE
    left, upper = (width - side) / 2, (height - side) / 2
    return left, upper, left + side, upper + side


def random_box(width: int, height: int, draws: NDArray[np.float64]) -> Box:
    """The first of the crops drawn that fits; if none does, the largest of an allowed shape in the middle.

    `draws` are numbers in [0, 1), four for each try: area, shape, and where it lies.
    """
    low, high = map(math.log, SHAPES)
    for area_draw, shape_draw, across, down in draws:
        area = width * height * (AREAS[0] + (AREAS[1] - AREAS[0]) * area_draw)
        shape = math.exp(low + (high - low) * shape_draw)
        w, h = math.sqrt(area * shape), math.sqrt(area / shape)
        if w <= width and h <= height:
            left, upper = across * (width - w), down * (height - h)
            return left, upper, min(left + w, width), min(upper + h, height)
    w, h = min(width, height * SHAPES[1]), min(height, width / SHAPES[0])
    left, upper = (width - w) / 2, (height - h) / 2
    return left, upper, left + w, upper + h
