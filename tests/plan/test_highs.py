"""An oracle of another kind: a mixed-integer program on the discretised graph, solved by HiGHS."""

import math
from typing import Any

import numpy as np
import pytest
from generator import small_problem
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_matrix

from takifugu.plan.problem import Problem
from takifugu.plan.solve import Solver, solve


def discretised_optimum(problem: Problem, cells: int) -> float:
    """Least energy of a path over (round, version, loss cell) with a budget of time.

    Losses are rounded up to the cells, so that every path is a true plan: an upper bound on the optimum
    that comes down to it as cells get finer. Windows must be absent (the graph has no clock).
    """
    solver = Solver(problem, 0.0, None, lambda _: None)
    assert problem.max_rounds is not None
    top = problem.start_loss + sum(s.loss_jump for s in problem.switches)
    grid = np.linspace(problem.target_loss, top, cells)
    index = problem.version_index
    ways = [(v, v, 0.0, 0.0, 0.0) for v in range(len(problem.versions))]
    ways += [(index[s.source], index[s.target], s.time_s, s.energy_j, s.loss_jump) for s in problem.switches]
    start = (0, index[problem.start_version], problem.start_loss)
    nodes: dict[tuple[int, int, float], int] = {start: 0}
    arcs: list[tuple[int, int, float, float]] = []
    frontier = [start]
    for number in range(problem.max_rounds):
        following: dict[tuple[int, int, float], int] = {}
        for _, version, loss in frontier:
            tail = nodes[number, version, loss]
            for a, b, seconds, joules, jump in ways:
                options = solver.all_options[b]
                if a != version or options is None:
                    continue
                after = problem.versions[b].curve.step(np.full(len(options), loss + jump), options.share)
                for k, value in enumerate(after):
                    if value <= problem.loss_limit:
                        head = -1
                    else:
                        up = float(grid[min(int(np.searchsorted(grid, value)), cells - 1)])
                        key = (number + 1, b, up)
                        if key not in nodes:
                            nodes[key] = following[key] = len(nodes)
                        head = nodes[key]
                    arcs.append((tail, head, options.energy_j[k] + joules, options.time_s[k] + seconds))
        frontier = list(following)
    if not any(head == -1 for _, head, *_ in arcs):
        return math.inf
    count = len(nodes)
    tails = np.array([a[0] for a in arcs])
    heads = np.array([a[1] if a[1] >= 0 else count for a in arcs])
    energy = np.array([a[2] for a in arcs])
    seconds = np.array([a[3] for a in arcs])
    number = np.arange(len(arcs))
    flow = coo_matrix(
        (np.r_[np.ones(len(arcs)), -np.ones(len(arcs))], (np.r_[tails, heads], np.r_[number, number])),
        shape=(count + 1, len(arcs)),
    )
    balance = np.zeros(count + 1)
    balance[0], balance[count] = 1.0, -1.0
    answer = milp(
        energy,
        integrality=np.ones(len(arcs)),
        bounds=Bounds(0, 1),
        constraints=[
            LinearConstraint(flow.tocsr(), balance, balance),
            LinearConstraint(seconds[None, :], -np.inf, problem.time_limit - problem.start_time_s),
        ],
        options={"mip_rel_gap": 1e-9},
    )
    return float(answer.fun) if answer.success else math.inf


def without_windows(seed: int) -> dict[str, Any]:
    data = small_problem(seed, most_plans=3e4, force=("cap",))
    for node in data["nodes"]:
        node.pop("available", None)
    data["target"]["max_rounds"] = min(data["target"]["max_rounds"], 3)
    return data


@pytest.mark.parametrize("block", range(4))
def test_highs_agrees_on_the_discretised_graph(block: int) -> None:
    close = 0
    for seed in range(700 + 8 * block, 708 + 8 * block):
        problem = Problem.from_dict(without_windows(seed))
        if problem.met_at_start:
            continue
        ours = solve(problem, 0.0, explain_infeasible=False)
        theirs = discretised_optimum(problem, cells=4000)
        if ours.energy_j is None:
            assert math.isinf(theirs)
        else:
            assert theirs >= ours.energy_j * (1 - 1e-7)  # rounding up can only cost
            close += theirs <= ours.energy_j * (1 + 1e-6)
    assert close >= 2
