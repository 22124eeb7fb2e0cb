"""Compiled loops against what they stand for, written down a second time with numpy or by definition."""

import numba
import numpy as np
import pytest
from numba.core import caching
from scipy.optimize import linprog

from takifugu.plan.compiled import compiled, flows, paths, sets
from takifugu.plan.curves import Exponential, Floats
from takifugu.plan.fleet import Crowd
from takifugu.plan.rounds import Arrivals

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
    # Two that are one node's own time, one with several in between.
    limits = np.quantile(f["level_s"], [0.3, 0.7, 1.0], method="nearest")
    low, high = limits * [1.0, 0.5, 1.0], limits
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
        slowest, k = np.nonzero((f["level_s"] >= low[row]) & (f["level_s"] <= high[row]))
        assert (len(slowest) == 1) == (low[row] == high[row])
        bounds = [(float(len(slowest) == 1 and i == slowest[0]), 1.0) for i in who]
        floor = (f["fixed_j"][slowest] + f["sample_j"][slowest] * f["levels"][slowest, k]).min()
        for g, share in enumerate(before):
            answers = [linprog(joules, A_ub=[-w], b_ub=[-share], bounds=bounds) for w in worth]
            least = max(floor, *(np.inf if a.status == 2 else a.fun for a in answers))
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


def landings(rng: np.random.Generator, grid: Floats, intervals: int) -> tuple[Floats, flows.Landings]:
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


@pytest.mark.parametrize("seed", range(20))
def test_climbing_never_leads_above_the_least_way_down(seed: int) -> None:
    """Flows and exits on a grid fifty times as fine; costs spread evenly in a cell, or most of it low down."""
    rng = np.random.default_rng(seed)
    grid = np.cumsum(rng.uniform(0.02, 0.1, 15))
    width = np.diff(grid)
    slope = np.sort(rng.uniform(0.5, 3.0, 14))[::-1].copy()
    cost = slope * width * rng.uniform(1.0, 1.8, 14)
    points = [np.sort(rng.uniform(grid[0], grid[-1] + 0.2, 9)) for _ in range(2)]
    left = [np.cumsum(rng.uniform(0.0, 0.3, 9)) for _ in range(2)]
    fee, jump = np.array([0.0, 0.1]), np.array([0.0, 0.07])
    lines = (np.array([0, 9, 18]), fee, jump, np.concatenate(points), np.concatenate(left))
    value = flows.climb(grid, cost, slope, lines, 100.0)
    for even in (True, False):
        fine, least = [grid[0]], [0.0]
        for i in range(14):
            steps = np.linspace(grid[i], grid[i + 1], 51)[1:]
            if even:
                density = np.full(50, cost[i] / width[i])
            else:
                density = np.where(np.arange(50) < 25, 2 * cost[i] / width[i] - slope[i], slope[i])
            for loss, price in zip(steps, density, strict=True):
                ways = [least[-1] + price * width[i] / 50]
                ways += [
                    f + float(np.interp(loss + j, p, x))
                    for f, j, p, x in zip(fee, jump, points, left, strict=True)
                ]
                fine.append(float(loss))
                least.append(min(ways))
        # Leaving is possible between these losses, too: a little less than what is found here.
        assert (np.interp(fine, grid, value) <= np.array(least) + slope.max() * width.max() / 50).all()
    assert value[-1] > 0.5 * least[-1]


@pytest.mark.parametrize("pieces", [1, 8])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_round_and_then_the_rest_cost_at_least_that(seed: int, pieces: int) -> None:
    rng = np.random.default_rng(seed)
    curve = Exponential(floor=0.1, data_gain=0.05, data_exponent=0.5, rate=0.8)
    grid = np.linspace(0.3, 2.0, 40)
    value = np.concatenate([[0.0], np.cumsum(rng.uniform(0.0, 1.0, 39))])
    high = np.linspace(0.05, 1.0, 12)
    low = np.concatenate([[0.0], high[:-1]])
    costs = np.cumsum(rng.uniform(0.05, 0.4, 13))
    share = low[:, None] + (high - low)[:, None] * np.arange(1, pieces + 1) / pieces
    there = Arrivals.of(curve, grid, high)
    at_point, chord = flows.rounds_first(
        grid,
        value,
        (there.cell, there.above, there.done),
        costs[:-1],
        costs[1:],
        (False, 0.8, 1.0),
        share,
        curve.asymptote(share),
        pieces,
    )
    tight = []
    for loss in np.concatenate([grid, rng.uniform(grid[0], grid[-1], 300)]):
        x = np.concatenate([high, rng.uniform(0.001, 1.0, 200)])
        after = curve.step(np.full(len(x), loss), x)
        left = np.where(after <= grid[0], 0.0, np.interp(after, grid, value))
        paid = np.interp(x, np.concatenate([[0.0], high]), costs) + left
        if loss in grid:
            assert (at_point[grid == loss][0] <= paid + 1e-12).all()
        bound = float(np.interp(loss, grid, chord))
        assert (bound <= paid + 1e-12).all()
        tight.append(bound / paid.min())
    assert np.mean(tight) > (0.8 if pieces > 1 else 0.5)


def test_loops_work_where_nothing_can_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caching.CacheImpl, "_locator_classes", [])  # as on a read-only disk without a home

    def twice(x: float) -> float:
        return 2.0 * x

    with pytest.raises(RuntimeError, match="cannot cache"):
        numba.njit(cache=True)(twice)
    assert compiled(twice)(1.5) == 3.0
