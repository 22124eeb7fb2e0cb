"""The switch as a Lightning callback, under DDP.

    torchrun --nproc-per-node 2 examples/warm_start_lightning.py

Handwritten digits from scikit-learn, on the CPU; runs in seconds.
"""

from __future__ import annotations

import os

import lightning
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import takifugu as tk
from takifugu.lowrank.trainers.lightning import LightningWarmStart


class Digits(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(
            nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
        )

    def training_step(self, batch, index):
        return F.cross_entropy(self.model(batch[0]), batch[1])

    def validation_step(self, batch, index):
        accuracy = (self.model(batch[0]).argmax(dim=1) == batch[1]).float().mean()
        self.log("accuracy", accuracy, sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        weights = torch.cat([p.detach().flatten() for p in self.parameters()])
        everyones = self.all_gather(weights).reshape(self.trainer.world_size, -1)
        same = bool((everyones == everyones[0]).all())
        if self.trainer.is_global_zero and not self.trainer.sanity_checking:
            accuracy = self.trainer.callback_metrics["accuracy"]
            print(f"epoch {self.current_epoch}: accuracy {accuracy:.3f}, alike on all processes: {same}")

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


def main() -> None:
    lightning.seed_everything(0)
    bunch = load_digits()
    images, labels = torch.tensor(bunch.data, dtype=torch.float32) / 16, torch.tensor(bunch.target)
    warm = tk.WarmStart(rank=0.25, warmup=3, where=["model.0", "model.2"])
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=int(os.environ.get("WORLD_SIZE", "1")),
        strategy="ddp",
        max_epochs=8,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        callbacks=[LightningWarmStart(warm)],
    )
    train = DataLoader(TensorDataset(images[:1400], labels[:1400]), batch_size=32, shuffle=True)
    trainer.fit(Digits(), train, DataLoader(TensorDataset(images[1400:], labels[1400:]), batch_size=64))
    if trainer.is_global_zero:
        print(warm.report)
    if torch.distributed.is_initialized():  # else its threads may outlive the interpreter
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
