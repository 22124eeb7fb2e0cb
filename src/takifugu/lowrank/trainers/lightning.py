"""A Lightning callback: `Trainer(callbacks=[LightningWarmStart(tk.WarmStart(rank=0.25, warmup=10))])`.

Layer names are those in the LightningModule, such as `model.layer4.*`. Lightning's checkpoints hold what is
needed: with `ckpt_path=` a run goes on from before, at or after the switch.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from takifugu.errors import UsageError
from takifugu.lowrank.trainers.resuming import checked_unit, record, shape_
from takifugu.lowrank.warmstart import WarmStart
from takifugu.structure import Structure


class LightningWarmStart(Callback):
    """Calls `warm` at the start of every epoch (or step, with `unit="step"`), on one device or under DDP."""

    def __init__(self, warm: WarmStart, unit: str = "epoch") -> None:
        self.warm, self.unit = warm, checked_unit(unit)
        self._module: LightningModule | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        strategy = trainer.strategy
        if type(strategy) not in (SingleDeviceStrategy, DDPStrategy):
            raise UsageError(
                f"the switch is not supported under {type(strategy).__name__}; "
                "use one device or strategy='ddp'"
            )
        if isinstance(strategy, DDPStrategy):
            self.warm.wrap = strategy._setup_model
        self._module = pl_module
        theirs = pl_module.on_load_checkpoint

        def on_load_checkpoint(checkpoint: dict[str, Any]) -> None:
            # The only moment between reading a checkpoint and loading the weights in it.
            mine = checkpoint.get("callbacks", {}).get(self.state_key)
            if mine is not None:
                shape_(pl_module, Structure.from_dict(mine["structure"]))
            theirs(checkpoint)

        pl_module.on_load_checkpoint = on_load_checkpoint  # type: ignore[method-assign]

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        vars(pl_module).pop("on_load_checkpoint", None)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.unit == "epoch":
            self._call(trainer, trainer.current_epoch)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self.unit == "step":
            self._call(trainer, trainer.global_step)

    def _call(self, trainer: Trainer, now: int) -> None:
        if len(trainer.optimizers) != 1:
            raise UsageError(f"the switch needs one optimizer, but there are {len(trainer.optimizers)}")
        strategy = trainer.strategy
        before = strategy.model
        assert before is not None
        epoch, step = (now, None) if self.unit == "epoch" else (None, now)
        after = self.warm(before, trainer.optimizers[0], epoch=epoch, step=step)
        if after is not before:
            strategy.model = after
            if isinstance(strategy, DDPStrategy):
                strategy._register_ddp_hooks()

    def state_dict(self) -> dict[str, Any]:
        return record(self.warm, self._module)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.warm.load_state_dict(state_dict["warm"])
