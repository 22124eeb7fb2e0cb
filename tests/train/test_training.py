"""Training runs in this process: what they compute, and that they can be stopped and go on anywhere."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

import takifugu as tk
from takifugu import durable
from takifugu.cli import main
from takifugu.errors import DataError, RunError, TrainingError, UsageError
from takifugu.train import models
from takifugu.train import recipe as recipes
from takifugu.train.job import Interrupted, Job, carry_out
from takifugu.train.launch import leave_behind
from takifugu.train.processes import Processes, Together
from takifugu.train.recipe import Recipe
from takifugu.train.snapshot import Snapshot
from takifugu.train.tasks import task_for
from takifugu.train.tasks.base import Place

METHODS: dict[str, dict[str, Any]] = {
    "dense": {"kind": "dense"},
    "warm-start": {"kind": "warm-start", "rank": 0.25, "warmup": 1, "rewarm": 3},
    "stages": {"kind": "warm-start", "stages": [[1, 0.5], [2, 0.25]]},
    "low-rank": {"kind": "low-rank", "rank": 0.25},
    "lottery-ticket": {"kind": "lottery-ticket", "rounds": 1, "keep": 0.6, "rewind": 1},
    "early-bird": {"kind": "early-bird", "keep": 0.7, "latest": 1},
}


def small(method: str = "warm-start", /, **changes: Any) -> Recipe:
    changes.setdefault("method", METHODS[method])
    data: dict[str, Any] = {
        "epochs": 3,
        "model": {"name": "resnet18-cifar10", "options": {"width": 4, "blocks": [1, 1, 1, 1]}},
        "data": {"name": "digits", "batch_size": 32, "validation": 0.2, "limit": 200, "augment": True},
        "optimizer": {"kind": "sgd", "lr": 0.05, "momentum": 0.9, "weight_decay": 1e-4},
        "schedule": {"kind": "one-cycle"},
        **changes,
    }
    return recipes.checked(data, "test")


def texts(folder: Path) -> Path:
    """A folder with very small data sets of the text tasks, in their own layout."""
    words = [f"w{n}" for n in range(30)]
    (folder / "wikitext-2").mkdir(parents=True)
    for part, lines in (("train", 60), ("valid", 20), ("test", 20)):
        text = "".join(
            " " + " ".join(words[(i * i + j * (i % 3 + 1)) % 30] for j in range(12)) + " \n"
            for i in range(lines)
        )
        (folder / "wikitext-2" / f"{part}.txt").write_text(text, encoding="utf-8")
    (folder / "multi30k").mkdir()
    for part, lines in (("train", 60), ("val", 12), ("test_2016_flickr", 12)):
        for language in ("en", "de"):
            text = "".join(
                f"{'the' if language == 'en' else 'der'} {words[i % 30]} {words[(i * 7) % 30]} .\n"
                for i in range(lines)
            )
            (folder / "multi30k" / f"{part}.{language}").write_text(text, encoding="utf-8")
    return folder


LANGUAGE: dict[str, Any] = {
    "model": {"name": "lstm-wikitext2", "options": {"hidden": 16, "dropout": 0.2}},
    "data": {"name": "wikitext-2", "batch_size": 4, "options": {"bptt": 12}},
    "optimizer": {"kind": "sgd", "lr": 2.0},
    "schedule": {"kind": "plateau"},
    "clip_norm": 0.25,
}
TRANSLATION: dict[str, Any] = {
    "model": {
        "name": "transformer-multi30k",
        "options": {"width": 16, "heads": 2, "feed_forward": 32, "layers": 2},
    },
    "data": {"name": "multi30k", "batch_size": 8, "label_smoothing": 0.1, "options": {"vocabulary": 120}},
    "optimizer": {"kind": "adam", "lr": 1e-3, "betas": [0.9, 0.98]},
    "schedule": {"kind": "inverse-sqrt", "warmup_steps": 10},
}


class Stops:
    """Asks the run to stop after given steps, as Ctrl-C would."""

    def __init__(self, *after: int) -> None:
        self.after = set(after)

    def __call__(self, tick: Any, training: Any) -> None:
        if tick.standing.steps in self.after:
            self.after.remove(tick.standing.steps)
            training.stop = True


def run(recipe: Recipe, out: Path, *stops: int, data: Path | None = None, **options: Any) -> dict[str, Any]:
    """To the end, however often it stops on the way."""
    asked, resume = Stops(*stops), False
    while True:
        job = Job(recipe, out, data, resume=resume, **options)
        try:
            return carry_out(job, Processes(Place(), "cpu"), progress=asked)
        except Interrupted:
            resume = True


def final(out: Path) -> dict[str, torch.Tensor]:
    """Everything of the last checkpoint: weights, statistics, the optimizer's and the method's state."""
    kept = json.loads((out / "checkpoints.json").read_text())["kept"][-1]
    return Snapshot.from_bytes((out / "checkpoints" / kept["file"]).read_bytes()).tensors


def rows(out: Path) -> list[dict[str, Any]]:
    """The metrics without what a clock says."""
    found = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [
        {key: value for key, value in row.items() if "seconds" not in key and not key.endswith("_per_s")}
        for row in found
    ]


def assert_same(one: Path, other: Path) -> None:
    ours, theirs = final(one), final(other)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name
    assert rows(one) == rows(other)


# ---- going on -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_a_run_that_was_stopped_ends_as_if_it_was_not(method: str, tmp_path: Path) -> None:
    recipe = small(method)
    whole = run(recipe, tmp_path / "whole")
    # Five steps an epoch: within the first, at an epoch's end, right after a change, twice in one epoch.
    broken = run(recipe, tmp_path / "broken", 2, 5, 6, 8)
    assert_same(tmp_path / "whole", tmp_path / "broken")
    assert broken["test"] == whole["test"]
    assert broken["parameters"] == whole["parameters"]
    drop = {key: value for key, value in whole.items() if key not in ("training_seconds", "events")}
    assert drop == {key: broken[key] for key in drop}


@pytest.mark.parametrize("changes", [LANGUAGE, TRANSLATION], ids=["language", "translation"])
def test_text_runs_go_on_as_well(changes: dict[str, Any], tmp_path: Path) -> None:
    data, recipe = texts(tmp_path / "data"), small("warm-start", **changes)
    whole = run(recipe, tmp_path / "whole", data=data)
    run(recipe, tmp_path / "broken", 2, 7, data=data)
    assert_same(tmp_path / "whole", tmp_path / "broken")
    assert whole["headline"].keys() == {"perplexity" if changes is LANGUAGE else "bleu"}


@pytest.mark.parametrize(
    "changes",
    [
        {"precision": "bf16", "channels_last": True},
        {"precision": "fp16"},
        {"optimizer": {"kind": "adamw", "lr": 1e-3}, "frobenius_decay": 1e-3},
        {"optimizer": {"kind": "sgd", "lr": 0.05}, "schedule": {"kind": "plateau"}},
        {"factor_decay": 1e-2, "method": METHODS["stages"]},
    ],
    ids=["bf16", "fp16", "frobenius", "plateau", "factor-decay"],
)
def test_so_do_other_settings(changes: dict[str, Any], tmp_path: Path) -> None:
    recipe = small("warm-start", **changes)
    run(recipe, tmp_path / "whole")
    run(recipe, tmp_path / "broken", 3, 7)
    assert_same(tmp_path / "whole", tmp_path / "broken")


def test_factors_may_have_a_decay_of_their_own(tmp_path: Path) -> None:
    """In groups of their own from the switch on, back in the others' when they are weights again."""
    up_again = {"kind": "warm-start", "stages": [[1, 0.25], [2, "dense"]]}
    recipe = small("warm-start", factor_decay=0.5, method=up_again)
    run(recipe, tmp_path / "run")
    seen = []
    for path in sorted((tmp_path / "run" / "checkpoints").iterdir()):
        header = Snapshot.from_bytes(path.read_bytes()).header
        factors = {name for name in _names(header) if name.endswith((".u.weight", ".v.weight"))}
        decays = {g["weight_decay"]: set(g["params"]) & factors for g in header["groups"]}
        seen.append(len(factors))
        assert decays[1e-4] == set()
        assert decays.get(0.5, set()) == factors
    assert max(seen) > 0
    assert seen[-1] == 0

    # The same decay for all is what it is without the option.
    run(small("warm-start", factor_decay=1e-4), tmp_path / "same")
    run(small("warm-start"), tmp_path / "without")
    assert_same(tmp_path / "same", tmp_path / "without")
    with pytest.raises(UsageError, match="`frobenius_decay` and `factor_decay` are mutually exclusive"):
        small("warm-start", factor_decay=1e-4, frobenius_decay=1e-4)


def _names(header: Any) -> set[str]:
    return {name for group in header["groups"] for name in group["params"]}


def test_layers_of_ones_own_network_are_meant_before_and_after_a_switch(tmp_path: Path) -> None:
    recipe = small(
        "stages", model={"name": "takifugu.zoo.small:cnn", "options": {"width": 16}}, frobenius_decay=1e-3
    )
    run(recipe, tmp_path / "whole")
    result = run(recipe, tmp_path / "broken", 7, 12)
    assert [event["layers"] for event in result["events"]] == [2, 2]  # not the first, nor the head
    assert_same(tmp_path / "whole", tmp_path / "broken")


def test_embeddings_of_ones_own_network_stay_as_they_are() -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(9, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 3))
    where = models.usual_where("mine:network")
    assert [spec.name for spec in tk.choose(model, 2, where)] == ["1"]


def test_a_finished_run_is_not_run_again(tmp_path: Path) -> None:
    recipe = small("dense", epochs=1)
    first = run(recipe, tmp_path / "run")
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    assert carry_out(Job(recipe, tmp_path / "run", resume=True), Processes(Place(), "cpu")) == first
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


def test_a_run_goes_on_only_as_it_began(tmp_path: Path) -> None:
    run(small("dense", epochs=1), tmp_path / "run")
    with pytest.raises(
        RunError, match="holds a run already; continue it with: takifugu train --resume .*run, or"
    ):
        run(small("dense", epochs=1), tmp_path / "run")
    with pytest.raises(
        RunError,
        match=r"was started with another recipe \(epochs: 1, now 2\); continue it as it is with: takifugu",
    ):
        Job(small("dense", epochs=2), tmp_path / "run", resume=True).check(1)
    with pytest.raises(RunError, match="another number of processes.*--workers"):
        Job(small("dense", epochs=1), tmp_path / "run", resume=True).check(2)
    with pytest.raises(RunError, match="there is no such run folder"):
        Job(small("dense"), tmp_path / "nowhere", resume=True).check(1)


# ---- what can go wrong ------------------------------------------------------------------------------------


def stopped(recipe: Recipe, out: Path, after: int, **options: Any) -> None:
    with pytest.raises(Interrupted):
        carry_out(Job(recipe, out, **options), Processes(Place(), "cpu"), progress=Stops(after))


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(tmp_path: Path) -> None:
    recipe = small("warm-start")
    run(recipe, tmp_path / "whole")
    stopped(recipe, tmp_path / "run", 7)
    newest, before = sorted((tmp_path / "run" / "checkpoints").iterdir(), reverse=True)
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    newest.write_bytes(content)
    seen: list[Any] = []
    carry_out(Job(recipe, tmp_path / "run", resume=True), Processes(Place(), "cpu"), watch=seen.append)
    note = seen[0]["notes"][0]
    assert newest.name in note
    assert "does not match its hash" in note
    assert seen[0]["step"] == int(before.stem)
    assert_same(tmp_path / "whole", tmp_path / "run")


def test_without_a_whole_checkpoint_it_says_so(tmp_path: Path) -> None:
    recipe = small("dense")
    stopped(recipe, tmp_path / "run", 7)
    for path in (tmp_path / "run" / "checkpoints").iterdir():
        path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(RunError, match="no checkpoint to go on from.*put one of them back"):
        carry_out(Job(recipe, tmp_path / "run", resume=True), Processes(Place(), "cpu"))


@pytest.mark.parametrize("where", ["fsync", "replace"])
def test_a_full_disk_does_not_destroy_the_last_checkpoint(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = small("warm-start")
    run(recipe, tmp_path / "whole")
    stopped(recipe, tmp_path / "run", 6)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, where, full)
        with pytest.raises(RunError, match=r"No space left on device.*last checkpoint is safe.*--resume"):
            carry_out(Job(recipe, tmp_path / "run", resume=True), Processes(Place(), "cpu"))
    carry_out(Job(recipe, tmp_path / "run", resume=True), Processes(Place(), "cpu"))
    assert_same(tmp_path / "whole", tmp_path / "run")


def test_a_loss_that_is_no_number_stops_the_run_and_says_where(tmp_path: Path) -> None:
    recipe = small("dense", optimizer={"kind": "sgd", "lr": 1e30}, schedule={"kind": "constant"})
    with pytest.raises(TrainingError, match=r"the loss is (nan|inf) at epoch 1, step \d") as caught:
        run(recipe, tmp_path / "run")
    step = int(str(caught.value).split("step ")[1].split(" ")[0]) - 1
    task = task_for(recipe, None, Place())
    assert f"batch seed {task.batch_seed(0, step)}" in str(caught.value)
    assert not (tmp_path / "run" / "result.json").exists()


def test_so_does_a_validation_that_is_no_number(tmp_path: Path) -> None:
    # One step an epoch: its loss is still a number, the weights after it are not.
    data = {"name": "digits", "batch_size": 500, "validation": 0.2, "limit": 200}
    recipe = small("dense", data=data, optimizer={"kind": "sgd", "lr": 1e30}, schedule={"kind": "constant"})
    with pytest.raises(
        TrainingError, match=r"the validation loss is nan after step 1 \(learning rate 1e\+30\)"
    ):
        run(recipe, tmp_path / "run")
    assert all(row["kind"] != "epoch" for row in rows(tmp_path / "run"))
    assert not (tmp_path / "run" / "checkpoints.json").exists()


def test_a_perplexity_beyond_all_numbers_stops_the_run_too(tmp_path: Path) -> None:
    recipe = small("dense", **(LANGUAGE | {"optimizer": {"kind": "sgd", "lr": 1e5}, "clip_norm": None}))
    with pytest.raises(TrainingError, match=r"the validation perplexity is inf|the loss is (nan|inf)"):
        run(recipe, tmp_path / "run", data=texts(tmp_path / "data"))


def test_after_a_damaged_checkpoint_there_is_again_one_to_fall_back_to(tmp_path: Path) -> None:
    recipe, out = small("dense"), tmp_path / "run"
    stopped(recipe, out, 8)  # there are those of steps 5 and 9 then
    (out / "checkpoints" / "00000009.safetensors").write_bytes(b"")
    stopped(recipe, out, 6, resume=True)
    kept = json.loads((out / "checkpoints.json").read_text())["kept"]
    assert [entry["step"] for entry in kept] == [5, 7]


@pytest.mark.parametrize("content", ["{}", '{"kept": 3}', '{"kept": [{}]}', '{"kept": [7]}'])
def test_a_damaged_list_of_checkpoints_is_named(content: str, tmp_path: Path) -> None:
    stopped(small("dense"), tmp_path / "run", 3)
    (tmp_path / "run" / "checkpoints.json").write_text(content)
    with pytest.raises(RunError, match=r"checkpoints\.json: is damaged; put it back"):
        carry_out(Job(small("dense"), tmp_path / "run", resume=True), Processes(Place(), "cpu"))


def test_lost_metrics_are_not_made_up(tmp_path: Path) -> None:
    stopped(small("dense"), tmp_path / "run", 8)
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    carry_out(Job(small("dense"), tmp_path / "run", resume=True), Processes(Place(), "cpu"))
    assert [row["kind"] for row in rows(tmp_path / "run")][-1] == "epoch"


def test_places_where_no_run_can_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("")
    for out in ("file", "mine"):
        with pytest.raises(RunError, match="exists and is not a run folder"):
            Job(small("dense"), tmp_path / out).check(1)

    def forbidden(path: Path, **_: Any) -> Any:  # a root user, who may all, could not see it
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "stat", forbidden)
    for resume in (False, True):
        with pytest.raises(RunError, match="Permission denied"):
            Job(small("dense"), tmp_path / "run", resume=resume).check(1)


def test_a_disk_that_is_full_when_the_model_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    recipe = small("dense", epochs=1)
    with monkeypatch.context() as patched:
        patched.setattr("takifugu.lowrank.checkpoint.save_file", full)
        with pytest.raises(RunError, match=r"No space left on device.*last checkpoint is safe.*--resume"):
            run(recipe, tmp_path / "run")
    carry_out(Job(recipe, tmp_path / "run", resume=True), Processes(Place(), "cpu"))
    assert (tmp_path / "run" / "model.safetensors").exists()


def test_two_processes_may_not_carry_out_one_run(tmp_path: Path) -> None:
    recipe = small("dense")
    stopped(recipe, tmp_path / "run", 3)
    with (
        durable.locked(tmp_path / "run", by="run.json"),
        pytest.raises(RunError, match="another process is carrying this run out"),
    ):
        carry_out(Job(recipe, tmp_path / "run", resume=True), Processes(Place(), "cpu"))


# ---- what comes out ---------------------------------------------------------------------------------------


def test_the_trained_model_can_be_loaded(tmp_path: Path) -> None:
    recipe = small("warm-start")
    result = run(recipe, tmp_path / "run")
    model = tk.load(tmp_path / "run" / "model.safetensors")
    assert sum(p.numel() for p in model.parameters()) == result["parameters"]
    task = task_for(recipe, None, Place())
    model.eval()
    with torch.no_grad():
        scores = task.scores(task.evaluate(model, "test"))
    assert scores == pytest.approx(result["test"])


def test_training_teaches(tmp_path: Path) -> None:
    recipe = recipes.load("digits-small", ["epochs=6", "method.warmup=2"])
    result = run(recipe, tmp_path / "run")
    assert result["test"]["top1"] > 0.85
    (switch,) = [event for event in result["events"] if event["event"] == "switch"]
    assert switch["epoch"] == 2
    epochs = [row for row in rows(tmp_path / "run") if row["kind"] == "epoch"]
    assert [row["parameters"] for row in epochs] == [94_186] * 2 + [30_186] * 4


def test_lottery_tickets_count_what_is_left(tmp_path: Path) -> None:
    recipe = small("lottery-ticket")
    result = run(recipe, tmp_path / "run")
    model = tk.load(tmp_path / "run" / "model.safetensors")
    weights = [p for p in model.parameters() if p.dim() > 1]
    total = sum(p.numel() for p in model.parameters())
    assert result["epochs"] == 6
    assert result["parameters"] / total == pytest.approx(0.6, abs=0.001)
    assert sum(int((p == 0).sum()) for p in weights) == total - result["parameters"]


def numbers() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(20, 3), torch.arange(20) % 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": {"name": "digits", "batch_size": 8}}, "digits has no test part.*data.validation"),
        ({"model": {"name": "resnet19"}}, "model.name: 'resnet19' is neither a zoo network"),
        (
            {"data": {"name": "cifar", "batch_size": 8}},
            "data.name: 'cifar' is not known; did you mean 'cifar10'",
        ),
        ({"method": {"kind": "warm"}}, "method.kind: 'warm' is not known; did you mean 'warm-start'"),
        (
            {"data": {"name": "digits", "batch_size": 8, "validation": 0.2, "options": {"bptt": 3}}},
            "data.options.bptt: digits has no such option",
        ),
        (
            {"data": {"name": "test_training:numbers", "batch_size": 8, "validation": 0.2, "augment": True}},
            r"data.augment: crops and flips images .*shape \(3,\); set it false",
        ),
    ],
)
def test_mistakes_are_told(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises((UsageError, DataError), match=message):
        run(small("dense", **changes), tmp_path / "run")


def test_tensorboard_has_the_same_figures(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run(small("dense", epochs=2), tmp_path / "run", tensorboard=True)
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    told = [point.value for point in events.Scalars("epoch/validation/loss")]
    ours = [row["validation"]["loss"] for row in rows(tmp_path / "run") if row["kind"] == "epoch"]
    assert told == pytest.approx(ours)


def test_without_tensorboard_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(RunError, match="needs TensorBoard; pip install"):
        run(small("dense", epochs=1), tmp_path / "run", tensorboard=True)


def test_the_leader_tells_the_others_that_it_has_no_tensorboard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Leader(Processes):
        def leader_only(self, make: Any) -> Any:  # the one way by which the others hear of a failure
            try:
                return make()
            except RunError as error:
                told.append(str(error))
                raise

    told: list[str] = []
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(RunError):
        carry_out(Job(small("dense"), tmp_path / "run", tensorboard=True), Leader(Place(), "cpu"))
    assert "needs TensorBoard" in told[0]


def test_sigterm_ends_a_run_that_is_still_reading_its_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reading(*_: Any) -> None:
        signal.raise_signal(signal.SIGTERM)
        pytest.fail("it goes on")

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr("takifugu.train.job.task_for", reading)
    assert main(["train", "digits-small", "--out", str(tmp_path / "run")]) == 130
    assert signal.getsignal(signal.SIGTERM) is before


def test_half_of_a_launchers_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    tried: list[bool] = []
    monkeypatch.setattr("takifugu.train.precision.avoid_faulty_amx", lambda: tried.append(True))
    assert main(["train", "digits-small", "--set", "precision=bf16", "--out", str(tmp_path / "run")]) == 2
    assert tried, "the user's own torchrun has not looked at the processor"
    assert "MASTER_ADDR" in (told := capsys.readouterr().err)
    assert "start it with torchrun, or unset them" in told


def test_torchrun_with_a_single_process_wraps_nothing(tmp_path: Path) -> None:
    store = distributed.HashStore()
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        alone = carry_out(Job(small("warm-start"), tmp_path / "alone"), Together(Place(), "cpu"))
    finally:
        distributed.destroy_process_group()
    assert alone["test"] == run(small("warm-start"), tmp_path / "run")["test"]
    assert_same(tmp_path / "alone", tmp_path / "run")


def test_a_closed_stderr_does_not_keep_it_from_training(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "takifugu", "train", "digits-small", "--out", str(tmp_path / "run")]
    words += ["--set", "data.limit=64", "--set", "epochs=1", "--set", "method.kind=dense"]
    done = subprocess.run(["/bin/sh", "-c", 'exec "$@" 2>&-', "sh", *words], check=False, capture_output=True)
    assert done.returncode == 0
    assert b"test top1" in done.stdout
    assert (tmp_path / "run" / "result.json").exists()


def test_a_worker_that_is_started_after_the_end_goes_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = tmp_path / "outcome.json"
    monkeypatch.setenv("TAKIFUGU_TRAIN_OUTCOME", str(outcome))
    assert leave_behind(1) == 0
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")  # it would wait for the other one
    assert main(["train", "digits-small", "--out", str(tmp_path / "run")]) == 0
    assert json.loads(outcome.read_text()) == {"code": 1}
    assert not (tmp_path / "run").exists()


def test_a_run_that_could_not_begin_is_not_in_the_way(tmp_path: Path) -> None:
    out = tmp_path / "run"
    for changes in (
        {"method": {"kind": "warm-start", "warmup": 99}},
        {"optimizer": {"kind": "sgd", "lr": 1e30}},
    ):
        with pytest.raises((UsageError, TrainingError)):
            run(small("dense", epochs=2, schedule={"kind": "constant"}, **changes), out)
    recipe = small("dense", epochs=1)
    Job(recipe, out).check(1)
    run(recipe, out)
    run(recipe, tmp_path / "new")
    assert_same(out, tmp_path / "new")
    with pytest.raises(RunError, match="holds a run already"):
        Job(recipe, out).check(1)


# ---- the command line remembers -----------------------------------------------------------------------------


def interrupted(monkeypatch: pytest.MonkeyPatch, *words: str, after: int = 3) -> None:
    """Run `takifugu train` in this process until Ctrl-C at this step."""
    from takifugu.train import loop

    original = loop.Training._set_rate_

    def set_rate_(training: Any) -> float:
        if training.standing.steps == after:
            signal.raise_signal(signal.SIGINT)
        return original(training)

    with monkeypatch.context() as patched:
        patched.setattr(loop.Training, "_set_rate_", set_rate_)
        assert main(["train", *words]) == 130


SHORT = ["--set", "data.limit=200", "--set", "epochs=2", "--set", "method.warmup=1", "--set", "seed=5"]


def test_resume_remembers_what_was_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, out = tmp_path / "whole", tmp_path / "of me"
    assert main(["train", "digits-small", *SHORT, "--out", str(whole)]) == 0
    for words in (["--resume", str(out)], ["digits-small", "--resume", "--out", str(out)]):
        interrupted(monkeypatch, "digits-small", *SHORT, "--out", str(out), "--checkpoint-every", "3")
        told = capsys.readouterr().err
        assert f"stopped, state saved; continue with: takifugu train --resume '{out}'\n" in told
        assert main(["train", *words]) == 0
        assert "continuing from step 4" in capsys.readouterr().err
        assert_same(whole, out)
        header = json.loads((out / "run.json").read_text())
        assert header["recipe"]["seed"] == 5
        assert header["options"]["checkpoint_every"] == 3.0
        shutil.rmtree(out)


def test_the_command_is_one_line_on_a_narrow_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    out = tmp_path / "a folder whose name is longer than a line of the terminal"
    interrupted(monkeypatch, "digits-small", *SHORT, "--out", str(out))
    assert f"continue with: takifugu train --resume '{out}'" in capsys.readouterr().err


def test_what_differs_is_named_and_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "run")
    interrupted(monkeypatch, "digits-small", *SHORT, "--out", out)
    for words in (
        ["--resume", out, "--set", "seed=6"],
        ["digits-small", *SHORT[:-1], "seed=6", "--resume", "--out", out],
    ):
        capsys.readouterr()
        assert main(["train", *words]) == 2
        told = capsys.readouterr().err
        assert f"{out}: was started with another recipe (seed: 5, now 6); continue it as it is with" in told
        assert f"takifugu train --resume {out}, or start a new run with another --out" in told
    assert main(["train", "--resume", out, "--workers", "2"]) == 2
    assert "was started with another number of processes (1, now 2)" in capsys.readouterr().err
    # What is the same may be given again.
    assert main(["train", "--resume", out, "--set", "seed=5", "--json"]) == 0
    first = json.loads(capsys.readouterr().out)
    assert main(["train", "--resume", out, *SHORT, "--json"]) == 0
    again = capsys.readouterr()
    assert "the run has finished; this is its result" in again.err
    assert json.loads(again.out) == first


def test_options_of_a_resumed_run_that_differ_are_in_its_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "run")
    interrupted(monkeypatch, "digits-small", *SHORT, "--out", out, "--checkpoint-every", "3")
    capsys.readouterr()
    interrupted(monkeypatch, "--resume", out, "--data-dir", str(tmp_path), after=4)
    assert f"continue with: takifugu train --resume {out} --data-dir {tmp_path}\n" in capsys.readouterr().err


def test_stopped_before_the_first_checkpoint_there_is_nothing_to_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def reading(*_: Any) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("takifugu.train.job.task_for", reading)
    out = str(tmp_path / "run")
    assert main(["train", "digits-small", "--set", "seed=2", "--out", out]) == 130
    told = capsys.readouterr().err
    command = f"takifugu train digits-small --set seed=2 --out {out}"
    assert f"stopped before the first checkpoint; start again with: {command}\n" in told


def test_run_folders_and_recipes_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run(small("dense", epochs=1), tmp_path / "run")
    for words, message in (
        (["run"], "run is a run folder; continue it with: takifugu train --resume run"),
        (["nowhere", "--resume"], "there is no run folder 'nowhere' and no recipe of this name"),
        (["--resume"], "which run? give its folder: takifugu train --resume FOLDER"),
        ([], "which recipe? `takifugu train --list` shows them"),
        (["digits-small", "--resume"], "digits-small.train: there is no such run folder"),
    ):
        assert main(["train", *words]) == 2
        assert message in capsys.readouterr().err
    header = json.loads(Path("run/run.json").read_text())
    for changed, message in (
        ({"recipe": None}, "run.json: holds no recipe; it is damaged"),
        ({"recipe": {**header["recipe"], "seed": 3}}, "the recipe does not match its hash"),
    ):
        Path("run/run.json").write_text(json.dumps({**header, **changed}))
        assert main(["train", "--resume", "run"]) == 2
        assert message in capsys.readouterr().err
