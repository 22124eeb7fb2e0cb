"""Plans that hold up under uncertain curves: the loss is reached in a given share of the samples.

A problem's versions may carry curves drawn from their uncertainty, joint by index: sample j is one
possible world. A plan counts in a world if it reaches the target there (time and energy do not depend on
the curves). It must also reach it on the curves themselves, by which a plan file is checked. Candidates are
plans for these, for single worlds, and for these with a tightened target; the cheapest that holds in enough
worlds wins.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from takifugu.errors import UsageError
from takifugu.plan.plan import Plan, meets_limits, replay
from takifugu.plan.problem import Problem
from takifugu.plan.result import Result, check_bound, status_of
from takifugu.plan.solve import Solver, solve

_TRIES = 7


def worlds(problem: Problem) -> list[Problem]:
    """One problem per sample; versions without samples keep their curve."""
    count = max((len(v.curve_samples) for v in problem.versions), default=0)
    return [
        replace(
            problem,
            versions=tuple(
                replace(v, curve=v.curve_samples[j], curve_samples=()) if v.curve_samples else v
                for v in problem.versions
            ),
        )
        for j in range(count)
    ]


def share_reached(plan: Plan, possible: list[Problem]) -> float:
    """In which share of the worlds the plan's decisions reach the target."""
    losses = [replay(world, plan.decisions) for world in possible]
    return float(
        np.mean([p is not None and p.loss <= w.loss_limit for p, w in zip(losses, possible, strict=True)])
    )


def solve_robust(
    problem: Problem,
    confidence: float,
    tolerance: float = 0.01,
    time_limit_s: float | None = None,
    progress: Callable[[str], None] | None = None,
) -> Result:
    """The cheapest plan found whose loss is reached in at least `confidence` of the samples.

    The lower bound is proven: a plan that holds in k of n worlds costs at least the k-th smallest of the
    worlds' own lower bounds, and at least that of the curves themselves.
    """
    if not 0.0 < confidence <= 1.0:
        raise UsageError(f"--confidence {confidence:g} is not in (0, 1]; 0.9 asks for nine samples in ten")
    possible = worlds(problem)
    if not possible:
        raise UsageError("--confidence needs curve samples; add versions.curve.samples, or leave it out")
    say = progress or (lambda _: None)
    needed = math.ceil(confidence * len(possible) - 1e-9)
    each = None if time_limit_s is None else time_limit_s / (2 * len(possible) + _TRIES + 1)
    bounds: list[float] = []
    best: Plan | None = None
    best_share = 0.0

    def consider(plan: Plan | None) -> float:
        nonlocal best, best_share
        plan = None if plan is None else replay(problem, plan.decisions)
        if plan is None:
            return 0.0
        share = share_reached(plan, possible)
        enough = share * len(possible) >= needed - 1e-9 and meets_limits(problem, plan)
        if enough and (best is None or plan.energy_j < best.energy_j):
            best, best_share = plan, share
        return share

    interrupted = False
    impossible, least_j = 0, 0.0
    try:
        nominal = solve(problem, tolerance, each, thorough=False)
        consider(nominal.plan)
        if nominal.stats.get("interrupted"):
            raise KeyboardInterrupt
        if nominal.status == "infeasible":
            return nominal
        least_j = nominal.lower_bound_j or 0.0
        for world in possible:
            found = solve(world, tolerance, each, explain_infeasible=False, thorough=False)
            if found.stats.get("interrupted"):
                consider(found.plan)
                raise KeyboardInterrupt
            impossible += found.status == "infeasible"
            bounds.append(np.inf if found.status == "infeasible" else found.lower_bound_j or 0.0)
            consider(found.plan)
        say(f"{len(possible)} samples planned, {impossible} of them infeasible")
        easy, hard = 0.0, problem.start_loss - problem.target_loss
        for _ in range(_TRIES):
            # The nominal plan for a tighter target holds in more worlds: find how tight it must be.
            margin = (
                0.5 * (easy + hard) if hard < problem.start_loss - problem.target_loss else hard / 16 + easy
            )
            tighter = replace(problem, target_loss=problem.target_loss - margin)
            found = solve(tighter, tolerance, each, explain_infeasible=False, thorough=False)
            enough = found.plan is None or consider(found.plan) * len(possible) >= needed - 1e-9
            if found.stats.get("interrupted"):
                raise KeyboardInterrupt
            easy, hard = (easy, margin) if enough else (margin, hard)
            if hard - easy < 1e-4 * max(abs(problem.target_loss), 1e-9):
                break
    except KeyboardInterrupt:
        interrupted = True
    stats = {"share": best_share, "interrupted": interrupted, "worlds": len(possible)}
    ordered = sorted(bounds)
    bound = max(ordered[needed - 1] if len(ordered) == len(possible) else 0.0, least_j)
    if len(possible) - impossible < needed and not interrupted:
        reason = f"the target is out of reach in {impossible} of {len(possible)} samples"
        return Result("infeasible", None, None, problem, "robust", (reason,), stats=stats)
    if best is None:
        return Result("unknown", None, None, problem, "robust", stats=stats)
    bound = check_bound(problem, best.energy_j, bound)
    gap = (best.energy_j - bound) / best.energy_j if best.energy_j else 0.0
    return Result(status_of(gap, tolerance), best, bound, problem, "robust", stats=stats)


__all__ = ["Solver", "share_reached", "solve_robust", "worlds"]
