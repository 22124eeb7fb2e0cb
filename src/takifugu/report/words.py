"""The result in plain words: one sentence for the headline, a few more below it."""

from __future__ import annotations

from dataclasses import dataclass

from takifugu.report import units
from takifugu.report.records import Plan, PlanFile, Problem, Run

_NAMED = 6
"""As many nodes are named in a sentence."""


@dataclass(frozen=True)
class Headline:
    title: str
    sentences: tuple[str, ...]
    tone: str
    """good, bad, open."""


def headline(source: Run | PlanFile) -> Headline:
    if isinstance(source, PlanFile):
        return _of_plan(source.plan, source.problem)
    if source.outcome is None:
        return _of_open_run(source)
    return _of_run(source)


def _of_run(run: Run) -> Headline:
    assert run.outcome is not None
    target, best = units.loss(run.problem.target_loss), run.best_baseline
    spent, took = units.energy(run.outcome.energy_j), units.duration(run.outcome.time_s)
    if run.met:
        title = f"Loss {target} reached with {spent} in {took}"
        title += f", {_against(run.energy_j, best.energy_j)} than the best baseline." if best else "."
    elif run.late:
        limit = units.duration(run.problem.deadline_s)
        title = f"Loss {target} reached too late: after {took} instead of {limit}, with {spent}."
    else:
        title = f"Loss {target} not reached: {units.loss(run.outcome.loss)} after {took} and {spent}."
    said = []
    if not run.reached and run.outcome.reason:
        said.append(f"It ended because: {run.outcome.reason.rstrip('.')}.")
    said += [*_baselines(run), *_prediction(run), *_beyond(run), *_certificate(run.plan, run.problem)]
    said += _not_the_run(run)
    return Headline(title, tuple(said), "good" if run.met else "bad")


def _of_open_run(run: Run) -> Headline:
    done, target = len(run.rounds), units.loss(run.problem.target_loss)
    planned = f" of {len(run.plan.rounds)} planned" if run.plan is not None and run.plan.rounds else ""
    title = f"In progress: {done}{planned} rounds done"
    if run.rounds:
        last = run.rounds[-1]
        title += f", loss {units.loss(last.loss)} (target {target}) with {units.energy(last.total_energy_j)}"
    said = ["There is no result.json yet: the run goes on, or was stopped and can be resumed."]
    return Headline(title + ".", (*said, *_certificate(run.plan, run.problem)), "open")


def _of_plan(plan: Plan, problem: Problem) -> Headline:
    target, by = units.loss(problem.target_loss), units.duration(problem.deadline_s)
    if plan.status == "infeasible":
        said = []
        if plan.best_loss_by_deadline is not None:
            said.append(
                f"The best loss any plan has by the deadline is {units.loss(plan.best_loss_by_deadline)}."
            )
        if plan.earliest_time_to_loss_s is not None:
            said.append(
                f"The loss can be had at {units.duration(plan.earliest_time_to_loss_s)} at the earliest."
            )
        return Headline(f"No plan reaches loss {target} within {by}: this is proven.", tuple(said), "bad")
    if plan.energy_j is None or plan.time_s is None:
        return Headline(
            f"No plan for loss {target} within {by} was found before time ran out.",
            ("Neither a plan nor the proof that there is none: allow more time.",),
            "open",
        )
    if not plan.rounds:
        return Headline(f"Loss {target} is met at the start: nothing to do.", (), "good")
    title = (
        f"A plan for loss {target}: {units.energy(plan.energy_j)} in {units.duration(plan.time_s)}, "
        f"{_count(len(plan.rounds), 'round')}, as predicted."
    )
    return Headline(title, tuple(_certificate(plan, problem)), "good")


def _against(energy_j: float, other_j: float) -> str:
    share = energy_j / other_j - 1 if other_j > 0 else 0.0
    if abs(share) < 0.0005:
        return "no more energy" if share <= 0 else "hardly more energy"
    return f"{units.percent(share)} {'less' if share < 0 else 'more'} energy"


def _baselines(run: Run) -> list[str]:
    if not run.baselines:
        return []
    finished = [b for b in run.baselines if b.outcome is not None]
    reached, best = sum(b.met for b in finished), run.best_baseline
    if best is None:
        return [f"None of the {_count(len(finished), 'baseline')} reached it in time."]
    which = f"the best of them, “{best.name}”, with {units.energy(best.energy_j)}"
    return [f"{reached} of {_count(len(finished), 'baseline')} reached it in time, {which}."]


def _prediction(run: Run) -> list[str]:
    assert run.outcome is not None
    predicted = run.outcome.predicted
    if predicted.energy_j is None or predicted.time_s is None:
        return []
    return [
        f"Predicted, from the fitted curves and the nodes' profiles: {units.energy(predicted.energy_j)} in "
        f"{units.duration(predicted.time_s)}; the run took {_more(run.outcome.energy_j, predicted.energy_j)} "
        f"energy and {_more(run.outcome.time_s, predicted.time_s)} time."
    ]


def _not_the_run(run: Run) -> list[str]:
    """Why a run may need less than what is proven of every plan."""
    bound = None if run.plan is None else run.plan.lower_bound_j
    if run.outcome is None or bound is None:
        return []
    if run.outcome.energy_j < bound:
        return [
            f"The run's {units.energy(run.outcome.energy_j)} is below that bound. This is no contradiction: "
            "the bound is on predicted energy, and actual speeds, energies and losses differed from the "
            "prediction."
        ]
    return [
        "The bound is on predicted energy; actual speeds, energies and losses differ from the prediction."
    ]


def _beyond(run: Run) -> list[str]:
    """What became of the plan on the way: made anew, or used up."""
    assert run.outcome is not None
    said, planned = [], run.outcome.planned_rounds
    extra = run.outcome.rounds - (planned or run.outcome.rounds)
    if anew := [event for event in run.events if event.get("event") == "replanned"]:
        said.append(f"The run drifted from the plan; replanned {_times(len(anew))}.")
        beyond = [event for event in run.events if event.get("event") == "beyond_plan"]
        extra = run.outcome.rounds + 1 - _whole(beyond[-1].get("round")) if beyond else 0
    if extra <= 0:
        return said
    enough = "The last plan was not enough" if anew else f"The plan's {planned} rounds were not enough"
    joined = [str(event.get("node")) for event in run.events if event.get("event") == "joined"]
    if joined:
        names = f"{', '.join(joined[:_NAMED])}{' and others' if len(joined) > _NAMED else ''}"
        return [*said, f"{enough}: its last team went on for {extra} more, joined by {names}."]
    return [*said, f"{enough}: its last round was repeated {_times(extra)}."]


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _whole(value: object) -> int:
    return value if isinstance(value, int) else 0


def _more(actual: float, predicted: float) -> str:
    share = actual / predicted - 1 if predicted > 0 else 0.0
    if abs(share) < 0.0005:
        return "as much"
    return f"{units.percent(share)} {'more' if share > 0 else 'less'}"


def _certificate(plan: Plan | None, problem: Problem) -> list[str]:
    if plan is None or plan.energy_j is None or plan.lower_bound_j is None or plan.gap is None:
        return []
    by = "" if problem.planned_for_s is None else f" within {units.duration(problem.planned_for_s)}"
    proven = f"Proven, for the same predicted figures: no plan{by} needs less than"
    energy = units.energy(plan.energy_j)
    if plan.gap <= 1e-9:
        return [f"{proven} the plan's {energy}.", *_samples(plan)]
    bound = units.energy(plan.lower_bound_j)
    return [f"{proven} {bound}, {units.percent(plan.gap)} below the plan's {energy}.", *_samples(plan)]


def _samples(plan: Plan) -> list[str]:
    if plan.samples is None:
        return []
    reached, count = plan.samples
    return [f"By the curves' samples, the plan reaches the target in {reached} of {count}."]


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
