"""Which rows of three columns, all to be small, are beaten by no other row."""

from __future__ import annotations

from bisect import bisect_left, bisect_right

import numpy as np
from numpy.typing import NDArray

from takifugu.plan.curves import Floats

_SMALL = 256


def undominated(a: Floats, b: Floats, c: Floats) -> NDArray[np.int64]:
    """Indices (ascending) of rows that no other row equals or beats in all three; of equal rows the first."""
    count = len(a)
    if count <= 1:
        return np.arange(count)
    if count > 4 * _SMALL:
        # Most rows fall to a few strong ones: a cheap first pass before the exact one.
        alive = _survive_champions(a, b, c)
        if len(alive) < count:
            return np.asarray(alive[undominated(a[alive], b[alive], c[alive])])
    order = np.lexsort((c, b, a))
    if count <= _SMALL:
        return _pairwise(a[order], b[order], c[order], order)
    return _sweep(b[order].tolist(), c[order].tolist(), order)


def _survive_champions(a: Floats, b: Floats, c: Floats) -> NDArray[np.int64]:
    def ranks(x: Floats) -> Floats:
        return np.asarray(np.argsort(np.argsort(x, kind="stable"), kind="stable"), dtype=float)

    total = ranks(a) + ranks(b) + ranks(c)
    champions = np.argsort(total, kind="stable")[:48]
    beaten = np.zeros(len(a), dtype=bool)
    for i in champions:
        worse = (a >= a[i]) & (b >= b[i]) & (c >= c[i])
        worse &= (a > a[i]) | (b > b[i]) | (c > c[i])
        beaten |= worse
    return np.flatnonzero(~beaten)


def _pairwise(a: Floats, b: Floats, c: Floats, order: NDArray[np.int64]) -> NDArray[np.int64]:
    # Sorted by (a, b, c): only an earlier row can beat a later one.
    beats = (b[:, None] <= b[None, :]) & (c[:, None] <= c[None, :])
    beaten = np.triu(beats, 1).any(axis=0)
    return np.sort(order[~beaten])


def _sweep(b: list[float], c: list[float], order: NDArray[np.int64]) -> NDArray[np.int64]:
    """Rows come in order of a; a staircase of (b, c) holds what has been seen: b rises, c falls."""
    stair_b: list[float] = []
    stair_c: list[float] = []
    kept: list[int] = []
    for place, (x, y) in enumerate(zip(b, c, strict=True)):
        at = bisect_right(stair_b, x)
        if at and stair_c[at - 1] <= y:
            continue
        kept.append(place)
        start = bisect_left(stair_b, x)
        stop = start
        while stop < len(stair_b) and stair_c[stop] >= y:
            stop += 1
        stair_b[start:stop] = [x]
        stair_c[start:stop] = [y]
    return np.sort(order[kept])
