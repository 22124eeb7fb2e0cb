"""The loop of plans that follow values (`plan/rollout.py`), where everybody is always there."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from takifugu.plan.compiled import compiled
from takifugu.plan.compiled.paths import point_below
from takifugu.plan.curves import Floats

Ints = NDArray[np.int64]
Exits = tuple[Ints, Ints, Floats, Floats, Floats]
"""[version] where its exits begin (and one more); of each its target, energy, time and jump."""
Menus = tuple[Ints, Ints, Floats, Floats, Floats, Floats]
"""[version, price] where a menu begins and ends; of each round its cost, share, asymptote and time."""
Shapes = tuple[NDArray[np.bool_], Floats, Floats]
"""[version] whether its curve is a power; its rate or scale; its exponent."""


@compiled
def after_round(
    power: bool, pace: float, exponent: float, loss: float, share: float, asymptote: float
) -> float:
    """The loss after a round: the formulas of `plan/curves.py`."""
    above = loss - asymptote
    if not above > 0.0:
        return loss
    if not power:
        moved: float = asymptote + above * np.exp(-pace * share)
        return min(moved, loss)
    if share <= 0.0:
        return loss
    if above / pace == 0.0:  # too small for a number
        return asymptote
    back, more = -np.log(above / pace) / exponent, np.log(share)
    together = max(back, more) + np.log1p(np.exp(-abs(back - more)))
    moved = asymptote + pace * np.exp(-exponent * together)
    return min(moved, loss)


@compiled
def after_rounds(
    power: bool, pace: float, exponent: float, loss: Floats, share: Floats, asymptote: Floats
) -> Floats:
    """[loss, share]: the loss after a round."""
    after = np.empty((len(loss), len(share)))
    for i in range(len(loss)):
        for k in range(len(share)):
            after[i, k] = after_round(power, pace, exponent, loss[i], share[k], asymptote[k])
    return after


@compiled
def left_at(grid: Floats, row: Floats, loss: float) -> float:
    """What is left to pay: linear between points, nothing at or below the first."""
    if loss <= grid[0]:
        return 0.0
    at = point_below(grid, loss)
    part = min((loss - grid[at]) / (grid[at + 1] - grid[at]), 1.0)
    left: float = row[at] + part * (row[at + 1] - row[at])
    return left


@compiled
def best_for_its_gain(
    shape: tuple[bool, float, float],
    loss: float,
    share: Floats,
    asymptote: Floats,
    cost: Floats,
    fee: float,
    here: float,
    grid: Floats,
    row: Floats,
) -> tuple[int, float, float]:
    """The round that costs least for what it takes off `here`, what is left to pay, that ratio, and the loss
    after it; -1 if none takes anything off. `shape`: of the curve, as in `after_round`."""
    power, pace, exponent = shape
    best, least, best_after = -1, np.inf, loss
    for k in range(len(share)):
        after = after_round(power, pace, exponent, loss, share[k], asymptote[k])
        left = left_at(grid, row, after)
        if here > left and (cost[k] + fee) / (here - left) < least:
            best, least, best_after = k, (cost[k] + fee) / (here - left), after
    return best, least, best_after


@compiled
def best_price(
    grid: Floats,
    value: Floats,
    per_second: Floats,
    per_round: Floats,
    capped: bool,
    loss: float,
    seconds: float,
    rounds: float,
) -> int:
    """The price with the highest bound for the rest of the way. `value[price, point]`"""
    at = point_below(grid, loss)
    part = (loss - grid[at]) / (grid[at + 1] - grid[at])
    best, highest = 0, -np.inf
    for p in range(len(per_second)):
        here = value[p, at] + part * (value[p, at + 1] - value[p, at]) - per_second[p] * seconds
        if capped:
            here -= per_round[p] * rounds
        if here > highest:
            best, highest = p, here
    return best


Steps = tuple[Ints, Ints, Ints, Floats, Floats, Floats]
"""[round]: its version, price, place in the menus, start, end and loss."""


@compiled
def follow(
    count: int,
    version: int,
    loss: float,
    clock: float,
    steps: Steps,
    loss_limit: float,
    time_limit: float,
    deadline_s: float,
    most_rounds: float,
    grid: Floats,
    value: Floats,
    per_second: Floats,
    per_round: Floats,
    exits: Exits,
    menus: Menus,
    shapes: Shapes,
    regret: float,
) -> tuple[int, int, int, int]:
    """Goes on from `count` rounds, which led here, and writes further ones down in `steps`. How it ended: 0
    (there), -1 (stuck or late) or -2 (a menu is not there yet: it begins at -1); how many rounds there are
    now; and the version and price whose menu is missing. `value[version, price, point]`; `regret`: what a
    switch may cost more than staying, to be looked at."""
    begins, targets, energies, times, jumps = exits
    first, last, cost, share, asymptote, time_s = menus
    power, pace, exponent = shapes
    versions, prices, places, starts, ends, losses = steps
    capped = bool(per_round.any())
    while loss > loss_limit:
        if count >= len(versions):
            return -1, count, 0, 0
        price = best_price(
            grid, value[version], per_second, per_round, capped, loss, deadline_s - clock, most_rounds - count
        )
        here = left_at(grid, value[version, price], loss)
        best, best_ratio, best_version, best_start, best_loss = -1, np.inf, version, clock, loss
        for exit_ in range(begins[version] - 1, begins[version + 1]):
            target, fee, wait, jump = version, 0.0, 0.0, 0.0
            if exit_ >= begins[version]:
                target, wait, jump = targets[exit_], times[exit_], jumps[exit_]
                fee = energies[exit_] + per_second[price] * wait
                left = fee + left_at(grid, value[target, price], loss + jump)
                if left > here * (1 + regret):
                    continue
            if first[target, price] < 0:
                return -2, count, target, price
            begin, end = first[target, price], last[target, price]
            found, ratio, after_found = best_for_its_gain(
                (power[target], pace[target], exponent[target]),
                loss + jump,
                share[begin:end],
                asymptote[begin:end],
                cost[begin:end],
                fee,
                here,
                grid,
                value[target, price],
            )
            if found >= 0 and (best < 0 or ratio < best_ratio):
                best, best_ratio, best_version = begin + found, ratio, target
                best_start, best_loss = clock + wait, after_found
        if best < 0 or best_start + time_s[best] > time_limit:
            return -1, count, 0, 0
        if best_version == version and best_loss >= loss - 1e-12 * abs(loss):
            return -1, count, 0, 0
        version, loss, clock = best_version, best_loss, best_start + time_s[best]
        versions[count], prices[count], places[count] = version, price, best
        starts[count], ends[count], losses[count] = best_start, clock, loss
        count += 1
    return 0, count, 0, 0
