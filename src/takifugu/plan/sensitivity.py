"""What one more minute, or 0.01 of loss, would save: the problem solved again with the limit moved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from takifugu.plan.plan import Plan
from takifugu.plan.problem import Problem


@dataclass(frozen=True)
class Saving:
    change: str
    energy_j: float | None
    """Least energy found with the change, never above the plan's own (that one stays valid)."""
    saved_j: float


def savings(
    problem: Problem,
    energy_j: float,
    solved: Callable[[Problem], Plan | None],
    holds: Callable[[Plan], bool],
) -> list[Saving]:
    """Return what each relaxed limit saves, each alone.

    `solved` returns the best plan found for a problem. `holds` tells whether a plan meets the limits as they
    are: a cheaper plan that does so is a better plan, not something that the change saves.
    """
    changes: list[tuple[str, Problem]] = [
        ("one more minute", replace(problem, deadline_s=problem.deadline_s + 60.0)),
        ("0.01 more loss", replace(problem, target_loss=problem.target_loss + 0.01)),
    ]
    if problem.max_rounds is not None:
        changes.append(("one more round", replace(problem, max_rounds=problem.max_rounds + 1)))
    rows = []
    for change, relaxed in changes:
        found = solved(relaxed)
        least = energy_j if found is None or holds(found) else min(found.energy_j, energy_j)
        rows.append(Saving(change, least, energy_j - least))
    return rows
