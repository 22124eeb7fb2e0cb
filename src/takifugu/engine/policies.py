"""What is carried out: the plan, or a baseline. Either is a list of decisions and what they should cost."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from takifugu.errors import ProblemError, UsageError, near_misses
from takifugu.plan.baselines import BASELINES, best_effort
from takifugu.plan.bench import MOST_COHORTS
from takifugu.plan.plan import FORMAT, Decision, Plan, Round, meets_limits, replay
from takifugu.plan.problem import Problem

PLAN = "plan"
_CLAIM_SLACK = 1e-6

MOST_OF_THE_DATA = 2.0 / 3.0
"""A team with this part of the fleet's samples is no small one."""


@dataclass(frozen=True)
class Policy:
    name: str
    slug: str
    """Its folder, and what --only takes."""
    plan: Plan
    file: Mapping[str, Any]
    """The plan file that says the same."""
    turns: int = 1
    """How many of the last rounds are repeated, in turn, once the plan is exhausted."""
    joined: Decision | None = None
    """What is done instead, if the last round is one of a small team."""
    near: float = -math.inf
    """The loss from which another round like the last should do: the plan expected as much of it."""
    replans: bool = False
    """Whether the rest is planned anew when reality and plan part (`replan.py`)."""

    def at(self, number: int, loss: float = math.inf) -> tuple[Decision, Round | None]:
        """What to do in a round (from 1) at this loss, and what was predicted for it.

        Beyond the plan nothing was. There a small team gets one more round if it is near, before others join.
        """
        planned = len(self.plan.rounds)
        if number <= planned:
            return self.plan.decisions[number - 1], self.plan.rounds[number - 1]
        return self.beyond(number - planned, loss)[0], None

    def beyond(self, number: int, loss: float = math.inf) -> list[Decision]:
        """What to do in a round beyond the plan (from 1), and what else if there is no time for that."""
        planned = len(self.plan.rounds)
        turns = min(self.turns, planned)
        again = self.plan.decisions[planned - turns + (number - 1) % turns]
        if self.joined is None or (number == 1 and loss <= self.near):
            return [again]
        return [self.joined, again]

    @cached_property
    def sha256(self) -> str:
        """Of who does what with which version: the figures follow from it."""
        rows = [[r.version, dict(sorted(r.nodes.items()))] for r in self.plan.rounds]
        beyond = [] if self.joined is None else [sorted(self.joined.used.items())]
        return hashlib.sha256(json.dumps([rows, self.turns, *beyond]).encode()).hexdigest()


def slugs() -> dict[str, str]:
    """Short name -> full name of every baseline."""
    return {make.__name__.replace("_", "-"): name for name, make in BASELINES.items()}


def chosen(only: str) -> str:
    """The short name of the policy a user means: "plan", or a baseline by its short or full name."""
    known = slugs()
    if only == PLAN or only in known:
        return only
    for slug, name in known.items():
        if name == only:
            return slug
    names = [PLAN, *known]
    raise UsageError(f"there is no policy {only!r}{near_misses(only, names)}; one of {', '.join(names)}")


def baselines(problem: Problem, only: str | None = None) -> list[Policy]:
    """Every baseline that can begin at all, whether or not it expects to meet the limits."""
    policies = []
    for slug, name in slugs().items():
        plan = best_effort(problem, name) if only in (None, slug) else None
        if plan is None or not plan.rounds:
            continue
        last = {tuple(sorted(d.used.items())) for d in plan.decisions[-MOST_COHORTS:]}
        turns = len(last) if slug == "rotating-cohorts" else 1
        joined = joined_by_others(problem, plan) if turns == 1 else None
        near = near_enough(problem, plan)
        policies.append(Policy(name, slug, plan, as_file(problem, plan, name), turns, joined, near))
    return policies


def from_file(
    problem: Problem, data: Mapping[str, Any], where: str = "the plan", replans: bool = False
) -> Policy:
    """The policy a plan file describes. Its rounds must fit the problem, and its figures its rounds."""
    rows = data.get("rounds")
    if not isinstance(rows, list):
        raise ProblemError([f"{where}: has no list of rounds; plan again with `takifugu plan -o`"])
    decisions = [_decision(problem, row, f"{where}: round {n}") for n, row in enumerate(rows, start=1)]
    plan = replay(problem, decisions)
    if plan is None:
        raise ProblemError(
            [f"{where}: needs a switch or a window that the problem does not have; plan again"]
        )
    for key, value in (("energy_j", plan.energy_j), ("time_s", plan.time_s), ("loss", plan.loss)):
        claim = data.get(key)
        # Not "off > slack", which nan never is; and Python compares whole numbers of any size with floats.
        slack = _CLAIM_SLACK * max(abs(value), 1e-12)
        if not isinstance(claim, int | float) or not value - slack <= claim <= value + slack:
            raise ProblemError(
                [f"{where}: says {key} = {claim!r}, its rounds give {value:.9g}; it was changed, plan again"]
            )
    joined, near = joined_by_others(problem, plan), near_enough(problem, plan)
    return Policy(PLAN, PLAN, plan, data, joined=joined, near=near, replans=replans)


def joined_by_others(problem: Problem, plan: Plan) -> Decision | None:
    """The last round's team with the thriftiest of the others, until most of the fleet's data is used.

    What a small team shows is more than what its model is worth, by the labels it lacks (docs/decisions/205):
    if it ends above the target, more of the same may never get there, where a few rounds of more nodes do.
    Nothing, if the plan is empty or its last team is large enough to be repeated.
    """
    if not plan.decisions:
        return None
    last = plan.decisions[-1]
    version, team = problem.versions[last.version], dict(last.used)
    enough = MOST_OF_THE_DATA * problem.total_samples

    def joules(place: int) -> float:
        node = problem.nodes[place]
        return node.sample_j(version) + node.transfer_j(version) / node.samples

    others = [i for i, node in enumerate(problem.nodes) if i not in team and node.can_hold(version)]
    for place in sorted(others, key=joules):
        if sum(team.values()) >= enough:
            break
        team[place] = problem.nodes[place].samples
    return Decision(last.version, team) if len(team) > len(last.used) else None


def near_enough(problem: Problem, plan: Plan) -> float:
    """The target, and what the plan's last round was to take off."""
    losses = [problem.start_loss, *(row.loss for row in plan.rounds)]
    return problem.loss_limit + (max(0.0, losses[-2] - losses[-1]) if plan.rounds else 0.0)


def _decision(problem: Problem, row: Any, where: str) -> Decision:
    version, used = (row.get("version"), row.get("nodes")) if isinstance(row, dict) else (None, None)
    versions, nodes = problem.version_index, {node.name: i for i, node in enumerate(problem.nodes)}
    if not isinstance(version, str) or version not in versions:
        close = near_misses(str(version), versions)
        raise ProblemError([f"{where}: the problem has no version {version!r}{close}"])
    if not isinstance(used, dict) or not used:
        raise ProblemError([f"{where}: no node takes part; plan again"])
    members: dict[int, int] = {}
    for name, samples in used.items():
        if name not in nodes:
            raise ProblemError([f"{where}: the problem has no node {name!r}{near_misses(name, nodes)}"])
        node = problem.nodes[nodes[name]]
        if not isinstance(samples, int) or isinstance(samples, bool) or not 1 <= samples <= node.samples:
            raise ProblemError([f"{where}: node {name!r} cannot use {samples!r} of {node.samples} samples"])
        if not node.can_hold(problem.versions[versions[version]]):
            raise ProblemError([f"{where}: node {name!r} has too little memory for version {version!r}"])
        members[nodes[name]] = samples
    return Decision(versions[version], members)


def as_file(problem: Problem, plan: Plan, solver: str) -> dict[str, Any]:
    """The plan file of a plan that nothing is proven of."""
    return {
        "format": FORMAT,
        "status": "feasible" if meets_limits(problem, plan) else "unknown",
        "energy_j": plan.energy_j,
        "lower_bound_j": None,
        "gap": None,
        "time_s": plan.time_s,
        "loss": plan.loss,
        "solver": solver,
        "rounds": [r.to_dict() for r in plan.rounds],
        "problem": problem.to_dict(),
        "problem_sha256": problem.sha256,
    }
