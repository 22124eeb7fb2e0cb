"""`takifugu train` as users start it: real processes, killed and stopped, on one process and on two."""

from __future__ import annotations

import json
import os
import random
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import takifugu as tk
from takifugu.train.snapshot import Snapshot

pytestmark = pytest.mark.distributed

TIMEOUT_S = 200
RECIPE = """
base = "digits-small"
epochs = 4
factor_decay = 1e-3
[model]
options = { width = 8 }
[data]
limit = 600
[method]
warmup = 2
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recipe") / "small.toml"
    path.write_text(RECIPE)
    return path


def command(recipe: Path, out: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "takifugu", "train", str(recipe), "--out", str(out), *options]


@contextmanager
def started(words: list[str], **environment: str) -> Iterator[subprocess.Popen[str]]:
    """A process in a session of its own, of which nothing is left afterwards."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    process = subprocess.Popen(
        words,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def finished(words: list[str], **environment: str) -> tuple[int, str, str]:
    with started(words, **environment) as process:
        out, err = process.communicate(timeout=TIMEOUT_S)
        return process.returncode, out, err


def told_to_go_on(err: str) -> list[str]:
    """The command that an interrupted run prints. The folder remembers the options, so it is short."""
    (told,) = (
        line.partition("continue with: takifugu ")[2] for line in err.splitlines() if "continue with" in line
    )
    assert shlex.split(told)[:2] == ["train", "--resume"]
    assert len(shlex.split(told)) == 3
    return [sys.executable, "-m", "takifugu", *shlex.split(told)]


def wait_for_step(process: subprocess.Popen[str], out: Path, step: int) -> None:
    """Until the run has a checkpoint at this step or later."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        assert process.poll() is None, f"it ended before step {step}: {process.communicate()[1]}"
        try:
            kept = json.loads((out / "checkpoints.json").read_text())["kept"]
        except FileNotFoundError:
            kept = []
        if kept and kept[-1]["step"] >= step:
            return
        time.sleep(0.01)
    pytest.fail(f"no checkpoint at step {step}")


def final(out: Path) -> dict[str, torch.Tensor]:
    kept = json.loads((out / "checkpoints.json").read_text())["kept"][-1]
    return Snapshot.from_bytes((out / "checkpoints" / kept["file"]).read_bytes()).tensors


def assert_same(one: Path, other: Path) -> None:
    ours, theirs = final(one), final(other)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


def scores(out: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((out / "result.json").read_text())["test"]
    return result


def parameters(out: Path) -> int:
    return int(json.loads((out / "result.json").read_text())["parameters"])


@pytest.fixture(scope="module")
def alone(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody disturbed."""
    out = tmp_path_factory.mktemp("alone") / "run"
    code, told, err = finished(command(recipe, out, "--json"))
    assert code == 0, err
    assert json.loads(told)["test"] == scores(out)
    return out


@pytest.fixture(scope="module")
def together(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out, aside = tmp_path_factory.mktemp("together") / "run", tmp_path_factory.mktemp("aside")
    code, told, err = finished(command(recipe, out, "--workers", "2"), TMPDIR=str(aside))
    assert code == 0, err
    assert f"{scores(out)['top1']:.4f}" in told
    # torch's own cache, one for all runs, may stay
    assert not [path for path in aside.iterdir() if not path.name.startswith("torchinductor_")]
    return out


def test_killed_three_times_it_ends_as_if_it_was_not(recipe: Path, alone: Path, tmp_path: Path) -> None:
    out, draw = tmp_path / "run", random.Random(5)
    options = ["--checkpoint-every", "0"]
    last = 0
    for _ in range(3):
        last += draw.randint(2, 8)
        with started(command(recipe, out, *options)) as process:
            wait_for_step(process, out, last)
            process.kill()
            assert process.wait() == -signal.SIGKILL
        options = ["--checkpoint-every", "0", "--resume"]
    code, _, err = finished(command(recipe, out, *options))
    assert code == 0, err
    assert "continuing from step" in err
    assert_same(alone, out)
    assert scores(out) == scores(alone)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_asked_to_stop_it_saves_and_exits_130(
    number: signal.Signals, recipe: Path, alone: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    # What --set changes is changed back: the recipe of the undisturbed run, if it is remembered.
    other = tmp_path / "other.toml"
    other.write_text(recipe.read_text().replace("epochs = 4", "epochs = 3"))
    with started(command(other, out, "--set", "epochs=4")) as process:
        wait_for_step(process, out, 1)
        process.send_signal(number)
        _, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130, err
    code, _, err = finished(told_to_go_on(err))
    assert code == 0, err
    assert_same(alone, out)


@pytest.mark.slow
def test_a_killed_worker_is_started_again(recipe: Path, together: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with started(command(recipe, out, "--workers", "2", "--checkpoint-every", "0")) as process:
        wait_for_step(process, out, 7)
        workers = [
            int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        ]
        os.kill(workers[-1], signal.SIGKILL)
        _, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, err
    assert "continuing from step" in err
    assert_same(together, out)
    assert scores(out) == scores(together)


@pytest.mark.slow  # the sharded test stops two workers as well
def test_two_workers_stop_together_and_go_on(recipe: Path, together: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with started(command(recipe, out, "--workers", "2", "--checkpoint-every", "0")) as process:
        wait_for_step(process, out, 4)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130, err
    code, _, err = finished(command(recipe, out, "--workers", "2", "--resume"))
    assert code == 0, err
    assert_same(together, out)


def test_sharded_it_computes_the_same_and_goes_on(recipe: Path, together: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    options = ["--workers", "2", "--sharding", "fsdp", "--checkpoint-every", "0.0"]
    options += ["--data-dir", str(tmp_path)]
    with started(command(recipe, out, *options)) as process:
        wait_for_step(process, out, 11)  # after the switch
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130
    again = told_to_go_on(err)
    header = json.loads((out / "run.json").read_text())
    assert (header["world"], header["sharding"]) == (2, "fsdp")
    assert header["options"]["data_dir"] == str(tmp_path)
    code, _, err = finished(again)
    assert code == 0, err
    assert "continuing from step" in err
    for folder in (out, together):
        model = tk.load(folder / "model.safetensors")
        assert sum(p.numel() for p in model.parameters()) == parameters(folder)
    ours, theirs = final(out), final(together)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_the_users_own_torchrun(recipe: Path, together: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    code, _, err = finished([*launcher, "-m", "takifugu", *command(recipe, out)[3:]])
    assert code == 0, err
    assert_same(together, out)


def test_a_failure_that_no_restart_can_mend_is_told_once(recipe: Path, tmp_path: Path) -> None:
    words = command(recipe, tmp_path / "run", "--workers", "2", "--set", "optimizer.lr=1e30")
    code, _, err = finished(words)
    assert code == 1, err
    assert 1 <= err.count("batch seed") <= 2, err  # by either process
    code, _, err = finished(command(recipe, tmp_path / "other", "--workers", "2", "--set", "data.name=cifar"))
    assert code == 2
    assert "did you mean 'cifar10'" in err


def test_only_the_leader_says_what_is_missing(recipe: Path, together: Path, tmp_path: Path) -> None:
    words = ["--workers", "2", "--data-dir", str(tmp_path), "--set", "data.name=cifar10"]
    code, _, err = finished(command(recipe, tmp_path / "run", *words))
    assert code == 2, err
    assert err.count("data_batch_1.bin is missing") == 1, err
    code, told, err = finished(command(recipe, together, "--workers", "2", "--resume", "--json"))
    assert code == 0, err
    assert json.loads(told)["test"] == scores(together)


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [
        '{kind="lottery-ticket", rounds=1, keep=0.6}',
        '{kind="early-bird", keep=0.7, latest=1}',
        '{kind="low-rank", rank=0.25}',
    ],
    ids=["lottery-ticket", "early-bird", "low-rank"],
)
def test_every_method_goes_on_on_two_processes(method: str, recipe: Path, tmp_path: Path) -> None:
    words = ["--workers", "2", "--checkpoint-every", "0", "--set", f"method={method}", "--set", "epochs=2"]
    if "early-bird" in method:  # it needs batch norms
        network = '{name="resnet18-cifar10", options={width=4, blocks=[1, 1, 1, 1]}}'
        words += ["--set", f"model={network}"]
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    code, _, err = finished(command(recipe, whole, *words))
    assert code == 0, err
    with started(command(recipe, broken, *words)) as process:
        wait_for_step(process, broken, 6)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130
    code, _, err = finished(command(recipe, broken, *words, "--resume"))
    assert code == 0, err
    assert_same(whole, broken)
    assert scores(whole) == scores(broken)
