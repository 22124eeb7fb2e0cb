"""Plans: what to do round by round, with the numbers that follow from it, and their file form."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from takifugu.errors import ProblemError
from takifugu.plan.curves import step_one
from takifugu.plan.fleet import Fleet, RoundCost, Used, earliest_start
from takifugu.plan.problem import Problem, Window

FORMAT = "takifugu.plan/1"


@dataclass(frozen=True)
class Decision:
    """One round before its numbers are known: a version and who trains on how many samples."""

    version: int
    used: Used


@dataclass(frozen=True)
class Round:
    version: str
    nodes: Mapping[str, int]
    start_s: float
    time_s: float
    energy_j: float
    loss: float

    def to_dict(self) -> dict[str, Any]:
        return {
            "version": self.version,
            "nodes": dict(self.nodes),
            "start_s": self.start_s,
            "time_s": self.time_s,
            "energy_j": self.energy_j,
            "loss": self.loss,
        }


@dataclass(frozen=True)
class Plan:
    rounds: tuple[Round, ...]
    energy_j: float
    time_s: float
    loss: float
    decisions: tuple[Decision, ...] = field(default=(), repr=False, compare=False)


def replay(problem: Problem, decisions: Sequence[Decision], fleet: Fleet | None = None) -> Plan | None:
    """Carries decisions out on paper. Nothing, if a switch or a start that they need does not exist."""
    fleet = fleet or Fleet.of(problem)
    switches = {(s.source, s.target): s for s in problem.switches}
    version, loss, clock, energy = problem.start_version, problem.start_loss, problem.start_time_s, 0.0
    rounds: list[Round] = []
    known: dict[tuple[int, int], tuple[RoundCost, tuple[Window, ...] | None, dict[str, int]]] = {}
    for decision in decisions:
        wanted = problem.versions[decision.version]
        key = (decision.version, id(decision.used))
        if key not in known:  # most rounds repeat a set
            who = {problem.nodes[i].name: int(n) for i, n in sorted(decision.used.items())}
            cost = fleet.round_cost(decision.version, decision.used)
            known[key] = (cost, fleet.common_windows(decision.used), who)
        cost, windows, who = known[key]
        time_s, energy_j, ready = cost.time_s, cost.energy_j, clock
        if wanted.name != version:
            switch = switches.get((version, wanted.name))
            if switch is None:
                return None
            ready += switch.time_s
            time_s += switch.time_s
            energy_j += switch.energy_j
            loss += switch.loss_jump
        start = earliest_start(windows, ready, cost.time_s)
        if start is None:
            return None
        loss = step_one(wanted.curve, loss, cost.share)
        clock = start + cost.time_s
        energy += energy_j
        version = wanted.name
        rounds.append(Round(version, who, start, time_s, energy_j, loss))
    return Plan(tuple(rounds), energy, clock, loss, tuple(decisions))


def meets_limits(problem: Problem, plan: Plan) -> bool:
    """Loss, deadline and round cap (members and windows are right by construction)."""
    if not plan.rounds:
        return problem.met_at_start
    few_enough = problem.max_rounds is None or len(plan.rounds) <= problem.max_rounds
    return few_enough and plan.loss <= problem.loss_limit and plan.time_s <= problem.time_limit


def read_plan(path: str | Path) -> dict[str, Any]:
    """A plan file as it stands; only its outer form is checked here, `verify` does the rest."""
    path = Path(path)
    try:
        data = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ProblemError([f"{path}: cannot be read ({error.strerror}); give a plan file"]) from None
    except (ValueError, RecursionError) as error:
        raise ProblemError([f"{path}: is not valid JSON ({error}); give a plan file"]) from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ProblemError([f"{path}: format is not '{FORMAT}'; give a file that `takifugu plan -o` wrote"])
    return data
