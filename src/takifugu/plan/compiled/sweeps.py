"""The loop of sweeps (`plan/sweep.py`): every round from a few labels, and which cells its ends win."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from takifugu.plan.compiled import compiled
from takifugu.plan.compiled.paths import point_below
from takifugu.plan.compiled.trails import after_round
from takifugu.plan.curves import Floats

Ints = NDArray[np.int64]

Ranks = tuple[Floats, Floats, Floats, Floats, Floats, float]
"""[phase] when it ends; a grid of losses and `value[phase, version, point, price]` on it; prices of seconds
and of rounds; the most rounds."""
Least = tuple[Floats, Floats, Floats, Floats, float, float]
"""The least time, on a grid of losses, and the fewest rounds on theirs; how much there is of both."""
Labels = tuple[Ints, Floats, Floats, Floats, Floats]
"""[label]: its cell, energy, clock, loss and rounds so far."""
Options = tuple[Floats, Floats, Floats, Floats, Floats, Floats, Ints, Floats, Floats]
"""[option]: energy, time, share, asymptote; [option, window] the first and the last instant of a start (no
windows: always); [option]: its bin; [bin]: at least the shares in it, and the asymptote there."""
Curve = tuple[bool, bool, float, float]
"""Whether there is a formula; whether it is a power; its rate or scale; its exponent."""
Tables = tuple[Floats, Floats]
"""[label, option] and [label, bin]: the loss after a round, for curves without a formula."""
Progress = tuple[Floats, Floats, float, float, float]
"""What is left to pay at one price, on a grid of losses; prices of a second and of a round; the whole way."""
Cells = tuple[Floats, Floats, Floats, Floats, Ints, Ints, Ints]
"""Rank, energy, clock, loss, rounds, parent and option of the label in each cell."""
Shape = tuple[int, int, int, int, int, int]
"""Buckets, slices, versions, times; the bucket labels are in, and the version they train."""
Limits = tuple[float, float, float, float, float]
"""When a plan starts; the deadline with its slack, and without; the target; the most rounds."""


@compiled
def left_on(grid: Floats, row: Floats, loss: float) -> float:
    """Linear between points, constant beyond them."""
    at = point_below(grid, loss)
    part = min(max((loss - grid[at]) / (grid[at + 1] - grid[at]), 0.0), 1.0)
    left: float = row[at] + part * (row[at + 1] - row[at])
    return left


@compiled
def standing(
    ranks: Ranks, loss: float, clock: float, rounds: float, caution: float
) -> tuple[int, float, float, int, float]:
    """The phase of a state, the seconds and rounds that are left in it, the grid point below its loss and the
    part of the way to the next one."""
    ends, grid, most_rounds = ranks[0], ranks[1], ranks[5]
    phase = 0
    while phase < len(ends) - 1 and clock >= ends[phase]:
        phase += 1
    # What is held back of a phase is not handed on to the next one.
    seconds = (ends[phase] - clock) * (1.0 - caution)
    left = (most_rounds - rounds) * (1.0 - caution)
    at = point_below(grid, loss)
    part = min(max((loss - grid[at]) / (grid[at + 1] - grid[at]), 0.0), 1.0)
    return phase, seconds, left, at, part


@compiled
def rank(
    ranks: Ranks,
    version: int,
    loss: float,
    clock: float,
    rounds: float,
    caution: float,
    enough: float,
    first: Ints,
) -> float:
    """What is left to pay at the price that says most; where that is `enough`, maybe less than that. `first`:
    by phase the price that said enough the last time, which is asked first."""
    phase, seconds, left, at, part = standing(ranks, loss, clock, rounds, caution)
    per_second, per_round = ranks[3], ranks[4]
    low, high = ranks[2][phase, version, at], ranks[2][phase, version, at + 1]
    best, count, begin = 0.0, len(per_second), first[phase]
    for k in range(count):
        p = begin + k if begin + k < count else begin + k - count
        here = low[p] + part * (high[p] - low[p]) - per_second[p] * seconds
        if per_round[p]:  # where rounds are free there may be endlessly many
            here -= per_round[p] * left
        if here > best:
            best = here
            if here >= enough:
                first[phase] = p
                break
    return best


@compiled
def best_price(
    ranks: Ranks, version: int, loss: float, clock: float, rounds: float, caution: float
) -> tuple[int, int]:
    """The phase of a state, and the price that says most there."""
    phase, seconds, left, at, part = standing(ranks, loss, clock, rounds, caution)
    per_second, per_round = ranks[3], ranks[4]
    low, high = ranks[2][phase, version, at], ranks[2][phase, version, at + 1]
    best, price = -np.inf, 0
    for p in range(len(per_second)):
        here = low[p] + part * (high[p] - low[p]) - per_second[p] * seconds
        if per_round[p]:  # where rounds are free there may be endlessly many
            here -= per_round[p] * left
        if here > best:
            best, price = here, p
    return phase, price


@compiled
def ranked(ranks: Ranks, version: int, loss: Floats, clock: Floats, rounds: Floats, caution: float) -> Floats:
    """[state]: what is left to pay."""
    found = np.empty(len(loss))
    first = np.zeros(len(ranks[0]), np.int64)
    for j in range(len(loss)):
        found[j] = rank(ranks, version, loss[j], clock[j], rounds[j], caution, np.inf, first)
    return found


@compiled
def hopeless(least: Least, loss: float, clock: float, rounds: float) -> bool:
    """Whether even the least time, or the fewest rounds, would be too many."""
    time_grid, least_s, round_grid, fewest, time_limit, most_rounds = least
    if clock + left_on(time_grid, least_s, loss) * (1 - 1e-9) > time_limit:
        return True
    if most_rounds == np.inf:
        return False
    needed = np.ceil(left_on(round_grid, fewest, loss) * (1 - 1e-9) - 1e-9)
    late: bool = rounds + needed > most_rounds
    return late


@compiled
def expand(
    labels: Labels,
    options: Options,
    curve: Curve,
    tables: Tables,
    progress: Progress,
    ranks: Ranks,
    least: Least,
    cells: Cells,
    shape: Shape,
    limits: Limits,
    caution: float,
    cutoff: float,
    regret: float,
    first: Ints,
) -> tuple[float, int, int]:
    """Every round from every label; ends that rank before what is in their cell take its place. The least
    energy with which the target is met below `cutoff`, and by which label and option; -1: not at all."""
    cell, spent, clocks, losses, done_rounds = labels
    energy_j, time_s, share, asymptote, opens, closes, bin_of, bin_share, bin_asymptote = options
    known, power, pace, exponent = curve
    grid, row, per_second, per_round, whole = progress
    best_rank, best_energy, best_clock, best_loss, best_rounds, parent, option = cells
    buckets, slices, versions, times, bucket, target = shape
    start_s, time_limit, deadline_s, target_loss, most_rounds = limits
    span, least_place = max(deadline_s - start_s, 1e-12), (bucket + 1) * slices
    found, found_label, found_option = cutoff, -1, -1
    bins, count = len(bin_share), len(energy_j)
    hope, gain = np.empty(bins), np.empty(bins)
    clock_of, ratio_of = np.empty(count), np.empty(count)
    for i in range(len(cell)):
        rounds = done_rounds[i] + 1.0
        if rounds > most_rounds:
            continue
        charged = 0.0
        if per_round:
            charged = per_round * (most_rounds - rounds) * (1.0 - caution)
        phase, price = best_price(ranks, target, losses[i], clocks[i], done_rounds[i], caution)
        points, rate, fee = ranks[1], ranks[3][price], ranks[4][price]
        values = ranks[2][phase, target, :, price]
        here = left_on(points, values, losses[i])
        for b in range(bins):
            if known:
                hope[b] = after_round(power, pace, exponent, losses[i], bin_share[b], bin_asymptote[b])
            else:
                hope[b] = tables[1][i, b]
            gain[b] = max(here - left_on(points, values, hope[b]), 1e-300)
            if hope[b] > target_loss:
                place = int((1.0 - left_on(grid, row, hope[b]) / whole) * (buckets * slices))
                if place < least_place:
                    gain[b] = 0.0  # comes forward too little
        # A first look: the least cost for what it takes off the rest, with the largest share of each bin.
        least_ratio = np.inf
        for k in range(count):
            ratio_of[k] = np.inf
            if gain[bin_of[k]] == 0.0:
                continue
            begin = clocks[i]
            if opens.shape[1]:
                begin = np.inf
                for w in range(opens.shape[1]):
                    opening = max(clocks[i], opens[k, w])
                    if opening <= closes[k, w]:
                        begin = min(begin, opening)
            clock_of[k] = begin + time_s[k]
            if clock_of[k] <= time_limit:
                ratio_of[k] = (energy_j[k] + rate * (clock_of[k] - clocks[i]) + fee) / gain[bin_of[k]]
                least_ratio = min(least_ratio, ratio_of[k])
        for k in range(count):
            if ratio_of[k] == np.inf:
                continue
            if ratio_of[k] > least_ratio * (1.0 + regret) and hope[bin_of[k]] > target_loss:
                continue
            energy, clock = spent[i] + energy_j[k], clock_of[k]
            if not energy < found:
                continue
            ceiling = found * (1.0 + caution)
            timed = per_second * (time_limit - clock) * (1.0 - caution)
            if known:
                loss = after_round(power, pace, exponent, losses[i], share[k], asymptote[k])
            else:
                loss = tables[0][i, k]
            if loss <= target_loss:
                found, found_label, found_option = energy, i, k
                continue
            left = left_on(grid, row, loss)
            place = min(int((1.0 - left / whole) * (buckets * slices)), (buckets + 1) * slices - 1)
            # Children must come forward by a bucket, so that a bucket is final when its turn comes.
            if place < least_place:
                continue
            hour = int((clock - start_s) / span * times)
            at = (place * versions + target) * times + min(max(hour, 0), times - 1)
            to_beat = min(best_rank[at], ceiling)
            # Most lose already at one price: only the others are ranked at all of them.
            if energy + max(left - timed - charged, 0.0) >= to_beat:
                continue
            enough = to_beat - energy
            total = energy + rank(ranks, target, loss, clock, rounds, caution, enough, first)
            if total >= to_beat or hopeless(least, loss, clock, rounds):
                continue
            best_rank[at], best_energy[at], best_clock[at] = total, energy, clock
            best_loss[at], best_rounds[at] = loss, int(rounds)
            parent[at], option[at] = cell[i], k
    return found, found_label, found_option
