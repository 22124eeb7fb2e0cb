"""Who is there when: node sets for fleets whose nodes come and go."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from takifugu.plan.curves import Floats
from takifugu.plan.families import Family, listed_family, prefixes
from takifugu.plan.fleet import Fleet
from takifugu.plan.options import Options
from takifugu.plan.problem import at_most

Mask = NDArray[np.bool_]

_ORDERS, _FEW = 600, 250
"""Orders per family: there are many families here, one for each crowd, and many crowds at once."""


@dataclass
class Attendance:
    fleet: Fleet
    multipliers: Floats
    favoured_s: Sequence[Floats | None]
    """[version]: round times worth looking at"""
    listed: Callable[[int, Mask], Options | None] | None = None
    """All sets of some nodes, by version, where there are few enough of them"""
    _known: dict[tuple[int, int, bytes], Family | None] = field(default_factory=dict, repr=False)
    _stay: dict[int, Floats] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        rows = [
            (i, a, at_most(b)) for i, node in enumerate(self.fleet.problem.nodes) for a, b in node.windows
        ]
        self._node = np.array([i for i, *_ in rows], dtype=np.int64)
        self._opens = np.array([a for _, a, _ in rows], dtype=float)
        self._closes = np.array([b for *_, b in rows], dtype=float)
        self._openings: list[float] = np.unique(self._opens[np.isfinite(self._opens)]).tolist()

    def present(self, clock: float, until: float) -> Mask:
        """Nodes with one window that contains this whole stretch."""
        return np.asarray(self.stay(clock) >= until)

    def stay(self, clock: float) -> Floats:
        """[node]: until when it stays, of those windows that are open by now the last; the same until
        somebody comes."""
        opened = bisect_right(self._openings, clock)
        if opened not in self._stay:
            until = np.full(len(self.fleet.samples), -np.inf)
            here = self._opens <= clock
            np.maximum.at(until, self._node[here], self._closes[here])
            self._stay[opened] = until
        return self._stay[opened]

    def next_opening(self, clock: float) -> float:
        """When somebody comes next; infinity if nobody does."""
        place = bisect_right(self._openings, clock)
        return self._openings[place] if place < len(self._openings) else np.inf

    def family(self, version: int, mask: Mask, orders: int = _ORDERS) -> Family | None:
        key = (version, orders, mask.tobytes())
        if key not in self._known:
            self._known[key] = self._drawn(version, mask, orders)
        return self._known[key]

    def _drawn(self, version: int, mask: Mask, orders: int) -> Family | None:
        if self.listed is not None:
            options = self.listed(version, mask)
            return None if options is None else listed_family(options)
        return prefixes(self.fleet, version, self.multipliers, mask, orders, self.favoured_s[version])

    def crowds(self, version: int, most: int = 14) -> list[Family]:
        """Families of those who are there at some moments: the start, and when somebody comes or goes."""
        problem = self.fleet.problem
        moments = np.concatenate(
            [self._openings, np.nextafter(self._closes[np.isfinite(self._closes)], np.inf)]
        )
        moments = np.unique(moments[(moments > problem.start_time_s) & (moments < problem.time_limit)])
        if len(moments) > most:
            moments = moments[np.linspace(0, len(moments) - 1, most).round().astype(int)]
        masks = [self.present(float(t), float(t)) for t in (problem.start_time_s, *moments)]
        found = [self.family(version, mask, _FEW) for mask in masks if mask.any()]
        return [f for f in found if f is not None]
