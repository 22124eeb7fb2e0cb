"""Which task a recipe's `[data]` is. A new kind is one file in here and one line in `_KINDS`."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from takifugu.errors import UsageError, near_misses
from takifugu.train.tasks.base import Place, Task
from takifugu.zoo import datasets

if TYPE_CHECKING:
    from takifugu.train.recipe import DataTable, Recipe

_KINDS: Mapping[str, str] = {
    "imagenet": "imagenet:imagenet_task",
    "wikitext-2": "language:language_task",
    "multi30k": "translation:translation_task",
}
"""Where the others live: file and function. All else are images in memory."""


def task_for(recipe: Recipe, data_dir: Path | None, place: Place) -> Task:
    """Reads the data; a name nobody knows is an error that lists those there are."""
    check_data(recipe.data.name)
    file, _, function = _KINDS.get(recipe.data.name, "images:image_task").partition(":")
    make = getattr(importlib.import_module(f"{__name__}.{file}"), function)
    task: Task = make(recipe, data_dir, place)
    return task


def check_data(name: str) -> None:
    if name not in names() and ":" not in name:
        raise UsageError(
            f"data.name: {name!r} is not known{near_misses(name, names())}; one of {', '.join(names())}, "
            "or package.module:function"
        )


def names() -> tuple[str, ...]:
    return (*datasets.names(), *_KINDS)


def options_of(
    table: DataTable, accepted: Mapping[str, type], unused: tuple[str, ...] = ()
) -> dict[str, Any]:
    """A kind's own options, checked; fields of the table that mean nothing to it are refused."""
    for name in unused:
        if getattr(table, name) != type(table).model_fields[name].default:
            raise UsageError(f"data.{name}: means nothing to {table.name}; leave it out")
    for name, value in table.options.items():
        if name not in accepted:
            known = f"accepted: {', '.join(accepted)}" if accepted else "it has none"
            raise UsageError(
                f"data.options.{name}: {table.name} has no such option{near_misses(name, accepted)}; {known}"
            )
        if not isinstance(value, accepted[name]) or isinstance(value, bool):
            raise UsageError(f"data.options.{name}: {value!r} is not of type {accepted[name].__name__}")
    return dict(table.options)
