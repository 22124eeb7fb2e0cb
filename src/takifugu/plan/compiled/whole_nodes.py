"""Branch and bound over whole nodes: the least of (cost - slope * effective size) over sets of choices.

Node i makes one choice k, from not taking part (0) to all of its data that fits. At least one node i chooses
`slow[i]` or more: it is the slowest of the round, so that no set is empty. A choice costs `cost[i, k]` and
has `size[i, k]`; a set's effective size is its size less how far it is off the fleet's mix of labels: the
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
    cost: Floats,
    size: Floats,
    lean: Floats,
    slow: Ints,
    first: Ints,
    last: Ints,
    slope: float,
    z: Floats,
    pick: Ints,
) -> tuple[float, float]:
    """The least sum over nodes at multipliers z, of choices between first and last (into `pick`) of which one
    is slow: no such set has less. And how much of it is for that one. Infinity: there is no such set."""
    total, more, who, how = 0.0, np.inf, -1, 0
    for i in range(len(first)):
        worth, best, best_slow, k_slow = slope * weight_of(lean, i, z), np.inf, np.inf, 0
        for k in range(first[i], last[i] + 1):
            here = cost[i, k] - worth * size[i, k]
            if here < best:
                best, pick[i] = here, k
            if k >= slow[i] and here < best_slow:
                best_slow, k_slow = here, k
        total += best
        if best_slow - best < more:
            more, who, how = best_slow - best, i, k_slow
    if who < 0:
        return np.inf, np.inf
    pick[who] = how
    return total + more, more


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
    slow: Ints,
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
        least, _ = least_at(cost, size, lean, slow, first, last, slope, here, pick)
        if least == np.inf:
            return np.inf, known
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
    slow: Ints,
    first: Ints,
    last: Ints,
    slope: float,
    z: Floats,
    enough: float,
    pick: Ints,
) -> int:
    """Takes away choices with which no set of the branch has less than `enough` (first and last, in place).
    The node to branch on: where another choice makes the least difference; -1: all are decided."""
    least, for_slow = least_at(cost, size, lean, slow, first, last, slope, z, pick)
    node, closest = -1, np.inf
    for i in range(len(first)):
        if first[i] == last[i]:
            continue
        worth, mine, best = slope * weight_of(lean, i, z), pick[i], np.inf
        for k in range(first[i], last[i] + 1):
            best = min(best, cost[i, k] - worth * size[i, k])
        # With a choice, others at their best; the slowest is paid for unless the choice is slow itself.
        others = least - best
        while first[i] < mine:
            k = first[i]
            spared = for_slow if k >= slow[i] else 0.0
            if others - spared + cost[i, k] - worth * size[i, k] < enough:
                break
            first[i] += 1
        while last[i] > mine:
            k = last[i]
            spared = for_slow if k >= slow[i] else 0.0
            if others - spared + cost[i, k] - worth * size[i, k] < enough:
                break
            last[i] -= 1
        if first[i] < last[i]:
            other = last[i] if mine < last[i] else first[i]
            more = abs(cost[i, other] - worth * size[i, other] - cost[i, mine] + worth * size[i, mine])
            part = more / max(cost[i, last[i]], 1e-300)
            if node < 0 or part < closest:
                node, closest = i, part
    return node


@compiled
def least_of_whole_nodes(
    cost: Floats,
    size: Floats,
    lean: Floats,
    slow: Ints,
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
    first, pick, known_pick = np.zeros_like(last), np.zeros_like(last), np.zeros_like(last)
    low, high = np.empty((most + 2, len(last)), np.int64), np.empty((most + 2, len(last)), np.int64)
    z, bound = np.empty((most + 2, starts.shape[1])), np.full(most + 2, np.inf)
    low[0], high[0], highest = first, last, -np.inf
    for row in range(len(starts)):
        least, _ = least_at(cost, size, lean, slow, first, last, slope, starts[row], pick)
        if least > highest:
            highest = least
            z[0] = starts[row]
    bound[0], known = climb(
        cost, size, lean, slow, first, last, slope, z[0], _AT_FIRST, cutoff, np.inf, known_pick
    )
    used = looks = 1
    while looks < most:
        at = int(bound[:used].argmin())
        enough = min(cutoff, known - close)
        if bound[at] >= enough:
            break
        node = narrow(cost, size, lean, slow, low[at], high[at], slope, z[at], enough, pick)
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
                slow,
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
