"""HTML from values. Texts are escaped wherever they go in; only what is `Html` already stays as it is."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Html:
    text: str

    @staticmethod
    def of(value: Html | str) -> Html:
        return value if isinstance(value, Html) else Html(html.escape(value))

    def __add__(self, other: Html | str) -> Html:
        return Html(self.text + Html.of(other).text)


def join(parts: Iterable[Html | str], between: str = "\n") -> Html:
    return Html(between.join(Html.of(part).text for part in parts))


def tag(name: str, *inside: Html | str, **attributes: str | None) -> Html:
    """`class_` is class, `aria_label` is aria-label; an attribute of None is left out."""
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Html(f"<{name}{given}>{join(inside, '').text}</{name}>")


def script_json(data: Any) -> str:
    """JSON that cannot end the script element it stands in, nor begin a comment or another one."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text
