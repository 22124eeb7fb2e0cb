"""`Workload`: what `[workload]` of a problem file means: a model, data, and every node's share."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from takifugu.errors import DataError, UsageError, near_misses
from takifugu.named import named
from takifugu.train import models, optimizers, partition
from takifugu.train.cooperative import DEFAULT_WEIGHTS, check_weights
from takifugu.train.round import RoundSpec, Samples
from takifugu.zoo import datasets

_FIELDS = {
    "model": str,
    "model_options": Mapping,
    "low_rank": list,
    "data": str,
    "partition": Mapping,
    "batch_size": int,
    "optimizer": Mapping,
    "weights": str,
    "validation": (int, float),
    "limit": int,
    "seed": int,
}


class Loaded(NamedTuple):
    """What the server and all nodes together have."""

    train: Samples
    validation: Samples
    classes: int


@dataclass(frozen=True, eq=False)
class Workload:
    model: str
    data: str | None
    batch_size: int
    optimizer: Mapping[str, Any]
    model_options: Mapping[str, Any] = field(default_factory=dict)
    low_rank: Sequence[str] = ()
    """Name patterns of the layers that go low-rank; none: what is usual for the model."""
    partition: Mapping[str, Any] = field(default_factory=lambda: {"kind": "iid"})
    weights: str = DEFAULT_WEIGHTS
    """What the server's mean is over: the whole fleet, or the members of the round (docs/decisions/204)."""
    validation: float = 0.1
    limit: int | None = None
    """Use this many samples of the data set only, drawn by the seed."""
    seed: int = 0
    base: Path = Path()
    """Where relative paths of the partition start: the problem file's folder."""
    _loaded: dict[Path, _Whole] = field(default_factory=dict, repr=False)

    @classmethod
    def from_dict(cls, table: Mapping[str, Any] | None, base: str | Path | None = None) -> Workload:
        """Checks the table of a problem file; a mistake is a `UsageError` that names the field."""
        if table is None:
            raise UsageError(
                "there is no [workload]; add the table with model, data, batch_size and optimizer"
            )
        for name, value in table.items():
            if name not in _FIELDS:
                raise UsageError(
                    f"workload.{name}: is not known{near_misses(name, _FIELDS)}; one of {', '.join(_FIELDS)}"
                )
            if not isinstance(value, _FIELDS[name]) or isinstance(value, bool):  # type: ignore[arg-type]
                raise UsageError(f"workload.{name}: {value!r} is not {_said(name)}")
        shared = table.get("partition", {"kind": "iid"})
        partition.check(shared)
        needed = ["model", "batch_size", "optimizer"]
        if not (shared["kind"] == "files" and "validation" in shared):
            needed.append("data")
        if missing := [name for name in needed if name not in table]:
            raise UsageError(f"workload.{missing[0]}: is missing; give {_said(missing[0])}")
        optimizers.check(table["optimizer"], "workload.optimizer")
        check_weights(table.get("weights", DEFAULT_WEIGHTS), "workload.weights")
        if table["batch_size"] < 1:
            raise UsageError(f"workload.batch_size: {table['batch_size']} is not at least 1")
        if not 0 < table.get("validation", 0.1) < 1:
            raise UsageError(f"workload.validation: {table['validation']!r} is not between 0 and 1")
        if table.get("limit", 1) < 1:
            raise UsageError(f"workload.limit: {table['limit']} is not at least 1")
        if not 0 <= table.get("seed", 0) < 2**63:
            raise UsageError(f"workload.seed: {table['seed']} is not between 0 and 2**63")
        if shared["kind"] == "writers" and table["data"] != "mnist":
            raise UsageError(
                "workload.partition: kind 'writers' needs data = 'mnist'; only its writers are known"
            )
        if shared["kind"] == "files" and "{name}" not in str(shared.get("pattern")):
            raise UsageError(
                "workload.partition.pattern: give a path with {name} in it, e.g. data/{name}.npz"
            )
        if "data" in table:
            datasets.facts(table["data"])  # an unknown name is better said now
        known = {name: value for name, value in table.items() if name != "data"}
        return cls(data=table.get("data"), base=Path(base or "."), **known)

    # ---- the model -----------------------------------------------------------------------------------------

    def build(self, data_dir: str | Path | None = None) -> nn.Module:
        """The model with fresh weights from the seed. Options that follow from the data are filled in:
        in_channels, inputs, image_size, classes, where the builder has them and the file does not."""
        facts = self.facts(data_dir)
        sized = {"classes": facts.classes, "inputs": math.prod(facts.shape)}
        if len(facts.shape) == 3:
            sized |= {"in_channels": facts.shape[0], "image_size": facts.shape[1]}
        return models.build(self.model, self.model_options, sized, self.seed, "workload.model")

    def builder(self) -> Callable[..., Any] | None:
        """The user's own function that builds the model; None for a network of the zoo."""
        return named(self.model) if ":" in self.model else None

    def where(self, model: nn.Module) -> Any:
        """The layers that go low-rank; see `models.usual_where`."""
        return models.usual_where(self.model, self.low_rank)

    def spec(self, device: str = "cpu") -> RoundSpec:
        return RoundSpec(self.batch_size, self.optimizer, device=device)

    # ---- the data ------------------------------------------------------------------------------------------

    def facts(self, data_dir: str | Path | None = None) -> datasets.Facts:
        """The shape of one input and the number of labels."""
        known = datasets.facts(self.data) if self.data is not None else None
        return known if known is not None else self._whole(data_dir).facts

    def load(self, data_dir: str | Path | None = None) -> Loaded:
        """All there is to train on, and the server's validation set, which no node sees."""
        whole = self._whole(data_dir)
        return Loaded(whole.train, whole.validation, whole.facts.classes)

    def shares(
        self,
        names: Sequence[str],
        sizes: Mapping[str, int | None] | Sequence[int | None] | None = None,
        data_dir: str | Path | None = None,
    ) -> dict[str, Samples]:
        """Each node's samples. `sizes` are the nodes' `samples`, by name or in the names' order, None where a
        node does not say; a share of another size is an error that names the node."""
        pairs = sizes.items() if isinstance(sizes, Mapping) else zip(names, sizes or (), strict=bool(sizes))
        given = {name: size for name, size in pairs if size is not None}
        if self.partition["kind"] == "files":
            return self._from_files(names, given, data_dir)
        whole = self._whole(data_dir)
        request = partition.Request(
            whole.train.labels.numpy(), names, given, self.seed, self.partition, whole.writers
        )
        places = partition.share_out(self.partition["kind"], request)
        return {name: whole.train.take(torch.from_numpy(places[name])) for name in names}

    def _whole(self, data_dir: str | Path | None) -> _Whole:
        folder = datasets.data_folder(data_dir)
        if folder not in self._loaded:
            self._loaded[folder] = self._read(folder)
        return self._loaded[folder]

    def _read(self, folder: Path) -> _Whole:
        held = self.partition.get("validation")
        if self.partition["kind"] == "files" and held is not None:
            validation = _read_npz(self.base / held, "the validation set")
            nothing = validation.take([])
            classes = int(validation.labels.max()) + 1
            return _Whole(
                nothing, validation, datasets.Facts(tuple(validation.inputs.shape[1:]), classes), None
            )
        assert self.data is not None
        dataset = datasets.load(self.data, folder)
        who = datasets.writers(folder) if self.partition["kind"] == "writers" else None
        if who is not None and len(who) != len(dataset.labels):
            raise DataError(
                f"{len(who)} writers are known, and the data set has {len(dataset.labels)} samples"
            )
        labels = dataset.labels.numpy()
        places = np.arange(len(labels))
        if self.limit is not None and self.limit < len(labels):
            # The part that a split of this share would hold back: every label keeps its weight.
            places = partition.validation_split(labels, self.limit / len(labels), self.seed + 1)[1]
        train, held_back = partition.validation_split(labels[places], self.validation, self.seed)
        whole = Samples(dataset.inputs, dataset.labels)
        return _Whole(
            whole.take(torch.from_numpy(places[train])),
            whole.take(torch.from_numpy(places[held_back])),
            dataset.facts,
            None if who is None else who[places[train]],
        )

    def _from_files(
        self, names: Sequence[str], sizes: Mapping[str, int], data_dir: str | Path | None
    ) -> dict[str, Samples]:
        facts = self.facts(data_dir)
        found = {}
        for name in names:
            if Path(name).name != name:
                raise DataError(f"node {name!r}: a name that is part of a path cannot have a / in it")
            path = self.base / str(self.partition["pattern"]).replace("{name}", name)
            samples = _read_npz(path, f"node {name!r}")
            if tuple(samples.inputs.shape[1:]) != facts.shape or int(samples.labels.max()) >= facts.classes:
                raise DataError(
                    f"node {name!r}: {path} has inputs of {tuple(samples.inputs.shape[1:])} and labels up to "
                    f"{int(samples.labels.max())}; expected {facts.shape} and at most {facts.classes - 1}"
                )
            if name in sizes and sizes[name] != len(samples):
                raise DataError(
                    f"node {name!r}: samples = {sizes[name]}, but {path} has {len(samples)}; correct it"
                )
            found[name] = samples
        return found


@dataclass(frozen=True, eq=False)
class _Whole:
    train: Samples
    validation: Samples
    facts: datasets.Facts
    writers: Any


def _read_npz(path: Path, whose: str) -> Samples:
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in ("inputs", "labels")}
    except FileNotFoundError:
        raise DataError(f"{whose}: {path} is missing; put a .npz file with inputs and labels there") from None
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise DataError(f"{whose}: {path} cannot be read ({error}); it must hold inputs and labels") from None
    inputs, labels = arrays["inputs"], arrays["labels"]
    if inputs.dtype.kind not in "fiu" or labels.dtype.kind not in "iu" or labels.ndim != 1 or not len(labels):
        raise DataError(
            f"{whose}: {path} must hold inputs as numbers and labels as whole numbers, one a sample"
        )
    if len(inputs) != len(labels):
        raise DataError(f"{whose}: {path} has {len(inputs)} inputs and {len(labels)} labels")
    if labels.min() < 0:
        raise DataError(f"{whose}: {path} has labels below 0")
    wide = inputs.dtype.kind == "u" and inputs.dtype.itemsize > 1
    tensor = torch.from_numpy(np.ascontiguousarray(inputs.astype(np.int64) if wide else inputs))
    return Samples(datasets.model_inputs(tensor, whose), torch.from_numpy(labels.astype(np.int64)))


def _said(field_name: str) -> str:
    return {
        "model": "a zoo network, or package.module:function",
        "model_options": "a table",
        "low_rank": "a list of layer-name patterns",
        "data": f"one of {', '.join(datasets.names())}, or package.module:function",
        "partition": "a table such as { kind = 'iid' }",
        "batch_size": "a whole number of at least 1",
        "optimizer": "a table such as { kind = 'sgd', lr = 0.05 }",
        "weights": "'normalized', 'fleet' or 'members'",
        "validation": "a share between 0 and 1",
        "limit": "a whole number of samples",
        "seed": "a whole number",
    }[field_name]
