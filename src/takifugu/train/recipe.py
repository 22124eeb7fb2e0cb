"""`Recipe`: a training run as data. TOML files; those of the package by name, any field overridden.

A recipe says everything that the result follows from, but for the data's folder and the number of processes.
`base = "another recipe"` takes all fields of another one and changes some. `unset = ["method.rank"]` removes
inherited fields, as `--set method.rank=` does on the command line.
"""

from __future__ import annotations

import copy
import datetime
import json
import math
import os
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import sha256
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from takifugu.errors import UsageError, near_misses
from takifugu.train import models, optimizers
from takifugu.train.methods import method_for
from takifugu.train.schedules import schedule_for
from takifugu.train.tasks import check_data

Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, lt=1)]


class _Table(BaseModel):
    # strict: "3" is not a number and true is not 1.
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class ModelTable(_Table):
    name: str = Field(description="a zoo network, or package.module:function")
    options: dict[str, Any] = Field({}, description="a table of the builder's options")
    low_rank: list[str] = Field([], description="a list of layer-name patterns; none: the paper's choice")


class DataTable(_Table):
    name: str = Field(description="a data set by name, or package.module:function")
    batch_size: Count = Field(description="a whole number: the batch of each process")
    augment: bool = Field(False, description="true or false: random crops and flips")
    label_smoothing: Share = Field(0.0, description="a share of at least 0 and below 1")
    validation: Share = Field(0.0, description="a share of the training data held back; 0: the test part")
    limit: Count | None = Field(None, description="a whole number of training samples")
    options: dict[str, Any] = Field({}, description="a table of options of this kind of data")


class Recipe(_Table):
    about: str = Field("", description="one line for `takifugu train --list`")
    model: ModelTable = Field(description="the table [model] with a name")
    data: DataTable = Field(description="the table [data] with name and batch_size")
    epochs: Count = Field(description="a whole number of at least 1")
    seed: Annotated[int, Field(ge=0)] = Field(0, description="a whole number of at least 0")
    precision: Literal["fp32", "bf16", "fp16"] = Field("fp32", description="fp32, bf16 or fp16")
    channels_last: bool = Field(False, description="true or false")
    clip_norm: Annotated[float, Field(gt=0)] | None = Field(None, description="a number above 0")
    frobenius_decay: Annotated[float, Field(ge=0)] = Field(0.0, description="a number of at least 0")
    factor_decay: Annotated[float, Field(ge=0)] | None = Field(None, description="a number of at least 0")
    optimizer: dict[str, Any] = Field(description="a table such as { kind = 'sgd', lr = 0.1 }")
    schedule: dict[str, Any] = Field({}, description="a table such as { kind = 'one-cycle' }")
    method: dict[str, Any] = Field(
        {"kind": "dense"}, description="a table such as { kind = 'warm-start', rank = 0.25 }"
    )

    @property
    def sha256(self) -> str:
        """Of everything but the words about it."""
        told = self.model_dump(exclude={"about"})
        return sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


# ---- finding ----------------------------------------------------------------------------------------------


def names() -> list[str]:
    """The package's recipes."""
    return sorted(
        file.name.removesuffix(".toml") for file in _shelf().iterdir() if file.name.endswith(".toml")
    )


def load(source: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Return the checked recipe of a name or path, with `field=value` overrides (`data.batch_size=64`).

    An empty value (`method.rank=`) removes the field.
    """
    return checked(overridden(_table(source), overrides), str(source))


def checked(data: Mapping[str, Any], source: str) -> Recipe:
    """Raises one `UsageError` with every mistake that can be found without building anything."""
    mistakes: list[str] = []
    recipe: Recipe | None = None
    try:
        recipe = Recipe.model_validate(data)
    except ValidationError as error:
        mistakes += _says(error)
    checks: tuple[tuple[Any, type, Callable[[Any], object]], ...] = (
        (_name(data, "model"), str, lambda name: models.check(name, "model.name")),
        (_name(data, "data"), str, check_data),
        (data.get("optimizer"), Mapping, optimizers.check),
        (data.get("schedule"), Mapping, schedule_for),
        (data.get("method"), Mapping, method_for),
    )
    for value, kind, check in checks:
        if isinstance(value, kind):  # if not, it was told above
            try:
                check(value)
            except UsageError as error:
                mistakes.append(str(error))
    if recipe is not None and recipe.factor_decay is not None and recipe.frobenius_decay:
        mistakes.append(
            "factor_decay: `frobenius_decay` and `factor_decay` are mutually exclusive; remove one with "
            "--set frobenius_decay= or --set factor_decay="
        )
    told = tuple(mistake.partition(":")[0] for mistake in mistakes)
    mistakes += (f"{path}: {what}" for path, what in _no_plain_data(data) if path not in told)
    if mistakes or recipe is None:
        raise UsageError("\n".join(f"{source}: {mistake}" for mistake in mistakes))
    return recipe


def _name(data: Mapping[str, Any], table: str) -> Any:
    found = data.get(table)
    return found.get("name") if isinstance(found, Mapping) else None


def overridden(data: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return a copy of the table with each `path=value` put in; values are TOML, or text if they are not.

    `path=` without a value removes the field. Fields are removed first, so that the order does not matter.
    """
    changed: dict[str, Any] = copy.deepcopy(dict(data))
    parsed, removed = [], set()
    for text in overrides:
        path, equals, value = text.partition("=")
        keys = path.strip().split(".")
        if not equals or not all(keys):
            raise UsageError(
                f"--set {text!r}: give field=value, e.g. --set optimizer.lr=0.05, or field= to remove it"
            )
        if value.strip():
            parsed.append((text, keys, value))
        elif tuple(keys) not in removed:
            _remove_(changed, keys, f"--set {text}")
            removed.add(tuple(keys))
    for text, keys, _ in parsed:
        if tuple(keys) in removed:
            raise UsageError(
                f"--set {text}: {'.'.join(keys)} is removed as well (--set {'.'.join(keys)}=); "
                "keep one of the two"
            )
    # Kinds first: a new one clears its table, but not what is set beside it.
    for text, keys, value in sorted(parsed, key=lambda one: one[1][-1] != "kind"):
        table = changed
        for key in keys[:-1]:
            table = table.setdefault(key, {})
            if not isinstance(table, dict):
                raise UsageError(f"--set {text!r}: {key!r} is a value, not a table")
        if keys[-1] == "kind" and table.get("kind") not in (None, _value(value)):
            table.clear()  # the options were those of the other kind
        table[keys[-1]] = _value(value)
    return changed


def _remove_(data: dict[str, Any], keys: Sequence[str], source: str) -> None:
    """Remove the field at this path; a path that leads nowhere is likely a typing error."""
    table: Any = data
    for depth, key in enumerate(keys):
        if not isinstance(table, dict) or key not in table:
            known = sorted(table) if isinstance(table, dict) else []
            hint = near_misses(key, known) or (f"; set there: {', '.join(known)}" if known else "")
            raise UsageError(
                f"{source}: the recipe does not set {'.'.join(keys[: depth + 1])}, so there is nothing to "
                f"remove{hint}"
            )
        if depth < len(keys) - 1:
            table = table[key]
    del table[keys[-1]]


def _table(source: str | Path, above: tuple[str, ...] = ()) -> dict[str, Any]:
    """A recipe's fields, those of its base included."""
    data = _read(source)
    base, unset = data.pop("base", None), data.pop("unset", None)
    if base is None and unset is not None:
        raise UsageError(f"{source}: unset: removes fields of a base, and there is none; name it with base =")
    if base is None:
        return data
    if unset is not None and not (isinstance(unset, list) and all(isinstance(path, str) for path in unset)):
        raise UsageError(f'{source}: unset: {unset!r} is not a list of fields such as ["method.rank"]')
    if isinstance(base, str) and base.endswith(".toml"):
        base = os.path.normpath(Path(source).parent / base)
    above = (*above, str(source))
    if not isinstance(base, str) or base in above:
        raise UsageError(f"{source}: base: {base!r} is not the name or the path of another recipe")
    inherited = _table(base, above)
    for path in dict.fromkeys(unset or ()):
        _remove_(inherited, path.split("."), f"{source}: unset {path!r}")
    return _merged(inherited, data)


def _merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in changes.items():
        below = merged.get(key)
        merged[key] = value
        if isinstance(value, dict) and isinstance(below, dict):
            # Of another kind, the old options would mean nothing.
            merged[key] = _merged(below, value) if value.get("kind") in (None, below.get("kind")) else value
    return merged


def _read(source: str | Path) -> dict[str, Any]:
    text = str(source)
    if not text.endswith(".toml"):
        if text not in names():
            raise UsageError(
                f"there is no recipe {text!r}{near_misses(text, names())}; `takifugu train --list` lists "
                "them; the path of a recipe ends in .toml"
            )
        return tomllib.loads((_shelf() / f"{text}.toml").read_text(encoding="utf-8"))
    try:
        return tomllib.loads(Path(text).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise UsageError(f"{text}: cannot be read ({reason}); give the path of a recipe") from None
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{text}: is not valid TOML ({error}); correct the syntax there") from None


def _shelf() -> Any:
    return resources.files("takifugu.train") / "recipes"


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text.strip()}")["value"]
    except tomllib.TOMLDecodeError:
        return text.strip()


# ---- what is wrong, in words ------------------------------------------------------------------------------


def _no_plain_data(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Where a recipe has what TOML can say and JSON cannot: run folders keep recipes as JSON."""
    if isinstance(value, Mapping | list):
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _no_plain_data(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, datetime.date | datetime.time):
        yield path, f"{value} is a date or a time; put it in quotes, or give a number"
    elif isinstance(value, float) and not math.isfinite(value):
        yield path, f"{value} is not a finite number"


def _says(error: ValidationError) -> Iterator[str]:
    tables: dict[Any, type[BaseModel]] = {"model": ModelTable, "data": DataTable}
    for found in error.errors(include_url=False):
        path = ".".join(map(str, found["loc"])) or "recipe"
        table = tables.get(found["loc"][0], Recipe) if len(found["loc"]) > 1 else Recipe
        known = table.model_fields
        last = str(found["loc"][-1]) if found["loc"] else ""
        fix = (known[last].description if last in known else None) or "a value of the right kind"
        if found["type"] == "missing":
            yield f"{path}: is missing; give {fix}"
        elif found["type"] == "extra_forbidden":
            hint = near_misses(last, known) or f"; known here: {', '.join(known)}"
            yield f"{path}: is not a field of a recipe{hint}"
        else:
            yield f"{path}: {found.get('input')!r} is not valid; give {fix}"
