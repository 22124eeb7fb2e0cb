"""Loops of the label search (`plan/search.py`): every round from every label, and which of them are kept."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from takifugu.plan.compiled import compiled
from takifugu.plan.compiled.paths import point_below
from takifugu.plan.compiled.rows import unbeaten
from takifugu.plan.compiled.sets import sort_by
from takifugu.plan.compiled.trails import after_round
from takifugu.plan.curves import Floats

Ints = NDArray[np.int64]
Labels = tuple[Ints, Floats, Floats, Floats]
"""[label] its version, energy, clock and loss."""
Moves = tuple[Ints, Ints, Floats, Floats, Floats]
"""[move] the version it leads from and to; energy, time and jump of its switch (none: it stays)."""
Rounds = tuple[Ints, Floats, Floats, Floats, Floats, Ints, Floats, Floats]
"""[version] where its options begin (and one more); of each its energy, time, share and asymptote, and where
its windows begin (and one more; none: always open); of each the first and the last instant of a start."""
Shapes = tuple[Ints, Floats, Floats]
"""[version] 0, 1: its curve is exponential, a power; 2: it is a table. Its rate or scale; its exponent."""
Tables = tuple[Ints, Ints, Floats, Floats]
"""[version] where its losses begin (and one more) and where its rows do; losses, rising; row by row the loss
after each option."""
Bounds = tuple[Floats, Floats, Floats, Floats, Floats, Floats]
"""A grid of losses; `value[version, point, price]` on it; prices of seconds and rounds; the least time and
the fewest rounds, `[version, point]`. No prices: no bounds."""

Children = tuple[Ints, Floats]
"""[3, label]: version, parent and option; energy, clock and loss."""
Archive = tuple[Ints, Floats]
"""[version] where its labels begin (and one more); [3, label]: energy, clock and loss, by rising energy."""

EXPONENTIAL, POWER, TABLE = 0, 1, 2
UNKNOWN = -2
"""Instead of a version: a table lacks a loss."""
LOSSES, TIMES = 128, 32
FEW, MANY = 150, 1500
"""Bins, for a first look at which labels are beaten; so few need none, after that, so many one more."""


@compiled
def at_least(bounds: Bounds, version: int, loss: float, seconds: float, rounds: float) -> tuple[float, bool]:
    """The energy that is still needed, and whether the time or the rounds that are left will not do."""
    grid, value, per_second, per_round, least_s, fewest = bounds
    if len(per_second) == 0:
        return 0.0, False
    at = point_below(grid, loss)
    part = min(max((loss - grid[at]) / (grid[at + 1] - grid[at]), 0.0), 1.0)
    best = 0.0
    for p in range(len(per_second)):
        here = value[version, at, p] + part * (value[version, at + 1, p] - value[version, at, p])
        here -= per_second[p] * seconds
        if per_round[p]:  # where rounds are free there may be endlessly many
            here -= per_round[p] * rounds
        best = max(best, here)
    needed = least_s[version, at] + part * (least_s[version, at + 1] - least_s[version, at])
    if needed * (1 - 1e-9) > seconds:
        return best, True
    needed = fewest[version, at] + part * (fewest[version, at + 1] - fewest[version, at])
    return best, np.ceil(needed * (1 - 1e-9) - 1e-9) > rounds


@compiled
def row_of(losses: Floats, first: int, last: int, loss: float) -> int:
    """The place of a loss in a rising list, from `first` on; -1 if it is not there."""
    end = last
    while first < last:
        middle = (first + last) // 2
        if losses[middle] < loss:
            first = middle + 1
        else:
            last = middle
    return first if first < end and losses[first] == loss else -1


@compiled
def missing(
    labels: Labels, moves: Moves, first: tuple[int, int], last: tuple[int, int], target: int, losses: Floats
) -> Floats:
    """The losses that rounds of a version begin with and that its table does not have."""
    version, loss = labels[0], labels[3]
    source, to, jump = moves[0], moves[1], moves[4]
    found, count = np.empty((last[1] - first[1]) * len(to)), 0
    for move in range(first[0], last[0]):
        if to[move] != target:
            continue
        for i in range(first[1], last[1]):
            if version[i] == source[move] and row_of(losses, 0, len(losses), loss[i] + jump[move]) < 0:
                found[count] = loss[i] + jump[move]
                count += 1
    return found[:count]


@compiled
def earliest_start(ready: float, opens: Floats, closes: Floats, first: int, last: int) -> float:
    """The earliest start in one of the windows from `first` to `last`; infinity if there is none."""
    if first == last:
        return ready
    start = np.inf
    for w in range(first, last):
        at = max(ready, opens[w])
        if at <= closes[w]:
            start = min(start, at)
    return start


@compiled
def ready(
    labels: Labels,
    moves: Moves,
    move: int,
    first: int,
    last: int,
    bounds: Bounds,
    time_limit: float,
    rounds_left: float,
    cutoff: float,
    pruned: float,
) -> tuple[Ints, float]:
    """Of the labels from `first` to `last` those from which a move may lead to a plan below the cutoff; and
    the least bound of all that were dropped for it."""
    version, energy, clock, loss = labels
    source, target, switch_j, switch_s, jump = moves
    base, count = np.empty(last - first, np.int64), 0
    for i in range(first, last):
        if version[i] != source[move]:
            continue
        seconds = time_limit - (clock[i] + switch_s[move])
        needed, hopeless = at_least(bounds, target[move], loss[i] + jump[move], seconds, rounds_left)
        needed += energy[i] + switch_j[move]
        if hopeless:
            continue
        if needed >= cutoff:
            pruned = min(pruned, needed)
            continue
        base[count] = i
        count += 1
    return base[:count], pruned


@compiled
def rounds_from(
    labels: Labels,
    moves: Moves,
    move: int,
    base: Ints,
    options: Rounds,
    shapes: Shapes,
    tables: Tables,
    limits: tuple[float, float, float],
    best: float,
    children: Children,
    count: int,
) -> tuple[int, tuple[float, int, int, int]]:
    """Adds what rounds by a move lead to, to the first `count` children; returns how many there are then, and
    the cheapest round that meets the target for less than `best` (energy, version, parent, option)."""
    energy, clock, loss = labels[1], labels[2], labels[3]
    v, fee, wait, jump = moves[1][move], moves[2][move], moves[3][move], moves[4][move]
    first, last = options[0][v], options[0][v + 1]
    joules, seconds, shares = options[1][first:last], options[2][first:last], options[3][first:last]
    asymptote, window, opens, closes = options[4][first:last], options[5], options[6], options[7]
    kind, pace, exponent = shapes[0][v], shapes[1][v], shapes[2][v]
    table_at, row_at, losses, rows = tables
    loss_limit, time_limit = limits[0], limits[1]
    numbers, values = children
    arrival, stays, row = (np.inf, -1, -1, -1), moves[0][move] == v, 0
    for i in base:
        here, ready_s, spent = loss[i] + jump, clock[i] + wait, energy[i] + fee
        if kind == TABLE:
            place = row_of(losses, table_at[v], table_at[v + 1], here)
            if place < 0:
                return count, (np.inf, UNKNOWN, -1, -1)
            row = row_at[v] + (place - table_at[v]) * (last - first)
        for k in range(last - first):
            if kind == TABLE:
                after = rows[row + k]
            else:
                after = after_round(kind == POWER, pace, exponent, here, shares[k], asymptote[k])
            start = ready_s
            if len(opens):
                start = earliest_start(ready_s, opens, closes, window[first + k], window[first + k + 1])
            end, total = start + seconds[k], spent + joules[k]
            if end > time_limit or (stays and not after < here):
                continue
            if after <= loss_limit:
                if total < best:
                    best, arrival = total, (total, v, i, k)
                continue
            numbers[0, count], numbers[1, count], numbers[2, count] = v, i, k
            values[0, count], values[1, count], values[2, count] = total, end, after
            count += 1
    return count, arrival


@compiled
def promising(
    children: Children,
    first: int,
    last: int,
    bounds: Bounds,
    time_limit: float,
    rounds_left: float,
    cutoff: float,
    pruned: float,
) -> tuple[int, float]:
    """Keeps of the children from `first` to `last` those that may lead to a plan below the cutoff; returns
    where they end, and the least bound of all that were dropped for it."""
    numbers, values = children
    count = first
    for r in range(first, last):
        needed, hopeless = 0.0, False
        if len(bounds[2]):
            seconds = time_limit - values[1, r]
            needed, hopeless = at_least(bounds, numbers[0, r], values[2, r], seconds, rounds_left)
        if hopeless:
            continue
        if values[0, r] + needed >= cutoff:
            pruned = min(pruned, values[0, r] + needed)
            continue
        if count < r:
            for c in range(3):
                numbers[c, count], values[c, count] = numbers[c, r], values[c, r]
        count += 1
    return count, pruned


@compiled
def not_far_behind(values: Floats, rows: Ints, few: int) -> Ints:
    """Rows that are left after a first look, with losses and times in bins: a row is beaten by any that costs
    no more in a lower bin of times, and in a lower bin of losses or with the lowest loss of its own. So `few`
    rows need no such look."""
    energy, clock, loss = values[0], values[1], values[2]
    if len(rows) <= few:
        return rows
    low_s = high_s = clock[rows[0]]
    low = high = loss[rows[0]]
    for r in rows:
        low_s, high_s = min(low_s, clock[r]), max(high_s, clock[r])
        low, high = min(low, loss[r]), max(high, loss[r])
    per_s = (TIMES - 1) / max(high_s - low_s, 1e-300)
    per = (LOSSES - 1) / max(high - low, 1e-300)
    lowest, least = np.full(LOSSES, np.inf), np.full((LOSSES + 1, TIMES + 1), np.inf)
    place = np.empty((len(rows), 2), np.int64)
    for n in range(len(rows)):
        i = int((loss[rows[n]] - low) * per)
        place[n, 0], place[n, 1] = i, int((clock[rows[n]] - low_s) * per_s)
        lowest[i] = min(lowest[i], loss[rows[n]])
    for n in range(len(rows)):
        # One bin further on: what lies there is beaten.
        i, j = place[n, 0] + (loss[rows[n]] > lowest[place[n, 0]]), place[n, 1] + 1
        least[i, j] = min(least[i, j], energy[rows[n]])
    for i in range(1, LOSSES + 1):
        for j in range(TIMES + 1):
            least[i, j] = min(least[i, j], least[i - 1, j])
    for j in range(1, TIMES + 1):
        for i in range(LOSSES + 1):
            least[i, j] = min(least[i, j], least[i, j - 1])
    left, count = np.empty(len(rows), np.int64), 0
    for n in range(len(rows)):
        left[count] = rows[n]
        count += energy[rows[n]] < least[place[n, 0], place[n, 1]]
    return left[:count]


@compiled
def expand(
    labels: Labels,
    moves: Moves,
    first: tuple[int, int],
    last: tuple[int, int],
    options: Rounds,
    shapes: Shapes,
    tables: Tables,
    bounds: Bounds,
    limits: tuple[float, float, float],
    costs: tuple[float, float, float],
    keep: bool,
) -> tuple[Children, tuple[float, int, int, int], float]:
    """All rounds by some moves from some labels (`first`, `last`: of both): the labels they lead to, the
    cheapest that meets the target (energy, version, parent, option), and the least bound of those that were
    dropped for it.

    `limits`: of the loss, of time, and how many rounds are left. `costs`: only plans below the first are
    looked for; labels whose bound reaches that, less a tolerance (the second), are dropped; the third is the
    least bound of those so far. `keep`: whether there is a round after this one.
    """
    source, target, begin = moves[0], moves[1], options[0]
    _, time_limit, rounds_left = limits
    best, tolerance, pruned = costs
    arrival = (np.inf, -1, -1, -1)
    rooms = np.zeros(len(begin), np.int64)
    for move in range(first[0], last[0]):
        v = target[move]
        rooms[v] += (begin[v + 1] - begin[v]) * np.sum(labels[0][first[1] : last[1]] == source[move])
    numbers, values = np.empty((3, rooms.sum()), np.int64), np.empty((3, rooms.sum()))
    own = (np.empty((3, rooms.max()), np.int64), np.empty((3, rooms.max())))
    total = count = 0
    for move in range(first[0], last[0]):
        v, before, cutoff = target[move], count, best * (1.0 - tolerance)
        base, pruned = ready(
            labels, moves, move, first[1], last[1], bounds, time_limit, rounds_left, cutoff, pruned
        )
        count, found = rounds_from(
            labels, moves, move, base, options, shapes, tables, limits, best, own, count
        )
        if found[1] == UNKNOWN:
            return (numbers[:, :0].copy(), values[:, :0].copy()), found, pruned
        if found[0] < best:
            best, arrival = found[0], found
        if not keep:
            count = 0
            continue
        # What meets the target was looked for first: its cost decides which of the others are kept.
        cutoff = best * (1.0 - tolerance)
        count, pruned = promising(own, before, count, bounds, time_limit, rounds_left - 1.0, cutoff, pruned)
        if move + 1 == last[0] or target[move + 1] != v:
            for row in not_far_behind(own[1], np.arange(count), FEW):
                for c in range(3):
                    numbers[c, total], values[c, total] = own[0][c, row], own[1][c, row]
                total += 1
            count = 0
    return (numbers[:, :total].copy(), values[:, :total].copy()), arrival, pruned


@compiled
def by_energy(energy: Floats, clock: Floats, loss: Floats, rows: Ints) -> Ints:
    """Rows by rising energy; of equal ones the smaller time, the smaller loss, the first comes first."""
    count = len(rows)
    key, order, spare = np.empty(count), np.empty(count, np.int64), np.empty(count, np.int64)
    for n in range(count):
        key[n] = energy[rows[n]]
    sort_by(key, count, order, spare)
    for n in range(count):
        order[n] = rows[order[n]]
    for n in range(1, count):
        row, at = order[n], n
        while at > 0:
            other = order[at - 1]
            if energy[other] < energy[row] or not (
                clock[row] < clock[other] or (clock[row] == clock[other] and loss[row] < loss[other])
            ):
                break
            order[at] = other
            at -= 1
        order[at] = row
    return order


@compiled
def select(versions: int, children: Children, archive: Archive) -> tuple[Ints, Archive]:
    """The children that no other child of their version, nor any label in the archive, equals or beats in
    energy, time and loss; and the archive with them, without those that they beat. Of equals the first."""
    (numbers, values), (begin, known) = children, archive
    total = values.shape[1]
    energy, clock, loss = values[0], values[1], values[2]
    kept = np.zeros(total, np.bool_)
    new_begin, new = np.zeros(versions + 1, np.int64), np.empty((3, known.shape[1] + total))
    size = 0
    for v in range(versions):
        rows, count = np.empty(total, np.int64), 0
        for r in range(total):
            if numbers[0, r] == v:
                rows[count] = r
                count += 1
        rows = by_energy(energy, clock, loss, not_far_behind(values, rows[:count], MANY))
        # Both in one order, the archive before children that are its equals.
        old, last, n = begin[v], begin[v + 1], 0
        both, which = np.empty((3, last - old + len(rows))), np.empty(last - old + len(rows), np.int64)
        for place in range(both.shape[1]):
            take_old = n == len(rows)
            if old < last and n < len(rows):
                r = rows[n]
                take_old = not (
                    energy[r] < known[0, old]
                    or (
                        energy[r] == known[0, old]
                        and (
                            clock[r] < known[1, old]
                            or (clock[r] == known[1, old] and loss[r] < known[2, old])
                        )
                    )
                )
            if take_old:
                both[0, place], both[1, place], both[2, place] = known[0, old], known[1, old], known[2, old]
                which[place] = -1
                old += 1
            else:
                r = rows[n]
                both[0, place], both[1, place], both[2, place] = energy[r], clock[r], loss[r]
                which[place] = r
                n += 1
        fine = unbeaten(both[1], both[2])
        for place in range(len(which)):
            if fine[place]:
                new[0, size], new[1, size], new[2, size] = both[0, place], both[1, place], both[2, place]
                size += 1
                if which[place] >= 0:
                    kept[which[place]] = True
        new_begin[v + 1] = size
    return np.flatnonzero(kept), (new_begin, new[:, :size].copy())
