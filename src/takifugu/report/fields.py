"""Fields of a JSON object, read one by one; a wrong one is an error that names file, line and field."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from takifugu.errors import ReportError
from takifugu.numbers import is_number


@dataclass(frozen=True)
class Fields:
    data: Mapping[str, Any]
    where: str
    """The file, and the line where there are several."""

    def number(self, name: str) -> float:
        value = self._get(name)
        if not is_number(value):
            self._fail(name, "a number", value)
        return float(value)

    def above_zero(self, name: str) -> float:
        value = self.number(name)
        if value <= 0:
            self._fail(name, "above 0", value)
        return value

    def numbers_or_none(self, name: str) -> list[float] | None:
        value = self.data.get(name)
        if value is not None and not (isinstance(value, list) and all(map(is_number, value))):
            self._fail(name, "a list of numbers", value)
        return value

    def number_or_none(self, name: str) -> float | None:
        return None if self.data.get(name) is None else self.number(name)

    def whole(self, name: str) -> int:
        value = self.number(name)
        if value != int(value):
            self._fail(name, "a whole number", value)
        return int(value)

    def whole_or_none(self, name: str) -> int | None:
        return None if self.data.get(name) is None else self.whole(name)

    def text(self, name: str) -> str:
        value = self._get(name)
        if not isinstance(value, str):
            self._fail(name, "a string", value)
        return value

    def text_or_none(self, name: str) -> str | None:
        return None if self.data.get(name) is None else self.text(name)

    def flag(self, name: str) -> bool:
        value = self._get(name)
        if not isinstance(value, bool):
            self._fail(name, "true or false", value)
        return value

    def table(self, name: str) -> Fields:
        value = self._get(name)
        if not isinstance(value, dict):
            self._fail(name, "an object", value)
        return Fields(value, f"{self.where}, {name!r}")

    def table_or_none(self, name: str) -> Fields | None:
        return None if self.data.get(name) is None else self.table(name)

    def tables(self, name: str) -> Iterator[Fields]:
        value = self._get(name)
        if not isinstance(value, list):
            self._fail(name, "a list", value)
        for index, row in enumerate(value):
            if not isinstance(row, dict):
                self._fail(f"{name}[{index}]", "an object", row)
            yield Fields(row, f"{self.where}, {name}[{index}]")

    def _get(self, name: str) -> Any:
        if name not in self.data:
            raise ReportError(f"{self.where}: {name!r} is missing; {_ADVICE}")
        return self.data[name]

    def _fail(self, name: str, wanted: str, value: object) -> NoReturn:
        shown = repr(value) if len(repr(value)) <= 60 else repr(value)[:57] + "..."
        raise ReportError(f"{self.where}: {name!r} must be {wanted}, is {shown}; {_ADVICE}")


_ADVICE = "the file is damaged or of another format, write it anew"


def read_json(path: Path) -> Fields:
    return _parse(_text(path), str(path))


def read_lines(path: Path, complete: bool) -> Iterator[Fields]:
    """JSON lines. While a run goes on (not `complete`) the last one may be half written: it is left out."""
    lines = _text(path).split("\n")
    unfinished = lines.pop()  # nothing, if the file ends as it should
    if unfinished.strip() and complete:
        lines.append(unfinished)
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield _parse(line, f"{path}, line {number}")


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ReportError(
            f"{path}: cannot be read ({reason}); give the folder of a run, or a plan file"
        ) from None


def _parse(text: str, where: str) -> Fields:
    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is not a number")

    try:
        data = json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise ReportError(f"{where}: is not valid JSON ({error}); {_ADVICE}") from None
    if not isinstance(data, dict):
        raise ReportError(f"{where}: expected an object, got {type(data).__name__}; {_ADVICE}")
    return Fields(data, where)
