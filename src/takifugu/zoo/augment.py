"""Random crops and flips of whole batches of images, and their normalization. No loop over images in here."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from takifugu.errors import UsageError


def crop_and_flip(images: Tensor, seed: int, padding: int = 4, flip: bool = True) -> Tensor:
    """Each image (N, C, H, W) moved by up to `padding` pixels, its edges mirrored in; half of them flipped.

    The same as padding by reflection and cutting a window of the old size out, without the padded copy: where
    each pixel comes from is computed, and all of them are collected at once. One seed gives one batch.
    """
    count, channels, height, width = images.shape
    if not 0 <= padding < min(height, width):
        raise UsageError(f"padding of {padding} pixels; use at least 0 and less than the images' size")
    draws = torch.Generator().manual_seed(seed)
    down, right = torch.randint(-padding, padding + 1, (2, count, 1), generator=draws)
    flipped = torch.rand(count, 1, generator=draws) < 0.5
    rows = _mirrored(torch.arange(height) + down, height)
    columns = torch.arange(width).expand(count, width)
    if flip:
        columns = torch.where(flipped, width - 1 - columns, columns)
    columns = _mirrored(columns + right, width)
    source = (rows[:, :, None] * width + columns[:, None, :]).view(count, 1, height * width)
    source = source.expand(count, channels, height * width).to(images.device)
    return images.reshape(count, channels, height * width).gather(2, source).view(images.shape)


def normalize(
    images: Tensor, mean: Sequence[float], deviation: Sequence[float], scale: float = 255.0
) -> Tensor:
    """Bytes to floats around 0: as parts of `scale`, less the channel's mean, by its deviation."""
    shape = (1, -1, *[1] * (images.dim() - 2))
    middle = torch.tensor(mean, device=images.device).view(shape)
    spread = torch.tensor(deviation, device=images.device).view(shape)
    return images.float().div(scale).sub_(middle).div_(spread)


def _mirrored(places: Tensor, size: int) -> Tensor:
    """Places beyond an edge come back from it; the edge itself is not repeated."""
    places = places.abs()
    return torch.where(places >= size, 2 * (size - 1) - places, places)
