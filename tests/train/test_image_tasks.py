"""Images as a task: of ImageNet's folders, and shared out among processes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from takifugu.errors import DataError, UsageError
from takifugu.train import recipe as recipes
from takifugu.train.tasks import task_for
from takifugu.train.tasks.base import Place
from takifugu.train.tasks.images import ImageTask, TensorImages


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    image = pytest.importorskip("PIL.Image")
    rng = np.random.default_rng(0)
    for part, count in (("train", 3), ("val", 2)):
        for name in ("n01", "n02", "n03"):
            place = tmp_path / "imagenet" / part / name
            place.mkdir(parents=True)
            for number in range(count):
                pixels = rng.integers(0, 256, (20, 16, 3), dtype=np.uint8)
                image.fromarray(pixels).save(place / f"{number}.JPEG")
    return tmp_path


def imagenet(folder: Path, *overrides: str) -> Any:
    small = ["data.batch_size=4", "data.options.size=8", *overrides]
    return task_for(recipes.load("resnet50-imagenet", small), folder, Place())


def test_imagenet_in_folders(folder: Path) -> None:
    task = imagenet(folder)
    assert task.steps == 2  # of nine images: a single one joins the batch before it
    batch = task.batch(0, 0)
    assert batch.inputs[0].shape == (4, 3, 8, 8)


def test_parts_with_other_classes_would_have_other_labels(folder: Path) -> None:
    shutil.rmtree(folder / "imagenet" / "val" / "n02")
    with pytest.raises(DataError, match="the class 'n02' is only in train; both parts need the same"):
        imagenet(folder)
    (folder / "imagenet" / "val" / "n02").mkdir()
    (folder / "imagenet" / "val" / "n00").mkdir()
    with pytest.raises(DataError, match="the class 'n00' is only in val"):
        imagenet(folder)


@pytest.mark.parametrize("option", ["size", "threads"])
def test_options_of_imagenet_are_counts(option: str, folder: Path) -> None:
    with pytest.raises(UsageError, match=f"option '{option}' must be a whole number of at least 1, got 0"):
        imagenet(folder, f"data.options.{option}=0")


def test_more_processes_than_images_to_evaluate() -> None:
    rng = torch.Generator().manual_seed(0)
    held = TensorImages(torch.randn(3, 1, 2, 2, generator=rng), torch.arange(3))
    train = TensorImages(torch.zeros(8, 1, 2, 2), torch.zeros(8, dtype=torch.long))
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 10)).requires_grad_(False)
    sums: dict[str, float] = {}
    for rank in range(8):
        parts = {"train": train, "validation": held, "test": held}
        task = ImageTask(parts, 10, (1, 2, 2), batch_size=1, seed=0, place=Place(rank, 8))
        for name, value in task.evaluate(model, "test").items():
            sums[name] = sums.get(name, 0.0) + value
    whole = ImageTask(parts, 10, (1, 2, 2), batch_size=1, seed=0).evaluate(model, "test")
    assert sums == pytest.approx(whole)
    assert sums["samples"] == 3
