"""Loops over nodes: knapsacks, prefixes of orders, windows that sets share."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from takifugu.plan.compiled import compiled
from takifugu.plan.curves import Floats
from takifugu.plan.fleet import Crowd

Ints = NDArray[np.int64]


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
def insert_by(key: Floats, order: Ints, count: int) -> None:
    """Sorts the first of `order` by rising key; quick where they nearly are."""
    for k in range(1, count):
        i, at = order[k], k
        while at > 0 and key[order[at - 1]] > key[i]:
            order[at] = order[at - 1]
            at -= 1
        order[at] = i


@compiled
def slowest_of(crowd: Crowd, low_s: float, high_s: float) -> tuple[int, float]:
    """Who a round as long as this cannot do without: the one node with a level whose time lies in between, or
    -1 if there are several; and the least energy of such a level."""
    level_s, levels, fixed_j, sample_j, _ = crowd
    who, found, least = -1, 0, np.inf
    for i in range(level_s.shape[0]):
        for k in range(level_s.shape[1]):
            if low_s <= level_s[i, k] <= high_s:
                who, found = i, found + 1
                least = min(least, fixed_j[i] + sample_j[i] * levels[i, k])
    return (who if found == 1 else -1), least


@compiled
def knapsacks(
    crowd: Crowd,
    weights: Floats,
    low_s: Floats,
    high_s: Floats,
    shares: Floats,
) -> tuple[Floats, Floats, Ints]:
    """[threshold, share]: fractional knapsacks of the nodes that fit, the slowest of them in whole, the
    largest over all rows of `weights`: along the tangent from the share before, and at the share before; and
    the row it is."""
    level_s, levels, fixed_j, sample_j, idle_w = crowd
    nodes, count_z, steps = len(fixed_j), len(weights), len(shares)
    tangent, left = np.zeros((len(low_s), steps)), np.zeros((len(low_s), steps))
    which = np.zeros((len(low_s), steps), np.int64)
    who, level = np.empty(nodes, np.int64), np.empty(nodes, np.int64)
    amount, joules, ratio = np.empty(nodes), np.empty(nodes), np.empty(nodes)
    reach, spent, slope = np.zeros(nodes + 1), np.zeros(nodes + 1), np.empty(nodes + 1)
    # A longer threshold changes few nodes: the order of the one before is nearly right.
    orders, inside, known = np.empty((count_z, nodes), np.int64), np.zeros(nodes, np.bool_), 0
    for row in range(len(low_s)):
        count = who_fits(level_s, high_s[row], who, level)
        if count < known or (row and high_s[row] < high_s[row - 1]):
            inside[:], known = False, 0
        added = known
        for j in range(count):
            i = who[j]
            amount[i] = levels[i, level[j]]
            idle = idle_w[i] * max(low_s[row] - level_s[i, level[j]], 0.0)
            joules[i] = fixed_j[i] + sample_j[i] * amount[i] + idle
            if not inside[i]:
                inside[i] = True
                orders[:, added] = i
                added += 1
        slowest, floor = slowest_of(crowd, low_s[row], high_s[row])
        others = count - (slowest >= 0)
        for z in range(count_z):
            order = orders[z]
            for k in range(count):
                i = order[k]
                ratio[i] = joules[i] / (weights[z, i] * amount[i])
            insert_by(ratio, order, count)
            reach[0] = spent[0] = 0.0
            if slowest >= 0:
                reach[0], spent[0] = weights[z, slowest] * amount[slowest], joules[slowest]
            k = 0
            for i in order[:count]:
                if i != slowest:
                    slope[k] = ratio[i]
                    reach[k + 1] = reach[k] + weights[z, i] * amount[i]
                    spent[k + 1] = spent[k] + joules[i]
                    k += 1
            slope[others] = np.inf
            # A share just above the last reach is rounding, not impossibility.
            end = reach[others] * (1 - 1e-12)
            at, before = 0, 0.0
            for g in range(steps):
                here = there = np.inf
                if before < end:
                    while at < others and reach[at + 1] <= before:
                        at += 1
                    here = there = spent[at]
                    if before >= reach[at]:
                        if at < others:
                            here += (before - reach[at]) * slope[at]
                        there = here + slope[at] * (shares[g] - before)
                # The line of one z: that from the highest start to the highest end may lie above them all.
                if here > left[row, g] or (here == left[row, g] and there > tangent[row, g]):
                    left[row, g], tangent[row, g], which[row, g] = here, there, z
                before = shares[g]
        if slowest < 0:  # one of several is in: that much in any case, and no line from less to more
            for g in range(steps):
                if floor > left[row, g]:
                    left[row, g] = tangent[row, g] = floor
        known = count
    return tangent, left, which


@compiled
def prefixes(
    crowd: Crowd,
    weights: Floats,
    lean: Floats,
    limits_s: Floats,
    most_cuts: int,
) -> tuple[Floats, Floats, Floats, Ints, Ints, Ints, Ints, Ints]:
    """All prefixes of all orders (thresholds times rows of `weights`): slowest, energy, effective samples,
    order and length of each; where orders begin; the nodes in order, and the samples each uses."""
    level_s, levels, fixed_j, sample_j, idle_w = crowd
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
