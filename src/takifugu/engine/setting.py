"""What stays the same throughout a run: the model's builder, the versions, everybody's data, the world."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version as installed
from pathlib import Path
from typing import Any

from torch import nn

import takifugu
from takifugu.engine.folder import RunFolder
from takifugu.engine.policies import Policy
from takifugu.engine.world import World
from takifugu.errors import RunError, StructureError, TakifuguError
from takifugu.lowrank.averaging import check_how
from takifugu.lowrank.surgery import build_swaps
from takifugu.plan.problem import Problem
from takifugu.structure import Structure
from takifugu.train.cooperative import DEFAULT_WEIGHTS, check_weights
from takifugu.train.fingerprint import samples_sha256
from takifugu.train.round import RoundSpec, Samples
from takifugu.train.workload import Workload

AVERAGING = "factors"
"""The default way to average; docs/decisions/202 has the evidence."""

SOURCES = {
    "loss": "measured",
    "accuracy": "measured",
    "train_loss": "measured",
    "time_s": "simulated",
    "energy_j": "simulated",
    "bytes": "simulated",
}


@dataclass(frozen=True, eq=False)
class Setting:
    problem: Problem
    build: Callable[[], nn.Module]
    spec: RoundSpec
    shares: Mapping[str, Samples]
    """Each node's own samples."""
    validation: Samples
    structures: Mapping[str, Structure]
    """By version."""
    world: World
    seed: int = 0
    averaging: str = AVERAGING
    weights: str = DEFAULT_WEIGHTS
    """What the server's mean is over; docs/decisions/204 has the reason."""
    until_s: float | None = None
    """When the run must be done, if not by the problem's own deadline."""

    def __post_init__(self) -> None:
        check_weights(self.weights)
        check_how(self.averaging)
        for node in self.problem.nodes:
            own = self.shares.get(node.name)
            if own is None:
                raise RunError(f"node {node.name!r} has no share of the data; the partition does not know it")
            if len(own) != node.samples:
                raise RunError(
                    f"node {node.name!r} has {len(own)} samples, the problem says {node.samples}; "
                    "correct the problem and plan again"
                )

    @classmethod
    def of(
        cls,
        problem: Problem,
        world: World,
        structures: Mapping[str, Structure],
        seed: int = 0,
        averaging: str = AVERAGING,
        *,
        base: Path | None = None,
        data_dir: Path | None = None,
        deadline_s: float | None = None,
    ) -> Setting:
        """Reads `[workload]` of the problem; `base` is where the paths in it start."""
        workload = Workload.from_dict(problem.workload, base)
        model = workload.build(data_dir)
        for version, structure in structures.items():
            try:
                build_swaps(model, structure)  # whether it fits; nothing is changed
            except TakifuguError as error:
                raise RunError(
                    f"version {version!r}: its structure does not fit the model: {error}"
                ) from error
        validation = workload.load(data_dir).validation
        names, sizes = [n.name for n in problem.nodes], [n.samples for n in problem.nodes]
        return cls(
            problem=problem,
            build=lambda: workload.build(data_dir),
            spec=workload.spec(),
            shares=workload.shares(names, sizes, data_dir),
            validation=validation,
            structures=structures,
            world=world,
            seed=seed,
            averaging=averaging,
            weights=workload.weights,
            until_s=deadline_s,
        )

    @property
    def deadline_s(self) -> float:
        """When the run must be done: as told, or by the real deadline, to which a reserve belongs."""
        return self.problem.without_reserve().deadline_s if self.until_s is None else self.until_s

    @cached_property
    def data_sha256(self) -> dict[str, Any]:
        """Hashes of the validation set and of each node's samples."""
        return {
            "validation": samples_sha256(self.validation)[:16],
            "nodes": {name: samples_sha256(samples)[:16] for name, samples in self.shares.items()},
        }

    def header(self, policy: Policy, command: str = "") -> dict[str, Any]:
        """What run.json says: all that the numbers follow from, and where each figure comes from."""
        target = {"loss": self.problem.target_loss, "deadline_s": self.deadline_s}
        return {
            "policy": policy.name,
            "slug": policy.slug,
            "engine": "simulation",
            "seed": self.seed,
            "averaging": self.averaging,
            "weights": self.weights,
            "world": self.world.to_dict(),
            "target": {**target, "max_rounds": self.problem.max_rounds},
            "versions": {name: structure.id for name, structure in self.structures.items()},
            "problem_sha256": self.problem.sha256,
            "plan_sha256": policy.sha256,
            "data": self.data_sha256,
            "replan": policy.replans,
            "sources": SOURCES,
            "libraries": {
                "takifugu": takifugu.__version__,
                "torch": installed("torch"),
                "numpy": installed("numpy"),
                "python": platform.python_version(),
            },
            "command": command,
        }

    def folder(self, path: Path, policy: Policy, resume: bool = False, command: str = "") -> RunFolder:
        """A new run folder, or with `resume` the one that is there, if it is of this very run."""
        header = self.header(policy, command)
        if resume and (path / "run.json").exists():
            found = RunFolder.open(path)
            found.check_same(header)
            return found
        return RunFolder.create(path, header, self.problem.to_dict(), policy.file, self.structures.values())


def read_structures(
    problem: Problem, folders: Iterable[Path], run: RunFolder | None = None
) -> dict[str, Structure]:
    """The structure of each version: what a run was started with, or the file the problem names.

    A path in the problem is relative to the problem file, which a plan file does not know; so it is looked
    for in several folders. A version without a file is the dense model.
    """
    if run is not None:
        return {name: run.structure(id) for name, id in run.header["versions"].items()}
    folders = list(dict.fromkeys(folders))
    found: dict[str, Structure] = {}
    for version in problem.versions:
        if version.structure is None:
            found[version.name] = Structure()
            continue
        places = [folder / version.structure for folder in folders]
        path = next((place for place in places if place.is_file()), None)
        if path is None:
            raise RunError(
                f"version {version.name!r}: there is no structure file {version.structure!r} "
                f"(looked at {', '.join(map(str, places))}); run the plan from the problem's folder, "
                "or put the file beside the plan"
            )
        try:
            found[version.name] = Structure.load(path)
        except StructureError as error:
            raise RunError(f"version {version.name!r}: {path}: {error}") from error
    return found
