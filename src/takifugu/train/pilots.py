"""Pilots: short cooperative trainings whose losses the curves are fitted to.

Pilots do what plans do (docs/decisions/205). A dense warm-up on all nodes comes first; from its end the dense
model goes on, and every low-rank version branches, which shows what a switch is worth and what it costs. With
`fresh`, each low-rank version is trained from the very start, too: a plan may begin low-rank, and then it
learns unlike one that was warmed up. And small teams begin at the start, alone, with everyone joining them in
the end: the loss that a small team shows is more than what its model is worth, as the labels it lacks come
back within a round or two.

Every round is on disk before it is told, so that an interrupted profile goes on where it was; as rounds
follow from their seeds alone, it ends with the same numbers.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn

from takifugu.errors import CheckpointError, DataError, UsageError
from takifugu.lowrank.checkpoint import load, save
from takifugu.lowrank.surgery import apply_
from takifugu.measure.trajectories import SWITCHED, Observation
from takifugu.structure import Structure
from takifugu.train.cooperative import DEFAULT_WEIGHTS, Mean, check_weights, cooperative_round
from takifugu.train.courses import (
    WARMUP,
    Course,
    Length,
    Subset,
    courses,
    subset_of,
    subsets,
    switched,
)
from takifugu.train.evaluation import evaluate
from takifugu.train.fingerprint import model_sha256, samples_sha256
from takifugu.train.ladder import DENSE, Rung
from takifugu.train.round import RoundSpec, Samples

_SwitchKey = tuple[str, str, str]
"""From which version, to which, and at the end of which run."""


@dataclass(frozen=True)
class PilotRound:
    """One round of a pilot."""

    run: str
    version: str
    round: int
    loss_before: float
    loss_after: float
    accuracy: float
    share: float
    imbalance: float
    samples: int
    begins: str
    """What the run begins with: see `Observation`."""
    after: str = ""
    """The run that this one goes on from."""

    def observation(self) -> Observation:
        return Observation(
            self.run,
            self.round,
            self.loss_before,
            self.loss_after,
            self.share,
            self.imbalance,
            self.begins,
            self.after,
        )


@dataclass(frozen=True)
class MeasuredSwitch:
    source: str
    target: str
    time_s: float
    loss_jump: float
    """What it added to the validation loss; 0 where it lowered it."""


@dataclass(frozen=True)
class PilotResult:
    start_loss: float
    rounds: tuple[PilotRound, ...]
    switches: tuple[MeasuredSwitch, ...]

    @property
    def samples_trained(self) -> int:
        return sum(one.samples for one in self.rounds)

    def observations(self) -> dict[str, list[Observation]]:
        found: dict[str, list[Observation]] = {}
        for one in self.rounds:
            found.setdefault(one.version, []).append(one.observation())
        return found


@dataclass(frozen=True, eq=False)
class Pilots:
    """What is to be run. `model` is the fresh dense one; it is not touched."""

    model: nn.Module
    rungs: Sequence[Rung]
    shares: Mapping[str, Samples]
    validation: Samples
    classes: int
    spec: RoundSpec
    seed: int
    rounds: int = 6
    warmup: int = 3
    amounts: Sequence[float] = (1.0, 0.5, 0.25)
    how: str = "factors"
    weights: str = DEFAULT_WEIGHTS
    fresh: int = 0
    leading: Sequence[str] = ()
    """All nodes, those first that small teams are made of: a plan's, if there is one."""
    builder: Callable[..., Any] | None = None
    """The function that built the model, where it is the user's own: its code is part of the fingerprint."""

    def __post_init__(self) -> None:
        check_weights(self.weights)
        if self.rounds < 1 or self.warmup < 1 or self.fresh < 0:
            raise UsageError(f"pilots of {self.rounds} rounds after {self.warmup} of warm-up; both need one")
        if not self.amounts or not all(0 < amount <= 1 for amount in self.amounts):
            raise UsageError(
                f"amounts {list(self.amounts)} are not all above 0 and at most 1; e.g. 1,0.5,0.25"
            )

    def refuse_too_short(self) -> None:
        """A curve needs three rounds; better said before the first than after the last."""
        if self.fresh and self.warmup + self.rounds < 3:
            raise UsageError(
                f"pilots of {self.rounds} rounds after {self.warmup} of warm-up are too few for a curve, "
                "which needs three rounds; raise --rounds or --warmup"
            )
        if not self.fresh and self.rounds * len(self.subsets()) < 3:
            raise UsageError(
                f"pilots of {self.rounds} rounds on {len(self.subsets())} amounts of data are too few for a "
                "curve, which needs three rounds; raise --rounds or give more --amounts"
            )

    def subsets(self) -> tuple[Subset, ...]:
        return subsets(self.shares, self.classes, self.amounts, self.seed, self.leading)

    @cached_property
    def courses(self) -> tuple[Course, ...]:
        """The single runs, in their order; a run comes after the one it goes on from."""
        everyone = subset_of(self.shares, self.classes, tuple(self.shares))
        length = Length(self.rounds, self.warmup, self.fresh, by_share=self.weights != "members")
        return courses([rung.name for rung in self.rungs], everyone, self.subsets(), length)

    @property
    def total_rounds(self) -> int:
        return sum(course.rounds for course in self.courses)

    def fingerprint(self) -> str:
        """A name for all that results follow from but their courses: the model with its code, the data, the
        versions and how they are trained. Another workload has other pilots."""
        digest = hashlib.sha256()
        about = {
            "versions": [(rung.name, rung.structure.id) for rung in self.rungs],
            "spec": [self.spec.batch_size, dict(self.spec.optimizer), self.spec.passes],
            "pilots": [self.seed, self.how, self.weights],
        }
        digest.update(json.dumps(about, sort_keys=True).encode())
        for samples in (*(self.shares[name] for name in sorted(self.shares)), self.validation):
            digest.update(samples_sha256(samples).encode())
        digest.update(model_sha256(self.model, self.builder).encode())
        return digest.hexdigest()[:16]

    @cached_property
    def keys(self) -> dict[str, str]:
        """Run -> what it is kept as. Another team or length is another run, and so is what goes on from it;
        those that are the same are not trained again when pilots change."""
        found: dict[str, str] = {}
        for course in self.courses:
            about = json.dumps([asdict(course), found.get(course.after)], sort_keys=True)
            found[course.run] = f"{course.run}.{hashlib.sha256(about.encode()).hexdigest()[:8]}"
        return found

    def run(
        self,
        folder: Path,
        told: Callable[[PilotRound], None] = lambda _: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> PilotResult:
        """All pilots, from where the folder says they are; `told` hears of each round, also of old ones."""
        state = _State(folder / self.fingerprint())
        for one in self._rounds(state, clock):
            told(one)
        return PilotResult(
            state.start_loss,
            tuple(one for course in self.courses for one in state.rounds[self.keys[course.run]]),
            tuple(state.switches[switch] for switch in self._all_switches()),
        )

    # ---- carrying it out -----------------------------------------------------------------------------------

    def _rounds(self, state: _State, clock: Callable[[], float]) -> Iterator[PilotRound]:
        if state.start_loss_or_none is None:
            state.start_loss_or_none = evaluate(self.model, self.validation, self.spec.loss).loss
            state.write()
        for course in self.courses:
            yield from self._pilot(state, course, clock)
        self._switches_further_down(state, clock)

    def _pilot(self, state: _State, course: Course, clock: Callable[[], float]) -> Iterator[PilotRound]:
        key = self.keys[course.run]
        done = state.whole_rounds(key)
        yield from done
        if len(done) == course.rounds:
            return
        if done:
            model, loss = state.model(key, len(done), copy.deepcopy(self.model)), done[-1].loss_after
        else:
            model, loss = self._begin(state, course, clock)
        members = {name: self.shares[name] for name in course.team.nodes}
        mean = Mean.of(self.weights, self.shares, self.spec)
        for index in range(len(done) + 1, course.rounds + 1):
            # The round's number in the fleet's life: branches see the same batches, and can be compared.
            outcome = cooperative_round(
                model,
                members,
                self.spec,
                self.seed,
                self.how,
                round_index=course.rounds_before + index,
                mean=mean,
            )
            score = evaluate(model, self.validation, self.spec.loss)
            one = PilotRound(
                course.run,
                course.version,
                index,
                loss,
                score.loss,
                score.accuracy,
                course.team.share,
                course.team.imbalance,
                outcome.samples,
                course.begins,
                course.after,
            )
            loss = score.loss
            state.add(key, one, model)
            yield one

    def _begin(self, state: _State, course: Course, clock: Callable[[], float]) -> tuple[nn.Module, float]:
        """The model that a run begins with, and its loss."""
        rung = next(rung for rung in self.rungs if rung.name == course.version)
        if not course.after:
            return self._fresh(rung)
        after = self.keys[course.after]
        before = state.rounds[after]
        model = state.model(after, len(before), copy.deepcopy(self.model))
        loss = before[-1].loss_after
        if course.begins == SWITCHED:
            loss = self._switched(state, model, (DENSE, rung.name, after), rung.structure, loss, clock)
        return model, loss

    def _fresh(self, rung: Rung) -> tuple[nn.Module, float]:
        """The untrained model as this version, and its loss."""
        model = copy.deepcopy(self.model)
        apply_(model, rung.structure)
        return model, evaluate(model, self.validation, self.spec.loss).loss

    def _switches_further_down(self, state: _State, clock: Callable[[], float]) -> None:
        """From every low-rank version to each smaller one, at the end of its pilot after the warm-up."""
        structures = {rung.name: rung.structure for rung in self.rungs}
        for switch in self._all_switches():
            _, target, after = switch
            if switch not in state.switches:
                model = state.model(after, len(state.rounds[after]), copy.deepcopy(self.model))
                loss = state.rounds[after][-1].loss_after
                self._switched(state, model, switch, structures[target], loss, clock)

    def _all_switches(self) -> list[_SwitchKey]:
        """From the dense version after the warm-up, then from every low-rank one to each smaller one."""
        low = [rung.name for rung in self.rungs if not rung.structure.is_dense]
        first = [(DENSE, name, self.keys[WARMUP]) for name in low]
        further = [
            (name, smaller, self.keys[switched(name)])
            for place, name in enumerate(low)
            for smaller in low[place + 1 :]
        ]
        return first + further

    def _switched(
        self,
        state: _State,
        model: nn.Module,
        switch: _SwitchKey,
        structure: Structure,
        loss: float,
        clock: Callable[[], float],
    ) -> float:
        began = clock()
        apply_(model, structure)
        took = clock() - began
        after = evaluate(model, self.validation, self.spec.loss).loss
        if switch not in state.switches:
            source, target, _ = switch
            state.switches[switch] = MeasuredSwitch(source, target, took, max(0.0, after - loss))
            state.write()
        return after


# ---- on disk ----------------------------------------------------------------------------------------------


class _State:
    """The folder of pilots: `pilots.jsonl`, and the model after the last round of each run; by key."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rounds: dict[str, list[PilotRound]] = {}
        self.switches: dict[_SwitchKey, MeasuredSwitch] = {}
        self.start_loss_or_none: float | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lines = self._path.read_text(encoding="utf-8").splitlines() if self._path.exists() else []
        except OSError as error:
            raise UsageError(
                f"{folder}: cannot be used for pilots ({error.strerror}); choose another"
            ) from None
        try:
            for line in lines:
                self._take(json.loads(line))
        except (ValueError, TypeError, KeyError) as error:
            raise DataError(f"{self._path}: is damaged ({error}); delete {folder} and start again") from None

    @property
    def _path(self) -> Path:
        return self.folder / "pilots.jsonl"

    @property
    def start_loss(self) -> float:
        assert self.start_loss_or_none is not None
        return self.start_loss_or_none

    def _take(self, line: dict[str, Any]) -> None:
        what = line.pop("what")
        if what == "start":
            self.start_loss_or_none = float(line["loss"])
        elif what == "switch":
            after = line.pop("at")
            switch = MeasuredSwitch(**line)
            self.switches[switch.source, switch.target, after] = switch
        else:
            key = line.pop("key")
            self.rounds.setdefault(key, []).append(PilotRound(**line))

    def write(self) -> None:
        """The whole file anew: it is small, and is there whole or not at all."""
        lines: list[dict[str, Any]] = [{"what": "start", "loss": self.start_loss}]
        for key, rounds in self.rounds.items():
            lines += [{"what": "round", "key": key, **asdict(one)} for one in rounds]
        for (*_, after), switch in self.switches.items():
            lines.append({"what": "switch", "at": after, **asdict(switch)})
        unfinished = self._path.with_name(f"{self._path.name}.{os.getpid()}.partial")
        unfinished.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        os.replace(unfinished, self._path)

    def _model_path(self, key: str, index: int) -> Path:
        return self.folder / f"{key}.{index}.safetensors"

    def add(self, key: str, one: PilotRound, model: nn.Module) -> None:
        """The model first: a round that is listed has its model."""
        save(model, self._model_path(key, one.round))
        self.rounds.setdefault(key, []).append(one)
        self.write()
        self._model_path(key, one.round - 1).unlink(missing_ok=True)

    def whole_rounds(self, key: str) -> list[PilotRound]:
        """The rounds that are done and can be gone on from; a run without its model starts again."""
        done = self.rounds.get(key, [])
        if done and not self._model_path(key, len(done)).exists():
            del self.rounds[key]
            return []
        return list(done)

    def model(self, key: str, index: int, onto: nn.Module) -> nn.Module:
        path = self._model_path(key, index)
        try:
            return load(path, onto)
        except CheckpointError as error:
            raise DataError(f"{error}; delete {self.folder} and start again") from None
