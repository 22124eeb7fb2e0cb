"""What counts as a number in a file or an argument."""

from __future__ import annotations

import math


def is_number(value: object) -> bool:
    """A finite number; neither a bool, which Python takes for one, nor an int beyond any float."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False
