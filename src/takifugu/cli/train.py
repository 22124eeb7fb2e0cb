"""`takifugu train`: a recipe carried out on one process or many."""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from takifugu.cli.train_options import Options

if TYPE_CHECKING:
    from takifugu.train.job import Job
    from takifugu.train.loop import Training
    from takifugu.train.recipe import Recipe
    from takifugu.train.standing import Tick
    from takifugu.train.training_folder import TrainingFolder


def train(
    recipe: Annotated[
        str | None,
        typer.Argument(
            metavar="RECIPE", help="A recipe's name or the path of a .toml file; with --resume, a run folder."
        ),
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
        Path | None, typer.Option(help="The run folder.", show_default="the recipe's name + .train")
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Continue a run: takifugu train --resume FOLDER. Its options are remembered."
        ),
    ] = False,
    workers: Annotated[
        int | None, typer.Option(help="Processes on this machine.", min=1, show_default="1")
    ] = None,
    sharding: Annotated[
        str | None, typer.Option(help="With several processes: 'ddp' or 'fsdp'.", show_default="ddp")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="'auto', 'cpu', 'cuda', 'mps'.", show_default="auto")
    ] = None,
    data_dir: Annotated[Path | None, typer.Option(help="The folder of the data sets.")] = None,
    checkpoint_every: Annotated[
        float | None,
        typer.Option(help="Minutes between checkpoints within an epoch.", min=0.0, show_default="10"),
    ] = None,
    tensorboard: Annotated[
        bool | None, typer.Option("--tensorboard/--no-tensorboard", help="Also write TensorBoard logs.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> int:
    """Train a model by a recipe: dense, low-rank after a warm start, or with a method to compare with."""
    from takifugu.errors import UsageError

    if list_:
        return _list(as_json)
    if recipe is None and resume:
        raise UsageError("which run? give its folder: takifugu train --resume FOLDER")
    if recipe is None:
        raise UsageError("which recipe? `takifugu train --list` shows them; or give the path of a .toml file")
    begun = _begun(recipe, out, set_ or [], resume)
    if show:
        return _show(begun.recipe, as_json)

    from takifugu.train.job import Job
    from takifugu.train.launch import launch, launched, leave_behind, over
    from takifugu.train.precision import avoid_faulty_amx
    from takifugu.train.processes import check_sharding, joined, under_launcher

    if over():
        return 0
    options = begun.options.given(
        data_dir,
        # Under a launcher the processes are there already, whatever the folder remembers.
        workers=1 if workers is None and under_launcher() else workers,
        sharding=sharding,
        device=device,
        checkpoint_every=checkpoint_every,
        tensorboard=tensorboard,
    )
    check_sharding(options.sharding)
    # A run launched with --workers has checked it already; the user's own torchrun has not.
    faulty = begun.recipe.precision == "bf16" and launched() is None and avoid_faulty_amx()
    if faulty and os.environ.get("RANK", "0") == "0":
        _say("note: AMX crashes on this processor; training in bf16 without it")
    told = replace(options, workers=launched() or options.workers)
    command = shlex.join(["takifugu", *begun.words, *told.words(Options())])
    remembered = begun.options if resume else told
    again = shlex.join(["takifugu", "train", "--resume", str(begun.out), *told.words(remembered)])
    if under_launcher() and launched() is None:
        # The processes of other machines do not see the folder: they need the recipe and every option.
        again = f"torchrun [same options] -m {command} --resume"
    job = Job(
        begun.recipe,
        begun.out,
        None if options.data_dir is None else Path(options.data_dir),
        options.sharding,
        resume,
        options.checkpoint_every * 60.0,
        options.tensorboard,
        command=command,
        continuation=again,
        overrides=begun.overrides,
        options=asdict(told),
    )
    if options.workers > 1:
        if under_launcher():
            raise UsageError("--workers within torchrun; give the number to torchrun instead")
        job.check(options.workers)
        words = [*begun.words, *replace(options, workers=begun.options.workers).words(begun.options)]
        flags = {"--resume": resume, "--json": as_json}
        words += [flag for flag, wanted in flags.items() if wanted]
        return launch(words, options.workers, job.continuation)
    with joined(_device(options.device)) as processes:
        if not under_launcher():
            job.check(1)
            return _run(job, processes, as_json)
        return leave_behind(_run(job, processes, as_json))


@dataclass(frozen=True)
class _Begun:
    """A recipe and its run folder; for a run that is resumed, with what the folder remembers."""

    recipe: Recipe
    out: Path
    overrides: list[str]
    words: list[str]
    """The command line that leads here, without the options."""
    options: Options


def _begun(source: str, out: Path | None, overrides: list[str], resume: bool) -> _Begun:
    from takifugu.errors import UsageError
    from takifugu.train import recipe as recipes
    from takifugu.train.training_folder import TrainingFolder

    is_folder = out is None and (Path(source) / "run.json").is_file()
    if is_folder and not resume:
        raise UsageError(
            f"{source} is a run folder; continue it with: takifugu train --resume {shlex.quote(source)}"
        )
    if is_folder:
        folder = TrainingFolder.open(source)
        words = ["train", source, *_set_words(overrides)]
        return _Begun(
            _remembered(folder, overrides), folder.path, overrides, words, Options.remembered(folder.header)
        )
    if resume and out is None and not source.endswith(".toml") and source not in recipes.names():
        raise UsageError(
            f"there is no run folder {source!r} and no recipe of this name; give the run's folder"
        )
    out = Path(f"{Path(source).stem}.train") if out is None else out
    header: Mapping[str, Any] = {}
    if resume and (out / "run.json").is_file():
        header = TrainingFolder.open(out).header
        overrides = overrides or header.get("set") or []
    words = ["train", source, *_set_words(overrides), "--out", str(out)]
    return _Begun(recipes.load(source, overrides), out, overrides, words, Options.remembered(header))


def _remembered(folder: TrainingFolder, overrides: list[str]) -> Recipe:
    """Return the recipe that the folder was started with; `--set` may repeat what it has, not change it."""
    from takifugu.errors import RunError
    from takifugu.train import recipe as recipes

    table, where = folder.header.get("recipe"), str(folder.path / "run.json")
    if not isinstance(table, dict):
        raise RunError(f"{where}: holds no recipe; it is damaged")
    recipe = recipes.checked(table, where)
    if recipe.sha256 != folder.header.get("recipe_sha256"):
        raise RunError(f"{where}: the recipe does not match its hash; the file was changed or is damaged")
    if overrides in ([], folder.header.get("set")):
        return recipe
    return recipes.checked(recipes.overridden(table, overrides), where)


def _set_words(overrides: Sequence[str]) -> list[str]:
    return [word for text in overrides for word in ("--set", text)]


def _run(job: Job, processes: Any, as_json: bool) -> int:
    from takifugu.cli import Exit
    from takifugu.errors import RunError, TakifuguError, TrainingError
    from takifugu.train.job import Interrupted, carry_out
    from takifugu.train.memory import keep_freed_memory
    from takifugu.train.processes import LeaderFailed, under_launcher
    from takifugu.train.training_folder import TrainingFolder

    if processes.device == "cpu":
        keep_freed_memory()
    if job.resume and processes.leads and (job.out / "result.json").exists():
        _say(f"{job.out}: the run has finished; this is its result")
    with _Talk(job, processes.leads) as talk:
        try:
            result = carry_out(job, processes, watch=talk.row, progress=talk.tick)
        except Interrupted:
            talk.say(f"stopped, state saved; continue with: {job.continuation}")
            return Exit.INTERRUPTED
        except KeyboardInterrupt:
            if job.resume or TrainingFolder.holds_run(job.out):
                talk.say(f"stopped; continue from the last checkpoint with: {job.continuation}")
            else:
                talk.say(f"stopped before the first checkpoint; start again with: {job.command}")
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
        _say(f"run folder: {job.out}; the trained model: {job.out / 'model.safetensors'}")
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
            # Not wrapped: a command with line breaks in it could not be copied.
            self.bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
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
            self.say(f"continuing from step {row['step']}")


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
