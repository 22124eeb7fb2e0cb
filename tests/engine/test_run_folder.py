from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import takifugu as tk
from takifugu import durable
from takifugu.engine.folder import RunFolder
from takifugu.errors import CheckpointError, RunError

HEADER = {
    "policy": "plan",
    "seed": 3,
    "averaging": "factors",
    "world": {"seed": 3},
    "versions": {},
    "problem_sha256": "p",
    "plan_sha256": "q",
}


def small() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 2))


class Rounds:
    """A run without training: the model's weight is the round's number."""

    def __init__(self, path: Path, **header: Any) -> None:
        self.folder = RunFolder.create(path, {**HEADER, **header}, {"a": 1}, {"rounds": []}, [tk.Structure()])
        self.model = small()

    def add(self, *numbers: int) -> Rounds:
        for number in numbers:
            nn.init.constant_(self.model[0].weight, number)
            row = {"round": number, "structure": tk.Structure().id, "loss": 1.0 / number}
            nodes = [{"round": number, "node": name} for name in "ab"]
            events = [{"round": number, "event": "slow"}] if number % 2 else []
            self.folder.add_round(row, nodes, events, lambda path: tk.save(self.model, path))
        return self


def resumed(path: Path) -> tuple[Any, nn.Module]:
    model = small()

    def load(checkpoint: Path, row: dict[str, Any]) -> None:
        tk.load(checkpoint, model)
        if tk.structure_of(model).id != row["structure"]:
            raise CheckpointError(f"{checkpoint}: is for structure {tk.structure_of(model).id}")

    return RunFolder.open(path).resume(load), model


def contents(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}


def test_a_run_is_kept_and_found_again(tmp_path: Path) -> None:
    run = Rounds(tmp_path / "run").add(1, 2, 3)
    found, model = resumed(tmp_path / "run")
    assert found.last["round"] == 3
    assert not found.notes
    assert torch.equal(model[0].weight, torch.full((2, 3), 3.0))
    kept = sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir())
    assert kept == ["2.safetensors", "3.safetensors"]
    assert [row["round"] for row in run.folder.rows("nodes.jsonl")] == [1, 1, 2, 2, 3, 3]


def test_the_same_run_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("one", "two"):
        torch.manual_seed(0)
        Rounds(tmp_path / name).add(1, 2)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


@pytest.mark.parametrize("step", range(1, 12))
def test_a_crash_at_any_step_of_a_round_loses_that_round_at_most(
    tmp_path: Path, monkeypatch, step: int
) -> None:
    """The power goes at the n-th call that reaches the disk; what is resumed then is a run of whole rounds."""
    run = Rounds(tmp_path / "run").add(1, 2)
    before = contents(tmp_path / "run")
    calls = 0

    class Dead(BaseException):
        pass

    def mortal(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == step:
                raise Dead
            return function(*args, **kwargs)

        return call

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", mortal(os.fsync))
        patched.setattr(os, "replace", mortal(os.replace))
        died = False
        try:
            run.add(3)
        except Dead:
            died = True
    found, model = resumed(tmp_path / "run")
    number = found.last["round"]
    assert number in ((2, 3) if died else (3,))
    assert torch.equal(model[0].weight, torch.full((2, 3), float(number)))
    after = contents(tmp_path / "run")
    if number == 2:
        assert after == before
    again = Rounds(tmp_path / "whole").add(1, 2, 3)
    run.model = again.model
    if number == 2:
        run.add(3)
    logs = ("rounds.jsonl", "nodes.jsonl", "events.jsonl")
    mine, whole = contents(tmp_path / "run"), contents(tmp_path / "whole")
    assert [[json.loads(line).get("round") for line in mine[log].splitlines()] for log in logs] == [
        [json.loads(line).get("round") for line in whole[log].splitlines()] for log in logs
    ]


@pytest.mark.parametrize("log", ["rounds.jsonl", "nodes.jsonl", "events.jsonl"])
def test_a_torn_last_line_is_cut(tmp_path: Path, log: str) -> None:
    Rounds(tmp_path / "run").add(1, 2)
    path = tmp_path / "run" / log
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"round": 3, "lo')
    assert resumed(tmp_path / "run")[0].last["round"] == 2
    assert path.read_bytes() == whole


@pytest.mark.parametrize("log", ["rounds.jsonl", "nodes.jsonl"])
def test_damage_in_the_middle_is_an_error(tmp_path: Path, log: str) -> None:
    Rounds(tmp_path / "run").add(1, 2)
    path = tmp_path / "run" / log
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([b"#" + lines[0], *lines[1:]]))
    with pytest.raises(RunError, match=rf"{log} line 1: is damaged .*start anew"):
        resumed(tmp_path / "run")


def test_missing_lines_are_an_error(tmp_path: Path) -> None:
    Rounds(tmp_path / "run").add(1, 2, 3)
    path = tmp_path / "run" / "rounds.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[2])
    with pytest.raises(RunError, match=r"line 2: round 3 where 2 belongs"):
        resumed(tmp_path / "run")


def spoil(path: Path, how: str) -> None:
    if how == "missing":
        path.unlink()
    elif how == "truncated":
        path.write_bytes(path.read_bytes()[:-4])
    elif how == "tampered":
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    elif how == "foreign":  # whole, of the right structure, but not this run's
        model = small()
        tk.save(model, path)
    elif how == "structure":
        model = small()
        tk.factorize_(model, tk.ranks.Fixed(1), force=True)
        tk.save(model, path)


OTHER = "is not the checkpoint that rounds.jsonl tells of"
KINDS = {"missing": "is missing"} | dict.fromkeys(("truncated", "tampered", "foreign", "structure"), OTHER)


@pytest.mark.parametrize("how", KINDS)
def test_a_bad_newest_checkpoint_falls_back(tmp_path: Path, how: str) -> None:
    run = Rounds(tmp_path / "run").add(1, 2, 3)
    spoil(run.folder.checkpoint(3), how)
    found, model = resumed(tmp_path / "run")
    assert found.last["round"] == 2
    assert KINDS[how] in found.notes[0]
    assert "3.safetensors" in found.notes[0]
    assert torch.equal(model[0].weight, torch.full((2, 3), 2.0))
    assert len((tmp_path / "run" / "rounds.jsonl").read_text().splitlines()) == 2


def test_a_checkpoint_with_another_hash_is_never_opened(tmp_path: Path) -> None:
    run = Rounds(tmp_path / "run").add(1, 2)
    spoil(run.folder.checkpoint(2), "foreign")
    opened: list[str] = []
    found = run.folder.resume(lambda path, row: opened.append(path.name))
    assert opened == ["1.safetensors"]
    assert OTHER in found.notes[0]


@pytest.mark.parametrize("how", KINDS)
def test_two_bad_checkpoints_are_an_error_naming_both(tmp_path: Path, how: str) -> None:
    run = Rounds(tmp_path / "run").add(1, 2, 3)
    before = (tmp_path / "run" / "rounds.jsonl").read_bytes()
    spoil(run.folder.checkpoint(3), how)
    spoil(run.folder.checkpoint(2), how)
    with pytest.raises(RunError, match=r"3\.safetensors.*2\.safetensors.*start anew"):
        resumed(tmp_path / "run")
    assert (tmp_path / "run" / "rounds.jsonl").read_bytes() == before


def test_before_the_first_checkpoint_there_is_the_start(tmp_path: Path) -> None:
    run = Rounds(tmp_path / "run").add(1)
    spoil(run.folder.checkpoint(1), "truncated")
    found, _ = resumed(tmp_path / "run")
    assert found.last is None
    assert (tmp_path / "run" / "nodes.jsonl").read_bytes() == b""


def test_a_full_disk_is_a_clear_error_and_loses_nothing(tmp_path: Path, monkeypatch) -> None:
    run = Rounds(tmp_path / "run").add(1, 2)
    before = contents(tmp_path / "run")

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for where, name in ((os, "fsync"), (os, "replace"), (durable, "append")):
        with monkeypatch.context() as patched:
            patched.setattr(where, name, full)
            with pytest.raises(RunError, match=r"No space left on device.*round 2 is safe.*--resume"):
                run.add(3)
        assert resumed(tmp_path / "run")[0].last["round"] == 2
        assert contents(tmp_path / "run") == before
    assert resumed(tmp_path / "run")[0].last["round"] == 2


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.parametrize("log", ["nodes.jsonl", "rounds.jsonl"])
def test_a_device_that_is_really_full(tmp_path: Path, log: str) -> None:
    run = Rounds(tmp_path / "run").add(1, 2)
    path, aside = tmp_path / "run" / log, tmp_path / log
    before = contents(tmp_path / "run")
    path.rename(aside)
    path.symlink_to("/dev/full")
    with pytest.raises(RunError, match=r"No space left on device.*round 2 is safe"):
        run.add(3)
    aside.replace(path)
    assert resumed(tmp_path / "run")[0].last["round"] == 2
    assert contents(tmp_path / "run") == before


def test_a_folder_in_use_is_not_overwritten(tmp_path: Path) -> None:
    Rounds(tmp_path / "run").add(1)
    with pytest.raises(RunError, match="holds a run already; continue it with --resume"):
        Rounds(tmp_path / "run")
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_text("")
    with pytest.raises(RunError, match="is not a run folder"):
        Rounds(tmp_path / "photos")
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="is not a run folder"):
        Rounds(tmp_path / "file")


def test_a_beginning_that_was_cut_short_can_begin_again(tmp_path: Path) -> None:
    Rounds(tmp_path / "run")
    (tmp_path / "run" / "run.json").unlink()
    (tmp_path / "run" / "plan.json.tmp").write_text("{")
    Rounds(tmp_path / "run").add(1)
    assert resumed(tmp_path / "run")[0].last["round"] == 1


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("seed", "another seed"),
        ("weights", "another weights"),
        ("problem_sha256", "another problem"),
        ("world", "another world"),
    ],
)
def test_another_run_is_not_continued(tmp_path: Path, key: str, said: str) -> None:
    run = Rounds(tmp_path / "run")
    run.folder.check_same(HEADER)
    with pytest.raises(RunError, match=said):
        run.folder.check_same({**HEADER, key: "other"})


def test_a_damaged_header_is_named(tmp_path: Path) -> None:
    Rounds(tmp_path / "run")
    (tmp_path / "run" / "plan.json").write_text("{")
    with pytest.raises(RunError, match=r"plan\.json: is damaged"):
        RunFolder.open(tmp_path / "run")
    (tmp_path / "run" / "run.json").write_text("{}")
    with pytest.raises(RunError, match=r"run\.json: format"):
        RunFolder.open(tmp_path / "run")
    with pytest.raises(RunError, match="no such run folder"):
        RunFolder.open(tmp_path / "nowhere")


def test_only_one_process_at_a_time(tmp_path: Path) -> None:
    run = Rounds(tmp_path / "run")
    again = RunFolder.open(tmp_path / "run")
    with run.folder.locked(), pytest.raises(RunError, match="another process is carrying this run out"):
        again.locked().__enter__()
    with again.locked():
        pass


def test_a_missing_log_is_named(tmp_path: Path) -> None:
    Rounds(tmp_path / "run").add(1)
    (tmp_path / "run" / "nodes.jsonl").unlink()
    with pytest.raises(RunError, match=r"nodes\.jsonl: cannot be read .*put it back"):
        resumed(tmp_path / "run")


def test_a_changed_structure_file_is_noticed(tmp_path: Path) -> None:
    run = Rounds(tmp_path / "run")
    id = tk.Structure().id
    assert run.folder.structure(id) == tk.Structure()
    path = tmp_path / "run" / "structures" / f"{id}.json"
    model = small()
    tk.factorize_(model, tk.ranks.Fixed(1), force=True)
    tk.structure_of(model).save(path)
    with pytest.raises(RunError, match="it has been changed"):
        run.folder.structure(id)
