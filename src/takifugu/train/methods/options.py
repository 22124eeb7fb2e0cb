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


def require_alone(option: str, value: Any, **others: Any) -> None:
    """Refuse the option beside any of the others; None is not given."""
    given = [name for name, other in others.items() if other is not None]
    if value is None or not given:
        return
    # Recipes inherit fields from their base, so the other one may not be the user's own: say how it goes.
    flags = " ".join(f"--set method.{name}=" for name in given)
    fields = ", ".join(f'"method.{name}"' for name in given)
    both = "; ".join(f"`{name}` and `{option}` are mutually exclusive" for name in given)
    raise UsageError(
        f"{option}: {both}; remove one with {flags}, or unset = [{fields}] beside a recipe's base"
    )


@contextmanager
def told_as(option: str) -> Iterator[None]:
    """Errors of a part that does not know the option's name are told under it."""
    try:
        yield
    except TakifuguError as error:
        raise UsageError(f"{option}: {error}") from None
