"""A callback for Transformers' `Trainer`, on one device:

    callback = TransformersWarmStart(tk.WarmStart(rank=0.25, warmup=1))
    trainer = Trainer(model, args, train_dataset=data, callbacks=[callback])
    trainer.train()

Every checkpoint folder gets a `takifugu.json` and a `takifugu.safetensors`. The Trainer builds its optimizer
before it asks any callback, so a run that is resumed says so first:

    callback.resume_(model, "out/checkpoint-500")
    trainer.train(resume_from_checkpoint="out/checkpoint-500")

The weights are kept a second time because Transformers writes some models under other names than they have,
and its Trainer, which does not translate them back, goes on without them after a warning.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import nn
from transformers import TrainerCallback

from takifugu.errors import CheckpointError, UsageError
from takifugu.lowrank.checkpoint import load, save
from takifugu.lowrank.trainers.resuming import checked_unit, record, shape_
from takifugu.lowrank.warmstart import WarmStart
from takifugu.structure import Structure

STATE, WEIGHTS = "takifugu.json", "takifugu.safetensors"


class TransformersWarmStart(TrainerCallback):
    """Calls `warm` at the start of every epoch, or of every step with `unit="step"`."""

    def __init__(self, warm: WarmStart, unit: str = "epoch") -> None:
        self.warm, self.unit = warm, checked_unit(unit)
        self._resumed: Path | None = None

    def resume_(self, model: nn.Module, folder: str | Path) -> None:
        """Gives a fresh model the structure of a checkpoint, and goes on from there."""
        path = Path(folder) / STATE
        try:
            saved = json.loads(path.read_text(encoding="utf-8"))
            structure = Structure.from_dict(saved["structure"])
            state = saved["warm"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"cannot resume the warm start from {str(path)!r}: {error}") from error
        shape_(model, structure)
        self.warm.load_state_dict(state)
        self._resumed = Path(folder)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.world_size > 1 or args.n_gpu > 1:
            raise UsageError(
                "the switch is not supported in a Trainer on several devices, whose wrapper cannot be built "
                "anew from a callback; use a loop of your own (examples/warm_start_accelerate.py)"
            )
        if args.load_best_model_at_end:
            raise UsageError(
                "load_best_model_at_end is not supported: the best weights may be of another structure; "
                "turn it off, and load the checkpoint you want with resume_()"
            )
        if self._resumed is not None:
            load(self._resumed / WEIGHTS, kwargs["model"])
            self._resumed = None

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.unit == "epoch":
            self.warm(kwargs["model"], kwargs["optimizer"], epoch=int((state.epoch or 0.0) + 1e-6))

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.unit == "step":
            self.warm(kwargs["model"], kwargs["optimizer"], step=state.global_step)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if state.is_world_process_zero and folder.is_dir():
            text = json.dumps(record(self.warm, kwargs["model"]), indent=2)
            (folder / STATE).write_text(text + "\n", encoding="utf-8")
            save(kwargs["model"], folder / WEIGHTS)
