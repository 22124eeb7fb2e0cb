"""A plan in words: rounds grouped into stretches, a timeline, and why each switch comes when it does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from takifugu.plan.fleet import Fleet
from takifugu.plan.plan import Decision, Plan, meets_limits, replay
from takifugu.plan.problem import Problem
from takifugu.plan.samples import needed, reached, sample_count


@dataclass(frozen=True)
class Stretch:
    """Rounds in a row with the same version and nodes."""

    first: int
    last: int
    version: str
    nodes: int
    samples: int
    start_s: float
    end_s: float
    energy_j: float
    loss: float


def ends_of_rounds(problem: Problem, plan: Plan) -> list[float]:
    """When each round is over. The next one may begin later: after a switch, or when nodes are there."""
    seconds = {(s.source, s.target): s.time_s for s in problem.switches}
    before = [problem.start_version, *(row.version for row in plan.rounds)]
    return [
        row.start_s + row.time_s - seconds.get((old, row.version), 0.0)
        for old, row in zip(before, plan.rounds, strict=False)
    ]


def stretches(problem: Problem, plan: Plan) -> list[Stretch]:
    """Runs of rounds of one version and like teams (within a tenth of the samples)."""
    ends = ends_of_rounds(problem, plan)
    groups: list[list[int]] = []
    for number, row in enumerate(plan.rounds):
        if groups:
            head = plan.rounds[groups[-1][0]]
            size, other = sum(head.nodes.values()), sum(row.nodes.values())
            if head.version == row.version and abs(size - other) <= 0.1 * max(size, other):
                groups[-1].append(number)
                continue
        groups.append([number])
    rows = []
    for group in groups:
        rounds = [plan.rounds[n] for n in group]
        last = rounds[-1]
        rows.append(
            Stretch(
                group[0] + 1,
                group[-1] + 1,
                rounds[0].version,
                round(float(np.mean([len(r.nodes) for r in rounds]))),
                round(float(np.mean([sum(r.nodes.values()) for r in rounds]))),
                rounds[0].start_s,
                ends[group[-1]],
                sum(r.energy_j for r in rounds),
                last.loss,
            )
        )
    return rows


def timeline(problem: Problem, plan: Plan, width: int = 64) -> Iterator[str]:
    """One line per version: when it trains, on a common axis up to the deadline."""
    span = max(problem.deadline_s, plan.time_s) or 1.0
    names = list(dict.fromkeys(r.version for r in plan.rounds))
    longest = max(map(len, names), default=0)
    for name in names:
        cells = [" "] * width
        for row, end in zip(plan.rounds, ends_of_rounds(problem, plan), strict=True):
            if row.version != name:
                continue
            first = min(int(row.start_s / span * width), width - 1)
            for cell in range(first, max(first + 1, min(int(np.ceil(end / span * width)), width))):
                cells[cell] = "="
        yield f"{name:<{longest}} |{''.join(cells)}|"
    yield f"{'':<{longest}}  0{'':>{width - 2}}{span:.4g} s"


def switch_reasons(
    problem: Problem, plan: Plan, fleet: Fleet | None = None, confidence: float | None = None
) -> Iterator[str]:
    """For each switch, what the same plan would cost with it one round earlier or later."""
    fleet = fleet or Fleet.of(problem)
    decisions = list(plan.decisions)
    start = problem.version_index[problem.start_version]
    before = [start, *(d.version for d in decisions[:-1])]
    for number, (old, new) in enumerate(zip(before, (d.version for d in decisions), strict=True)):
        if old == new:
            continue
        names = (problem.versions[old].name, problem.versions[new].name)
        per_round = [_cost_of_progress(problem, fleet, v, decisions[number].used) for v in (old, new)]
        line = f"round {number + 1}: {names[0]} -> {names[1]}"
        if per_round[0] is not None and per_round[1] is not None and per_round[1] < per_round[0]:
            line += f", a round on the same nodes costs {per_round[1] / per_round[0]:.2f}x the energy"
        notes = []
        if number > 0:
            notes.append(("one round earlier", _moved(decisions, number - 1, new)))
        if number + 1 < len(decisions) and decisions[number + 1].version == new:
            notes.append(("one round later", _moved(decisions, number, old)))
        for words, changed in notes:
            line += f"; {words}: {_verdict(problem, fleet, plan, changed, confidence)}"
        yield line


def _moved(decisions: list[Decision], number: int, version: int) -> list[Decision]:
    changed = list(decisions)
    changed[number] = Decision(version, changed[number].used)
    return changed


def _cost_of_progress(problem: Problem, fleet: Fleet, version: int, used: object) -> float | None:
    members = {i: n for i, n in dict(used).items() if fleet.by_version[version].can_join[i]}  # type: ignore[call-overload]
    return fleet.round_cost(version, members).energy_j if members else None


def _verdict(
    problem: Problem, fleet: Fleet, plan: Plan, decisions: list[Decision], confidence: float | None
) -> str:
    for decision in decisions:
        if not all(fleet.by_version[decision.version].can_join[i] for i in decision.used):
            return "some nodes lack the memory"
    other = replay(problem, decisions, fleet)
    if other is None:
        return "not possible"
    if not meets_limits(problem, other):
        if other.loss > problem.loss_limit:
            return f"would end at loss {other.loss:.4g}, short of the target"
        return f"would end at {other.time_s:.6g} s, after the deadline"
    if confidence is not None:
        count, held = sample_count(problem), reached(problem, other, fleet)
        if held < needed(confidence, count):
            return f"would reach the target in {held} of {count} samples only"
    more = (other.energy_j / plan.energy_j - 1.0) * 100 if plan.energy_j else 0.0
    return f"{more:+.2f}% energy"
