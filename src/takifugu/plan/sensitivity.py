"""What one more minute, or 0.01 of loss, would be worth: the problem solved again with the limit moved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from takifugu.plan.problem import Problem


@dataclass(frozen=True)
class Saving:
    change: str
    energy_j: float | None
    """Least energy found with the change, never above the plan's own (that one stays valid)."""
    saved_j: float


def savings(problem: Problem, energy_j: float, energy_of: Callable[[Problem], float | None]) -> list[Saving]:
    """Relaxed limits, each alone. `energy_of` solves a problem and gives its energy."""
    changes: list[tuple[str, Problem]] = [
        ("one more minute", replace(problem, deadline_s=problem.deadline_s + 60.0)),
        ("0.01 more loss", replace(problem, target_loss=problem.target_loss + 0.01)),
    ]
    if problem.max_rounds is not None:
        changes.append(("one more round", replace(problem, max_rounds=problem.max_rounds + 1)))
    rows = []
    for change, relaxed in changes:
        found = energy_of(relaxed)
        least = energy_j if found is None else min(found, energy_j)
        rows.append(Saving(change, least, energy_j - least))
    return rows
