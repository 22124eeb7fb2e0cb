"""How `takifugu train` runs a recipe, apart from the recipe itself: processes, device, data folder, logs.

A run folder remembers these options and the `--set` options, so that `takifugu train --resume FOLDER` needs
none of them. Options that are given to `--resume` replace the remembered ones for that process only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Options:
    workers: int = 1
    sharding: str = "ddp"
    device: str = "auto"
    data_dir: str | None = None
    checkpoint_every: float = 10.0
    """Minutes."""
    tensorboard: bool = False

    @classmethod
    def remembered(cls, header: Mapping[str, Any]) -> Options:
        """Return the options that a run folder's header holds; older folders hold none."""
        held = header.get("options")
        names = {field.name for field in fields(cls)}
        return cls(**{key: value for key, value in held.items() if key in names}) if held else cls()

    def given(self, data_dir: Path | None, **others: Any) -> Options:
        """Return these options with those replaced that are not None."""
        # Absolute: the run may be resumed from another folder.
        folder = None if data_dir is None else str(data_dir.absolute())
        chosen = {"data_dir": folder, **others}
        return replace(self, **{key: value for key, value in chosen.items() if value is not None})

    def words(self, known: Options) -> list[str]:
        """Return the command-line words for the options that differ from the `known` ones."""
        found: list[str] = []
        for field in fields(self):
            value, flag = getattr(self, field.name), field.name.replace("_", "-")
            if value == getattr(known, field.name):
                continue
            if isinstance(value, bool):
                found.append(f"--{flag}" if value else f"--no-{flag}")
            else:
                found += [f"--{flag}", str(value)]
        return found
