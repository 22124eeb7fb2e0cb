"""Recompute what a plan file claims to be proven: its lower bound, or that there is no plan.

`verify.py` replays a plan, which cannot tell whether a cheaper one exists. Here the problem is solved again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from takifugu.plan.problem import Problem
from takifugu.plan.result import Result
from takifugu.plan.robust import check_confidence, solve_robust
from takifugu.plan.solve import solve

SLACK = 1e-9
_TRIES = 4
"""Solves, each with a smaller tolerance: a better plan than the file's can leave a bound below the claim."""

_BUG = "this is a bug in the solver, report it with the problem and the plan"


@dataclass(frozen=True)
class Proof:
    ok: bool
    """Whether the claim was proven again. False: refuted, or not proven."""
    message: str
    lower_bound_j: float | None = None
    """The best bound that was proven here."""
    energy_j: float | None = None
    """The energy of the best plan that was found here."""


def prove(
    problem: Problem,
    plan: Mapping[str, Any],
    energy_j: float,
    time_limit_s: float | None = None,
    progress: Callable[[str], None] | None = None,
) -> Proof:
    """Solve the problem again, and compare with a plan file whose replayed energy is `energy_j`.

    A claimed bound is confirmed if a bound at least as high (within 1e-9) is proven here, and refuted if a
    plan with less energy is found. If neither succeeds it counts as not proven.
    """
    claim = plan.get("lower_bound_j")
    if claim is None:
        return Proof(True, "the file claims no lower bound; there is nothing to prove")
    if claim <= 0.0:
        return Proof(True, f"a lower bound of {claim:g} J needs no proof", 0.0)
    ends = None if time_limit_s is None else time.monotonic() + time_limit_s
    bound, best = 0.0, energy_j
    confidence = _confidence(plan)
    for _ in range(_TRIES):
        left = None if ends is None else ends - time.monotonic()
        if left is not None and left <= 0.0:
            break
        gap = (best - claim) / best
        tolerance = min(gap, 0.999) if gap > SLACK else 0.0
        found = _solved(problem, confidence, tolerance, left, progress)
        if found.status == "infeasible":
            return Proof(
                False, f"the solver calls this problem infeasible, but the plan meets its limits; {_BUG}"
            )
        bound = max(bound, found.lower_bound_j or 0.0)
        if bound > energy_j * (1 + SLACK):
            return Proof(
                False,
                f"the solver's lower bound {bound!r} J is above the plan's energy {energy_j!r} J; {_BUG}",
            )
        best = min(best, energy_j if found.energy_j is None else found.energy_j)
        if best < claim * (1 - SLACK):
            return Proof(
                False,
                f"lower_bound_j {claim:,.9g} J is false: a plan with {best:,.9g} J exists",
                bound,
                best,
            )
        if bound >= claim * (1 - SLACK):
            return Proof(True, f"proven again: no plan needs less than {bound:,.9g} J", bound, best)
        if found.gap is None or found.gap > tolerance + SLACK:
            break  # it got no further
    return Proof(
        False,
        f"lower_bound_j {claim:,.9g} J could not be proven; what could: no plan needs less than "
        f"{bound:,.9g} J ({(energy_j - bound) / energy_j:.3%} below the plan's {energy_j:,.9g} J)",
        bound,
        best,
    )


def prove_infeasible(
    problem: Problem, time_limit_s: float | None = None, progress: Callable[[str], None] | None = None
) -> Proof:
    """Solve a problem again of which a file claims that no plan meets its limits."""
    found = solve(problem, 0.5, time_limit_s, progress, explain_infeasible=False, thorough=False)
    if found.stats.get("interrupted"):
        raise KeyboardInterrupt
    if found.status == "infeasible":
        return Proof(True, "proven again: no plan meets the limits")
    if found.energy_j is None:
        return Proof(False, "that no plan meets the limits could not be proven in the time")
    return Proof(
        False,
        f"status infeasible is false: a plan with {found.energy_j:,.9g} J meets the limits",
        found.lower_bound_j,
        found.energy_j,
    )


def _confidence(plan: Mapping[str, Any]) -> float | None:
    samples = plan.get("samples")
    return samples.get("confidence") if isinstance(samples, dict) else None


def _solved(
    problem: Problem,
    confidence: float | None,
    tolerance: float,
    time_limit_s: float | None,
    progress: Callable[[str], None] | None,
) -> Result:
    if confidence is None:
        found = solve(problem, tolerance, time_limit_s, progress, explain_infeasible=False)
    else:
        check_confidence(problem, confidence)
        found = solve_robust(problem, confidence, tolerance, time_limit_s, progress)
    if found.stats.get("interrupted"):
        raise KeyboardInterrupt
    return found
