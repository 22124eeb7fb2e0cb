"""`takifugu train`: a recipe carried out on one process or many."""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from takifugu.train.job import Job
    from takifugu.train.loop import Training
    from takifugu.train.standing import Tick


def train(
    recipe: Annotated[
        str | None, typer.Argument(help="A recipe's name, or the path of a .toml file.")
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="List the recipes that come with takifugu.")] = False,
    show: Annotated[bool, typer.Option("--show", help="Print the recipe as it would run, and stop.")] = False,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="FIELD=VALUE",
            help="Override a field: optimizer.lr=0.05; method.rank= removes it.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The run folder; default: the recipe's name + .train")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in the folder.")] = False,
    workers: Annotated[int, typer.Option(help="Processes on this machine.", min=1)] = 1,
    sharding: Annotated[str, typer.Option(help="With several processes: 'ddp' or 'fsdp'.")] = "ddp",
    device: Annotated[str, typer.Option(help="'auto', 'cpu', 'cuda', 'mps'.")] = "auto",
    data_dir: Annotated[Path | None, typer.Option(help="Where the data sets lie.")] = None,
    checkpoint_every: Annotated[
        float, typer.Option(help="Minutes between checkpoints within an epoch.", min=0.0)
    ] = 10.0,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Write TensorBoard logs too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> int:
    """Train a model by a recipe: dense, low-rank by a warm start, or one of the methods to compare with."""
    from takifugu.errors import UsageError
    from takifugu.train import recipe as recipes

    if list_:
        return _list(as_json)
    if recipe is None:
        raise UsageError("which recipe? `takifugu train --list` shows those there are; or give a .toml file")
    found = recipes.load(recipe, set_ or ())
    if show:
        return _show(found, as_json)

    from takifugu.train.job import Job
    from takifugu.train.launch import launch, launched, leave_behind, over
    from takifugu.train.precision import avoid_faulty_amx
    from takifugu.train.processes import check_sharding, joined, under_launcher

    if over():
        return 0
    check_sharding(sharding)
    # Who launched us with --workers has tried it for us; a torchrun of the user's own has not.
    faulty = found.precision == "bf16" and launched() is None and avoid_faulty_amx()
    if faulty and os.environ.get("RANK", "0") == "0":
        _say("note: this processor's AMX kills processes; training in bf16 goes on without it")
    out = Path(f"{Path(recipe).stem}.train") if out is None else out
    overrides = [word for text in set_ or () for word in ("--set", text)]
    words = ["train", recipe, *overrides, "--out", str(out)]
    started = launched() or workers
    several = ["--workers", str(started), "--sharding", sharding] if started > 1 else []
    others = (
        ("--device", device, "auto"),
        ("--data-dir", data_dir, None),
        ("--checkpoint-every", checkpoint_every, 10.0),
    )
    also = [word for name, value, usual in others if value != usual for word in (name, str(value))]
    also += ["--tensorboard"] if tensorboard else []
    told = shlex.join(["takifugu", *words, *several, *also])
    job = Job(found, out, data_dir, sharding, resume, checkpoint_every * 60.0, tensorboard, command=told)
    if workers > 1:
        if under_launcher():
            raise UsageError("--workers within torchrun; give the number to torchrun instead")
        job.check(workers)
        flags = {"--resume": resume, "--json": as_json}
        words += ["--sharding", sharding, *also, *(flag for flag, wanted in flags.items() if wanted)]
        return launch(words, workers)
    with joined(_device(device)) as processes:
        if not under_launcher():
            job.check(1)
            return _run(job, processes, as_json)
        return leave_behind(_run(job, processes, as_json))


def _run(job: Job, processes: Any, as_json: bool) -> int:
    from takifugu.cli import Exit
    from takifugu.errors import RunError, TakifuguError, TrainingError
    from takifugu.train.job import Interrupted, carry_out
    from takifugu.train.memory import keep_freed_memory
    from takifugu.train.processes import LeaderFailed, under_launcher

    if processes.device == "cpu":
        keep_freed_memory()
    with _Talk(job, processes.leads) as talk:
        try:
            result = carry_out(job, processes, watch=talk.row, progress=talk.tick)
        except Interrupted:
            talk.say(f"saved; go on with: {job.command} --resume")
            return Exit.INTERRUPTED
        except LeaderFailed:
            return Exit.OK  # the leader has said it, and ends with the code
        except (TrainingError, RunError) as error:
            _say(f"takifugu: error: {error}")
            return Exit.FAILED
        except TakifuguError as error:
            if not under_launcher():
                raise
            _say(f"takifugu: error: {error}")  # said here: the launcher must not start it all again
            return Exit.USAGE
    if processes.leads:
        if as_json:
            typer.echo(json.dumps({"format": "takifugu.trained/1", "run": str(job.out), **result}, indent=1))
        else:
            for line in _lines(result):
                typer.echo(line)
        _say(f"run folder: {job.out}")
    return Exit.OK


def _device(wanted: str) -> str:
    import torch

    from takifugu.errors import UsageError

    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=wanted)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"--device {wanted!r} cannot be used: {str(error).splitlines()[0]}") from None
    return wanted


# ---- what is told ---------------------------------------------------------------------------------------


def _list(as_json: bool) -> int:
    from takifugu.train import recipe as recipes

    found = {name: recipes.load(name) for name in recipes.names()}
    if as_json:
        typer.echo(json.dumps({name: one.model_dump() for name, one in found.items()}, indent=1))
        return 0
    width = max(map(len, found), default=0)
    for name, one in found.items():
        typer.echo(f"{name:<{width}}  {one.about}")
    return 0


def _show(recipe: Any, as_json: bool) -> int:
    from takifugu.plan.toml_writer import toml

    data = recipe.model_dump()
    typer.echo(json.dumps(data, indent=1) if as_json else toml(data).rstrip())
    return 0


def _lines(result: Mapping[str, Any]) -> Iterator[str]:
    for name, value in result["test"].items():
        yield f"test {name:<12} {value:.4f}"
    yield f"parameters        {result['parameters']:,}"
    yield f"epochs            {result['epochs']}"
    yield f"training time     {result['training_seconds']:,.1f} s"
    if result["sent_bytes"]:
        yield f"sent              {result['sent_bytes'] / 1e6:,.1f} MB by each process"


class _Talk:
    """A bar on a terminal, and a line for every epoch and event everywhere; other processes are silent."""

    def __init__(self, job: Job, leads: bool) -> None:
        self.job, self.leads = job, leads
        self.bar: Any = None
        self.begun, self.steps_before = time.monotonic(), -1

    def __enter__(self) -> _Talk:
        if self.leads and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn

            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[told]}"))
            self.bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self.bar.start()
            self.line = self.bar.add_task("", total=1, told="")
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()
            self.bar = None

    def say(self, text: str) -> None:
        if not self.leads:
            return
        if self.bar is not None:
            self.bar.console.print(text, markup=False, highlight=False)
        else:
            _say(text)

    def tick(self, tick: Tick, training: Training) -> None:
        if self.bar is None:
            return
        at, task = tick.standing, training.task
        if self.steps_before < 0:
            self.steps_before, self.begun = at.steps - 1, time.monotonic() - 1e-3
        speed = (at.steps - self.steps_before) / (time.monotonic() - self.begun)
        total = task.steps * training.epochs * training.method.cycles
        world = training.processes.place.world
        told = (
            f"loss {tick.loss:.4f}  {world * at.samples / max(at.epoch_seconds, 1e-9):,.0f} {task.unit}/s  "
            f"{_duration((total - at.steps) / speed)} left"
        )
        if at.sent_bytes:
            told += f"  {at.sent_bytes / 1e6:,.0f} MB sent"
        self.bar.update(
            self.line,
            description=f"epoch {_counted(at.cycle, at.epoch, training)}",
            total=task.steps,
            completed=at.step,
            told=told,
        )

    def row(self, row: Mapping[str, Any]) -> None:
        if row["kind"] == "epoch":
            scores = "  ".join(f"{name} {value:.4f}" for name, value in row["validation"].items())
            cycle = f"cycle {row['cycle'] + 1}, " if row["cycle"] else ""
            self.say(
                f"{cycle}epoch {row['epoch'] + 1}/{self.job.recipe.epochs}: training loss "
                f"{row['train_loss']:.4f}; {scores}; {row['parameters']:,} parameters; {row['seconds']:.1f} s"
            )
        elif row["kind"] == "event":
            self.say(f"epoch {row['epoch'] + 1}: {row['event']}: {_told(row)}")
        elif row["kind"] == "resumed":
            for note in row["notes"]:
                self.say(f"note: {note}")
            self.say(f"going on from step {row['step']}")


def _told(row: Mapping[str, Any]) -> str:
    said = ("kind", "event", "cycle", "epoch", "step", "params_before", "params", "seconds")
    parts = [f"{name} {_short(value)}" for name, value in row.items() if name not in said]
    if "params" in row:
        parts.insert(0, f"{row['params_before']:,} -> {row['params']:,} parameters")
    if "seconds" in row:
        parts.append(f"{row['seconds']:.2g} s")
    return ", ".join(parts)


def _short(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _counted(cycle: int, epoch: int, training: Training) -> str:
    told = f"{epoch + 1}/{training.epochs}"
    return told if training.method.cycles == 1 else f"{told} of cycle {cycle + 1}/{training.method.cycles}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _say(message: str) -> None:
    sys.stderr.write(f"{message}\n")
