"""Numbers as a reader likes them: a few digits and a unit that fits."""

from __future__ import annotations

import math
from dataclasses import dataclass

SPACE = "\u00a0"
"""A number and its unit stay on one line."""

MINUS = "\u2212"
NOTHING = "\u2013"


@dataclass(frozen=True)
class Unit:
    """A unit for a whole axis: value / `size` is what is shown."""

    name: str
    size: float


_SECONDS = (Unit("s", 1.0), Unit("min", 60.0), Unit("h", 3600.0))
_JOULES = (Unit("mJ", 1e-3), Unit("J", 1.0), Unit("kJ", 1e3), Unit("MJ", 1e6), Unit("GJ", 1e9))
_BYTES = (Unit("B", 1.0), Unit("kB", 1e3), Unit("MB", 1e6), Unit("GB", 1e9), Unit("TB", 1e12))


def seconds_unit(most: float) -> Unit:
    return _SECONDS[2] if most >= 3 * 3600 else _SECONDS[1] if most >= 300 else _SECONDS[0]


def joules_unit(most: float) -> Unit:
    return _fitting(_JOULES, most)


def bytes_unit(most: float) -> Unit:
    return _fitting(_BYTES, most)


def _fitting(units: tuple[Unit, ...], most: float) -> Unit:
    return next((u for u in reversed(units) if abs(most) >= u.size), units[0] if most else units[1])


def digits(value: float, significant: int = 3) -> str:
    """Without exponents for what people read: 0.0421, 1.23, 456, 1,235."""
    if value == 0:
        return "0"
    exponent = math.floor(math.log10(abs(value)))
    if exponent < -4:
        return f"{value:.{significant - 1}e}"
    return f"{value:,.{max(0, significant - 1 - exponent)}f}"


def energy(joules: float) -> str:
    unit = joules_unit(joules)
    return f"{digits(joules / unit.size)}{SPACE}{unit.name}"


def amount(count: float) -> str:
    unit = bytes_unit(count)
    return f"{digits(count / unit.size)}{SPACE}{unit.name}"


def duration(seconds: float) -> str:
    if seconds < 120:
        return f"{digits(seconds)}{SPACE}s"
    whole = round(seconds)
    if whole < 3600:
        return _pair(whole // 60, "min", whole % 60, "s")
    whole = round(seconds / 60)
    return _pair(whole // 60, "h", whole % 60, "min")


def _pair(large: int, large_unit: str, small: int, small_unit: str) -> str:
    first = f"{large:,}{SPACE}{large_unit}"
    return f"{first}{SPACE}{small}{SPACE}{small_unit}" if small else first


def loss(value: float) -> str:
    return f"{value:.4g}" if value >= 1e-3 or value <= 0 else f"{value:.2e}"


def percent(share: float) -> str:
    """A share without a sign: 0.0312 is 3.1 %, 0.412 is 41 %."""
    value = abs(share) * 100
    if 0 < value < 0.05:
        return f"less than 0.1{SPACE}%"
    return f"{value:.0f}{SPACE}%" if value >= 10 else f"{value:.1f}{SPACE}%"


def deviation(actual: float, predicted: float | None) -> str:
    """How far reality lies from a prediction: +3.1 %, −12 %."""
    if predicted is None or predicted == 0:
        return NOTHING
    share = actual / predicted - 1
    if abs(share) < 0.0005:
        return f"±0{SPACE}%"
    return ("+" if share > 0 else MINUS) + percent(share)
