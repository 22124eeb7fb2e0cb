"""A plan under the curves' samples: the loss it ends with in each of them.

A version's curve may carry samples of its parameters, joint across versions by index: sample j is one
possible truth. Time and energy do not depend on the curves, so only losses differ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from takifugu.plan.curves import Floats, step_one
from takifugu.plan.fleet import Fleet
from takifugu.plan.plan import Decision, Plan
from takifugu.plan.problem import Problem


def sample_count(problem: Problem) -> int:
    return max((len(v.curve_samples) for v in problem.versions), default=0)


def needed(confidence: float, count: int) -> int:
    """Return in how many of `count` samples a plan must reach the loss."""
    return max(1, math.ceil(confidence * count - 1e-9))


def final_losses(problem: Problem, decisions: Sequence[Decision], fleet: Fleet | None = None) -> Floats:
    """Return the loss at the end of a plan in each sample."""
    fleet = fleet or Fleet.of(problem)
    jumps = {(s.source, s.target): s.loss_jump for s in problem.switches}
    count = sample_count(problem)
    shares: dict[tuple[int, int], float] = {}
    losses, version = [problem.start_loss] * count, problem.start_version
    for decision in decisions:
        key = (decision.version, id(decision.used))
        if key not in shares:  # most rounds repeat a set
            shares[key] = fleet.round_cost(decision.version, decision.used).share
        wanted = problem.versions[decision.version]
        jump = jumps[version, wanted.name] if wanted.name != version else 0.0
        version = wanted.name
        curves = wanted.curve_samples or (wanted.curve,) * count
        losses = [step_one(c, x + jump, shares[key]) for c, x in zip(curves, losses, strict=True)]
    return np.array(losses)


def reached(problem: Problem, plan: Plan, fleet: Fleet | None = None) -> int:
    """Return in how many samples a plan reaches the target."""
    return int((final_losses(problem, plan.decisions, fleet) <= problem.loss_limit).sum())
