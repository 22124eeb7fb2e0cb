"""`Structure`: what a version of a model *is*, as plain data. No torch in here.

A structure lists the layers that are factorized, and how; a layer that is not listed is dense. It
is what `choose` returns and `apply_` carries out, what a checkpoint's header holds, what travels to
a node, and what a problem file's versions point to. Two equal structures have the same `id`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from takifugu.errors import StructureError

FORMAT = "takifugu.structure/1"

Shape = tuple[int, ...]


@dataclass(frozen=True)
class LayerSpec:
    """How one layer is factorized.

    `rank` is keyed by matrix: a Linear or a convolution has one, `weight` (Tucker-2 has two
    unfoldings of it, `out` and `in`); an LSTM has `weight_ih_l0`, `weight_hh_l0`, ...; an attention
    has `q`, `k`, `v`, `out`. A rank counts per group and per gate. `shapes` holds the dense
    parameters' shapes, by the names they have in the dense module.
    """

    name: str
    kind: str
    scheme: str
    rank: Mapping[str, int]
    shapes: Mapping[str, Shape]
    tie: str | None = None
    """Name of an earlier layer whose factors this one shares (tied weights)."""

    def to_dict(self) -> dict[str, Any]:
        data: dict[str, Any] = {
            "name": self.name,
            "kind": self.kind,
            "scheme": self.scheme,
            "rank": dict(self.rank),
            "shapes": {matrix: list(shape) for matrix, shape in self.shapes.items()},
        }
        if self.tie is not None:
            data["tie"] = self.tie
        return data

    @classmethod
    def from_dict(cls, data: object, where: str = "layer") -> LayerSpec:
        if not isinstance(data, dict):
            raise StructureError(f"{where}: expected an object, got {type(data).__name__}")
        unknown = sorted(set(data) - {"name", "kind", "scheme", "rank", "shapes", "tie"})
        if unknown:
            raise StructureError(f"{where}: unknown field {unknown[0]!r}; remove it")
        for key in ("name", "kind", "scheme"):
            if not isinstance(data.get(key), str) or not data[key]:
                raise StructureError(f"{where}.{key}: expected a non-empty string, got {data.get(key)!r}")
        rank, shapes, tie = data.get("rank"), data.get("shapes"), data.get("tie")
        if not isinstance(rank, dict) or not rank or not all(_is_count(r) for r in rank.values()):
            raise StructureError(f"{where}.rank: expected positive integers by matrix, got {rank!r}")
        if (
            not isinstance(shapes, dict)
            or not shapes
            or not all(
                isinstance(shape, list) and shape and all(_is_count(size) for size in shape)
                for shape in shapes.values()
            )
        ):
            raise StructureError(
                f"{where}.shapes: expected lists of positive integers by matrix, got {shapes!r}"
            )
        if tie is not None and not isinstance(tie, str):
            raise StructureError(f"{where}.tie: expected a layer name, got {tie!r}")
        return cls(
            name=data["name"],
            kind=data["kind"],
            scheme=data["scheme"],
            rank=dict(rank),
            shapes={matrix: tuple(shape) for matrix, shape in shapes.items()},
            tie=tie,
        )


@dataclass(frozen=True)
class Structure:
    """The factorized layers of a version, in the order of the model's modules."""

    layers: tuple[LayerSpec, ...] = ()
    _by_name: Mapping[str, LayerSpec] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        by_name: dict[str, LayerSpec] = {}
        for spec in self.layers:
            if spec.name in by_name:
                raise StructureError(f"layer {spec.name!r} is listed twice; keep one")
            if spec.tie is not None and spec.tie not in by_name:
                raise StructureError(
                    f"layer {spec.name!r} is tied to {spec.tie!r}, which must be listed before it"
                )
            by_name[spec.name] = spec
        object.__setattr__(self, "_by_name", by_name)

    @property
    def id(self) -> str:
        """Sixteen hexadecimal digits of the content's hash: equal content, equal id."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    @property
    def is_dense(self) -> bool:
        return not self.layers

    def __iter__(self) -> Iterator[LayerSpec]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def __getitem__(self, name: str) -> LayerSpec:
        return self._by_name[name]

    def __hash__(self) -> int:
        return hash(self.id)

    def get(self, name: str) -> LayerSpec | None:
        return self._by_name.get(name)

    def to_dict(self) -> dict[str, Any]:
        return {"format": FORMAT, "layers": [spec.to_dict() for spec in self.layers]}

    def to_json(self, indent: int | None = None) -> str:
        """Canonical JSON: the order of ranks and shapes does not matter, that of layers does."""
        separators = (",", ":") if indent is None else None
        return json.dumps(self.to_dict(), sort_keys=True, indent=indent, separators=separators)

    @classmethod
    def from_dict(cls, data: object) -> Structure:
        if not isinstance(data, dict):
            raise StructureError(f"structure: expected an object, got {type(data).__name__}")
        if data.get("format") != FORMAT:
            raise StructureError(f"structure.format: expected {FORMAT!r}, got {data.get('format')!r}")
        unknown = sorted(set(data) - {"format", "layers"})
        if unknown:
            raise StructureError(f"structure: unknown field {unknown[0]!r}; remove it")
        layers = data.get("layers")
        if not isinstance(layers, list):
            raise StructureError(f"structure.layers: expected a list, got {type(layers).__name__}")
        return cls(
            tuple(LayerSpec.from_dict(layer, f"structure.layers[{i}]") for i, layer in enumerate(layers))
        )

    @classmethod
    def from_json(cls, text: str) -> Structure:
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise StructureError(f"structure: not valid JSON ({error})") from error
        return cls.from_dict(data)

    def save(self, path: str | Path) -> None:
        try:
            Path(path).write_text(self.to_json(indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise StructureError(f"cannot write structure {str(path)!r}: {error}") from error

    @classmethod
    def load(cls, path: str | Path) -> Structure:
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise StructureError(f"cannot read structure {str(path)!r}: {error}") from error
        return cls.from_json(text)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
