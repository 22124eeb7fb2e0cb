"""The callback in the real Trainer of Transformers, on real digits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.data import Dataset

import takifugu as tk
from takifugu.errors import CheckpointError, UsageError

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
load_digits = pytest.importorskip("sklearn.datasets").load_digits

from takifugu.lowrank.trainers.transformers import TransformersWarmStart  # noqa: E402

EPOCHS, STEPS = 4, 12


class Digits(Dataset):
    def __init__(self) -> None:
        bunch = load_digits()
        self.images = torch.tensor(bunch.images, dtype=torch.float32)[:, None] / 16
        self.labels = torch.tensor(bunch.target)

    def __len__(self) -> int:
        return STEPS * 32

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"pixel_values": self.images[index], "labels": self.labels[index]}


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, image_size=8,
        patch_size=2, num_channels=1, num_labels=10, hidden_dropout_prob=0.1,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config)


def feed_forward(name: str, module: torch.nn.Module) -> bool:
    shapes = module.shapes if hasattr(module, "shapes") else {"weight": tuple(module.weight.shape)}
    return shapes["weight"] in ((64, 32), (32, 64))


def arguments(folder: Path, **options):
    return transformers.TrainingArguments(
        str(folder),
        **{
            "num_train_epochs": EPOCHS,
            "per_device_train_batch_size": 32,
            "learning_rate": 3e-3,
            "save_strategy": "epoch",
            "report_to": [],
            "disable_tqdm": True,
            "use_cpu": True,
            "logging_strategy": "no",
            **options,
        },
    )


def fit(folder: Path, unit: str = "epoch", resume: Path | None = None):
    warm = tk.WarmStart(rank=0.25, warmup=2 if unit == "epoch" else 2 * STEPS, where=feed_forward)
    model, callback = network(), TransformersWarmStart(warm, unit)
    if resume is not None:
        callback.resume_(model, resume)
    trainer = transformers.Trainer(model, arguments(folder), train_dataset=Digits(), callbacks=[callback])
    trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    return model, warm


@pytest.mark.parametrize("unit", ["epoch", "step"])
def test_switched_stopped_and_resumed_it_ends_at_the_same_weights(tmp_path: Path, unit: str) -> None:
    whole, warm = fit(tmp_path / "whole", unit)
    assert warm.switched
    assert len(tk.structure_of(whole)) == 4
    assert "projected" in str(warm.report)
    for epoch in range(1, EPOCHS):  # two checkpoints are of a dense model, one of a low-rank one
        folder = tmp_path / "whole" / f"checkpoint-{epoch * STEPS}"
        resumed, again = fit(tmp_path / f"{epoch}", unit, folder)
        assert len(again.reports) == (1 if epoch <= 2 else 0)
        assert resumed.state_dict().keys() == whole.state_dict().keys()
        for name, value in whole.state_dict().items():
            assert torch.equal(resumed.state_dict()[name], value), (epoch, name)


def test_what_it_cannot_do_is_said_before_training(tmp_path: Path) -> None:
    callback = TransformersWarmStart(tk.WarmStart())
    with pytest.raises(CheckpointError, match="cannot resume the warm start"):
        callback.resume_(network(), tmp_path)
    best = arguments(tmp_path, load_best_model_at_end=True, eval_strategy="epoch")
    trainer = transformers.Trainer(
        network(), best, train_dataset=Digits(), eval_dataset=Digits(), callbacks=[callback]
    )
    with pytest.raises(UsageError, match="load_best_model_at_end is not supported"):
        trainer.train()
    with pytest.raises(UsageError, match="count in 'epoch' or 'step'"):
        TransformersWarmStart(tk.WarmStart(), unit="batch")
