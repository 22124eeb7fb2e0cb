"""Plain data -> TOML, as much of it as a problem file needs. Python reads TOML and does not write it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def toml(data: Mapping[str, Any]) -> str:
    """Scalars first, then a [table] for each mapping and [[tables]] for lists of mappings.

    Tables within those are tables of their own one level down (`[versions.curve]`), inline below that. None
    is left out: TOML has no word for it.
    """
    return "\n".join(_table(data, "", 0)).strip("\n") + "\n"


def _table(data: Mapping[str, Any], path: str, depth: int) -> Iterator[str]:
    later: list[tuple[str, Any]] = []
    for key, value in data.items():
        if value is None:
            continue
        if _has_own_table(value, depth):
            later.append((key, value))
        else:
            yield f"{_key(key)} = {inline(value)}"
    for key, value in later:
        name = f"{path}{_key(key)}"
        for one in value if _is_table_list(value) else [value]:
            yield ""
            yield f"[[{name}]]" if _is_table_list(value) else f"[{name}]"
            yield from _table(one, f"{name}.", depth + 1)


def _has_own_table(value: Any, depth: int) -> bool:
    if depth == 0:
        return isinstance(value, Mapping) or _is_table_list(value)
    return depth == 1 and isinstance(value, Mapping) and not _is_short(value)


def inline(value: Any) -> str:
    """A value on one line; long lists of tables get a line each."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else str(value)
    if isinstance(value, str):
        # JSON's escapes are TOML's; only the control character 7f is JSON's to leave alone and TOML's not.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(k)} = {inline(v)}" for k, v in value.items() if v is not None) + " }"
    if _is_table_list(value):
        return "[\n" + "".join(f"  {inline(one)},\n" for one in value) + "]"
    if isinstance(value, Sequence):
        return "[" + ", ".join(map(inline, value)) + "]"
    raise TypeError(f"{type(value).__name__} has no form in TOML")


def _key(key: str) -> str:
    return key if _BARE.fullmatch(key) else inline(key)


def _is_table_list(value: Any) -> bool:
    return isinstance(value, Sequence) and bool(value) and all(isinstance(one, Mapping) for one in value)


def _is_short(value: Any) -> bool:
    """Reads better on one line: a few scalars under a key."""
    return all(not isinstance(v, Mapping | list) for v in value.values()) and len(inline(value)) < 80
