"""The planner's inner loops, compiled: what numpy would have to do in thousands of small calls.

Plain functions of arrays that know nothing of plans; what they compute, and why it is right, stands where
they are called. Numba translates them when they are first used and keeps the result on disk. Import this
module only where it is needed: numba takes a third of a second, which small problems can do without.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
from numpy.typing import NDArray

from takifugu.plan.curves import Floats

Ints = NDArray[np.int64]
F = TypeVar("F", bound=Callable[..., Any])


def compiled(function: F) -> F:
    return cast(F, numba.njit(cache=True, nogil=True, error_model="numpy")(function))


@compiled
def who_fits(level_s: Floats, limit_s: float, who: Ints, level: Ints) -> int:
    """How many nodes are done in time; who they are, and how much of its data each can use."""
    count = 0
    for i in range(level_s.shape[0]):
        most = 0
        for k in range(level_s.shape[1]):
            most += level_s[i, k] <= limit_s
        if most:
            who[count], level[count] = i, most - 1
            count += 1
    return count


@compiled
def sort_by(key: Floats, count: int, order: Ints, spare: Ints) -> None:
    """Fills `order` with 0 .. count - 1 by rising key, equal ones as they came (merges of longer and longer
    runs; numpy's own takes seconds to translate)."""
    for k in range(count):
        order[k] = k
    run = 1
    while run < count:
        for low in range(0, count, 2 * run):
            middle, high = min(low + run, count), min(low + 2 * run, count)
            a, b = low, middle
            for k in range(low, high):
                if a < middle and (b >= high or key[order[a]] <= key[order[b]]):
                    spare[k] = order[a]
                    a += 1
                else:
                    spare[k] = order[b]
                    b += 1
        for k in range(count):
            order[k] = spare[k]
        run *= 2


@compiled
def knapsacks(
    level_s: Floats,
    levels: Floats,
    fixed_j: Floats,
    sample_j: Floats,
    idle_w: Floats,
    weights: Floats,
    low_s: Floats,
    high_s: Floats,
    shares: Floats,
) -> tuple[Floats, Floats]:
    """[threshold, share]: fractional knapsacks of the nodes that fit, the largest over all rows of
    `weights`; along the tangent from the share before, and at the share before."""
    nodes, count_z, steps = len(fixed_j), len(weights), len(shares)
    tangent, left = np.zeros((len(low_s), steps)), np.zeros((len(low_s), steps))
    who, level = np.empty(nodes, np.int64), np.empty(nodes, np.int64)
    order, spare = np.empty(nodes, np.int64), np.empty(nodes, np.int64)
    amount, joules = np.empty(nodes), np.empty(nodes)
    ratio, worth = np.empty(nodes), np.empty(nodes)
    reach, spent, slope = np.zeros(nodes + 1), np.zeros(nodes + 1), np.empty(nodes + 1)
    for row in range(len(low_s)):
        count = who_fits(level_s, high_s[row], who, level)
        for j in range(count):
            i = who[j]
            amount[j] = levels[i, level[j]]
            idle = idle_w[i] * max(low_s[row] - level_s[i, level[j]], 0.0)
            joules[j] = fixed_j[i] + sample_j[i] * amount[j] + idle
        for z in range(count_z):
            for j in range(count):
                worth[j] = weights[z, who[j]] * amount[j]
                ratio[j] = joules[j] / worth[j]
            sort_by(ratio, count, order, spare)
            for k in range(count):
                j = order[k]
                slope[k] = ratio[j]
                reach[k + 1] = reach[k] + worth[j]
                spent[k + 1] = spent[k] + joules[j]
            slope[count] = np.inf
            # A share just above the last reach is rounding, not impossibility.
            end = reach[count] * (1 - 1e-12)
            at, before = 0, 0.0
            for g in range(steps):
                here = there = np.inf
                if before < end:
                    while at < count and reach[at + 1] <= before:
                        at += 1
                    here = spent[at]
                    if at < count:
                        here += (before - reach[at]) * slope[at]
                    there = here + slope[at] * (shares[g] - before)
                tangent[row, g] = max(tangent[row, g], there)
                left[row, g] = max(left[row, g], here)
                before = shares[g]
    return tangent, left


@compiled
def prefixes(
    level_s: Floats,
    levels: Floats,
    fixed_j: Floats,
    sample_j: Floats,
    idle_w: Floats,
    weights: Floats,
    lean: Floats,
    limits_s: Floats,
    most_cuts: int,
) -> tuple[Floats, Floats, Floats, Ints, Ints, Ints, Ints, Ints]:
    """All prefixes of all orders (thresholds times rows of `weights`): slowest, energy, effective samples,
    order and length of each; where orders begin; the nodes in order, and the samples each uses."""
    nodes, count_z, labels = len(fixed_j), len(weights), lean.shape[1]
    who, level = np.empty(nodes, np.int64), np.empty(nodes, np.int64)
    order, spare = np.empty(nodes, np.int64), np.empty(nodes, np.int64)
    rows = places = 0
    for limit in limits_s:
        count = who_fits(level_s, limit, who, level)
        rows += min(count, most_cuts) * count_z
        places += count * count_z
    time_s, energy_j, data = np.empty(rows), np.empty(rows), np.empty(rows)
    order_of, cut = np.empty(rows, np.int64), np.empty(rows, np.int64)
    begin = np.zeros(len(limits_s) * count_z + 1, np.int64)
    members, used = np.empty(places, np.int64), np.empty(places, np.int64)
    amount, taken_s, joules, key = np.empty(nodes), np.empty(nodes), np.empty(nodes), np.empty(nodes)
    off = np.empty(labels)
    row = number = place = 0
    for limit in limits_s:
        count = who_fits(level_s, limit, who, level)
        for j in range(count):
            i = who[j]
            amount[j], taken_s[j] = levels[i, level[j]], level_s[i, level[j]]
            joules[j] = fixed_j[i] + sample_j[i] * amount[j]
        cuts = min(count, most_cuts)
        for z in range(count_z):
            for j in range(count):
                i = who[j]
                key[j] = (joules[j] + idle_w[i] * (limit - taken_s[j])) / (weights[z, i] * amount[j])
            sort_by(key, count, order, spare)
            slowest = energy = idle = waited = total = 0.0
            off[:] = 0.0
            done, next_cut = 0, 1
            for k in range(count):
                j = order[k]
                i = who[j]
                members[place + k], used[place + k] = i, int(amount[j])
                slowest = max(slowest, taken_s[j])
                energy += joules[j]
                idle += idle_w[i]
                waited += idle_w[i] * taken_s[j]
                total += amount[j]
                for c in range(labels):
                    off[c] += lean[i, c] * amount[j]
                if k + 1 < next_cut:
                    continue
                away = 0.0
                for c in range(labels):
                    away += abs(off[c])
                time_s[row] = slowest
                energy_j[row] = energy + slowest * idle - waited
                data[row] = total - away
                order_of[row], cut[row] = number, k + 1
                row += 1
                done += 1
                next_cut = 1 + round((count - 1) * done / max(cuts - 1, 1))
            number += 1
            place += count
            begin[number] = place
    return time_s, energy_j, data, order_of, cut, begin, members, used


@compiled
def walk_up(
    cell: Ints, part: Floats, unfinished: Ints, costs: Floats, ceiling: Floats, value: Floats
) -> None:
    """Fills `value[price, point]` from the second point on: the least of `ceiling` and of (round + what is
    left after it); `cell`, `part`: where rounds lead, by point and share."""
    for p in range(len(costs)):
        row = value[p]
        for i in range(1, len(row)):
            best = ceiling[p, i]
            for k in range(unfinished[i]):
                at = cell[i, k]
                if at >= i - 1:
                    # Landing between this point and the one below: the same round again and again.
                    room = 0.0 if at >= i else 1.0 - part[i, k]
                    total = row[i - 1] + costs[p, k] / max(room, 1e-12)
                else:
                    total = costs[p, k] + row[at] + part[i, k] * (row[at + 1] - row[at])
                best = min(best, total)
            row[i] = max(best, row[i - 1])


@compiled
def round_first(cell: Ints, part: Floats, unfinished: Ints, costs: Floats, value: Floats) -> Floats:
    """[price, point]: the least of (round + what is left after it), never less at a higher point."""
    least = np.empty_like(value)
    for p in range(len(costs)):
        row, highest = value[p], -np.inf
        for i in range(len(row)):
            best = np.inf
            for k in range(costs.shape[1]):
                total = costs[p, k]
                if k < unfinished[i]:
                    at = cell[i, k]
                    total += row[at] + part[i, k] * (row[at + 1] - row[at])
                best = min(best, total)
            highest = max(highest, best)
            least[p, i] = highest
    return least


@compiled
def point_below(grid: Floats, x: float) -> int:
    """The last point of the grid at or below x, but never its very last; the first one where x lies below."""
    low, high = 0, len(grid) - 1
    while high - low > 1:
        middle = (low + high) // 2
        if grid[middle] <= x:
            low = middle
        else:
            high = middle
    return low


@compiled
def best_for_its_gain(
    after: Floats, cost: Floats, fee: float, here: float, grid: Floats, value: Floats
) -> tuple[int, float]:
    """The round that costs least for what it takes off `here`, what is left to pay, and that ratio; -1 if
    none takes anything off. `value` is linear between the points of `grid`, and 0 at or below the first."""
    best, least = -1, np.inf
    for k in range(len(after)):
        left = 0.0
        if after[k] > grid[0]:
            at = point_below(grid, after[k])
            part = min((after[k] - grid[at]) / (grid[at + 1] - grid[at]), 1.0)
            left = value[at] + part * (value[at + 1] - value[at])
        if here > left:
            ratio = (cost[k] + fee) / (here - left)
            if ratio < least:
                best, least = k, ratio
    return best, least


@compiled
def highest(
    loss: Floats,
    seconds: Floats,
    rounds: Floats,
    grid: Floats,
    value: Floats,
    per_second: Floats,
    per_round: Floats,
) -> Floats:
    """[state]: the highest of 0 and, by price, what is left to pay less the price of what is left of time
    and rounds. `value[:, price]` is linear between the points of `grid`, and constant beyond them."""
    best = np.zeros(len(loss))
    for j in range(len(loss)):
        at = point_below(grid, loss[j])
        part = min(max((loss[j] - grid[at]) / (grid[at + 1] - grid[at]), 0.0), 1.0)
        for p in range(len(per_second)):
            bound = value[at, p] + part * (value[at + 1, p] - value[at, p]) - per_second[p] * seconds[j]
            if per_round[p]:  # where rounds are free there may be endlessly many
                bound -= per_round[p] * rounds[j]
            best[j] = max(best[j], bound)
    return best


@compiled
def earliest_starts(ready: Floats, opens: Floats, closes: Floats) -> Floats:
    """[label, option]: the earliest start, not before the label is ready, from `opens[option]` to
    `closes[option]` of one of its windows; infinity if there is none."""
    start = np.full((len(ready), len(opens)), np.inf)
    for i in range(len(ready)):
        for k in range(len(opens)):
            for w in range(opens.shape[1]):
                at = max(ready[i], opens[k, w])
                if at <= closes[k, w]:
                    start[i, k] = min(start[i, k], at)
    return start


@compiled
def common_windows(
    nodes: Ints, begin: Ints, length: Ints, opens: Floats, closes: Floats, most: int
) -> tuple[Ints, Floats, Floats]:
    """For each stretch of `nodes` the windows that all of them share: how many, when they open and close.
    `opens[node]`, `closes[node]` are padded with windows that close before they open. The count is -1 where
    there would be more than `most`."""
    rows = len(begin)
    count, first, last = np.ones(rows, np.int64), np.zeros((rows, most)), np.zeros((rows, most))
    new_first, new_last = np.empty(most), np.empty(most)
    for row in range(rows):
        first[row, 0], last[row, 0] = -np.inf, np.inf
        for k in range(begin[row], begin[row] + length[row]):
            i, found = nodes[k], 0
            for w in range(count[row]):
                for u in range(opens.shape[1]):
                    a, b = max(first[row, w], opens[i, u]), min(last[row, w], closes[i, u])
                    if a < b:
                        if found < most:
                            new_first[found], new_last[found] = a, b
                        found += 1
            if found > most:
                count[row] = -1
                break
            for w in range(found):
                first[row, w], last[row, w] = new_first[w], new_last[w]
            count[row] = found
    return count, first, last


@compiled
def between(table: Floats, first: int, last: int, least: bool) -> float:
    """The least (or the greatest) of a row from one place to another; `table[level]` has it for stretches of
    1, 2, 4, ... places (`certificate._Range`)."""
    level, length = 0, last - first + 1
    while length > 1:
        length >>= 1
        level += 1
    one: float = table[level, first]
    two: float = table[level, last - (1 << level) + 1]
    return min(one, two) if least else max(one, two)


Landings = tuple[Ints, Floats, NDArray[np.bool_]]
"""[point, interval]: the grid point below the loss after a round, how far above it, target met or not."""


@compiled
def ahead(
    grid: Floats,
    value: Floats,
    floor: Floats,
    roof: Floats,
    far_at: Landings,
    near_at: Landings,
    weak: Floats,
    strong: Floats,
    span: Floats,
) -> tuple[Floats, Floats, Floats, Floats, Floats, Floats]:
    """What `certificate._Ahead` holds. `floor`, `roof`: tables of the value's slopes; `weak`, `strong`: the
    pull on each interval of shares, `span`: its length."""
    cell_far, above_far, done_far = far_at
    cell_near, above_near, done_near = near_at
    points, intervals = cell_far.shape
    near, far, across = (
        np.empty((points, intervals)),
        np.empty((points, intervals)),
        np.empty((points, intervals)),
    )
    along_far, along, steepest = (
        np.empty((points - 1, intervals)),
        np.empty((points - 1, intervals)),
        np.empty((points - 1, intervals)),
    )
    slope = roof[0]
    for i in range(points):
        for k in range(intervals):
            bottom, top = cell_far[i, k], cell_near[i, k]
            far[i, k] = near[i, k] = 0.0
            if not done_far[i, k]:
                far[i, k] = value[bottom] + slope[bottom] * above_far[i, k]
            if not done_near[i, k]:
                near[i, k] = value[top] + slope[top] * above_near[i, k]
            # Slope in the share is slope in the loss times pull.
            bottom = 0 if done_far[i, k] else bottom
            top = max(0 if done_near[i, k] else top, bottom)
            low = 0.0 if done_far[i, k] else between(floor, bottom, top, True)
            dip = (between(roof, bottom, top, False) * strong[i, k] - low * weak[i, k]) * span[k] * 0.25
            dip = np.inf if np.isnan(dip) else max(dip, 0.0)
            across[i, k] = min(dip, max(near[i, k] - far[i, k], 0.0))
    for i in range(points - 1):
        quarter = 0.25 * (grid[i + 1] - grid[i])
        for k in range(intervals):
            done = done_far[i, k]
            bottom = 0 if done else cell_far[i, k]
            # V after the round is at least its chord, less a quarter of (range of slopes x width);
            # below the target the slope is 0.
            last = max(0 if done_far[i + 1, k] else cell_far[i + 1, k], bottom)
            low = 0.0 if done else between(floor, bottom, last, True)
            dip = (between(roof, bottom, last, False) - low) * quarter
            along_far[i, k] = min(dip, max(far[i + 1, k] - far[i, k], 0.0))
            last = max(0 if done_near[i + 1, k] else cell_near[i + 1, k], bottom)
            low = 0.0 if done else between(floor, bottom, last, True)
            dip = (between(roof, bottom, last, False) - low) * quarter
            along[i, k] = min(dip, max(near[i + 1, k] - far[i, k], 0.0))
            steepest[i, k] = between(roof, bottom, max(i, bottom), False)
    return near, far, across, along_far, along, steepest


@compiled
def gain_ratios(
    value: Floats,
    near: Floats,
    far: Floats,
    across: Floats,
    along_far: Floats,
    along: Floats,
    steepest: Floats,
    left: Floats,
    right: Floats,
    speed: Floats,
    exact: bool,
) -> Floats:
    """[cell, interval]: the smallest of several bounds on gain per cost (`certificate.gains`)."""
    ratio = np.empty_like(steepest)
    for i in range(steepest.shape[0]):
        for k in range(steepest.shape[1]):
            gain_far = max(value[i + 1] - far[i + 1, k], value[i] - far[i, k])
            # More data gains more: the interval's largest share at its least cost.
            best = min(gain_far + along_far[i, k], value[i + 1] - far[i, k]) / left[k]
            if not exact:
                gain_near = max(value[i + 1] - near[i + 1, k], value[i] - near[i, k])
                dip = along[i, k] + np.maximum(across[i + 1, k], across[i, k])
                # What is not a number is no bound: `maximum` passes it on, `fmin` passes it over.
                line = np.maximum((gain_near + dip) / left[k], (gain_far + dip) / right[k])
                best = np.fmin(best, line)
            # A round is a flow: it gains at most (steepest slope on its way) x (speed at its start).
            best = np.fmin(best, steepest[i, k] * speed[i, k])
            ratio[i, k] = np.inf if np.isnan(best) else best
    return ratio


@compiled
def worst_on_the_way(ratio: Floats, cell: Ints, done: NDArray[np.bool_], least: float) -> Floats:
    """[cell]: the largest ratio (at least `least`) of all rounds that pass over it, from where they start
    down to where they land: `cell`, or the first one if the target is met."""
    count, levels = ratio.shape[0], 1
    while 1 << levels <= count:
        levels += 1
    table = np.full((levels, count), least)
    for i in range(count):
        for k in range(ratio.shape[1]):
            if ratio[i, k] > least:
                # Two stretches of 1, 2, 4, ... cells that cover the way.
                first = 0 if done[i, k] else cell[i, k]
                level, length = 0, i - first + 1
                while length > 1:
                    length >>= 1
                    level += 1
                last = i - (1 << level) + 1
                table[level, first] = max(table[level, first], ratio[i, k])
                table[level, last] = max(table[level, last], ratio[i, k])
    for level in range(levels - 1, 0, -1):
        half = 1 << (level - 1)
        for i in range(count):
            table[level - 1, i] = max(table[level - 1, i], table[level, i])
            if i + half < count:
                table[level - 1, i + half] = max(table[level - 1, i + half], table[level, i])
    worst: Floats = table[0]
    return worst


@compiled
def round_bounds(
    near: Floats,
    far: Floats,
    across: Floats,
    dip: Floats,
    left: Floats,
    right: Floats,
    exact: bool,
) -> tuple[Floats, Floats]:
    """[point]: at most what a round from there and then the rest cost; at the point itself, and by chords to
    the points beside it (`certificate._round_first`)."""
    points, intervals = far.shape
    low, chord = np.full(points, np.inf), np.full(points, np.inf)
    for i in range(points):
        for k in range(intervals):
            here = left[k] + far[i, k]
            low[i] = min(low[i], here)
            if not exact:
                line = min(left[k] + near[i, k], right[k] + far[i, k]) - across[i, k]
                here = max(here, line)
            deepest = 0.0
            if i > 0:
                deepest = max(deepest, dip[i - 1, k])
            if i < points - 1:
                deepest = max(deepest, dip[i, k])
            chord[i] = min(chord[i], here - deepest)
    return low, chord


@compiled
def settle_ties(a: Floats, b: Floats, c: Floats, order: Ints) -> bool:
    """Puts rows that are equal in a, by which they are sorted, in order of b, c and place. Gives up where
    more than a few are equal."""
    first = 0
    for k in range(1, len(order)):
        if a[order[k]] != a[order[first]]:
            first = k
            continue
        if k - first > 50:
            return False
        row, at = order[k], k
        while at > first:
            other = order[at - 1]
            before = b[other] < b[row]
            if b[other] == b[row]:
                before = c[other] < c[row] or (c[other] == c[row] and other < row)
            if before:
                break
            order[at] = other
            at -= 1
        order[at] = row
    return True


@compiled
def unbeaten(b: Floats, c: Floats) -> NDArray[np.bool_]:
    """For each row whether no earlier row is as small in both columns. A staircase of rows holds what has
    been seen: b rises, c falls."""
    kept = np.zeros(len(b), np.bool_)
    stair_b, stair_c, steps = np.empty(len(b)), np.empty(len(b)), 0
    for row in range(len(b)):
        low, high = 0, steps  # the first step with a larger b
        while low < high:
            middle = (low + high) // 2
            if stair_b[middle] <= b[row]:
                low = middle + 1
            else:
                high = middle
        if low and stair_c[low - 1] <= c[row]:
            continue
        kept[row] = True
        first = low - 1 if low and stair_b[low - 1] == b[row] else low
        last = first
        while last < steps and stair_c[last] >= c[row]:
            last += 1
        # Steps from `first` to `last` give way to one.
        shift = first + 1 - last
        if shift > 0:
            for k in range(steps - 1, last - 1, -1):
                stair_b[k + 1], stair_c[k + 1] = stair_b[k], stair_c[k]
        elif shift < 0:
            for k in range(last, steps):
                stair_b[k + shift], stair_c[k + shift] = stair_b[k], stair_c[k]
        stair_b[first], stair_c[first] = b[row], c[row]
        steps += shift
    return kept
