"""What the page says, for programs: `takifugu report --json`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from takifugu.report.records import Plan, PlanFile, Run
from takifugu.report.words import headline

FORMAT = "takifugu.report/1"


def summary(source: Run | PlanFile) -> dict[str, Any]:
    words, problem = headline(source), source.problem
    data: dict[str, Any] = {
        "format": FORMAT,
        "kind": "run" if isinstance(source, Run) else "plan",
        "headline": words.title,
        "details": list(words.sentences),
        "target": {"loss": problem.target_loss, "deadline_s": problem.deadline_s},
        "problem_sha256": problem.sha256,
        "certificate": None if source.plan is None else _certificate(source.plan),
    }
    if isinstance(source, PlanFile):
        return {**data, "rounds": len(source.plan.rounds), "reasons": list(source.plan.reasons)}
    best = source.best_baseline
    return {
        **data,
        "best_baseline": None if best is None else best.name,
        "policies": [_policy(run) for run in (source, *source.baselines)],
    }


def _certificate(plan: Plan) -> dict[str, Any]:
    return {
        "status": plan.status,
        "energy_j": plan.energy_j,
        "lower_bound_j": plan.lower_bound_j,
        "gap": plan.gap,
    }


def _policy(run: Run) -> dict[str, Any]:
    if run.outcome is None:
        return {"policy": run.name, "in_progress": True, "rounds": len(run.rounds), "energy_j": run.energy_j}
    return {"policy": run.name, "in_progress": False, **asdict(run.outcome)}
