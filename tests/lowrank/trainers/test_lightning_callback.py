"""The callback in the real Lightning, on real digits."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import takifugu as tk
from takifugu.errors import UsageError

lightning = pytest.importorskip("lightning.pytorch")
load_digits = pytest.importorskip("sklearn.datasets").load_digits

from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402

from takifugu.lowrank.trainers.lightning import LightningWarmStart  # noqa: E402

EPOCHS = 5


class Digits(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 10)
        )
        self.loaded = 0

    def training_step(self, batch, index):
        return F.cross_entropy(self.model(batch[0]), batch[1])

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=5e-3)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)]

    def on_load_checkpoint(self, checkpoint) -> None:
        self.loaded += 1


def data() -> TensorDataset:
    bunch = load_digits()
    return TensorDataset(torch.tensor(bunch.data, dtype=torch.float32) / 16, torch.tensor(bunch.target))


def fit(folder: Path, epochs: int = EPOCHS, unit: str = "epoch", resume: str | None = None):
    at = 2 if unit == "epoch" else 2 * 29
    warm = tk.WarmStart(rank=0.25, warmup=at, where=["model.0", "model.2"], rewarm=40)
    module = Digits()
    callback = LightningWarmStart(warm, unit)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=epochs,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[callback, ModelCheckpoint(folder, "{epoch}", save_top_k=-1)],
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, DataLoader(data(), 64), ckpt_path=resume)
    return module, warm


@pytest.mark.parametrize("unit", ["epoch", "step"])
def test_switched_stopped_and_resumed_it_ends_at_the_same_weights(tmp_path: Path, unit: str) -> None:
    whole, warm = fit(tmp_path / "whole", unit=unit)
    assert warm.switched
    assert [spec.name for spec in tk.structure_of(whole)] == ["model.0", "model.2"]
    assert "4 projected" in str(warm.report)
    x, y = data().tensors
    assert (whole.model.eval()(x).argmax(1) == y).float().mean() > 0.9
    for epoch in range(EPOCHS - 1):  # two checkpoints are of a dense model, two of a low-rank one
        resumed, again = fit(
            tmp_path / f"{epoch}", unit=unit, resume=str(tmp_path / f"whole/epoch={epoch}.ckpt")
        )
        assert again.switched
        assert len(again.reports) == (1 if epoch < 2 else 0)
        assert resumed.loaded == 1, "the module's own hook is still called"
        assert "on_load_checkpoint" not in vars(resumed)
        assert resumed.state_dict().keys() == whole.state_dict().keys()
        for name, value in whole.state_dict().items():
            assert torch.equal(resumed.state_dict()[name], value), (epoch, name)


def test_unknown_units_and_strategies_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="count in 'epoch' or 'step'"):
        LightningWarmStart(tk.WarmStart(), unit="batch")
    trainer = lightning.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, max_epochs=1, enable_progress_bar=False
    )
    callback = LightningWarmStart(tk.WarmStart())
    trainer.strategy.__class__ = type("OtherStrategy", (type(trainer.strategy),), {})
    with pytest.raises(UsageError, match="not supported under OtherStrategy"):
        callback.setup(trainer, Digits(), "fit")
