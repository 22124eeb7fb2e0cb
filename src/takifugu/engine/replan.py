"""A plan meets reality: where the two part, the rest is planned anew.

After every round the server knows the clock and the loss. It believes a part of what that loss differs from
what the curve said, since single rounds scatter. From there the rest of the plan is carried out on paper. If
it misses the target, or needs fewer or more rounds than it has left, the rest is solved anew from where the
run stands; a new plan is taken if the old one fails, or if it saves enough. Where no plan does any more,
others join. docs/decisions/207-replanning.md has the reasons and what was tried.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from takifugu.durable import Row
from takifugu.engine.folder import RunFolder
from takifugu.engine.policies import Policy, as_file, from_file
from takifugu.engine.state import State
from takifugu.errors import ProblemError, RunError
from takifugu.plan.curves import step_one
from takifugu.plan.fleet import Fleet
from takifugu.plan.plan import Decision, Plan, Round, read_plan, replay
from takifugu.plan.problem import Problem
from takifugu.plan.result import Result

TRUST = 0.3
"""The part of what a loss differs from the curve's that is believed."""
ALIKE = 0.1
"""A team has the fleet's labels if its label mix is no further from the fleet's (total variation). What
another team shows above the curve is the labels it lacks, which come back when others join (decision 205)."""
PARTED = 0.03
"""They have parted if the rounds that are needed differ from those that are left by more than this part."""
WORTH, LEAST = 0.1, 0.01
"""If the old plan still does, a new one must save this part of what is left to pay, and of the whole."""
TOLERANCE = 0.02
HAIR = 1e-4
"""Above the target by this part at least, as long as the target is not really met."""
PATIENCE = 0.1
"""A plan may end later than it should by this part of what is then left before the deadline."""
RESERVE_PARTS = (0.3, 0.6, 0.85, 1.0)
"""Where the time that was planned for will not do, so much of the reserve is used, the less the better: what
is behind in it is mended by quick rounds, which leave time for more."""
MOST_REPEATS = 1000


@dataclass(frozen=True)
class Course:
    """The plan in force: the one a run began with, or one that was made after a round."""

    policy: Policy
    after: int = 0
    """The round it was made after"""
    cut: int | None = None
    """The last round it is followed to, if it was given up before its end"""

    @property
    def planned(self) -> int:
        """The last round that it has a decision for."""
        return self.after + len(self.policy.plan.rounds) if self.cut is None else self.cut

    def at(self, number: int, loss: float = math.inf) -> tuple[Decision, Round | None]:
        """What to do in a round, and what was predicted for it: nothing, beyond the plan."""
        if number <= self.planned:
            return self.policy.at(number - self.after)
        return self.beyond(number, loss)[0], None

    def beyond(self, number: int, loss: float) -> list[Decision]:
        return self.policy.beyond(number - self.planned, loss)


def resumed_course(policy: Policy, folder: RunFolder, row: Row) -> Course:
    """The plan in force in a round that was carried out before."""
    after, course = row.get("plan_after", 0), Course(policy)
    if after:
        path = folder.plan_path(after)
        try:
            data = read_plan(path)
            again = from_file(Problem.from_dict(data.get("problem") or {}), data, str(path), replans=True)
        except ProblemError as error:
            raise RunError(f"{path}: {error}; put the file back, or start anew in another folder") from error
        course = Course(again, after)
    planned = row.get("planned_rounds", course.planned)
    return course if planned == course.planned else replace(course, cut=planned)


def _followed(problem: Problem, file: Mapping[str, Any], at: State) -> Course:
    return Course(from_file(problem, file, replans=True), at.round)


@dataclass(frozen=True)
class Replanner:
    problem: Problem
    fleet: Fleet
    deadline_s: float
    """When it must be done; what was planned for may be earlier, the rest is a reserve."""
    whole_j: float
    """What the first plan was to take."""

    @property
    def planned_s(self) -> float:
        """The deadline that was planned for"""
        return min(self.problem.deadline_s, self.deadline_s)

    def believed(
        self,
        before: float,
        version: str,
        trained: str,
        used: Mapping[int, int],
        loss: float,
        fresh: float = math.inf,
    ) -> float:
        """The loss after a round, between what the curve made of the one before it and what was seen.

        `used`: what those who came back trained on. `fresh`: the loss the run really started with. As long as
        the curve is above it, it stands for a network that hesitates: a loss below the curve is then no
        sign of being ahead, since curve and losses are meant to meet later.
        """
        if version != trained:
            jumps = {(s.source, s.target): s.loss_jump for s in self.problem.switches}
            before += jumps[version, trained]
        expected = before
        if used:
            index = self.problem.version_index[trained]
            share = self.fleet.round_cost(index, used).share
            expected = step_one(self.problem.versions[index].curve, before, share)
        if loss > expected and self._lacks_labels(used):
            return expected
        if loss < expected and expected > fresh:
            return expected
        return expected + TRUST * (loss - expected)

    def _lacks_labels(self, used: Mapping[int, int]) -> bool:
        """Whether the label mix of those who trained is known to differ from the fleet's."""
        if self._labels is None or not used:
            return False
        samples = self._labels.sum(axis=1)
        trained = sum(used[i] * self._labels[i] / samples[i] for i in used)
        mix, fleet = trained / trained.sum(), self._labels.sum(axis=0) / samples.sum()
        return bool(0.5 * np.abs(mix - fleet).sum() > ALIKE)

    @cached_property
    def _labels(self) -> NDArray[np.float64] | None:
        """[node, label], or nothing where they are not known"""
        rows = [node.labels for node in self.problem.nodes]
        return None if None in rows else np.array(rows, dtype=float)

    def course(self, course: Course, at: State) -> Course:
        """The plan for the rest: the one there is, or a new one."""
        left, late = course.planned - at.round, at.clock_s >= self.planned_s
        limits = list(self._limits_s(at.clock_s))
        here = self._from(at, used_up=left <= 0 or late)
        patient = replace(
            here, deadline_s=limits[0] + PATIENCE * (self.deadline_s - limits[0]), nodes=self._real.nodes
        )
        rest = self._rest(course, at, patient)
        if rest is not None and left > 0 and abs(len(rest.rounds) - left) <= PARTED * left:
            return course
        result = next((r for r in (self._solved(here, by_s) for by_s in limits) if r.plan is not None), None)
        if result is None or result.plan is None:
            # Nothing does any more: it goes on as it was, while there is time. In the reserve others join.
            return replace(course, cut=at.round) if late and left > 0 else course
        if rest is not None:
            worth_j = max(WORTH * rest.energy_j, LEAST * self.whole_j)
            if result.plan.energy_j > rest.energy_j - worth_j:
                return course if left > 0 else _followed(patient, as_file(patient, rest, "repeated"), at)
        return _followed(result.problem, result.to_dict(), at)

    def _from(self, at: State, used_up: bool) -> Problem:
        """The problem from here. A plan that is used up above the target promised too much: the next has to
        promise twice the way that is left."""
        problem = self.problem
        loss = 2.0 * at.loss - problem.target_loss if used_up else at.believed
        least = problem.loss_limit + HAIR * abs(problem.loss_limit)
        cap = None if problem.max_rounds is None else max(problem.max_rounds - at.round, 1)
        return replace(
            problem,
            start_version=at.version,
            start_loss=max(loss, least),
            start_time_s=at.clock_s,
            max_rounds=cap,
            reserve=None,
        )

    @cached_property
    def _real(self) -> Problem:
        """The problem with the windows as they are."""
        return self.problem.without_reserve()

    def _limits_s(self, clock_s: float) -> Iterator[float]:
        """What to plan for: as planned; then with more and more of the reserve, or of what is left of it."""
        if clock_s < self.planned_s:
            yield self.planned_s
        begin_s = max(clock_s, self.planned_s)
        if self.deadline_s > begin_s:
            yield from (begin_s + part * (self.deadline_s - begin_s) for part in RESERVE_PARTS)

    def _rest(self, course: Course, at: State, here: Problem) -> Plan | None:
        """What is left of the plan, on paper from here until the target is met, its last round repeated if
        need be. Nothing, if that breaks a limit."""
        decisions = course.policy.plan.decisions
        ahead = list(decisions[at.round - course.after :])
        last = decisions[-1]
        once_s = self.fleet.round_cost(last.version, last.used).time_s
        repeats = min((here.time_limit - at.clock_s) / once_s, here.max_rounds or MOST_REPEATS, MOST_REPEATS)
        for rows in (ahead, [*ahead, *[last] * (int(repeats) + 1)]):
            paper = replay(here, rows, self.fleet) if rows else None
            if paper is None:
                continue
            met = next((n for n, row in enumerate(paper.rounds, 1) if row.loss <= here.loss_limit), None)
            if met is not None:
                rest = replay(here, rows[:met], self.fleet)
                late = rest is None or rest.time_s > here.time_limit
                return None if late or met > (here.max_rounds or met) else rest
        return None

    def _solved(self, here: Problem, by_s: float) -> Result:
        from takifugu.plan.solve import solve

        # No limit on its time: the same state gives the same plan, also when a run is resumed.
        nodes = (
            here.nodes if by_s <= self.planned_s else self._real.nodes
        )  # the reserve of windows is used, too
        wanted = replace(here, deadline_s=by_s, nodes=nodes)
        found = solve(wanted, TOLERANCE, explain_infeasible=False, thorough=False)
        if found.stats.get("interrupted"):
            raise KeyboardInterrupt
        return found
