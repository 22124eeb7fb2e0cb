"""The folder of a training run: its recipe, its metrics, and the checkpoints it goes on from.

    run.json            what the run is: recipe, processes, versions
    metrics.jsonl       a line every few steps, every epoch, and for whatever happened in between
    checkpoints/        the newest two; checkpoints.json says which are whole, with their hashes
    model.safetensors   the trained model, for `takifugu.load`
    result.json         what came out

A checkpoint knows how long metrics.jsonl was when it was made; what was written later is cut away when the
run goes on from there. So a run that is killed at any moment loses only the steps since its last checkpoint.
"""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from takifugu import durable
from takifugu.durable import Row
from takifugu.errors import CheckpointError, RunError
from takifugu.train.snapshot import Snapshot

FORMAT = "takifugu.training/1"
KEPT = 2
"""Checkpoints kept: the newest, and one to fall back to."""


@dataclass(frozen=True)
class Found:
    """The newest checkpoint that is whole, and what is wrong with those after it."""

    content: bytes
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class TrainingFolder:
    path: Path
    header: Mapping[str, Any] = field(repr=False)

    # ---- beginning ----------------------------------------------------------------------------------

    @classmethod
    def create(cls, path: str | Path, header: Mapping[str, Any]) -> TrainingFolder:
        path = Path(path)
        cls.check_free(path)
        if (path / "run.json").exists():
            with durable.locked(path, by="run.json"):  # nobody is just beginning it
                (path / "run.json").unlink()
        header = {"format": FORMAT, **header}
        with _disk(path, "nothing is lost"):
            (path / "checkpoints").mkdir(parents=True, exist_ok=True)
            durable.write_text(path / "metrics.jsonl", "")
            durable.write_json(path / "run.json", header)  # last: with it, the folder is a run
        return cls(path, header)

    @classmethod
    def check_free(cls, path: Path) -> None:
        """Refuses a place where no new run can begin."""
        with _disk(path, "nothing is lost"):
            if cls.holds_run(path):
                raise RunError(
                    f"{path}: holds a run already; continue it with: {_command(path)}, or "
                    "choose another --out"
                )
            if path.exists() and (not path.is_dir() or not _only_leftovers(path)):
                raise RunError(
                    f"{path}: exists and is not a run folder; choose an empty or a new folder with --out"
                )

    @staticmethod
    def holds_run(path: Path) -> bool:
        """Whether there is something to go on from. A run that failed before its first checkpoint, for a
        wrong option or missing data, is not in the way of the next one."""
        return (path / "run.json").exists() and (path / "checkpoints.json").exists()

    @classmethod
    def open(cls, path: str | Path) -> TrainingFolder:
        path = Path(path)
        with _disk(path, "nothing is lost"):
            there = path.is_dir()
        if not there:
            raise RunError(f"{path}: there is no such run folder; start the run without --resume")
        header = durable.read_json(path / "run.json")
        if header.get("format") != FORMAT:
            raise RunError(
                f"{path / 'run.json'}: format is {header.get('format')!r}, not '{FORMAT}'; "
                "is it a folder of `takifugu train`?"
            )
        return cls(path, header)

    def check_same(self, header: Mapping[str, Any]) -> None:
        """Refuses to go on with another recipe or other processes than the run began with."""
        if self.header.get("recipe_sha256") != header.get("recipe_sha256"):
            changes = list(_differences(self.header.get("recipe"), header.get("recipe")))
            told = "; ".join(changes[:3]) + ("; ..." if changes[3:] else "")
            raise RunError(
                f"{self.path}: was started with another recipe ({told}); continue it as it is with: "
                f"{_command(self.path)}, or start a new run with another --out"
            )
        for key, what, advice in (
            ("world", "number of processes", "resume with as many (--workers)"),
            ("sharding", "sharding", "resume with the same --sharding"),
        ):
            ours, theirs = self.header.get(key), header.get(key)
            if ours != theirs:
                raise RunError(
                    f"{self.path}: was started with another {what} ({ours}, now {theirs}); {advice}, or "
                    "choose another --out"
                )

    def locked(self) -> AbstractContextManager[None]:
        return durable.locked(self.path, by="run.json")

    # ---- growing ------------------------------------------------------------------------------------

    def log(self, row: Row) -> None:
        with _disk(self.path, "the last checkpoint is safe"):
            durable.append(self.path / "metrics.jsonl", [row])

    @property
    def log_size(self) -> int:
        return (self.path / "metrics.jsonl").stat().st_size

    def keep(self, step: int, content: bytes) -> None:
        """Keeps a checkpoint. It counts once checkpoints.json tells of it; only then the oldest one goes."""
        path = self.path / "checkpoints" / f"{step:08}.safetensors"
        with _disk(self.path, "the last checkpoint is safe"):
            digest = durable.write_file(path, lambda partial: _written(partial, content))
            # Later ones were damaged, or the run would not have come by here again: nothing to fall back to.
            kept = [entry for entry in self._kept() if entry["step"] < step]
            kept = [*kept, {"file": path.name, "step": step, "sha256": digest}][-KEPT:]
            durable.write_json(self.path / "checkpoints.json", {"kept": kept})
            names = {entry["file"] for entry in kept}
            for old in (self.path / "checkpoints").iterdir():
                if old.name not in names:
                    old.unlink()

    def finish(self, result: Mapping[str, Any]) -> None:
        with _disk(self.path, "the last checkpoint is safe"):
            durable.write_json(self.path / "result.json", result)

    # ---- looking, going on --------------------------------------------------------------------------

    def rows(self) -> Iterator[Row]:
        yield from (row for row, _ in durable.lines(self.path / "metrics.jsonl"))

    def result(self) -> Row | None:
        path = self.path / "result.json"
        return durable.read_json(path) if path.exists() else None

    def newest(self) -> Found | None:
        """The checkpoint to go on from; None if there is none yet. Only damaged ones: an error."""
        notes: list[str] = []
        kept = self._kept()
        for entry in reversed(kept):
            path = self.path / "checkpoints" / entry["file"]
            try:
                return Found(_whole(path, entry["sha256"]), tuple(notes))
            except CheckpointError as error:
                notes.append(f"{path}: {error}")
        if kept:
            raise RunError(
                f"{self.path}: no checkpoint to go on from ({'; '.join(notes)}); "
                "put one of them back, or start anew in another folder"
            )
        return None

    def cut_back(self, log_size: int) -> None:
        """Forgets what was written after a checkpoint."""
        with _disk(self.path, "the last checkpoint is safe"):
            (self.path / "result.json").unlink(missing_ok=True)
            durable.truncate(self.path / "metrics.jsonl", min(log_size, self.log_size))

    def _kept(self) -> list[Row]:
        path = self.path / "checkpoints.json"
        kept = durable.read_json(path).get("kept") if path.exists() else []
        wanted = {"file": str, "step": int, "sha256": str}
        if not isinstance(kept, list) or not all(
            isinstance(entry, dict) and all(isinstance(entry.get(key), kind) for key, kind in wanted.items())
            for entry in kept
        ):
            raise RunError(f"{path}: is damaged; put it back, or start anew in another folder")
        return kept


def _command(path: Path) -> str:
    return shlex.join(["takifugu", "train", "--resume", str(path)])


def _differences(old: Any, new: Any, path: str = "") -> Iterator[str]:
    """Yield the fields in which two recipes differ, with both values; what is said about a recipe aside."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in dict.fromkeys([*old, *new]):
            if path or key != "about":
                yield from _differences(old.get(key), new.get(key), f"{path}.{key}" if path else key)
    elif old != new:
        yield f"{path}: {_brief(old)}, now {_brief(new)}"


def _brief(value: Any) -> str:
    text = "not set" if value is None else repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _whole(path: Path, sha256: str) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"cannot be read ({error.strerror})") from None
    if hashlib.sha256(content).hexdigest() != sha256:
        raise CheckpointError("is damaged: it does not match its hash in checkpoints.json")
    Snapshot.from_bytes(content)
    return content


def _written(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def _only_leftovers(path: Path) -> bool:
    """Whether a folder holds nothing but what an interrupted beginning of ours leaves."""
    names = {p.name.removesuffix(".tmp") for p in path.iterdir()}
    if not names <= {"checkpoints", "metrics.jsonl", "run.json", "tensorboard"}:
        return False
    return (path / "run.json").exists() or not any((path / "checkpoints").glob("*"))


@contextmanager
def _disk(path: Path, safe: str) -> Iterator[None]:
    """Turns what the disk refuses into one clear error."""
    try:
        yield
    except OSError as error:
        raise RunError(
            f"{path}: cannot be written ({error.strerror or error}); {safe}: free some space or mend the "
            "folder, then continue with --resume"
        ) from error
