"""The ways a run can make its model small, by the `kind` of a recipe's `[method]` table.

A method is one file in here and one line in `METHODS`. Importing this package is light: torch is loaded when
a method is asked for.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from takifugu.errors import UsageError, near_misses

if TYPE_CHECKING:
    from takifugu.lowrank.candidates import Where
    from takifugu.train.methods.base import Method

METHODS: Mapping[str, str] = {
    "dense": "base:Method",
    "warm-start": "warm_start:WarmStarted",
    "low-rank": "low_rank:LowRank",
    "lottery-ticket": "lottery_ticket:LotteryTicket",
    "early-bird": "early_bird:EarlyBird",
}
"""Where each kind lives: file and class."""

_WHERE = "where"
"""An argument of the methods that choose layers; it comes from the recipe's network, not from its table."""


def method_class(kind: Any) -> type[Method]:
    """The class of a kind."""
    if not isinstance(kind, str) or kind not in METHODS:
        near = near_misses(str(kind), METHODS)
        raise UsageError(f"method.kind: {kind!r} is not known{near}; one of {', '.join(METHODS)}")
    file, _, name = METHODS[kind].partition(":")
    found: type[Method] = getattr(importlib.import_module(f"{__name__}.{file}"), name)
    return found


def method_for(table: Mapping[str, Any], where: Where = None) -> Method:
    """What a recipe's `[method]` table means. `where`: which layers the low-rank methods are about."""
    if "kind" not in table:
        raise UsageError(f"method.kind: is missing; one of {', '.join(METHODS)}")
    cls = method_class(table["kind"])
    parameters = inspect.signature(cls).parameters
    accepted = [name for name in parameters if name != _WHERE]
    options = {name: value for name, value in table.items() if name != "kind"}
    for option in options:
        if option not in accepted:
            known = f"accepted: {', '.join(accepted)}" if accepted else "it has none"
            near = near_misses(option, accepted)
            raise UsageError(f"method.{option}: {table['kind']} has no such option{near}; {known}")
    if _WHERE in parameters:
        options[_WHERE] = where
    try:
        return cls(**options)
    except UsageError as error:  # the method's file knows the option, but not the table it stands in
        raise UsageError(f"method.{error}") from None
