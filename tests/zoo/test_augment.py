"""Whole batches against a plain loop over images."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from takifugu.errors import UsageError
from takifugu.zoo import augment


def windows(image: Tensor, padding: int) -> list[Tensor]:
    """All crops of the padded image, and each of them flipped."""
    _, height, width = image.shape
    padded = F.pad(image[None].double(), (padding,) * 4, mode="reflect")[0].to(image.dtype)
    crops = [
        padded[:, y : y + height, x : x + width]
        for y in range(2 * padding + 1)
        for x in range(2 * padding + 1)
    ]
    return crops + [crop.flip(-1) for crop in crops]


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**63 - 1),
    count=st.integers(0, 5),
    channels=st.integers(1, 3),
    size=st.tuples(st.integers(2, 7), st.integers(2, 7)),
    padding=st.integers(0, 3),
    bytes_=st.booleans(),
)
def test_every_output_is_a_real_crop_of_its_own_image(
    seed: int, count: int, channels: int, size: tuple[int, int], padding: int, bytes_: bool
) -> None:
    padding = min(padding, min(size) - 1)
    images = torch.randint(0, 256, (count, channels, *size), generator=torch.Generator().manual_seed(1))
    images = images.to(torch.uint8) if bytes_ else images.float()
    found = augment.crop_and_flip(images, seed, padding)
    assert (found.dtype, found.shape) == (images.dtype, images.shape)
    for before, after in zip(images, found, strict=True):
        assert any(torch.equal(after, window) for window in windows(before, padding))


def test_all_crops_come_about_equally_often() -> None:
    image = torch.arange(25, dtype=torch.uint8).view(1, 5, 5)
    choices = windows(image, 1)
    found = augment.crop_and_flip(image.expand(9000, 1, 5, 5), seed=3, padding=1)
    counts = torch.tensor([int((found == window).flatten(1).all(1).sum()) for window in choices])
    assert int(counts.sum()) == 9000  # all different, so none is counted twice
    assert counts.min() > 400
    assert counts.max() < 600


def test_the_seed_is_all_that_decides() -> None:
    images = torch.randint(0, 256, (64, 3, 32, 32), dtype=torch.uint8)
    first = augment.crop_and_flip(images, 5)
    torch.manual_seed(99)
    assert torch.equal(first, augment.crop_and_flip(images, 5))
    assert not torch.equal(first, augment.crop_and_flip(images, 6))
    assert torch.equal(first.float(), augment.crop_and_flip(images.float(), 5))
    channels_last = images.to(memory_format=torch.channels_last)
    assert torch.equal(first, augment.crop_and_flip(channels_last, 5))


def test_without_flips_and_without_crops() -> None:
    images = torch.rand(32, 1, 6, 6)
    assert torch.equal(augment.crop_and_flip(images, 0, padding=0, flip=False), images)
    for before, after in zip(images, augment.crop_and_flip(images, 0, padding=0), strict=True):
        assert torch.equal(after, before) or torch.equal(after, before.flip(-1))


def test_padding_beyond_the_image_is_refused() -> None:
    with pytest.raises(UsageError, match="padding of 6 pixels"):
        augment.crop_and_flip(torch.zeros(1, 1, 6, 8), 0, padding=6)


def test_normalize() -> None:
    images = torch.randint(0, 256, (4, 3, 5, 5), dtype=torch.uint8)
    before = images.clone()
    mean, deviation = (0.5, 0.4, 0.3), (0.1, 0.2, 0.3)
    found = augment.normalize(images, mean, deviation)
    for c in range(3):
        torch.testing.assert_close(found[:, c], (images[:, c] / 255 - mean[c]) / deviation[c])
    floats = before.float()
    augment.normalize(floats, mean, deviation)
    assert torch.equal(images, before)
    assert torch.equal(floats, before.float())  # what is float already is not changed in place
    rows = torch.rand(5, 7)  # not only images
    assert torch.equal(augment.normalize(rows, (0.0,), (1.0,), scale=1.0), rows)
