"""Checks of the methods' options. Messages begin with its name; `method_for` says where it stands."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from takifugu.errors import TakifuguError, UsageError
from takifugu.numbers import is_number


def require_count(option: str, value: Any, least: int, meaning: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(f"{option}: {value!r} is not a whole number of {meaning}, at least {least}")
    return value


def require_share(option: str, value: Any, meaning: str) -> float:
    """A number between 0 and 1, both excluded: keeping all or nothing is not what a method is for."""
    if not is_number(value) or not 0 < value < 1:
        raise UsageError(f"{option}: {value!r} is not a share of {meaning} above 0 and below 1, such as 0.3")
    return float(value)


def require_amount(option: str, value: Any) -> float:
    if not is_number(value) or value < 0:
        raise UsageError(f"{option}: {value!r} is not a number of at least 0")
    return float(value)


def require_one_of(first: str, one: Any, second: str, other: Any) -> None:
    if one is not None and other is not None:
        raise UsageError(f"{second}: {first} is given as well, and either one settles the other; drop one")


@contextmanager
def told_as(option: str) -> Iterator[None]:
    """Errors of a part that does not know the option's name are told under it."""
    try:
        yield
    except TakifuguError as error:
        raise UsageError(f"{option}: {error}") from None
