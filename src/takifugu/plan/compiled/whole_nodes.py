"""Branch and bound over whole nodes: the least of (cost - slope * effective size) over sets of choices.

Node i makes one choice k, from not taking part (0) to all of its data that fits. A choice costs `cost[i, k]`
and has `size[i, k]`; a set's effective size is its size less how far it is off the fleet's mix of labels: the
sum over labels of |sum over nodes of lean[i, c] * size[i, k]|. Multipliers z in [-1, 1] per label make that a
sum over nodes, too large by something that branching takes away.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from takifugu.plan.compiled import compiled
from takifugu.plan.curves import Floats

Ints = NDArray[np.int64]

_AT_FIRST, _LATER = 60, 12
"""Steps towards better multipliers, for all sets and for every branch."""
_PATIENCE = 4
"""Steps without success before they are made half as long."""


@compiled
def weight_of(lean: Floats, i: int, z: Floats) -> float:
    weight = 1.0
    for c in range(len(z)):
        weight -= z[c] * lean[i, c]
    return weight


@compiled
def least_at(
    cost: Floats, size: Floats, lean: Floats, first: Ints, last: Ints, slope: float, z: Floats, pick: Ints
) -> float:
    """Each node's best choice between its first and last at multipliers z (into `pick`), and their sum: no
    set of such choices has less."""
    total = 0.0
    for i in range(len(first)):
        worth, best = slope * weight_of(lean, i, z), np.inf
        for k in range(first[i], last[i] + 1):
            if cost[i, k] - worth * size[i, k] < best:
                best, pick[i] = cost[i, k] - worth * size[i, k], k
        total += best
    return total


@compiled
def off_balance(size: Floats, lean: Floats, pick: Ints, off: Floats) -> float:
    """How far a set is off the fleet's mix: label by label (into `off`), and in all."""
    off[:] = 0.0
    for i in range(len(pick)):
        if pick[i]:
            for c in range(len(off)):
                off[c] += lean[i, c] * size[i, pick[i]]
    return float(np.abs(off).sum())


@compiled
def climb(
    cost: Floats,
    size: Floats,
    lean: Floats,
    first: Ints,
    last: Ints,
    slope: float,
    z: Floats,
    steps: int,
    enough: float,
    known: float,
    known_pick: Ints,
) -> tuple[float, float]:
    """The bound of a branch, raised by better multipliers (z, in place) until it is `enough`; and the least
    of what is known and of the sets met on the way (`known_pick`, in place)."""
    pick, off, best_z, here = np.empty(len(first), np.int64), np.empty(len(z)), z.copy(), z.copy()
    bound, pace, failed = -np.inf, 1.0, 0
    for _ in range(steps):
        least = least_at(cost, size, lean, first, last, slope, here, pick)
        missed = slope * (off_balance(size, lean, pick, off) - (here * off).sum())
        if least + missed < known:
            known = least + missed
            known_pick[:] = pick
            enough = min(enough, known)
        failed += 1
        if least > bound:
            bound, failed = least, 0
            best_z[:] = here
        if bound >= enough or missed <= 0.0:
            break
        if failed == _PATIENCE:
            pace, failed = 0.5 * pace, 0
            here[:] = best_z
            continue
        # Along the slope of the bound, as far as it would take if it were straight (Polyak's rule).
        steep = 0.0
        for c in range(len(z)):
            if not (here[c] >= 1.0 and off[c] > 0.0) and not (here[c] <= -1.0 and off[c] < 0.0):
                steep += off[c] * off[c]
        if steep <= 0.0:
            break
        length = pace * (enough - least) / (slope * steep)
        for c in range(len(z)):
            here[c] = min(max(here[c] + length * off[c], -1.0), 1.0)
    z[:] = best_z
    return bound, known


@compiled
def narrow(
    cost: Floats,
    size: Floats,
    lean: Floats,
    first: Ints,
    last: Ints,
    slope: float,
    z: Floats,
    enough: float,
    pick: Ints,
) -> int:
    """Takes away choices with which no set of the branch has less than `enough` (first and last, in place).
    The node to branch on: where another choice makes the least difference; -1: all are decided."""
    least = least_at(cost, size, lean, first, last, slope, z, pick)
    node, closest = -1, np.inf
    for i in range(len(first)):
        if first[i] == last[i]:
            continue
        worth, mine = slope * weight_of(lean, i, z), pick[i]
        best = cost[i, mine] - worth * size[i, mine]
        while first[i] < mine and least + cost[i, first[i]] - worth * size[i, first[i]] - best >= enough:
            first[i] += 1
        while last[i] > mine and least + cost[i, last[i]] - worth * size[i, last[i]] - best >= enough:
            last[i] -= 1
        if first[i] < last[i]:
            other = last[i] if mine < last[i] else first[i]
            more = cost[i, other] - worth * size[i, other] - best
            if more < closest * cost[i, last[i]]:
                node, closest = i, more / max(cost[i, last[i]], 1e-300)
    return node


@compiled
def least_of_whole_nodes(
    cost: Floats,
    size: Floats,
    lean: Floats,
    first: Ints,
    last: Ints,
    slope: float,
    starts: Floats,
    cutoff: float,
    close: float,
    most: int,
) -> tuple[float, float, Ints, int]:
    """A lower bound for all sets; the least set found, its choices, and how many branches were looked at. The
    one with the least bound comes first, from the best of the multipliers in `starts`. It ends when none is
    left below the cutoff, or by more than `close` below the set that was found, or after `most` branches."""
    pick, known_pick = np.zeros(len(first), np.int64), np.zeros(len(first), np.int64)
    low, high = np.empty((most + 2, len(first)), np.int64), np.empty((most + 2, len(first)), np.int64)
    z, bound = np.empty((most + 2, starts.shape[1])), np.full(most + 2, np.inf)
    low[0], high[0], highest = first, last, -np.inf
    for row in range(len(starts)):
        least = least_at(cost, size, lean, first, last, slope, starts[row], pick)
        if least > highest:
            highest = least
            z[0] = starts[row]
    bound[0], known = climb(cost, size, lean, first, last, slope, z[0], _AT_FIRST, cutoff, np.inf, known_pick)
    used = looks = 1
    while looks < most:
        at = int(bound[:used].argmin())
        enough = min(cutoff, known - close)
        if bound[at] >= enough:
            break
        node = narrow(cost, size, lean, low[at], high[at], slope, z[at], enough, pick)
        if node < 0:  # one set is left
            value = slope * off_balance(size, lean, pick, z[at])
            for i in range(len(pick)):
                value += cost[i, pick[i]] - slope * size[i, pick[i]]
            if value < known:
                known = value
                known_pick[:] = pick
            bound[at] = np.inf
            looks += 1
            continue
        low[used], high[used], z[used], before = low[at], high[at], z[at], bound[at]
        high[at, node] = min(pick[node], high[at, node] - 1)
        low[used, node] = high[at, node] + 1
        for branch in (at, used):
            enough = min(cutoff, known - close)
            found, known = climb(
                cost,
                size,
                lean,
                low[branch],
                high[branch],
                slope,
                z[branch],
                _LATER,
                enough,
                known,
                known_pick,
            )
            bound[branch] = max(found, before)
            looks += 1
        used += 1
    # Whatever was taken away had at least what was enough then, and that only falls.
    return min(bound[:used].min(), cutoff, known - close), known, known_pick, looks
