"""The run folder: what a run leaves behind, and what it goes on from.

Small files appear whole or not at all; the three logs grow by lines. A round counts once its line is in
`rounds.jsonl`, which is written last; whatever else was written for a round that does not count is cut
away when the run is resumed. So a run that is killed at any moment loses at most the round it was in.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from takifugu import durable
from takifugu.durable import Row
from takifugu.errors import CheckpointError, RunError, StructureError
from takifugu.structure import Structure

FORMAT = "takifugu.run/1"
LOGS = ("rounds.jsonl", "nodes.jsonl", "events.jsonl")
RESULT = (
    *("reached", "loss", "time_s", "energy_j", "bytes", "rounds"),
    *("planned_rounds", "deadline_met", "reason", "predicted"),
)
"""What `result.json` must say to be told again."""
KEPT = 2
"""Checkpoints kept: the newest, and one to fall back to."""


@dataclass(frozen=True)
class Resumed:
    """Where a run stands: its last whole round (nothing: at the start), and what had to be left behind."""

    last: Row | None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class RunFolder:
    path: Path
    header: Mapping[str, Any] = field(repr=False)
    """run.json: everything that the numbers of this run follow from."""

    # ---- beginning ----------------------------------------------------------------------------------

    @classmethod
    def create(
        cls,
        path: str | Path,
        header: Mapping[str, Any],
        problem: Mapping[str, Any],
        plan: Mapping[str, Any],
        structures: Iterable[Structure] = (),
    ) -> RunFolder:
        path = Path(path)
        if (path / "run.json").exists():
            raise RunError(f"{path}: holds a run already; continue it with --resume, or choose another --out")
        if path.exists() and not _only_leftovers(path):
            raise RunError(
                f"{path}: exists and is not a run folder; choose an empty or a new folder with --out"
            )
        header = {"format": FORMAT, **header}
        with _disk(path, 0):
            (path / "checkpoints").mkdir(parents=True, exist_ok=True)
            (path / "structures").mkdir(exist_ok=True)
            (path / "plans").mkdir(exist_ok=True)
            durable.write_json(path / "problem.json", problem)
            durable.write_json(path / "plan.json", plan)
            for structure in structures:
                durable.write_text(
                    path / "structures" / f"{structure.id}.json", structure.to_json(indent=2) + "\n"
                )
            for log in LOGS:
                durable.write_text(path / log, "")
            durable.write_json(path / "run.json", header)  # last: with it, the folder is a run
        return cls(path, header)

    @classmethod
    def open(cls, path: str | Path) -> RunFolder:
        path = Path(path)
        if not path.is_dir():
            raise RunError(f"{path}: there is no such run folder; start the run without --resume")
        header = durable.read_json(path / "run.json")
        if header.get("format") != FORMAT:
            raise RunError(f"{path / 'run.json'}: format is not '{FORMAT}'; is it of a newer version?")
        if not isinstance(header.get("versions"), dict):
            raise RunError(f"{path / 'run.json'}: 'versions' is missing; put it back, or start anew")
        for name in ("problem.json", "plan.json"):
            durable.read_json(path / name)
        return cls(path, {"replan": False, **header})  # there are runs from before there was any

    def check_same(self, header: Mapping[str, Any]) -> None:
        """Refuses to go on with another problem, plan, seed, world or deadline than the run began with."""
        same = (
            "problem_sha256",
            "plan_sha256",
            "policy",
            "replan",
            "seed",
            "averaging",
            "weights",
            "world",
            "target",
            "versions",
        )
        for key in same:
            ours, theirs = self.header.get(key), json.loads(json.dumps(header.get(key)))
            if ours != theirs:
                raise RunError(
                    f"{self.path}: was started with another {key.removesuffix('_sha256')} "
                    f"({_short(ours)}, now {_short(theirs)}); resume with the same, or choose another --out"
                )
        self._check_same_data(header.get("data") or {})

    def _check_same_data(self, now: Mapping[str, Any]) -> None:
        """Raise `RunError` if a node's samples or the validation set have changed since the run started."""
        before = _by_owner(self.header.get("data") or {})  # runs of earlier releases do not record it
        after = _by_owner(now)
        for whose, sha256 in before.items():
            if after.get(whose, sha256) != sha256:
                raise RunError(
                    f"{self.path}: the data of {whose} have changed since the run started; put the data that "
                    "it started with back (see --data-dir), or start a new run with another --out"
                )

    # ---- growing ------------------------------------------------------------------------------------

    def add_round(
        self, row: Row, nodes: Iterable[Row], events: Iterable[Row], save: Callable[[Path], None]
    ) -> None:
        """Keeps one round. `save(path)` writes the model; the order is what makes a crash harmless."""
        number = int(row["round"])
        with _disk(self.path, number - 1):
            row = {**row, "checkpoint_sha256": self._keep_checkpoint(number, save)}
            durable.append(self.path / "nodes.jsonl", nodes)
            durable.append(self.path / "events.jsonl", events)
            durable.append(self.path / "rounds.jsonl", [row])
            self.checkpoint(number - KEPT).unlink(missing_ok=True)

    def add_events(self, events: Iterable[Row], last_round: int) -> None:
        with _disk(self.path, last_round):
            durable.append(self.path / "events.jsonl", events)

    def add_plan(self, after: int, plan: Mapping[str, Any]) -> None:
        """Keeps a plan for what is left after a round."""
        with _disk(self.path, after):
            durable.write_json(self.plan_path(after), plan)

    def plan_path(self, after: int) -> Path:
        return self.path / "plans" / f"{after}.json"

    def plans(self) -> list[int]:
        """The rounds after which the rest was planned anew."""
        return sorted(int(p.stem) for p in (self.path / "plans").glob("*.json") if p.stem.isdecimal())

    def finish(self, result: Mapping[str, Any], last_round: int) -> None:
        with _disk(self.path, last_round):
            durable.write_json(self.path / "result.json", result)

    def checkpoint(self, round: int) -> Path:
        return self.path / "checkpoints" / f"{round}.safetensors"

    def _keep_checkpoint(self, number: int, save: Callable[[Path], None]) -> str:
        return durable.write_file(self.checkpoint(number), save)

    # ---- looking ------------------------------------------------------------------------------------

    def rows(self, log: str) -> Iterator[Row]:
        """The whole lines of a log, checked. A torn last line is what a crash leaves: it is not there."""
        yield from (row for row, _ in durable.lines(self.path / log))

    def result(self) -> Row | None:
        path = self.path / "result.json"
        if not path.exists():
            return None
        found = durable.read_json(path)
        if missing := [name for name in RESULT if name not in found]:
            raise RunError(f"{path}: {missing[0]!r} is missing; delete the file, and resume to write it anew")
        return found

    def structure(self, id: str) -> Structure:
        path = self.path / "structures" / f"{id}.json"
        try:
            structure = Structure.load(path)
        except StructureError as error:
            raise RunError(f"{path}: {error}; put the structure file back, or start anew") from error
        if structure.id != id:
            raise RunError(f"{path}: holds structure {structure.id}; it has been changed, put it back")
        return structure

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Only one process at a time carries a run out; the lock ends with the process, however it ends."""
        with durable.locked(self.path, by="run.json"):
            yield

    # ---- going on -----------------------------------------------------------------------------------

    def resume(self, load: Callable[[Path, Row], None]) -> Resumed:
        """Cuts everything back to the last round whose line and checkpoint are whole.

        `load(path, row)` puts the checkpoint into the model, or raises `CheckpointError`.
        """
        rounds = list(durable.lines(self.path / "rounds.jsonl"))
        for place, (row, _) in enumerate(rounds, start=1):
            if (found := row.get("round")) != place:
                raise RunError(
                    f"{self.path / 'rounds.jsonl'} line {place}: round {found!r} where {place} belongs; "
                    "lines are missing or out of order: put the file back, or start anew in another folder"
                )
        complaints: list[str] = []
        for number in range(len(rounds), max(len(rounds) - KEPT, -1), -1):
            last = rounds[number - 1][0] if number else None
            try:
                if last is not None:
                    self._load(number, last, load)
            except CheckpointError as error:
                complaints.append(str(error))
                continue
            with _disk(self.path, number):
                self._cut_back(number, rounds[number - 1][1] if number else 0)
            notes = tuple(f"{complaint}; went back to round {number}" for complaint in complaints)
            return Resumed(last, notes)
        raise RunError(
            f"{self.path}: no checkpoint to go on from ({'; '.join(complaints)}); "
            "put one of them back, or start anew in another folder"
        )

    def _load(self, number: int, row: Row, load: Callable[[Path, Row], None]) -> None:
        path = self.checkpoint(number)
        if not path.is_file():
            raise CheckpointError(f"{path}: is missing")
        # The hash comes first: a file that was damaged or exchanged must not reach the model.
        if durable.sha256(path) != row.get("checkpoint_sha256"):
            raise CheckpointError(f"{path}: is not the checkpoint that rounds.jsonl tells of")
        load(path, row)

    def _cut_back(self, number: int, rounds_end: int) -> None:
        (self.path / "result.json").unlink(missing_ok=True)
        for log in ("nodes.jsonl", "events.jsonl"):
            path, end = self.path / log, 0
            for row, after in durable.lines(path):
                place = row.get("round", 0)
                if not isinstance(place, int):
                    raise RunError(f"{path}: round {place!r} is not a number; put it back, or start anew")
                if place > number:
                    break
                end = after
            durable.truncate(path, end)
        durable.truncate(self.path / "rounds.jsonl", rounds_end)
        kept = {self.checkpoint(number - age) for age in range(KEPT)}
        for path in (self.path / "checkpoints").iterdir():
            if path not in kept:
                path.unlink()
        for after in self.plans():
            if after > number:
                self.plan_path(after).unlink()


# ---- files ----------------------------------------------------------------------------------------------


@contextmanager
def _disk(path: Path, last_round: int) -> Iterator[None]:
    """Turns what the disk refuses into one clear error; the round before is safe, whatever is half done."""
    try:
        yield
    except (OSError, CheckpointError) as error:
        cause = error.__cause__ if isinstance(error, CheckpointError) else error
        reason = getattr(cause, "strerror", None) or str(cause or error)
        safe = f"round {last_round} is safe" if last_round else "nothing is lost"
        raise RunError(
            f"{path}: cannot be written ({reason}); {safe}: free some space or mend the folder, "
            "then continue with --resume"
        ) from error


def _only_leftovers(path: Path) -> bool:
    """Whether a folder holds nothing but what an interrupted beginning of ours leaves."""
    ours = {"checkpoints", "structures", "plans", "problem.json", "plan.json", *LOGS}
    if not path.is_dir():
        return False
    names = {p.name.removesuffix(".tmp") for p in path.iterdir()}
    return names <= {*ours, "run.json", "baselines"} and not any((path / "checkpoints").glob("*"))


def _by_owner(data: Mapping[str, Any]) -> dict[str, Any]:
    """Hashes of run.json's `data`, by whose they are."""
    nodes = {f"node {name!r}": sha256 for name, sha256 in (data.get("nodes") or {}).items()}
    return {"the server (validation)": data.get("validation"), **nodes}


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
