"""A training run from its recipe to its result: what `takifugu train` does in every process."""

from __future__ import annotations

import json
import os
import platform
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import takifugu
from takifugu.durable import Row
from takifugu.errors import CheckpointError, RunError, UsageError
from takifugu.lowrank.checkpoint import save
from takifugu.terminable import terminable
from takifugu.train import models
from takifugu.train.loop import Training, model_seed
from takifugu.train.methods import method_for
from takifugu.train.processes import Processes
from takifugu.train.recipe import Recipe
from takifugu.train.snapshot import Snapshot
from takifugu.train.standing import Interrupted, Tick
from takifugu.train.tasks import check_data, task_for
from takifugu.train.training_folder import TrainingFolder

Watch = Callable[[Row], None]


@dataclass(frozen=True)
class Job:
    recipe: Recipe
    out: Path
    data_dir: Path | None = None
    sharding: str = "ddp"
    resume: bool = False
    checkpoint_s: float = 600.0
    tensorboard: bool = False
    command: str = ""
    continuation: str = ""
    """The command that continues the run."""
    overrides: Sequence[str] = ()
    """The `--set` options, for the folder to remember; the recipe has them already."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the command besides the recipe, for the folder to remember."""

    def check(self, world: int) -> None:
        """What can be said before anything is started: on many processes, everyone would say it."""
        check_data(self.recipe.data.name)
        method_for(self.recipe.method)
        if world > 1 and self.sharding == "fsdp" and self.recipe.frobenius_decay:
            raise UsageError(
                "frobenius_decay: is not supported with --sharding fsdp; use ddp, or leave it out"
            )
        if self.resume:
            TrainingFolder.open(self.out).check_same(self.header(world))
        else:
            TrainingFolder.check_free(self.out)

    def header(self, world: int) -> dict[str, Any]:
        return {
            "recipe": self.recipe.model_dump(),
            "recipe_sha256": self.recipe.sha256,
            "world": world,
            "sharding": self.sharding if world > 1 else "none",
            "command": self.command,
            "set": list(self.overrides),
            "options": dict(self.options),
            "versions": {"takifugu": takifugu.__version__, "torch": torch.__version__},
            "machine": {
                "system": f"{platform.system()} {platform.machine()}",
                "cpus": os.cpu_count(),
                "threads": torch.get_num_threads(),
            },
        }


def carry_out(
    job: Job,
    processes: Processes,
    *,
    watch: Watch = lambda row: None,
    progress: Callable[[Tick, Training], None] = lambda tick, training: None,
) -> dict[str, Any]:
    """Runs the job to its end and returns its result; `Interrupted` if it was asked to stop before.

    `watch` sees every line of metrics, `progress` every step; both on the leading process only.
    """
    place = processes.place
    with ExitStack() as stack:
        stack.enter_context(terminable())  # until there is something to save
        folder = processes.leader_only(lambda: stack.enter_context(_opened(job, place.world)))
        done = folder.result() if folder is not None else None
        if told := processes.from_leader(None if done is None else json.dumps(done).encode()):
            return dict(json.loads(told))
        # The leader's recipe: other machines do not have the folder that remembers --set.
        told = processes.from_leader(None if folder is None else json.dumps(folder.header["recipe"]).encode())
        recipe = job.recipe if told is None else Recipe.model_validate(json.loads(told))
        task = processes.leader_first(lambda: task_for(recipe, job.data_dir, place))
        module = models.build(
            recipe.model.name, recipe.model.options, task.model_options(), model_seed(recipe), "model.name"
        )
        where = models.usual_where(recipe.model.name, recipe.model.low_rank)
        board = processes.leader_only(lambda: stack.enter_context(_board(job)))
        log = _Log(folder, watch, board) if folder is not None else _silent
        training = Training(
            recipe,
            task,
            method_for(recipe.method, where),
            module,
            where,
            processes,
            job.sharding,
            checkpoint_s=job.checkpoint_s,
            log=log,
            progress=(lambda tick: progress(tick, training)) if processes.leads else _silent,
        )
        with _stopping(training):
            _begin(training, folder, processes, watch)
            result = training.run(folder)
            result["headline"] = {task.headline: result["test"][task.headline]}
            plain = training.plain_module()
            if folder is not None:
                _save_model(plain, folder.path / "model.safetensors")
                folder.finish(result)
    return result


@contextmanager
def _opened(job: Job, world: int) -> Iterator[TrainingFolder]:
    folder = _folder(job, world)
    with folder.locked():
        yield folder


def _folder(job: Job, world: int) -> TrainingFolder:
    restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    if job.resume or (restarted and (job.out / "run.json").exists()):
        folder = TrainingFolder.open(job.out)
        folder.check_same(job.header(world))
        return folder
    return TrainingFolder.create(job.out, job.header(world))


def _begin(training: Training, folder: TrainingFolder | None, processes: Processes, watch: Watch) -> None:
    """From the newest checkpoint, which the leader reads for everyone, or from the start."""
    found = processes.leader_only(lambda: folder.newest() if folder is not None else None)
    content = processes.from_leader(None if found is None else found.content)
    if content is None:
        if folder is not None:
            folder.cut_back(0)
        training.start_()
        return
    try:
        snapshot = Snapshot.from_bytes(content)
        training.resume_(snapshot)
    except CheckpointError as error:
        raise RunError(f"the newest checkpoint cannot be used: {error}") from None
    if folder is not None and found is not None:
        folder.cut_back(int(snapshot.header["log_size"]))
        notes = [f"{note}; went back to the one before it" for note in found.notes]
        watch({"kind": "resumed", "step": training.standing.steps, "notes": notes})


def _save_model(module: nn.Module, path: Path) -> None:
    try:
        save(module, path)
    except CheckpointError as error:
        raise RunError(
            f"{error}; the last checkpoint is safe: free some space or mend the folder, "
            "then continue with --resume"
        ) from error


class _Log:
    def __init__(self, folder: TrainingFolder, watch: Watch, board: Any) -> None:
        self.folder, self.watch, self.board = folder, watch, board

    def __call__(self, row: Row) -> None:
        self.folder.log(row)
        self.watch(row)
        if self.board is not None:
            for name, value in _flat(row):
                self.board.add_scalar(f"{row['kind']}/{name}", value, row["step"])


def _flat(row: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for name, value in row.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and name not in ("step", "cycle"):
            yield prefix + name, float(value)


@contextmanager
def _board(job: Job) -> Iterator[Any]:
    """A TensorBoard writer, if one is wanted."""
    if not job.tensorboard:
        yield None
        return
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise RunError("--tensorboard needs TensorBoard; pip install 'takifugu[tensorboard]'") from None
    writer = SummaryWriter(job.out / "tensorboard")
    try:
        yield writer
    finally:
        writer.close()


@contextmanager
def _stopping(training: Training) -> Iterator[None]:
    """Ctrl-C and SIGTERM ask the run to save and end. A second Ctrl-C on a single process ends it at once."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are the main thread's business
        return

    def ask(signum: int, _: object) -> None:
        if training.stop and signum == signal.SIGINT and training.processes.place.world == 1:
            raise KeyboardInterrupt
        training.stop = True

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _silent(*_: object) -> None:
    pass


__all__ = ["Interrupted", "Job", "carry_out"]
