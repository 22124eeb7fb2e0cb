"""Plans that hold up under uncertain curves: the loss is reached in a given share of the samples.

A problem's versions may carry curves drawn from their uncertainty, joint by index: sample j is one
possible world. A plan counts in a world if it reaches the target there (time and energy do not depend on
the curves). It must also reach it on the curves themselves, by which a plan file is checked. Candidates are
plans for these, for single worlds, for these with a tightened target, and the baselines; the cheapest that
holds in enough worlds wins.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from takifugu.errors import UsageError
from takifugu.plan import samples
from takifugu.plan.baselines import run_baselines
from takifugu.plan.curves import step_one
from takifugu.plan.fleet import Fleet
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


def check_confidence(problem: Problem, confidence: float) -> None:
    """Raise if the confidence is not a share, or if no curve of the problem has samples."""
    if not 0.0 < confidence <= 1.0:
        raise UsageError(f"--confidence {confidence:g} is not in (0, 1]; 0.9 asks for nine samples in ten")
    if not samples.sample_count(problem):
        raise UsageError("--confidence needs curve samples; add versions.curve.samples, or leave it out")


def continued(problem: Problem, plan: Plan, confidence: float, fleet: Fleet | None = None) -> Plan | None:
    """Return the plan with its last round repeated until the loss is reached in enough samples.

    None, if that breaks a limit, or if more rounds lower the loss in no sample.
    """
    fleet = fleet or Fleet.of(problem)
    if not plan.decisions:
        return plan if meets_limits(problem, plan) else None
    count = samples.sample_count(problem)
    enough = samples.needed(confidence, count)
    losses = samples.final_losses(problem, plan.decisions, fleet)
    last = plan.decisions[-1]
    version = problem.versions[last.version]
    curves = version.curve_samples or (version.curve,) * count
    cost = fleet.round_cost(last.version, last.used)
    most = problem.max_rounds or math.inf
    if math.isfinite(problem.time_limit):
        most = min(most, len(plan.decisions) + (problem.time_limit - plan.time_s) / cost.time_s)
    extra = 0
    while (losses <= problem.loss_limit).sum() < enough:
        before, extra = losses, extra + 1
        losses = np.array([step_one(c, x, cost.share) for c, x in zip(curves, before, strict=True)])
        if len(plan.decisions) + extra > most * (1 + 1e-9) or not (losses < before).any():
            return None
    longer = replay(problem, [*plan.decisions, *[last] * extra], fleet)
    return longer if longer is not None and meets_limits(problem, longer) else None


def robust_baselines(problem: Problem, confidence: float) -> dict[str, Plan | None]:
    """Return every baseline, continued until it reaches the loss in enough samples; None: it never does."""
    fleet = Fleet.of(problem)
    return {
        name: None if plan is None else continued(problem, plan, confidence, fleet)
        for name, plan in run_baselines(problem).items()
    }


def solve_robust(
    problem: Problem,
    confidence: float,
    tolerance: float = 0.01,
    time_limit_s: float | None = None,
    progress: Callable[[str], None] | None = None,
    thorough: bool = True,
) -> Result:
    """The cheapest plan found whose loss is reached in at least `confidence` of the samples.

    The lower bound is proven: a plan that holds in k of n worlds costs at least the k-th smallest of the
    worlds' own lower bounds, and at least that of the curves themselves. `thorough=False` leaves single
    worlds out, which are most of the work: then the bound is that of the curves alone.
    """
    check_confidence(problem, confidence)
    found = _solve(problem, confidence, tolerance, time_limit_s, progress, thorough)
    return replace(found, confidence=confidence)


def _solve(
    problem: Problem,
    confidence: float,
    tolerance: float,
    time_limit_s: float | None,
    progress: Callable[[str], None] | None,
    thorough: bool,
) -> Result:
    possible = worlds(problem)
    say = progress or (lambda _: None)
    enough_of = samples.needed(confidence, len(possible))
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
        enough = share * len(possible) >= enough_of - 1e-9 and meets_limits(problem, plan)
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
        for plan in robust_baselines(problem, confidence).values():
            consider(plan)  # so that no baseline is cheaper than the plan
        for world in possible if thorough else ():
            found = solve(world, tolerance, each, explain_infeasible=False, thorough=False)
            if found.stats.get("interrupted"):
                consider(found.plan)
                raise KeyboardInterrupt
            impossible += found.status == "infeasible"
            bounds.append(np.inf if found.status == "infeasible" else found.lower_bound_j or 0.0)
            consider(found.plan)
        if thorough:
            say(f"{len(possible)} samples planned, {impossible} of them infeasible")
        easy, hard = 0.0, problem.start_loss - problem.target_loss
        for _ in range(_TRIES):
            # The nominal plan for a tighter target holds in more worlds: find how tight it must be.
            margin = (
                0.5 * (easy + hard) if hard < problem.start_loss - problem.target_loss else hard / 16 + easy
            )
            tighter = replace(problem, target_loss=problem.target_loss - margin)
            found = solve(tighter, tolerance, each, explain_infeasible=False, thorough=False)
            enough = found.plan is None or consider(found.plan) * len(possible) >= enough_of - 1e-9
            if found.stats.get("interrupted"):
                raise KeyboardInterrupt
            easy, hard = (easy, margin) if enough else (margin, hard)
            if hard - easy < 1e-4 * max(abs(problem.target_loss), 1e-9):
                break
    except KeyboardInterrupt:
        interrupted = True
    stats = {"share": best_share, "interrupted": interrupted, "worlds": len(possible)}
    ordered = sorted(bounds)
    bound = max(ordered[enough_of - 1] if len(ordered) == len(possible) else 0.0, least_j)
    if len(possible) - impossible < enough_of and not interrupted:
        reason = f"the target is out of reach in {impossible} of {len(possible)} samples"
        return Result("infeasible", None, None, problem, "robust", (reason,), stats=stats)
    if best is None:
        return Result("unknown", None, None, problem, "robust", stats=stats)
    bound = check_bound(problem, best.energy_j, bound)
    gap = (best.energy_j - bound) / best.energy_j if best.energy_j else 0.0
    return Result(status_of(gap, tolerance), best, bound, problem, "robust", stats=stats)


__all__ = [
    "Solver",
    "check_confidence",
    "continued",
    "robust_baselines",
    "share_reached",
    "solve_robust",
    "worlds",
]
