"""The loop behind `takifugu train`: a recipe's task and method, step by step, on one process or many.

All of a run's state is in its snapshot. Whatever is random is seeded anew for every batch from the run's seed
and the batch's place, so that a run goes on bit for bit from any step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from takifugu.durable import Row
from takifugu.errors import TrainingError
from takifugu.lowrank.weight_decay import FrobeniusDecay
from takifugu.train import optimizers
from takifugu.train.ahead import working_ahead
from takifugu.train.methods.base import Method
from takifugu.train.processes import Processes
from takifugu.train.recipe import Recipe
from takifugu.train.schedules import Moment, schedule_for
from takifugu.train.seeds import derived
from takifugu.train.snapshot import Snapshot
from takifugu.train.standing import Interrupted, Standing, Tick
from takifugu.train.state import restore_, state_of
from takifugu.train.step import training_step_
from takifugu.train.tasks.base import Batch, Carry, Task
from takifugu.train.training_folder import TrainingFolder

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
LINES_PER_EPOCH = 20
"""Lines of metrics within an epoch."""


class Training:
    """One run. `stop` may be set at any time, from a signal handler, say: the run then saves and ends."""

    def __init__(
        self,
        recipe: Recipe,
        task: Task,
        method: Method,
        module: nn.Module,
        where: Any,
        processes: Processes,
        sharding: str = "ddp",
        *,
        checkpoint_s: float = 600.0,
        log: Callable[[Row], None] = lambda row: None,
        progress: Callable[[Tick], None] = lambda tick: None,
    ) -> None:
        self.recipe, self.task, self.method = recipe, task, method
        self.processes, self.checkpoint_s = processes, checkpoint_s
        self.sharding = sharding if processes.place.world > 1 else "none"
        self.log, self.progress = log, progress
        self.schedule = schedule_for(recipe.schedule)
        self.decay = FrobeniusDecay(recipe.frobenius_decay, where) if recipe.frobenius_decay else None
        self.device = torch.device(processes.device)
        self.scaler = torch.amp.GradScaler(self.device.type) if recipe.precision == "fp16" else None
        self.standing = Standing()
        self.stop = False
        self.carry: Carry = None
        self.events: list[Row] = []
        self.model: nn.Module = module
        self.optimizer: Optimizer

    # ---- what a method sees ---------------------------------------------------------------------------

    @property
    def cycle(self) -> int:
        return self.standing.cycle

    @property
    def epoch(self) -> int:
        return self.standing.epoch

    @property
    def epochs(self) -> int:
        return self.recipe.epochs

    @property
    def module(self) -> nn.Module:
        return self.model.module if self.sharding == "ddp" else self.model  # type: ignore[return-value]

    def wrap(self, module: nn.Module) -> nn.Module:
        return self.processes.wrapped(self.laid_out(module), self.sharding)

    def new_optimizer_(self) -> None:
        self.optimizer = self.fresh_optimizer(self.module)

    def note(self, event: str, **fields: Any) -> None:
        row = {"kind": "event", "event": event, **self._now(), **fields}
        self.events.append(row)
        self.log(row)

    # ---- beginning, or going on -----------------------------------------------------------------------

    def start_(self) -> None:
        self.method.build_(self.model)
        self.model = self.wrap(self.model.to(self.device))
        self.optimizer = self.fresh_optimizer(self.module)

    def resume_(self, snapshot: Snapshot) -> None:
        restore_(self, snapshot)

    # ---- the loop -------------------------------------------------------------------------------------

    def run(self, folder: TrainingFolder | None) -> dict[str, Any]:
        """Trains to the end from where it stands. `folder` is the leader's; the others have none."""
        self._saved_at = time.monotonic()
        self.method.attach_(self)
        devices = [self.device] if self.device.type == "cuda" else []
        with working_ahead() as ahead, torch.random.fork_rng(devices=devices):
            while self.standing.cycle < self.method.cycles:
                if self.standing.step == 0:
                    self._before_epoch_()
                self._epoch_(ahead, folder)
                self._end_epoch_()
                self._save(folder)
                if self._agreed_stop():
                    raise Interrupted
        return self._result()

    def _before_epoch_(self) -> None:
        self.carry = None
        self.method.before_epoch_(self)
        if self.recipe.factor_decay is not None:
            decay = float(self.recipe.optimizer.get("weight_decay", 0.0))
            optimizers.decay_factors_(self.optimizer, self.model, self.recipe.factor_decay, decay)
        if self.sharding == "none":
            self.laid_out(self.model)  # new layers come in torch's usual order

    def _epoch_(self, ahead: ThreadPoolExecutor, folder: TrainingFolder | None) -> None:
        at, steps, number = self.standing, self.task.steps, self._epoch_number
        parameters = self.method.parameters(self.module)
        sent = self.processes.sent_bytes(self.model, self.sharding)
        every = max(1, steps // LINES_PER_EPOCH)
        self.model.train()
        coming: Future[Batch] = ahead.submit(self.task.batch, number, at.step)
        while at.step < steps:
            begun = time.monotonic()
            batch = coming.result()
            waited = time.monotonic() - begun
            if at.step + 1 < steps:
                coming = ahead.submit(self.task.batch, number, at.step + 1)
            rate = self._set_rate_()
            loss, stop, save = self._step_(batch)
            took = time.monotonic() - begun
            at.step, at.steps = at.step + 1, at.steps + 1
            at.loss_sum, at.samples = at.loss_sum + loss, at.samples + batch.samples
            at.seconds, at.epoch_seconds = at.seconds + took, at.epoch_seconds + took
            at.waited_seconds, at.sent_bytes = at.waited_seconds + waited, at.sent_bytes + sent
            self.progress(Tick(at, loss, rate, parameters))
            if at.step % every == 0:
                self.log({"kind": "steps", **self._now(), "loss": loss, "learning_rate": rate})
            if (stop or save) and at.step < steps:
                self._save(folder)
                if stop:
                    raise Interrupted

    def _step_(self, batch: Batch) -> tuple[float, bool, bool]:
        at, number = self.standing, self._epoch_number
        torch.manual_seed(self.task.batch_seed(number, at.step))  # dropout
        batch = self._on_device(batch)
        flags = [0, 0, 0]
        carry: Carry = None

        def forward() -> Tensor:
            nonlocal carry
            with self._autocast():
                loss, carry = self.task.loss(self.model, batch, self.carry)
            return loss

        def check(loss: float) -> None:
            bad = 0 if loss == loss and abs(loss) != float("inf") else self.processes.place.rank + 1
            due = self.processes.leads and time.monotonic() - self._saved_at > self.checkpoint_s
            flags[:] = self.processes.most([bad, int(self.stop), int(due)])
            if flags[0]:
                raise self._diverged(flags[0] - 1, loss if bad else None)

        def between_() -> None:
            if self.decay is not None:
                self.decay.add_(self.model)
            self.method.before_step_(self.module)
            if self.recipe.clip_norm is not None:
                clip_grad_norm_(self.model.parameters(), self.recipe.clip_norm)

        value = training_step_(self.optimizer, forward, check=check, scaler=self.scaler, between_=between_)
        self.method.after_step_(self.module)
        self.carry = carry
        return value, bool(flags[1]), bool(flags[2])

    def _end_epoch_(self) -> None:
        at = self.standing
        total = self.processes.total(
            {"loss": at.loss_sum, "samples": float(at.samples), "batches": float(at.step)}
        )
        begun = time.monotonic()
        scores = self.evaluate("validation")
        at.history.append(scores["loss"])
        self.log(
            {
                "kind": "epoch",
                **self._now(),
                "train_loss": total["loss"] / total["batches"],
                "validation": scores,
                "learning_rate": self.optimizer.param_groups[0]["lr"],
                "parameters": self.method.parameters(self.module),
                "seconds": round(at.epoch_seconds, 4),
                "waited_seconds": round(at.waited_seconds, 4),
                "evaluation_seconds": round(time.monotonic() - begun, 4),
                f"{self.task.unit}_per_s": round(total["samples"] / max(at.epoch_seconds, 1e-9), 3),
                "sent_bytes": at.sent_bytes,
            }
        )
        at.epoch, at.step, at.samples = at.epoch + 1, 0, 0
        at.loss_sum = at.epoch_seconds = at.waited_seconds = 0.0
        self.carry = None
        if at.epoch == self.recipe.epochs:
            at.cycle, at.epoch, at.history = at.cycle + 1, 0, []

    def evaluate(self, part: str) -> dict[str, float]:
        """The scores on a part of the data, of all processes together, on the plain model."""
        module = self.plain_module()
        self.processes.same_buffers_(module)
        module.eval()
        try:
            with torch.no_grad(), self._autocast():
                sums = self.task.evaluate(module, part)
        finally:
            module.train()
        scores = self.task.scores(self.processes.total(sums))
        for name, value in scores.items():
            if not math.isfinite(value):
                raise TrainingError(
                    f"the {part} {name} is {value} after step {self.standing.steps} (learning rate "
                    f"{self.optimizer.param_groups[0]['lr']:g}); lower optimizer.lr, or set clip_norm"
                )
        return scores

    def plain_module(self) -> nn.Module:
        """The model without a wrapper; a gathered copy if it is sharded. Every process has to call it."""
        if self.sharding == "fsdp":
            from takifugu.lowrank.sharded import gathered

            return gathered(self.model)
        return self.module

    def _result(self) -> dict[str, Any]:
        return {
            "test": self.evaluate("test"),
            "parameters": self.method.parameters(self.module),
            "epochs": self.recipe.epochs * self.method.cycles,
            "steps": self.standing.steps,
            "training_seconds": round(self.standing.seconds, 3),
            "sent_bytes": self.standing.sent_bytes,
            "events": self.events,
        }

    # ---- small things ---------------------------------------------------------------------------------

    @property
    def _epoch_number(self) -> int:
        """Since the beginning of the run: every cycle sees its own order of the data."""
        return self.standing.cycle * self.recipe.epochs + self.standing.epoch

    def _now(self) -> dict[str, int]:
        at = self.standing
        return {"cycle": at.cycle, "epoch": at.epoch, "step": at.steps}

    def _set_rate_(self) -> float:
        at = self.standing
        moment = Moment(
            at.epoch * self.task.steps + at.step, self.task.steps, self.recipe.epochs, tuple(at.history)
        )
        rate = float(self.recipe.optimizer["lr"]) * self.schedule.factor(moment)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        return rate

    def _save(self, folder: TrainingFolder | None) -> None:
        snapshot = state_of(self, 0 if folder is None else folder.log_size)

        def keep() -> None:
            if folder is not None:
                folder.keep(self.standing.steps, snapshot.to_bytes())

        self.processes.leader_only(keep)
        self._saved_at = time.monotonic()

    def _agreed_stop(self) -> bool:
        return bool(self.processes.most([int(self.stop)])[0])

    def fresh_optimizer(self, module: nn.Module) -> Optimizer:
        table: Mapping[str, Any] = self.recipe.optimizer
        if self.decay is None:
            return optimizers.build(table, module.parameters())
        groups = self.decay.groups(module, table.get("weight_decay", 0.0), biases=True, norms=True)
        return optimizers.build(table, groups)

    def laid_out(self, module: nn.Module) -> nn.Module:
        if self.recipe.channels_last:
            module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return module

    def _on_device(self, batch: Batch) -> Batch:
        inputs = tuple(tensor.to(self.device, non_blocking=True) for tensor in batch.inputs)
        if self.recipe.channels_last:
            inputs = tuple(
                t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t for t in inputs
            )
        return Batch(inputs, batch.targets.to(self.device, non_blocking=True), batch.samples)

    def _autocast(self) -> torch.autocast:
        dtype = _DTYPES.get(self.recipe.precision)
        return torch.autocast(self.device.type, dtype=dtype or torch.bfloat16, enabled=dtype is not None)

    def _diverged(self, rank: int, loss: float | None) -> TrainingError:
        at = self.standing
        seed = self.task.batch_seed(self._epoch_number, at.step, rank)
        told = "no number" if loss is None else str(loss)
        return TrainingError(
            f"the loss is {told} at epoch {at.epoch + 1}, step {at.step + 1} (rank {rank}, batch seed "
            f"{seed}, learning rate {self.optimizer.param_groups[0]['lr']:g}); lower optimizer.lr, "
            "set clip_norm, or look for broken samples"
        )


def model_seed(recipe: Recipe) -> int:
    return derived(recipe.seed, "weights")
