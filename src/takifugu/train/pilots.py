"""Pilots: short cooperative trainings whose losses the curves are fitted to.

One dense warm-up on all nodes comes first. From its end every version branches, once for each amount of data:
all nodes, and subsets of them. A plan may also begin low-rank, and a fresh low-rank network learns unlike one
that was warmed up; so each low-rank version is trained from the start, too, for `fresh` rounds on all nodes.
What the switch does to the validation loss, and how long it takes, is seen on the way. Every round is on disk
before it is told, so that an interrupted profile goes on where it was; as rounds follow from their seeds
alone, it ends with the same numbers.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from takifugu.errors import CheckpointError, DataError, UsageError
from takifugu.lowrank.checkpoint import load, save
from takifugu.lowrank.surgery import apply_
from takifugu.measure.fitting import Observation
from takifugu.structure import Structure
from takifugu.train.cooperative import check_weights, cooperative_round, out_of
from takifugu.train.evaluation import evaluate
from takifugu.train.ladder import DENSE, Rung
from takifugu.train.round import RoundSpec, Samples

WARMUP = "warmup"
_LEAST_SHARE = 0.1
"""Of a team with less than this pilots are not longer still."""


def fresh(version: str) -> str:
    """The name of a version's pilot from the start."""
    return WARMUP if version == DENSE else f"{version}-fresh"


@dataclass(frozen=True)
class Subset:
    """Some of the nodes: the amount of data they have together, and how far their label mix is off."""

    nodes: tuple[str, ...]
    share: float
    imbalance: float


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

    def observation(self) -> Observation:
        return Observation(
            self.run, self.round, self.loss_before, self.loss_after, self.share, self.imbalance
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
    weights: str = "fleet"
    fresh: int = 0

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
        if self.rounds * len(self.subsets()) < 3:
            raise UsageError(
                f"pilots of {self.rounds} rounds on {len(self.subsets())} amounts of data are too few for a "
                "curve, which needs three rounds; raise --rounds or give more --amounts"
            )

    def subsets(self) -> tuple[Subset, ...]:
        return subsets(self.shares, self.classes, self.amounts, self.seed)

    def rounds_of(self, subset: Subset) -> int:
        """By the fleet's weights half the data goes half the way a round: as many more rounds show as much.
        Shorter ones would end before a small team's loss stops falling, which is what they are to tell."""
        return (
            round(self.rounds / max(subset.share, _LEAST_SHARE)) if self.weights == "fleet" else self.rounds
        )

    @property
    def total_rounds(self) -> int:
        low = sum(not rung.structure.is_dense for rung in self.rungs)
        branches = sum(map(self.rounds_of, self.subsets()))
        return self.warmup + low * self.fresh + len(self.rungs) * branches

    def fingerprint(self) -> str:
        """Names all that the results follow from: another workload has other pilots."""
        digest = hashlib.sha256()
        about = {
            "versions": [(rung.name, rung.structure.id) for rung in self.rungs],
            "subsets": [asdict(subset) for subset in self.subsets()],
            "spec": [self.spec.batch_size, dict(self.spec.optimizer), self.spec.passes],
            "pilots": [self.seed, self.rounds, self.warmup, self.how, self.weights, self.fresh],
        }
        digest.update(json.dumps(about, sort_keys=True).encode())
        for samples in (*(self.shares[name] for name in sorted(self.shares)), self.validation):
            digest.update(samples.labels.numpy().tobytes())
            digest.update(np.float64(samples.inputs.double().sum()).tobytes())
        for name, tensor in self.model.state_dict().items():
            digest.update(name.encode() + np.float64(tensor.double().sum()).tobytes())
        return digest.hexdigest()[:16]

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
            tuple(one for rounds in state.rounds.values() for one in rounds),
            tuple(state.switches.values()),
        )

    # ---- carrying it out -----------------------------------------------------------------------------------

    def _rounds(self, state: _State, clock: Callable[[], float]) -> Iterator[PilotRound]:
        model = copy.deepcopy(self.model)
        if state.start_loss_or_none is None:
            state.start_loss_or_none = evaluate(model, self.validation, self.spec.loss).loss
            state.write()
        everyone, *_ = self.subsets()
        if set(everyone.nodes) != set(self.shares):
            everyone = subset_of(self.shares, self.classes, tuple(self.shares))
        yield from self._pilot(
            state, WARMUP, DENSE, everyone, self.warmup, lambda: (model, state.start_loss), 0
        )
        for rung in self.rungs:
            if not rung.structure.is_dense:
                begin = partial(self._fresh, rung)
                yield from self._pilot(state, fresh(rung.name), rung.name, everyone, self.fresh, begin, 0)
            for index, subset in enumerate(self.subsets()):
                run = f"{rung.name}-{index}"
                begin = partial(self._branch, state, rung, clock)
                rounds = self.rounds_of(subset)
                yield from self._pilot(state, run, rung.name, subset, rounds, begin, self.warmup)
        self._switches_further_down(state, clock)

    def _pilot(
        self,
        state: _State,
        run: str,
        version: str,
        subset: Subset,
        rounds: int,
        begin: Callable[[], tuple[nn.Module, float]],
        rounds_before: int,
    ) -> Iterator[PilotRound]:
        done = state.whole_rounds(run)
        yield from done
        if len(done) == rounds:
            return
        if done:
            model, loss = state.model(run, len(done), copy.deepcopy(self.model)), done[-1].loss_after
        else:
            model, loss = begin()
            model = copy.deepcopy(model)
        members = {name: self.shares[name] for name in subset.nodes}
        for index in range(len(done) + 1, rounds + 1):
            # The round's number in the fleet's life: branches see the same batches, and can be compared.
            outcome = cooperative_round(
                model,
                members,
                self.spec,
                self.seed,
                self.how,
                round_index=rounds_before + index,
                out_of=out_of(self.weights, self.shares),
            )
            score = evaluate(model, self.validation, self.spec.loss)
            one = PilotRound(
                run,
                version,
                index,
                loss,
                score.loss,
                score.accuracy,
                subset.share,
                subset.imbalance,
                outcome.samples,
            )
            loss = score.loss
            state.add(one, model)
            yield one

    def _fresh(self, rung: Rung) -> tuple[nn.Module, float]:
        """The untrained model as this version, and its loss."""
        model = copy.deepcopy(self.model)
        apply_(model, rung.structure)
        return model, evaluate(model, self.validation, self.spec.loss).loss

    def _branch(self, state: _State, rung: Rung, clock: Callable[[], float]) -> tuple[nn.Module, float]:
        """The model at the end of the warm-up, as this version, and its loss."""
        model = state.model(WARMUP, self.warmup, copy.deepcopy(self.model))
        loss = state.rounds[WARMUP][-1].loss_after
        if rung.structure.is_dense:
            return model, loss
        return model, self._switched(state, model, DENSE, rung.name, rung.structure, loss, clock)

    def _switches_further_down(self, state: _State, clock: Callable[[], float]) -> None:
        """From every low-rank version to each smaller one, at the end of its first pilot."""
        low = [rung for rung in self.rungs if not rung.structure.is_dense]
        for place, rung in enumerate(low):
            for smaller in low[place + 1 :]:
                if (rung.name, smaller.name) in state.switches:
                    continue
                rounds = self.rounds_of(self.subsets()[0])
                model = state.model(f"{rung.name}-0", rounds, copy.deepcopy(self.model))
                loss = state.rounds[f"{rung.name}-0"][-1].loss_after
                self._switched(state, model, rung.name, smaller.name, smaller.structure, loss, clock)

    def _switched(
        self,
        state: _State,
        model: nn.Module,
        source: str,
        target: str,
        structure: Structure,
        loss: float,
        clock: Callable[[], float],
    ) -> float:
        began = clock()
        apply_(model, structure)
        took = clock() - began
        after = evaluate(model, self.validation, self.spec.loss).loss
        if (source, target) not in state.switches:
            state.switches[source, target] = MeasuredSwitch(source, target, took, max(0.0, after - loss))
            state.write()
        return after


# ---- which nodes ------------------------------------------------------------------------------------------


def subset_of(shares: Mapping[str, Samples], classes: int, nodes: Sequence[str]) -> Subset:
    """What these nodes have together, against the whole fleet."""
    histograms = {name: np.array(samples.histogram(classes), dtype=float) for name, samples in shares.items()}
    fleet = sum(histograms.values(), np.zeros(classes))
    used = sum((histograms[name] for name in nodes), np.zeros(classes))
    imbalance = 0.5 * float(np.abs(used / used.sum() - fleet / fleet.sum()).sum())
    return Subset(tuple(sorted(nodes)), float(used.sum() / fleet.sum()), imbalance)


def subsets(
    shares: Mapping[str, Samples], classes: int, amounts: Sequence[float], seed: int
) -> tuple[Subset, ...]:
    """Nodes for each amount of data, largest first; by turns ill balanced and well balanced ones, so that the
    amount and the balance of the data can be told apart. An amount given twice gets one of each."""
    if not shares:
        raise DataError("there are no nodes to run pilots on; give at least one")
    rng = np.random.default_rng([seed, 2])
    names = sorted(shares)
    sizes = np.array([len(shares[name]) for name in names])
    found: list[Subset] = []
    for turn, amount in enumerate(sorted(amounts, reverse=True)):
        if amount * sizes.sum() >= sizes.sum() - 0.5:
            chosen = [subset_of(shares, classes, names)]
        else:
            tries = []
            for _ in range(64):
                order = rng.permutation(len(names))
                # As many of a random order as come nearest to the amount, but at least one.
                count = 1 + int(np.argmin(np.abs(np.cumsum(sizes[order]) - amount * sizes.sum())))
                tries.append(subset_of(shares, classes, [names[i] for i in order[:count]]))
            off = min(abs(one.share - amount) for one in tries)
            near = [one for one in tries if abs(one.share - amount) <= off + 0.1 * amount]
            # The least amount ill balanced: the cheapest small teams are what a plan is tempted by, and
            # if their pilots were better balanced than they are, it would fall for it.
            sign = 1.0 if (len(amounts) - turn) % 2 == 0 else -1.0
            chosen = sorted(near, key=lambda one: (sign * one.imbalance, one.nodes))
        fresh = next((one for one in chosen if one not in found), None)
        if fresh is not None:
            found.append(fresh)
    return tuple(found)


# ---- on disk ----------------------------------------------------------------------------------------------


class _State:
    """The folder of pilots: `pilots.jsonl`, and the model after the last round of each run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rounds: dict[str, list[PilotRound]] = {}
        self.switches: dict[tuple[str, str], MeasuredSwitch] = {}
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
            switch = MeasuredSwitch(**line)
            self.switches[switch.source, switch.target] = switch
        else:
            one = PilotRound(**line)
            self.rounds.setdefault(one.run, []).append(one)

    def write(self) -> None:
        """The whole file anew: it is small, and is there whole or not at all."""
        lines: list[dict[str, Any]] = [{"what": "start", "loss": self.start_loss}]
        lines += [{"what": "round", **asdict(one)} for rounds in self.rounds.values() for one in rounds]
        lines += [{"what": "switch", **asdict(switch)} for switch in self.switches.values()]
        unfinished = self._path.with_name(f"{self._path.name}.{os.getpid()}.partial")
        unfinished.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        os.replace(unfinished, self._path)

    def _model_path(self, run: str, index: int) -> Path:
        return self.folder / f"{run}.{index}.safetensors"

    def add(self, one: PilotRound, model: nn.Module) -> None:
        """The model first: a round that is listed has its model."""
        save(model, self._model_path(one.run, one.round))
        self.rounds.setdefault(one.run, []).append(one)
        self.write()
        self._model_path(one.run, one.round - 1).unlink(missing_ok=True)

    def whole_rounds(self, run: str) -> list[PilotRound]:
        """The rounds that are done and can be gone on from; a run without its model starts again."""
        done = self.rounds.get(run, [])
        if done and not self._model_path(run, len(done)).exists():
            del self.rounds[run]
            return []
        return list(done)

    def model(self, run: str, index: int, onto: nn.Module) -> nn.Module:
        path = self._model_path(run, index)
        try:
            return load(path, onto)
        except CheckpointError as error:
            raise DataError(f"{error}; delete {self.folder} and start again") from None
