"""From a draft to a problem: what `takifugu profile model` does, without the talking.

A draft is a problem file that says what is wanted ([target], [workload]) and who is there (nodes), and lacks
what has to be measured: versions, curves, switches, the start, and the nodes' samples and labels.
"""

from __future__ import annotations

import copy
import json
import tomllib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from takifugu.errors import ProblemError, UsageError
from takifugu.lowrank.surgery import apply_
from takifugu.measure.fitting import LABEL_WEIGHTS, Fits, fit_versions
from takifugu.measure.machine import PowerModel
from takifugu.plan.curves import Exponential, Power
from takifugu.plan.files import read_fleet
from takifugu.plan.problem import Problem
from takifugu.plan.toml_writer import toml
from takifugu.train.costs import MEASURED, Costs, check_costs, time_steps
from takifugu.train.courses import WARMUP
from takifugu.train.evaluation import evaluate
from takifugu.train.ladder import DENSE, Rung, check_ratios, ladder, optimizer_copies
from takifugu.train.pilots import MeasuredSwitch, PilotResult, PilotRound, Pilots
from takifugu.train.workload import Workload

RATIOS = (0.5, 0.25, 0.125)


@dataclass(frozen=True)
class Draft:
    """A problem file as it is written, nodes read in, nothing else looked at."""

    data: Mapping[str, Any]
    base: Path

    @classmethod
    def load(cls, path: str | Path) -> Draft:
        path = Path(path)
        try:
            text = path.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
            raise ProblemError([f"{path}: cannot be read ({reason}); give the path of a draft"]) from None
        try:
            data = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
        except ValueError as error:
            kind = "JSON" if path.suffix == ".json" else "TOML"
            raise ProblemError([f"{path}: is not valid {kind} ({error}); mend the syntax there"]) from None
        if not isinstance(data, dict):
            raise ProblemError([f"{path}: is not a table; see `takifugu plan --schema`"])
        mistakes = [
            f"{name}: is not a table; write [{name}]"
            for name in ("start", "data")
            if not isinstance(data.get(name, {}), dict)
        ]
        if isinstance(data.get("nodes_file"), str) and "nodes" not in data:
            data["nodes"], _ = read_fleet(path.parent / data.pop("nodes_file"), mistakes)
        nodes = data.get("nodes")
        named = isinstance(nodes, list) and all(
            isinstance(n, dict) and isinstance(n.get("name"), str) for n in nodes
        )
        if not mistakes and (not nodes or not named):
            mistakes.append("nodes: give at least one [[nodes]] with a name, or nodes_file")
        if mistakes:
            raise ProblemError(mistakes)
        return cls(data, path.parent)

    @property
    def nodes(self) -> list[dict[str, Any]]:
        return list(self.data["nodes"])

    def workload(self) -> Workload:
        table = self.data.get("workload")
        if table is not None and not isinstance(table, dict):
            raise ProblemError(["workload: is not a table; write [workload]"])
        return Workload.from_dict(table, self.base)


@dataclass(frozen=True, eq=False)
class Profile:
    """A profile ready to run: the draft is checked, the data are shared out, the versions are known."""

    draft: Draft
    rungs: tuple[Rung, ...]
    pilots: Pilots
    nodes: tuple[dict[str, Any], ...]
    start_version: str

    @classmethod
    def prepare(
        cls,
        draft: Draft,
        ratios: Sequence[float] = RATIOS,
        rounds: int = 6,
        warmup: int = 3,
        amounts: Sequence[float] = (1.0, 0.5, 0.25),
        data_dir: str | Path | None = None,
        how: str = "factors",
        like: Mapping[str, Any] | None = None,
    ) -> Profile:
        """`like` is a plan file's content: small teams are made of the nodes that it uses most."""
        check_ratios(ratios)  # before data is looked for
        workload = draft.workload()
        names = [node["name"] for node in draft.nodes]
        given = {node["name"]: node.get("samples") for node in draft.nodes}
        for name, size in given.items():
            if size is not None and (not isinstance(size, int) or isinstance(size, bool)):
                raise ProblemError([f"nodes '{name}' samples: {size!r} is not a whole number; correct it"])
        shares = workload.shares(names, given, data_dir)
        data = workload.load(data_dir)
        model = workload.build(data_dir)
        optimizer = workload.optimizer
        copies = optimizer_copies(optimizer["kind"], optimizer.get("momentum", 0.0))
        example = next(iter(shares.values())).inputs[:2]
        rungs = ladder(model, ratios, workload.where(model), example, workload.batch_size, copies)
        counted = [share.histogram(data.classes) for share in shares.values()]
        _refuse_other_labels(draft.nodes, counted)
        nodes = tuple(
            {**node, "samples": sum(labels), "labels": labels}
            for node, labels in zip(draft.nodes, counted, strict=True)
        )
        pilots = Pilots(
            model,
            rungs,
            shares,
            data.validation,
            data.classes,
            workload.spec(),
            workload.seed,
            rounds,
            warmup,
            amounts,
            how,
            workload.weights,
            fresh=warmup + rounds,
            builder=workload.builder(),
        )
        pilots.refuse_too_short()
        chosen = draft.data.get("start", {}).get("version", DENSE)
        if chosen not in [rung.name for rung in rungs]:
            raise UsageError(
                f"start.version: there is no version {chosen!r}; one of {', '.join(r.name for r in rungs)}"
            )
        profile = cls(draft, rungs, pilots, nodes, chosen)
        thrifty = cheapest(profile._stand_in())
        leading = thrifty if like is None else most_used(thrifty, like)
        return replace(profile, pilots=replace(pilots, leading=leading))

    def _stand_in(self) -> Problem:
        """Everything else in the draft is looked at before hours of pilots, with curves that stand in."""
        curve = {"kind": "exponential", "floor": 0.0, "rate": 1.0}
        versions = [{**self._version(rung), "curve": curve} for rung in self.rungs]
        weight = self.draft.data.get("data", {}).get("label_weight", 0.0)
        return Problem.from_dict(self._problem(versions, [], 1.0, weight))

    def run(
        self,
        folder: Path,
        told: Callable[[PilotRound], None] = lambda _: None,
        curve_samples: int = 20,
        costs: str = MEASURED,
    ) -> Finding:
        """Runs the pilots (or what is left of them) and fits the curves.

        `costs`: what versions cost on nodes without own figures: "measured", by the ratio of step times on
        this machine (kept in the folder with the pilots), or "flops".
        """
        check_costs(costs)
        found = self._costs(folder) if costs == MEASURED else None
        result = self.pilots.run(folder, told)
        data = self.draft.data.get("data", {})
        weights = (float(data["label_weight"]),) if "label_weight" in data else LABEL_WEIGHTS
        fits = fit_versions(result.observations(), weights, curve_samples, self.pilots.seed)
        return Finding(self, result, fits, found)

    def _costs(self, folder: Path) -> Costs | None:
        """The versions' speeds, measured unless they have been before; None where no node needs them."""
        names = [rung.name for rung in self.rungs]
        own = ("samples_per_s", "joules_per_sample")
        if all(name in (node.get(key) or {}) for node in self.nodes for key in own for name in names):
            return None
        path = folder / self.pilots.fingerprint() / "costs.json"
        if path.exists():
            return Costs.load(path)
        pilots = self.pilots
        samples = max(pilots.shares.values(), key=len)
        found = Costs.of(time_steps(pilots.model, self.rungs, samples, pilots.spec), self.rungs)
        found.save(path)
        return found

    def _version(self, rung: Rung) -> dict[str, Any]:
        return {
            "name": rung.name,
            "structure": None if rung.structure.is_dense else f"structures/{rung.structure.id}.json",
            "train_flops_per_sample": float(rung.train_flops_per_sample),
            "payload_bytes": rung.payload_bytes,
            "memory_bytes": rung.memory_bytes,
            "source": "measured",
        }

    def _problem(
        self,
        versions: Sequence[Mapping[str, Any]],
        switches: Sequence[Mapping[str, Any]],
        start_loss: float,
        label_weight: float,
        costs: Costs | None = None,
    ) -> dict[str, Any]:
        draft = self.draft.data
        start, parts = draft.get("start", {}), draft.get("data", {})
        found = {
            "format": draft.get("format", 1),
            "target": draft.get("target"),
            "start": {**start, "version": self.start_version, "loss": start_loss},
            "round": draft.get("round"),
            "data": {**parts, "label_weight": label_weight},
            "workload": draft.get("workload"),
            "versions": [_present(version) for version in versions],
            "switches": list(switches),
            "nodes": [node if costs is None else costs.fill(node, self.rungs) for node in self.nodes],
        }
        unknown = {key: value for key, value in draft.items() if key not in found}
        return {**{key: value for key, value in found.items() if value is not None}, **unknown}


@dataclass(frozen=True, eq=False)
class Finding:
    """What a profile found out."""

    profile: Profile
    result: PilotResult
    fits: Fits
    costs: Costs | None = None
    """The versions' measured speeds; None: nodes have their own figures, or versions are priced by FLOPs."""

    def start_loss(self) -> float:
        """What a plan should start from, so that the curves arrive where the pilots from the start did: the
        fresh model's loss, and more where the network hesitates, which no curve does. A version that is there
        from the start has its jump behind it, as if it had been switched to (`Space.trajectories`)."""
        start = max(self.fresh_loss(), self.fits.versions[DENSE].begun.fresh or 0.0)
        return start + (self._jump_left(self.profile.start_version) or 0.0)

    def jump(self, switch: MeasuredSwitch) -> float:
        """What a switch really adds to the loss, as far as the pilots after it tell.

        Most of what was seen right after it is made up for within a round or two. Between low-rank versions
        no pilot was run: there as large a part of the jump remains as of the dense one to the same version.
        """
        (seen,) = (
            s.loss_jump for s in self.result.switches if (s.source, s.target) == (DENSE, switch.target)
        )
        left = self._jump_left(switch.target)
        if left is None or seen <= 0.0:
            return switch.loss_jump
        return switch.loss_jump * min(1.0, left / seen)

    def _jump_left(self, version: str) -> float | None:
        """What is left of the jump from the dense version to this one, where a fit was to find that."""
        as_if = self.fits.versions[version].begun.switched
        if as_if is None:
            return None
        warm = next(one for one in reversed(self.result.rounds) if one.run == WARMUP).loss_after
        return max(0.0, as_if - warm)

    def fresh_loss(self) -> float:
        """Of the fresh model, as the version that the plan starts with."""
        chosen = next(r for r in self.profile.rungs if r.name == self.profile.start_version)
        if chosen.structure.is_dense:
            return self.result.start_loss
        model = copy.deepcopy(self.profile.pilots.model)
        apply_(model, chosen.structure)
        return evaluate(model, self.profile.pilots.validation, self.profile.pilots.spec.loss).loss

    def problem(self, watts: float) -> dict[str, Any]:
        """The complete problem, checked. A switch's energy is estimated: the server draws `watts`."""
        power = PowerModel(watts)
        versions = []
        for rung in self.profile.rungs:
            fit = self.fits.versions[rung.name]
            curve = {"kind": fit.curve.kind, **fit.curve.parameters()}
            curve["samples"] = [sample.parameters() for sample in fit.samples]
            versions.append({**self.profile._version(rung), "curve": curve})
        switches = [
            {
                "from": switch.source,
                "to": switch.target,
                "time_s": switch.time_s,
                "energy_j": power.joules(switch.time_s),
                "loss_jump": self.jump(switch),
            }
            for switch in self.result.switches
        ]
        data = self.profile._problem(
            versions, switches, self.start_loss(), self.fits.label_weight, self.costs
        )
        Problem.from_dict(data)
        return data

    def write(self, path: Path, watts: float) -> None:
        """The problem file, and its structures beside it."""
        text = toml(self.problem(watts))
        if self.costs is not None:
            text = f"# Speeds of versions: {self.costs.describe()}\n{text}"
        try:
            folder = path.parent / "structures"
            folder.mkdir(parents=True, exist_ok=True)
            for rung in self.profile.rungs:
                if not rung.structure.is_dense:
                    rung.structure.save(folder / f"{rung.structure.id}.json")
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise UsageError(f"{path}: cannot be written ({error.strerror}); choose another -o") from None
        Problem.load(path)

    def full_run_rounds(self) -> int | None:
        """Rounds the dense model needs with all nodes, by its curve; None: it never reaches the target."""
        target = self.profile.draft.data["target"]
        most = target.get("max_rounds") or 10_000
        return rounds_to(self.fits.versions[DENSE].curve, self.start_loss(), target["loss"], most)

    @property
    def pilot_passes(self) -> float:
        """Pilot work in passes over the whole fleet's data."""
        return self.result.samples_trained / sum(len(s) for s in self.profile.pilots.shares.values())


def cheapest(problem: Problem) -> tuple[str, ...]:
    """The nodes by the energy they need for a sample, transfer included; versions count alike."""
    joules = np.array(
        [
            [n.sample_j(version) + n.transfer_j(version) / n.samples for n in problem.nodes]
            for version in problem.versions
        ]
    )
    relative = (joules / np.maximum(joules.mean(axis=1, keepdims=True), 1e-300)).mean(axis=0)
    return tuple(problem.nodes[place].name for place in np.argsort(relative, kind="stable"))


def most_used(names: Sequence[str], plan: Mapping[str, Any]) -> tuple[str, ...]:
    """The nodes by the rounds of the plan that they take part in; of equal ones as they come in `names`."""
    rows = plan.get("rounds")
    teams = [row.get("nodes") for row in rows or () if isinstance(row, dict)]
    if not teams or not all(isinstance(team, dict) for team in teams):
        raise UsageError("the plan has no rounds; plan again, and give what `takifugu plan -o` wrote")
    counts = Counter(name for team in teams if team for name in team)
    if strangers := sorted(set(counts) - set(names)):
        raise UsageError(
            f"the plan uses node {strangers[0]!r}, which the draft does not have; it was made for other nodes"
        )
    return tuple(sorted(names, key=lambda name: (-counts[name], names.index(name))))


def rounds_to(curve: Exponential | Power, loss: float, target: float, most: int) -> int | None:
    """How many rounds on all data bring the loss to the target."""
    now = np.asarray(loss, dtype=float)
    for done in range(most + 1):
        if float(now) <= target:
            return done
        now = curve.step(now, np.asarray(1.0))
    return None


def _refuse_other_labels(nodes: Sequence[Mapping[str, Any]], counted: Sequence[Sequence[int]]) -> None:
    """Raises where the draft's `labels` are not those of the node's data: one of the two is wrong."""
    mistakes = [
        f"nodes '{node['name']}' labels: {node['labels']} in the file, {list(found)} in the node's data; "
        "remove the line (labels are counted), or correct [workload] data and partition"
        for node, found in zip(nodes, counted, strict=True)
        if "labels" in node and not _same_labels(node["labels"], found)
    ]
    if mistakes:
        raise ProblemError(mistakes)


def _same_labels(given: Any, counted: Sequence[int]) -> bool:
    if not isinstance(given, list) or len(given) > len(counted):
        return False
    return [*given, *[0] * (len(counted) - len(given))] == list(counted)


def _present(table: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in table.items() if value is not None}
