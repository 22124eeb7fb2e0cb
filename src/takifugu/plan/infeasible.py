"""Infeasible is an answer: how far off it is, which limit binds, and the smallest changes that would help.

Every change that is named has been tried: a plan that meets the changed problem exists.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from takifugu.plan.options import Options, enumerate_options
from takifugu.plan.problem import MOST_ROUNDS, Node, Problem
from takifugu.plan.reach import Reach, Reached, fastest

if TYPE_CHECKING:
    from takifugu.plan.result import Result
    from takifugu.plan.solve import Solver

_MOST_NEW_NODES = 64


def explained(solver: Solver, result: Result) -> Result:
    """The infeasible result with its reasons (as many as time allows)."""
    from takifugu.plan.search import OutOfTime

    problem, reasons = solver.problem, []
    best_loss = earliest = None
    try:
        reached = reach(problem, solver.check)
        best_loss = reached.best_loss
        earliest = reached.time_s if np.isfinite(reached.time_s) else None
        reasons = list(_reasons(problem, reached, solver))
    except OutOfTime:
        reasons.append("the time limit came before the smallest changes were found")
    return replace(
        result,
        reasons=tuple(reasons),
        best_loss_by_deadline=best_loss,
        earliest_time_to_loss_s=earliest,
    )


def reach(problem: Problem, check: Callable[[], None]) -> Reached:
    """The quickest way to the target and the lowest loss by the deadline, on achievable node sets."""
    from takifugu.plan.solve import Solver

    solver = Solver(problem, 0.01, None, lambda _: None)
    options: list[Options | None]
    if solver.complete:
        options = [enumerate_options(solver.fleet, v) for v in solver.versions]
    else:
        options = solver.quick_options()
    found = Reach(problem, [fastest(o) for o in options], most_labels=200, check=check).run()
    found.exact = found.exact and solver.complete
    return found


def _reasons(problem: Problem, reached: Reached, solver: Solver) -> list[str]:
    reasons: list[str] = []
    check = solver.check
    if np.isfinite(reached.time_s):
        late = reached.time_s - problem.deadline_s
        takes = "takes until" if reached.exact else "takes, by the fastest plan found, until"
        reasons.append(
            f"the deadline binds: the loss {problem.target_loss:g} {takes} {reached.time_s:.6g} s"
            f"{' at the earliest' if reached.exact else ''}, the deadline is {problem.deadline_s:g} s"
        )
        reasons.append(f"feasible with deadline +{_duration(late)} ({_round_up(reached.time_s, 6):g} s)")
    else:
        uncapped = (
            reach(replace(problem, max_rounds=None), check) if problem.max_rounds is not None else reached
        )
        if np.isfinite(uncapped.time_s):
            count = len(uncapped.decisions)
            reasons.append(
                f"the round cap binds: {problem.max_rounds} rounds do not reach {problem.target_loss:g}"
            )
            if uncapped.time_s <= problem.time_limit:
                reasons.append(f"feasible with max_rounds = {_fewest_rounds(problem, count, check)}")
            else:
                reasons.append(
                    f"feasible with max_rounds = {count} and "
                    f"deadline_s = {_round_up(uncapped.time_s, 6):g} together"
                )
        else:
            reasons += _out_of_reach(problem, uncapped, solver)
    if (advised := _round_up(reached.best_loss)) < problem.start_loss:
        reasons.append(f"feasible with loss {advised:g} by the same deadline")
    twins = _more_nodes(problem, check)
    if twins:
        reasons.append(twins)
    return reasons


def _fewest_rounds(problem: Problem, enough: int, check: Callable[[], None]) -> int:
    """The smallest cap that would do; the quickest plan may take more rounds than needed."""
    low, high = problem.max_rounds or 0, enough
    while high - low > 1:
        middle = (low + high) // 2
        works = reach(replace(problem, max_rounds=middle), check).time_s <= problem.time_limit
        low, high = (low, middle) if works else (middle, high)
    return high


def _out_of_reach(problem: Problem, uncapped: Reached, solver: Solver) -> list[str]:
    """Return what keeps the loss out of reach at any time: windows, memory or the curves.

    `uncapped`: the result of the search without a cap on rounds.
    """
    loss, check = f"{problem.target_loss:g}", solver.check
    always = tuple(replace(node, available=None) for node in problem.nodes)
    roomy = tuple(replace(node, memory_bytes=None) for node in problem.nodes)
    for nodes, binds, change in (
        (always, f"the windows bind: {loss} is not reached while nodes are there", "always available"),
        (roomy, f"the memory binds: what reaches {loss} does not fit", "of enough memory"),
    ):
        if nodes == problem.nodes:
            continue
        freed = replace(problem, nodes=nodes)
        if np.isfinite(reach(replace(freed, max_rounds=None), check).time_s):
            works = reach(freed, check).time_s <= problem.time_limit
            return [binds, *([f"feasible with nodes {change}"] if works else [])]
    if (uncapped.exact and uncapped.ended) or _below_every_floor(problem):
        return [f"the loss binds: no version gets down to {loss} on this fleet, however long it trains"]
    if solver.fewest_rounds > MOST_ROUNDS:
        return [
            f"the rounds bind: by the curves the loss {loss} takes at least {solver.fewest_rounds:.3g} "
            f"rounds, and a plan has at most {MOST_ROUNDS:,}"
        ]
    return [f"the loss binds: no plan of up to {MOST_ROUNDS:,} rounds was found that gets down to {loss}"]


def _below_every_floor(problem: Problem) -> bool:
    """Whether the target lies at or below the floor of every version that switches lead to."""
    there, new = set[str](), {problem.start_version}
    while new:
        there |= new
        new = {s.target for s in problem.switches if s.source in there} - there
    floors = [getattr(v.curve, "floor", -np.inf) for v in problem.versions if v.name in there]
    return all(floor >= problem.loss_limit for floor in floors)


def _more_nodes(problem: Problem, check: Callable[[], None]) -> str | None:
    """The fewest copies of one node that would do (the nodes that add most data per second first)."""
    from takifugu.plan.fleet import Fleet

    fleet = Fleet.of(problem)
    index = problem.version_index[problem.start_version]
    costs = fleet.by_version[index]
    pace = fleet.samples / (costs.fixed_s + costs.sample_s * fleet.samples)
    ranked = np.argsort(-np.where(costs.can_join, pace, -1.0), kind="stable")[:2]
    best: tuple[int, str] | None = None
    for i in ranked:
        node = problem.nodes[int(i)]
        count = 1
        while count <= _MOST_NEW_NODES and (best is None or count < best[0]):
            check()
            if _works(problem, node, count, check):
                best = (_fewest(problem, node, count // 2, count, check), node.name)
                break
            count *= 2
    if best is None:
        return None
    words = {1: "one more node", 2: "two more nodes", 3: "three more nodes"}
    return f"feasible with {words.get(best[0], f'{best[0]} more nodes')} like {best[1]}"


def _works(problem: Problem, node: Node, count: int, check: Callable[[], None]) -> bool:
    copies = tuple(replace(node, name=f"{node.name} copy {k + 1}") for k in range(count))
    larger = replace(problem, nodes=problem.nodes + copies)
    reached = reach(larger, check)
    return reached.time_s <= larger.time_limit


def _fewest(problem: Problem, node: Node, low: int, high: int, check: Callable[[], None]) -> int:
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _works(problem, node, middle, check) else (middle, high)
    return high


def _round_up(value: float, digits: int = 4) -> float:
    """So many significant digits, never below: what is advised must be enough."""
    if value == 0:
        return 0.0
    unit = 10.0 ** (np.floor(np.log10(abs(value))) - digits + 1)
    return float(np.ceil(value / unit - 1e-9) * unit)


def _duration(seconds: float) -> str:
    if seconds >= 5400:
        return f"{np.ceil(seconds / 360) / 10:.1f} h"
    if seconds >= 90:
        return f"{np.ceil(seconds / 6) / 10:.1f} min"
    return f"{_round_up(seconds, 3):g} s"
