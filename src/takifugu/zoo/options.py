"""Checks of the networks' options, and example tensors made of nothing but their shape."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from takifugu.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor


def require_counts(least: int = 1, **options: object) -> None:
    """Each option must be a whole number of at least `least`."""
    for option, value in options.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise UsageError(f"option {option!r} must be a whole number of at least {least}, got {value!r}")


def require_count_list(length: int, **options: object) -> None:
    """Each option must be a list or tuple of `length` positive whole numbers."""
    for option, value in options.items():
        if not isinstance(value, (list, tuple)) or len(value) != length:
            raise UsageError(f"option {option!r} must list {length} whole numbers, got {value!r}")
        for index, item in enumerate(value):
            require_counts(**{f"{option}[{index}]": item})


def require_scale(**options: object) -> None:
    """Each option must be a positive finite number."""
    for option, value in options.items():
        if not _is_number(value) or not 0 < value < math.inf:  # type: ignore[operator]
            raise UsageError(f"option {option!r} must be a number above 0, got {value!r}")


def require_dropout(**options: object) -> None:
    """Each option must be a probability below 1: dropping everything would train nothing."""
    for option, value in options.items():
        if not _is_number(value) or not 0 <= value < 1:  # type: ignore[operator]
            raise UsageError(f"option {option!r} must be at least 0 and below 1, got {value!r}")


def fixed_image(shape: Sequence[int]) -> Tensor:
    """Values in [-1, 1] without visible order, the same on every call."""
    import torch

    # A sine sampled far coarser than its period: as good as noise here, and no generator is advanced.
    return torch.arange(math.prod(shape), dtype=torch.float32).mul(12.9898).sin().reshape(*shape)


def fixed_tokens(shape: Sequence[int], below: int) -> Tensor:
    """Token ids in [0, below), the same on every call, spread over the vocabulary."""
    import torch

    return (torch.arange(math.prod(shape)) * 7919 % below).reshape(*shape)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
