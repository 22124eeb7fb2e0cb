"""Carries a policy out: real training, in this process, on a virtual clock.

Times and energies come from the world's true nodes; the models, the losses and what dropouts do to them are
real. All of a run's state is its model, its last line in `rounds.jsonl` and the plan which that names: so it
can go on from there bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from takifugu.durable import Row
from takifugu.engine.folder import RunFolder
from takifugu.engine.policies import Policy
from takifugu.engine.replan import Course, Replanner, resumed_course
from takifugu.engine.setting import Setting
from takifugu.engine.state import Begun, State, Trained
from takifugu.engine.world import Outcome
from takifugu.errors import CheckpointError, RunError, TrainingError
from takifugu.lowrank.checkpoint import load, save
from takifugu.lowrank.surgery import apply_, structure_of
from takifugu.plan.fleet import Fleet, earliest_start
from takifugu.plan.plan import Decision, Round
from takifugu.plan.problem import at_most
from takifugu.plan.turnout import Turnout
from takifugu.train.cooperative import Mean, cooperative_round, member_seed
from takifugu.train.evaluation import Score, evaluate
from takifugu.train.round import Samples

PATIENCE = 1.5
"""The server waits for a missing member until this many times the planned round time."""

MOST_ROUNDS = 2000
"""Where the problem gives no cap."""

NOBODY = "no node of the next round is available any more"

Progress = Callable[[Row], None]


def simulate(
    policy: Policy, setting: Setting, folder: RunFolder, progress: Progress | None = None
) -> dict[str, Any]:
    """Runs to the end, from wherever the folder stands; returns what `result.json` says."""
    with folder.locked():
        done = folder.result()
        return done if done is not None else _Simulation(policy, setting, folder, progress).run()


class _Simulation:
    def __init__(
        self, policy: Policy, setting: Setting, folder: RunFolder, progress: Progress | None
    ) -> None:
        self.policy, self.setting, self.folder = policy, setting, folder
        self.problem = setting.problem
        self.progress = progress or (lambda _: None)
        # Nodes stay until their windows really end; a plan with a reserve expects them to leave earlier.
        self.fleet = Fleet.of(self.problem.without_reserve())
        self.turnout = Turnout(self.fleet)
        self.mean = Mean.of(setting.weights, setting.shares, setting.spec)
        self.switches = {(s.source, s.target): s for s in self.problem.switches}
        self.places = {node.name: i for i, node in enumerate(self.problem.nodes)}
        self.course = Course(policy)
        self.replanner = (
            Replanner(self.problem, self.fleet, setting.deadline_s, policy.plan.energy_j)
            if policy.replans
            else None
        )
        self.model = self._start_model()

    def run(self) -> dict[str, Any]:
        state = start = self.start = self._start()
        resumed = self.folder.resume(self._load)
        if resumed.last is not None:
            try:
                state = State.after(resumed.last)
            except (KeyError, TypeError) as error:
                raise RunError(
                    f"{self.folder.path / 'rounds.jsonl'}: its last line lacks {error}; "
                    "put the file back, or start anew in another folder"
                ) from error
            self.course = resumed_course(self.policy, self.folder, resumed.last)
            self._replan(state)
            event = self._event("resumed", state.round, state.clock_s, notes=list(resumed.notes))
            self.folder.add_events([event], state.round)
        elif resumed.notes:
            self.model = self._start_model()  # a checkpoint that was refused may have left its traces
        reason = self._over(state)
        if reason is not None and state.round == 0:
            self.folder.add_events([self._ending(state, reason)], 0)
        while reason is None:
            try:
                state, reason = self._round(state)
            except TrainingError as error:
                reason = f"training failed: {error}"
                event = self._event("stopped", state.round + 1, state.clock_s, reason=reason)
                self.folder.add_events([event], state.round)
        return self._finish(start, state, reason)

    # ---- the model ----------------------------------------------------------------------------------

    def _start_model(self) -> nn.Module:
        model = self.setting.build()
        apply_(model, self.setting.structures[self.problem.start_version])
        return model

    def _load(self, path: Path, row: Row) -> None:
        load(path, self.model)
        found = structure_of(self.model).id
        if found != row.get("structure"):
            raise CheckpointError(
                f"{path}: is for structure {found}, rounds.jsonl says {row.get('structure')}"
            )

    def _start(self) -> State:
        score = evaluate(self.model, self.setting.validation, self.setting.spec.loss)
        problem = self.problem
        loss, accuracy = score.loss, score.accuracy
        # Curves start at [start].loss. It is above the fresh model's loss where the network hesitates, and
        # replanning has to start where the curves do; otherwise it takes a run for ahead that is not.
        believed = max(loss, problem.start_loss)
        return State(0, problem.start_version, problem.start_time_s, 0.0, 0.0, loss, accuracy, believed)

    # ---- the plan in force --------------------------------------------------------------------------

    def _replan(self, state: State) -> None:
        """The rest is planned anew, if it has to be; the new plan is kept in the folder."""
        past = state.clock_s >= self.setting.deadline_s or state.round >= self._most_rounds
        if self.replanner is None or past or state.loss <= self.problem.loss_limit:
            return
        course = self.replanner.course(self.course, state)
        if course.after != self.course.after:
            self.folder.add_plan(course.after, course.policy.file)
        self.course = course

    def _believed(self, state: State, begun: Begun, loss: float) -> float:
        if self.replanner is None:
            return loss
        used = {self.places[name]: samples for name, samples in begun.returned.items()}
        return self.replanner.believed(
            state.believed, state.version, begun.version, used, loss, self.start.loss
        )

    @property
    def _most_rounds(self) -> int:
        return self.problem.max_rounds or MOST_ROUNDS

    # ---- when it ends -------------------------------------------------------------------------------

    def _over(self, state: State) -> str | None:
        """Why the run is over; nothing if it goes on."""
        problem, planned = self.problem, self.course.planned
        if state.loss <= problem.loss_limit:
            return "target met"
        if state.round >= self._most_rounds:
            return f"the cap of {self._most_rounds} rounds"
        if state.round < planned:
            return None
        if not planned:
            return (
                f"the plan is empty, but the loss at the start is {state.loss:.6g}, not [start].loss = "
                f"{problem.start_loss:g}; correct it and plan again"
            )
        if self._fitting(state) is not None:
            return None
        found = self._assemble(self.course.at(state.round + 1, state.loss)[0], state.clock_s)
        return (
            NOBODY
            if found is None
            else "the plan is exhausted, and another round would end past the deadline"
        )

    def _fitting(self, state: State) -> Decision | None:
        """Beyond the plan: what there is time for; nothing, if for nothing any more."""
        for decision in self.course.beyond(state.round + 1, state.loss):
            found = self._assemble(decision, state.clock_s)
            if found is not None and found[0] + found[2] <= at_most(self.setting.deadline_s):
                return decision
        return None

    def _next(self, state: State) -> tuple[Decision, Round | None]:
        if state.round < self.course.planned:
            return self.course.at(state.round + 1)
        decision = self._fitting(state)
        assert decision is not None  # or the run would be over
        return decision, None

    def _finish(self, start: State, state: State, reason: str) -> dict[str, Any]:
        plan, problem = self.policy.plan, self.problem
        reached = state.loss <= problem.loss_limit
        result = {
            "reached": reached,
            "loss": state.loss,
            "accuracy": state.accuracy,
            "time_s": state.clock_s,
            "energy_j": state.energy_j,
            "bytes": state.bytes,
            "rounds": state.round,
            "planned_rounds": len(plan.rounds),
            "replans": self.folder.plans(),
            "deadline_met": reached and state.clock_s <= at_most(self.setting.deadline_s),
            "reason": reason,
            "predicted": {"energy_j": plan.energy_j, "time_s": plan.time_s, "loss": plan.loss},
            "start_loss": start.loss,
        }
        self.folder.finish(result, state.round)
        return result

    # ---- one round ----------------------------------------------------------------------------------

    def _assemble(self, decision: Decision, ready_s: float) -> tuple[float, dict[int, int], float] | None:
        """When the round can begin, with whom, and how long it should take by the profile.

        The server knows the profile only. If reality is so late that the members no longer share a window,
        those who can still come together with the most samples go ahead; nothing, if there is nobody.
        """
        cost = self.fleet.round_cost(decision.version, decision.used)
        start = earliest_start(self.fleet.common_windows(decision.used), ready_s, cost.time_s)
        if start is not None:
            return start, dict(decision.used), cost.time_s
        found = self.turnout.largest(decision.version, decision.used, ready_s)
        return None if found is None else (found.start_s, dict(found.used), found.cost.time_s)

    def _begin(self, state: State) -> Begun | None:
        """The next round as the server sets it off; nothing, if no member is available any more."""
        problem, number = self.problem, state.round + 1
        decision, predicted = self._next(state)
        version = problem.versions[decision.version]
        switch = self.switches[state.version, version.name] if version.name != state.version else None
        ready = state.clock_s + (switch.time_s if switch else 0.0)
        found = self._assemble(decision, ready)
        if found is None:
            return None
        start, used, planned_s = found
        members = {problem.nodes[place].name: samples for place, samples in sorted(used.items())}
        outcomes = {
            name: self.setting.world.outcome(number, name, version.name, samples)
            for name, samples in members.items()
        }
        absent = tuple(problem.nodes[place].name for place in sorted(set(decision.used) - set(used)))
        return Begun(
            number,
            decision,
            version.name,
            switch,
            predicted,
            ready,
            start,
            planned_s,
            members,
            outcomes,
            absent,
        )

    def _round(self, state: State) -> tuple[State, str | None]:
        begun = self._begin(state)
        if begun is None:
            event = self._event("stopped", state.round + 1, state.clock_s, reason=NOBODY)
            self.folder.add_events([event], state.round)
            return state, NOBODY
        if begun.switch is not None:
            apply_(self.model, self.setting.structures[begun.version])
        trained = self._train(begun.number, begun.returned)
        score = evaluate(self.model, self.setting.validation, self.setting.spec.loss)
        if not math.isfinite(score.loss + trained.truncation):
            raise TrainingError(
                f"the validation loss is {score.loss} after round {begun.number}; lower the learning rate"
            )
        slowest = self._slowest(begun)
        nodes = self._node_rows(begun, slowest, trained)
        row = self._row(state, begun, slowest, nodes, trained, score)
        after = State.after(row)
        events = self._events(state, begun)
        self._replan(after)
        reason = self._over(after)
        if reason is not None:
            events.append(self._ending(after, reason))
        self.folder.add_round(row, nodes, events, lambda path: save(self.model, path))
        self.progress(row)
        return after, reason

    def _slowest(self, begun: Begun) -> float:
        """When the server has waited long enough, in seconds after the start."""
        slowest = max((begun.outcomes[name].time_s for name in begun.returned), default=0.0)
        if len(begun.returned) < len(begun.members):
            slowest = max(slowest, PATIENCE * (begun.planned_s - self.problem.overhead_s))
        return slowest

    def _node_rows(self, begun: Begun, slowest: float, trained: Trained) -> list[Row]:
        return [
            {
                "round": begun.number,
                "node": name,
                "samples": begun.members[name],
                "time_s": outcome.time_s,
                "energy_j": outcome.energy_j + self._idle_j(name, outcome, slowest),
                "bytes": outcome.bytes,
                "train_loss": trained.losses.get(name),
                "status": outcome.status,
            }
            for name, outcome in begun.outcomes.items()
        ]

    def _row(
        self,
        state: State,
        begun: Begun,
        slowest: float,
        nodes: Sequence[Row],
        trained: Trained,
        score: Score,
    ) -> Row:
        switch, predicted = begun.switch, begun.predicted
        length = slowest + self.problem.overhead_s
        energy = sum(row["energy_j"] for row in nodes) + self.problem.overhead_j
        energy += switch.energy_j if switch else 0.0
        sent = sum(row["bytes"] for row in nodes)
        return {
            "round": begun.number,
            "version": begun.version,
            "structure": self.setting.structures[begun.version].id,
            "switched": switch is not None,
            "start_s": begun.start_s,
            "end_s": begun.start_s + length,
            "time_s": length + (switch.time_s if switch else 0.0),
            "energy_j": energy,
            "loss": score.loss,
            "accuracy": score.accuracy,
            "train_loss": trained.loss,
            "bytes": sent,
            "samples": sum(begun.returned.values()),
            "members": len(begun.members),
            "dropped": len(begun.members) - len(begun.returned),
            "truncation": trained.truncation,
            "predicted": predicted
            and {
                "start_s": predicted.start_s,
                "time_s": predicted.time_s,
                "energy_j": predicted.energy_j,
                "loss": predicted.loss,
            },
            "total": {"energy_j": state.energy_j + energy, "bytes": state.bytes + sent},
            **self._outlook(state, begun, score.loss),
        }

    def _outlook(self, state: State, begun: Begun, loss: float) -> Row:
        """What going on needs to know of the plan in force."""
        if self.replanner is None:
            return {}
        believed = self._believed(state, begun, loss)
        return {
            "believed_loss": believed,
            "plan_after": self.course.after,
            "planned_rounds": self.course.planned,
        }

    def _idle_j(self, name: str, outcome: Outcome, slowest: float) -> float:
        if outcome.status == "dropped":
            return 0.0
        return self.setting.world.nodes[name].idle_watts * (slowest - outcome.time_s)

    def _train(self, number: int, members: Mapping[str, int]) -> Trained:
        """The members' training, from the server's model; if nobody came back, it stays as it is."""
        if not members:
            return Trained({}, None, 0.0)
        setting = self.setting
        outcome = cooperative_round(
            self.model,
            {name: self._part(name, samples, number) for name, samples in members.items()},
            setting.spec,
            setting.seed,
            setting.averaging,
            round_index=number,
            mean=self.mean,
        )
        losses = {name: member.loss for name, member in outcome.members.items()}
        return Trained(losses, outcome.loss, outcome.truncation)

    def _part(self, name: str, samples: int, number: int) -> Samples:
        """As many of a node's samples as it is to use: others in every round, so that all are seen."""
        own = self.setting.shares[name]
        if samples == len(own):
            return own
        draw = torch.Generator().manual_seed(member_seed(self.setting.seed, number, f"{name}/part"))
        return own.take(torch.randperm(len(own), generator=draw)[:samples])

    # ---- what is told -------------------------------------------------------------------------------

    def _event(self, event: str, number: int, time_s: float, **more: Any) -> Row:
        return {"round": number, "time_s": time_s, "event": event, **more}

    def _ending(self, state: State, reason: str) -> Row:
        if reason == "target met":
            return self._event("target_met", state.round, state.clock_s, loss=state.loss)
        return self._event("stopped", state.round, state.clock_s, reason=reason)

    def _events(self, state: State, begun: Begun) -> list[Row]:
        number, switch, events = begun.number, begun.switch, []
        beyond, plan = number - self.course.planned, self.course.policy.plan
        joined = self.course.policy.joined
        if state.round and self.course.after == state.round:
            told = {"rounds": len(plan.rounds), "energy_j": plan.energy_j, "until_s": plan.time_s}
            events.append(
                self._event("replanned", number, state.clock_s, believed_loss=state.believed, **told)
            )
        if beyond == 1:
            events.append(self._event("beyond_plan", number, state.clock_s, loss=state.loss))
        if joined is not None and begun.decision is joined:
            before = plan.rounds[-1].nodes
            if beyond == 1 or (beyond == 2 and state.members <= len(before)):
                members = [self.problem.nodes[i].name for i in sorted(joined.used)]
                events += [
                    self._event("joined", number, state.clock_s, node=name)
                    for name in members
                    if name not in before
                ]
        if switch is not None:
            names = {"from": switch.source, "to": switch.target}
            events.append(self._event("switch", number, state.clock_s, **names))
        if begun.start_s > begun.ready_s:
            seconds = begun.start_s - begun.ready_s
            events.append(self._event("wait", number, begun.ready_s, seconds=seconds))
        events += [self._event("absent", number, begun.start_s, node=name) for name in begun.absent]
        kinds = {"slow": "slow", "dropped": "dropout"}
        events += [
            self._event(kinds[outcome.status], number, begun.start_s, node=name)
            for name, outcome in begun.outcomes.items()
            if outcome.status in kinds
        ]
        return events
