"""What `takifugu plan` prints: the plan as a table and a timeline, its reasons, and the baselines.

Where a plan was made for a share of the curves' samples (`--confidence`), sensitivity and baselines are, too.
"""

from __future__ import annotations

from collections.abc import Iterator

from takifugu.cost_notes import cost_notes
from takifugu.plan.baselines import run_baselines
from takifugu.plan.bench import MOST_ROUNDS as MOST_BASELINE_ROUNDS
from takifugu.plan.explanation import stretches, switch_reasons, timeline
from takifugu.plan.fleet import Fleet
from takifugu.plan.plan import Plan, meets_limits, replay
from takifugu.plan.problem import Problem
from takifugu.plan.result import Result
from takifugu.plan.robust import robust_baselines, solve_robust
from takifugu.plan.samples import needed, reached, sample_count
from takifugu.plan.sensitivity import savings
from takifugu.plan.solve import solve


def summary(result: Result) -> Iterator[str]:
    plan = result.plan
    if plan is None:
        yield f"status: {result.status}"
        yield from (f"  - {reason}" for reason in result.reasons)
        if result.best_loss_by_deadline is not None:
            yield f"best loss by the deadline: {result.best_loss_by_deadline:.6g}"
        if result.earliest_time_to_loss_s is not None:
            yield f"earliest time to the loss: {result.earliest_time_to_loss_s:.6g} s"
        return
    gap = "unknown" if result.gap is None else f"{result.gap * 100:.3g}%"
    bound = "unknown" if result.lower_bound_j is None else f"{result.lower_bound_j:,.6g} J"
    yield f"status: {result.status}    energy: {plan.energy_j:,.6g} J    lower bound: {bound}    gap: {gap}"
    problem = result.problem
    yield (
        f"time: {plan.time_s:,.6g} s of {problem.deadline_s:,.6g} s    loss: {plan.loss:.6g} "
        f"(target {problem.target_loss:g})    rounds: {len(plan.rounds)}"
    )
    if (held := result.samples_reached) is not None:
        yield _samples(result, held)
    yield from (f"costs: {note}" for note in cost_notes(problem.to_dict()))


def _samples(result: Result, held: int) -> str:
    count = sample_count(result.problem)
    line = f"samples: the plan reaches the target in {held} of {count} samples of the fitted curves"
    if result.confidence is not None:
        return f"{line} (asked: {needed(result.confidence, count)})"
    if held < needed(0.9, count):
        line += "; --confidence 0.9 plans for nine in ten"
    return line


def table(result: Result) -> Iterator[str]:
    plan = result.plan
    if plan is None or not plan.rounds:
        return
    head = ("rounds", "version", "nodes", "samples", "from s", "to s", "energy J", "loss")
    rows = [
        (
            f"{s.first}" if s.first == s.last else f"{s.first}-{s.last}",
            s.version,
            f"{s.nodes}",
            f"{s.samples}",
            f"{s.start_s:.1f}",
            f"{s.end_s:.1f}",
            f"{s.energy_j:.1f}" if plan.energy_j >= 100.0 else f"{s.energy_j:.4g}",
            f"{s.loss:.4f}",
        )
        for s in stretches(result.problem, plan)
    ]
    widths = [max(len(r[i]) for r in (head, *rows)) for i in range(len(head))]
    for row in (head, *rows):
        yield "  ".join(
            c.ljust(w) if i == 1 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))
        )


def explanation(result: Result, effort_s: float | None = None) -> Iterator[str]:
    """Everything: table, timeline, switches, sensitivity and baselines."""
    plan, problem = result.plan, result.problem
    if plan is None or not plan.rounds:
        return
    yield ""
    yield from table(result)
    yield ""
    yield from timeline(problem, plan)
    reasons = list(switch_reasons(problem, plan, Fleet.of(problem), result.confidence))
    if reasons:
        yield ""
        yield "why it switches when it does"
        yield from (f"  {reason}" for reason in reasons)
    confidence = result.confidence
    yield ""
    yield "what a looser limit would save (least energy found, within the tolerance)"
    if confidence is not None:
        yield f"  each solved for {_share(result)} too, but not sample by sample: small savings may be missed"
    tolerance = max(result.gap or 0.0, 0.01)

    def solved(changed: Problem) -> Plan | None:
        if confidence is None:
            found = solve(changed, tolerance, effort_s, thorough=False)
        else:
            found = solve_robust(changed, confidence, tolerance, effort_s, thorough=False)
        if found.stats.get("interrupted"):
            raise KeyboardInterrupt  # its best so far would tell nothing about the limit
        return found.plan

    def holds(other: Plan) -> bool:
        again = replay(problem, other.decisions)
        if again is None or not meets_limits(problem, again):
            return False
        if confidence is None:
            return True
        return reached(problem, again) >= needed(confidence, sample_count(problem))

    for row in savings(problem, plan.energy_j, solved, holds):
        share = 100 * row.saved_j / plan.energy_j if plan.energy_j else 0.0
        yield f"  {row.change}: {row.saved_j:,.4g} J ({share:.2f}%)"
    yield ""
    if confidence is None:
        yield "baselines (our own choice, on the same problem)"
        others, missed = run_baselines(problem), "misses a limit"
    else:
        yield (
            "baselines (our own choice, on the same problem; each repeats its last round until it reaches "
            f"the loss in {_share(result)})"
        )
        others = robust_baselines(problem, confidence)
        missed = "misses a limit, or the loss in too many samples"
    if problem.rounds_limit > MOST_BASELINE_ROUNDS and len(plan.rounds) > MOST_BASELINE_ROUNDS // 2:
        missed += f" within the {MOST_BASELINE_ROUNDS:,} rounds that baselines are followed"
    longest = max(map(len, others))
    for name, other in others.items():
        if other is None:
            yield f"  {name:<{longest}}  {missed}"
        else:
            times = other.energy_j / plan.energy_j if plan.energy_j else 1.0
            yield f"  {name:<{longest}}  {other.energy_j:,.6g} J  {times:.2f}x"


def _share(result: Result) -> str:
    count = sample_count(result.problem)
    assert result.confidence is not None
    return f"{needed(result.confidence, count)} of {count} samples of the curves"
