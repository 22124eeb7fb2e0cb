"""What a solve hands back: a plan or none, how good it is for certain, and its file form."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from takifugu.errors import InternalError
from takifugu.plan.plan import FORMAT, Plan
from takifugu.plan.problem import Problem
from takifugu.plan.samples import reached, sample_count

OPTIMAL_GAP = 1e-9
"""Relative gap up to which a plan counts as optimal; so much may a bound lie above a plan, by rounding."""


def check_bound(problem: Problem, energy_j: float, bound_j: float) -> float:
    """Return the bound, at most the plan's energy. Raise if it lies above it by more than rounding explains.

    A lower bound above a plan that meets the limits is invalid, so no claim may rest on it.
    """
    if bound_j - energy_j > OPTIMAL_GAP * max(abs(energy_j), abs(bound_j)):
        raise InternalError(
            f"the lower bound {bound_j!r} J lies above a plan that needs {energy_j!r} J, for the problem "
            f"with sha256 {problem.sha256}; this is a mistake in takifugu, please report it with the file"
        )
    return min(bound_j, energy_j)


def status_of(gap: float, tolerance: float) -> str:
    """Return what a plan with this gap may be called."""
    return "optimal" if gap <= OPTIMAL_GAP else "within_tolerance" if gap <= tolerance else "feasible"


@dataclass(frozen=True)
class Result:
    status: str
    """optimal, within_tolerance, feasible, infeasible or unknown"""
    plan: Plan | None
    lower_bound_j: float | None
    problem: Problem
    solver: str
    reasons: tuple[str, ...] = ()
    best_loss_by_deadline: float | None = None
    earliest_time_to_loss_s: float | None = None
    confidence: float | None = None
    """The share of the curves' samples in which the loss had to be reached; the bound is of such plans."""
    stats: dict[str, Any] = field(default_factory=dict, compare=False)
    """How much work it was; never part of the plan file."""

    @property
    def energy_j(self) -> float | None:
        return None if self.plan is None else self.plan.energy_j

    @property
    def gap(self) -> float | None:
        if self.plan is None or self.lower_bound_j is None:
            return None
        if not self.plan.rounds or self.plan.energy_j <= 0:
            return 0.0
        return (self.plan.energy_j - self.lower_bound_j) / self.plan.energy_j

    @property
    def samples_reached(self) -> int | None:
        """In how many of the curves' samples the plan reaches the target; None without plan or samples."""
        if self.plan is None or not sample_count(self.problem):
            return None
        return reached(self.problem, self.plan)

    def to_dict(self) -> dict[str, Any]:
        """The plan file: no timestamps, no timings."""
        plan = self.plan
        data: dict[str, Any] = {
            "format": FORMAT,
            "status": self.status,
            "energy_j": self.energy_j,
            "lower_bound_j": self.lower_bound_j,
            "gap": self.gap,
            "time_s": None if plan is None else plan.time_s,
            "loss": None if plan is None else plan.loss,
            "solver": self.solver,
            "rounds": [] if plan is None else [r.to_dict() for r in plan.rounds],
        }
        if self.status == "infeasible":
            data["reasons"] = list(self.reasons)
            data["best_loss_by_deadline"] = self.best_loss_by_deadline
            data["earliest_time_to_loss_s"] = self.earliest_time_to_loss_s
        if plan is not None and (count := sample_count(self.problem)):
            data["samples"] = {"count": count, "reached": self.samples_reached}
            if self.confidence is not None:
                data["samples"]["confidence"] = self.confidence
        if self.problem.reserve is not None:
            data["reserve"] = self.problem.reserve.to_dict()
        return {**data, "problem": self.problem.to_dict(), "problem_sha256": self.problem.sha256}
