"""Compiled loops against what they stand for, written down a second time with numpy or by definition."""

import numba
import numpy as np
import pytest
from numba.core import caching
from scipy.optimize import linprog

from takifugu.plan.compiled import compiled, gain_bounds, paths, sets
from takifugu.plan.curves import Floats
from takifugu.plan.fleet import Crowd

SEEDS = range(6)


def fleet(rng: np.random.Generator, nodes: int = 7, parts: int = 2) -> dict[str, Floats]:
    samples = rng.integers(2, 40, nodes)
    levels = -(-samples[:, None] * np.arange(1, parts + 1) // parts)
    per_sample = rng.uniform(0.1, 2.0, nodes)
    return {
        "level_s": rng.uniform(0.0, 3.0, (nodes, 1)) + per_sample[:, None] * levels,
        "levels": levels.astype(float),
        "fixed_j": rng.uniform(0.0, 5.0, nodes),
        "sample_j": rng.uniform(0.1, 1.0, nodes),
        "idle_w": rng.uniform(0.0, 0.5, nodes) * rng.integers(0, 2),
    }


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 8, 9, 100])
def test_sorts_as_numpy_does(count: int) -> None:
    rng = np.random.default_rng(count)
    key = rng.integers(0, max(count // 2, 1), count + 3).astype(float)
    key[: count // 4] = np.inf
    order, spare = np.empty(count + 3, np.int64), np.empty(count + 3, np.int64)
    sets.sort_by(key, count, order, spare)
    assert order[:count].tolist() == np.argsort(key[:count], kind="stable").tolist()


@pytest.mark.parametrize("seed", SEEDS)
def test_knapsacks_are_linear_programs(seed: int) -> None:
    rng = np.random.default_rng(seed)
    f = fleet(rng)
    weights = rng.uniform(0.5, 1.5, (3, len(f["fixed_j"]))) / f["levels"][:, -1].sum()
    limits = np.quantile(f["level_s"], [0.3, 0.7, 1.0])
    low, high = limits * 0.9, limits
    shares = np.linspace(0.1, 1.3, 13)
    tangent, left, which = sets.knapsacks(Crowd(**f), weights, low, high, shares)
    for z, row in enumerate(weights):
        alone = sets.knapsacks(Crowd(**f), row[None], low, high, shares)[0]
        assert (alone[which == z] == tangent[which == z]).all()
    before = np.concatenate([[0.0], shares[:-1]])
    for row in range(len(limits)):
        count = (f["level_s"] <= high[row]).sum(axis=1)
        who = np.flatnonzero(count)
        at = (who, count[who] - 1)
        idle = f["idle_w"][who] * np.maximum(low[row] - f["level_s"][at], 0.0)
        joules = f["fixed_j"][who] + f["sample_j"][who] * f["levels"][at] + idle
        worth = weights[:, who] * f["levels"][at]
        for g, share in enumerate(before):
            answers = [linprog(joules, A_ub=[-w], b_ub=[-share], bounds=(0, 1)) for w in worth]
            least = max(np.inf if a.status == 2 else a.fun for a in answers)
            assert left[row, g] == pytest.approx(least, rel=1e-6, abs=1e-9)
        # The tangent at a share lies below the next one's own bound, and is no lower than the bound before it.
        known = left[row, 1:][np.isfinite(left[row, 1:])]
        assert (tangent[row, : len(known)] <= known * (1 + 1e-9)).all()
        assert (tangent[row] >= left[row]).all()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("most_cuts", [100, 4])
def test_prefixes_say_what_their_members_cost(seed: int, most_cuts: int) -> None:
    rng = np.random.default_rng(seed)
    f = fleet(rng, nodes=9)
    weights, lean = rng.uniform(0.5, 1.5, (2, 9)), rng.uniform(-0.3, 0.3, (9, 3))
    limits = np.quantile(f["level_s"], [0.4, 1.0])
    time_s, energy_j, data, order, cut, begin, members, used = sets.prefixes(
        Crowd(**f), weights, lean, limits, most_cuts
    )
    assert len(begin) == len(limits) * len(weights) + 1
    assert begin[-1] == len(members) == len(used)
    for number in range(len(begin) - 1):
        length = begin[number + 1] - begin[number]
        cuts = cut[order == number]
        assert len(cuts) == min(length, most_cuts)
        assert cuts[-1] == length
        assert (np.diff(cuts) > 0).all()
        z, limit = weights[number % len(weights)], limits[number // len(weights)]
        who = members[begin[number] : begin[number + 1]]
        amount = used[begin[number] : begin[number + 1]]
        taken = np.array([f["level_s"][i][f["levels"][i] == n][0] for i, n in zip(who, amount, strict=True)])
        key = f["fixed_j"][who] + f["sample_j"][who] * amount + f["idle_w"][who] * (limit - taken)
        assert (np.diff(key / (z[who] * amount)) >= -1e-12).all()
    for row in range(len(cut)):
        first = begin[order[row]]
        who, amount = members[first : first + cut[row]], used[first : first + cut[row]]
        taken = np.array([f["level_s"][i][f["levels"][i] == n][0] for i, n in zip(who, amount, strict=True)])
        joules = f["fixed_j"][who] + f["sample_j"][who] * amount + f["idle_w"][who] * (taken.max() - taken)
        off = (lean[who] * amount[:, None]).sum(axis=0)
        assert time_s[row] == taken.max()
        assert energy_j[row] == pytest.approx(joules.sum())
        assert data[row] == pytest.approx(amount.sum() - np.abs(off).sum())


def landings(rng: np.random.Generator, grid: Floats, intervals: int) -> tuple[Floats, gain_bounds.Landings]:
    """Losses after rounds, falling with the share, never above the loss before."""
    after = (
        grid[:, None]
        - np.cumsum(rng.uniform(0.0, 0.2, (1, intervals)), axis=1) * np.linspace(1, 2, len(grid))[:, None]
    )
    done = after <= grid[0]
    cell = np.clip(np.searchsorted(grid, after, side="right") - 1, 0, len(grid) - 2)
    return after, (cell, np.where(done, 0.0, after - grid[cell]), done)


@pytest.mark.parametrize("seed", SEEDS)
def test_walking_up_is_the_least_at_every_point(seed: int) -> None:
    rng = np.random.default_rng(seed)
    grid = np.sort(rng.uniform(0.0, 2.0, 30))
    after, (cell, above, done) = landings(rng, grid, 8)
    part = above / np.diff(grid)[cell]
    unfinished = (~done).sum(axis=1)
    costs = np.sort(rng.uniform(0.5, 2.0, (3, 8)), axis=1)
    ceiling = rng.uniform(2.0, 9.0, (3, len(grid)))
    value = np.zeros((3, len(grid)))
    paths.walk_up(cell, part, unfinished, costs, ceiling, value)
    assert (np.diff(value, axis=1) >= 0).all()
    same = np.zeros_like(value)
    first = paths.walk_up_rounds_first(cell, part, unfinished, costs, ceiling, same)
    assert np.array_equal(same, value)
    for p in range(3):
        left = np.where(done, 0.0, np.interp(after, grid, value[p]))
        best = (costs[p] + left).min(axis=1)
        np.testing.assert_allclose(first[p], np.maximum.accumulate(best))
        # Each point: its ceiling, its best round that lands two points below or lower, or repeats of one.
        for i in range(1, len(grid)):
            ways = [ceiling[p, i]]
            for k in range(unfinished[i]):
                if cell[i, k] < i - 1:
                    ways.append(costs[p, k] + left[i, k])
                else:
                    room = (grid[i] - after[i, k]) / (grid[i] - grid[i - 1]) if cell[i, k] == i - 1 else 0.0
                    ways.append(value[p, i - 1] + costs[p, k] / max(room, 1e-12))
            assert value[p, i] == pytest.approx(max(min(ways), value[p, i - 1]))


@pytest.mark.parametrize("seed", SEEDS)
def test_ahead_by_definition(seed: int) -> None:
    rng = np.random.default_rng(seed)
    grid = np.sort(rng.uniform(0.0, 2.0, 25))
    value = np.concatenate([[0.0], np.cumsum(rng.uniform(0.0, 1.0, 24))])
    slope = np.diff(value) / np.diff(grid)
    far_loss, far_at = landings(rng, grid, 6)
    near_loss = np.minimum(far_loss + rng.uniform(0.0, 0.1, far_loss.shape), grid[:, None])
    near_done = near_loss <= grid[0]
    near_cell = np.clip(np.searchsorted(grid, near_loss, side="right") - 1, 0, len(grid) - 2)
    near_at = (near_cell, np.where(near_done, 0.0, near_loss - grid[near_cell]), near_done)
    weak, strong = np.sort(rng.uniform(0.1, 3.0, (2, *far_loss.shape)), axis=0)
    span = rng.uniform(0.01, 0.2, 6)
    floor, roof = tables(slope)
    near, far, across, along_far, along, steepest = gain_bounds.ahead(
        grid, value, floor, roof, far_at, near_at, weak, strong, span
    )
    np.testing.assert_allclose(far, np.where(far_at[2], 0.0, np.interp(far_loss, grid, value)))
    np.testing.assert_allclose(near, np.where(near_done, 0.0, np.interp(near_loss, grid, value)))
    bottom, top = np.where(far_at[2], 0, far_at[0]), np.where(near_done, 0, near_cell)

    def slopes(first: int, last: int, target_passed: bool) -> tuple[float, float]:
        stretch = slope[first : max(first, last) + 1]
        return 0.0 if target_passed else float(stretch.min()), float(stretch.max())

    for i, k in np.ndindex(*far_loss.shape):
        low, high = slopes(bottom[i, k], top[i, k], far_at[2][i, k])
        dip = max((high * strong[i, k] - low * weak[i, k]) * span[k] / 4, 0.0)
        assert across[i, k] == pytest.approx(min(dip, max(near[i, k] - far[i, k], 0.0)))
        if i == len(grid) - 1:
            continue
        width = grid[i + 1] - grid[i]
        for found, last, after in ((along_far, bottom, far), (along, top, near)):
            low, high = slopes(bottom[i, k], last[i + 1, k], far_at[2][i, k])
            dip = min((high - low) * width / 4, max(after[i + 1, k] - far[i, k], 0.0))
            assert found[i, k] == pytest.approx(dip)
        assert steepest[i, k] == slopes(bottom[i, k], i, False)[1]


def tables(row: Floats) -> tuple[Floats, Floats]:
    """[level, place]: the least and the greatest of 1, 2, 4, ... places."""
    levels = int(np.ceil(np.log2(len(row)))) + 1
    found = np.array(
        [[[f(row[i : i + 2**k]) for i in range(len(row))] for k in range(levels)] for f in (np.min, np.max)]
    )
    return found[0], found[1]


@pytest.mark.parametrize("seed", SEEDS)
def test_the_best_round_for_its_gain(seed: int) -> None:
    rng = np.random.default_rng(seed)
    grid = np.sort(rng.uniform(0.2, 2.0, 12))
    value = np.concatenate([[0.0], np.cumsum(rng.uniform(0.0, 1.0, 11))])
    after, cost = rng.uniform(0.0, 2.0, 40), rng.uniform(0.1, 1.0, 40)
    here, fee = float(rng.uniform(0.5, value[-1])), 0.3
    left = np.where(after <= grid[0], 0.0, np.interp(after, grid, value))
    ratio = np.where(here > left, (cost + fee) / np.maximum(here - left, 1e-300), np.inf)
    k, found = paths.best_for_its_gain(after, cost, fee, here, grid, value)
    assert k == ratio.argmin()
    assert found == pytest.approx(ratio.min())
    assert paths.best_for_its_gain(after, cost, fee, -1.0, grid, value)[0] == -1


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_the_smallest_of_the_bounds_on_gain_counts(seed: int, exact: bool) -> None:
    rng = np.random.default_rng(seed)
    value = np.cumsum(rng.uniform(0.0, 1.0, 8))
    near, far, across = np.sort(rng.uniform(0.0, 1.0, (3, 8, 5)), axis=0)[::-1]
    along_far, along, steepest, speed = rng.uniform(0.0, 2.0, (4, 7, 5))
    left, right = rng.uniform(0.1, 1.0, (2, 5))
    left[0] = right[1] = 0.0  # free rounds: gain over nothing
    across[3], speed[2, 2] = np.nan, np.nan  # no number, no bound
    found = gain_bounds.gain_ratios(
        value, near, far, across, along_far, along, steepest, left, right, speed, exact
    )
    gain_far, gain_near = (
        np.maximum(value[1:, None] - x[1:], value[:-1, None] - x[:-1]) for x in (far, near)
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        bounds = [
            np.minimum(gain_far + along_far, value[1:, None] - far[:-1]) / left,
            steepest * speed,
        ]
        if not exact:
            dip = along + np.maximum(across[1:], across[:-1])
            bounds.append(np.maximum((gain_near + dip) / left, (gain_far + dip) / right))
    np.testing.assert_allclose(found, np.nanmin(np.where(np.isnan(bounds), np.inf, bounds), axis=0))


@pytest.mark.parametrize("seed", SEEDS)
def test_the_highest_bound_of_all_prices(seed: int) -> None:
    rng = np.random.default_rng(seed)
    grid = np.sort(rng.uniform(0.2, 2.0, 12))
    value = np.cumsum(rng.uniform(0.0, 1.0, (4, 12)), axis=1)
    loss, seconds, rounds = rng.uniform(0.0, 2.5, 50), rng.uniform(-1.0, 5.0, 50), rng.uniform(0.0, 9.0, 50)
    per_second, per_round = rng.uniform(0.0, 1.0, 4), rng.uniform(0.0, 0.5, 4) * [0, 1, 0, 1]
    rounds[0] = np.inf
    per_round[:] = per_round if seed else 0.0
    found = paths.highest(loss, seconds, rounds, grid, value.T.copy(), per_second, per_round)
    rows = []
    for p in range(4):
        row = np.interp(loss, grid, value[p]) - per_second[p] * seconds
        rows.append(row - per_round[p] * rounds if per_round[p] else row)
    np.testing.assert_allclose(found, np.maximum(np.max(rows, axis=0), 0.0), atol=1e-12)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_earliest_start_in_some_window(seed: int) -> None:
    rng = np.random.default_rng(seed)
    ready, opens = rng.uniform(0.0, 10.0, 20), rng.uniform(0.0, 10.0, (15, 3))
    closes = opens + rng.uniform(-1.0, 3.0, (15, 3))
    found = sets.earliest_starts(ready, opens, closes)
    start = np.maximum(ready[:, None, None], opens)
    assert (found == np.where(start <= closes, start, np.inf).min(axis=2)).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_the_worst_ratio_on_the_way(seed: int) -> None:
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 40))
    ratio = rng.uniform(0.5, 1.5, (count, 4))
    cell = np.minimum(rng.integers(0, count, (count, 4)), np.arange(count)[:, None])
    done = rng.uniform(size=(count, 4)) < 0.2
    found = gain_bounds.worst_on_the_way(ratio, cell, done, 0.9)
    wanted = np.full(count, 0.9)
    for i, k in np.ndindex(count, 4):
        way = slice(0 if done[i, k] else cell[i, k], i + 1)
        wanted[way] = np.maximum(wanted[way], ratio[i, k])
    assert (found == wanted).all()


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_round_and_then_the_rest(seed: int, exact: bool) -> None:
    rng = np.random.default_rng(seed)
    near, far, across = rng.uniform(0.0, 1.0, (3, 9, 5))
    dip, (left, right) = rng.uniform(0.0, 0.5, (8, 5)), rng.uniform(0.1, 1.0, (2, 5))
    low, chord = gain_bounds.round_bounds(near, far, across, dip, left, right, exact)
    np.testing.assert_allclose(low, (left + far).min(axis=1))
    point = left + far
    if not exact:
        point = np.maximum(point, np.minimum(left + near, right + far) - across)
    none = np.zeros((1, 5))
    dips = np.maximum(np.concatenate([none, dip]), np.concatenate([dip, none]))
    np.testing.assert_allclose(chord, (point - dips).min(axis=1))


def test_loops_work_where_nothing_can_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caching.CacheImpl, "_locator_classes", [])  # as on a read-only disk without a home

    def twice(x: float) -> float:
        return 2.0 * x

    with pytest.raises(RuntimeError, match="cannot cache"):
        numba.njit(cache=True)(twice)
    assert compiled(twice)(1.5) == 3.0
