"""A folder of a few real photographs, laid out as ImageNet is."""

from __future__ import annotations

import builtins
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from takifugu.errors import DataError, UsageError
from takifugu.zoo.imagenet import AREAS, SHAPES, ImageNet, open_imagenet, random_box, shown_box

image_module: Any = pytest.importorskip("PIL.Image")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sklearn = pytest.importorskip("sklearn.datasets")
    root = tmp_path_factory.mktemp("data")
    photos = [image_module.fromarray(sklearn.load_sample_image(n)) for n in ("china.jpg", "flower.jpg")]
    for part in ("train", "val"):
        for name, photo in zip(("n02", "n01"), photos, strict=True):
            place = root / "imagenet" / part / name
            place.mkdir(parents=True)
            photo.save(place / "b.JPEG")
            photo.crop((0, 0, 200, 300)).convert("L").save(place / "a.JPEG")  # some of ImageNet is grey
            (place / "notes.txt").write_text("no image")
    return root


@pytest.fixture
def images(folder: Path) -> Iterator[ImageNet]:
    images = open_imagenet(folder)
    yield images
    images.close()


def test_files_and_labels_in_the_usual_order(images: ImageNet) -> None:
    assert images.classes == ("n01", "n02")
    assert [f"{p.parent.name}/{p.name}" for p in images.paths] == [
        "n01/a.JPEG",
        "n01/b.JPEG",
        "n02/a.JPEG",
        "n02/b.JPEG",
    ]
    assert images.labels.tolist() == [0, 0, 1, 1]
    assert len(images) == 4


def test_evaluation_sees_the_middle(images: ImageNet, folder: Path) -> None:
    found = images.batch(torch.tensor([3, 0]), seed=0, train=False)
    assert (found.dtype, found.shape) == (torch.uint8, (2, 3, 224, 224))
    assert torch.equal(found, images.batch([3, 0], seed=9, train=False))
    # The usual two steps: the shorter side to 256, and 224 x 224 out of the middle.
    with image_module.open(images.paths[3]) as photo:
        width, height = photo.size
        scale = 256 / min(width, height)
        resized = photo.resize(
            (round(width * scale), round(height * scale)), image_module.Resampling.BILINEAR
        )
    left, upper = (resized.width - 224) // 2, (resized.height - 224) // 2
    usual = np.asarray(resized.crop((left, upper, left + 224, upper + 224))).astype(float)
    assert np.abs(usual.transpose(2, 0, 1) - found[0].numpy()).mean() < 3
    assert torch.equal(found[1, 0], found[1, 2])  # grey


def test_the_seed_is_all_that_is_random(folder: Path, images: ImageNet) -> None:
    first = images.batch([0, 1, 2, 3, 3], seed=4, train=True)
    for threads in (1, 8):
        other = open_imagenet(folder, threads=threads)
        assert torch.equal(first, other.batch([0, 1, 2, 3, 3], seed=4, train=True))
        other.close()
    assert not torch.equal(first, images.batch([0, 1, 2, 3, 3], seed=5, train=True))
    assert not torch.equal(first[3], first[4])  # the same photograph, another crop
    assert first.shape == (5, 3, 224, 224)
    assert images.batch([], seed=0, train=True).shape == (0, 3, 224, 224)


def test_half_of_the_training_images_are_flipped(images: ImageNet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("takifugu.zoo.imagenet.random_box", lambda w, h, draws: (0, 0, w, h))
    found = images.batch([1] * 40, seed=0, train=True)
    kinds = {image.numpy().tobytes() for image in found}
    assert len(kinds) == 2
    assert found[0].flip(-1).numpy().tobytes() in kinds
    assert 8 < int((found == found[0]).flatten(1).all(1).sum()) < 32


def test_inputs_are_normalized(images: ImageNet) -> None:
    raw = images.batch([1], seed=0, train=False)[0].double() / 255
    found = images.inputs(torch.tensor([1]), None)[0]
    for c, (mean, deviation) in enumerate(((0.485, 0.229), (0.456, 0.224), (0.406, 0.225))):
        torch.testing.assert_close(found[c].double(), (raw[c] - mean) / deviation, rtol=1e-4, atol=1e-5)
    assert torch.equal(images.inputs(torch.tensor([1]), 7), images.inputs(torch.tensor([1]), 7))
    assert not torch.equal(images.inputs(torch.tensor([1]), 0), found[None])


@given(st.integers(1, 2000), st.integers(1, 2000), st.integers(0, 2**32))
def test_crops_lie_in_the_image_and_have_the_shape_they_should(width: int, height: int, seed: int) -> None:
    left, upper, right, lower = random_box(width, height, np.random.default_rng(seed).random((10, 4)))
    assert 0 <= left < right <= width + 1e-9
    assert 0 <= upper < lower <= height + 1e-9
    w, h = right - left, lower - upper
    assert SHAPES[0] * (1 - 1e-6) <= w / h <= SHAPES[1] * (1 + 1e-6)
    if 1 / 2 < width / height < 2:
        assert w * h >= AREAS[0] * width * height * (1 - 1e-6)
    left, upper, right, lower = shown_box(width, height)
    assert right - left == pytest.approx(lower - upper) == pytest.approx(min(width, height) * 0.875)


def test_where_files_are_missing_the_layout_is_said(tmp_path: Path) -> None:
    for make in (None, "imagenet/train", "imagenet/train/n01"):
        if make:
            (tmp_path / make).mkdir(parents=True)
        with pytest.raises(
            DataError,
            match=r"cannot be downloaded.*train/<class>/\*\.JPEG and val/<class>/\*\.JPEG in .*imagenet,",
        ):
            open_imagenet(tmp_path)
    with pytest.raises(UsageError, match="part 'validation' of ImageNet"):
        open_imagenet(tmp_path, "validation")


def test_a_damaged_file_is_named(folder: Path, tmp_path: Path) -> None:
    place = tmp_path / "imagenet/train/n01"
    place.mkdir(parents=True)
    whole = (folder / "imagenet/train/n01/b.JPEG").read_bytes()
    for name, content in (("a.JPEG", b"no image"), ("b.JPEG", whole[: len(whole) // 2])):
        (place / name).write_bytes(content)
    images = open_imagenet(tmp_path)
    for i, name in enumerate(("a", "b")):
        with pytest.raises(DataError, match=rf"{name}\.JPEG: cannot be decoded"):
            images.batch([i], seed=0, train=False)
    images.close()


def test_without_pillow(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name == "PIL":
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(DataError, match=r"pip install 'takifugu\[imagenet\]'"):
        open_imagenet(folder)
