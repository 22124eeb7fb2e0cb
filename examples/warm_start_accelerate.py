"""The switch in an Accelerate loop, on one process or several. The three lines that matter are marked.

    accelerate launch --num-processes 2 --cpu examples/warm_start_accelerate.py

Handwritten digits from scikit-learn, on the CPU; runs in seconds.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import takifugu as tk  # 1


def main() -> None:
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    bunch = load_digits()
    images = torch.tensor(bunch.data, dtype=torch.float32) / 16
    labels = torch.tensor(bunch.target)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loader = DataLoader(TensorDataset(images[:1400], labels[:1400]), batch_size=32, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    warm = tk.WarmStart(rank=0.25, warmup=3, where=["0", "2"], wrap=accelerator.prepare_model)  # 2
    for epoch in range(8):
        model = warm(model, optimizer, epoch=epoch)  # 3
        if warm.report is not None and warm.report.at == epoch:
            accelerator.print(warm.report)
        for batch, target in loader:
            loss = F.cross_entropy(model(batch), target)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
        with torch.no_grad():
            accuracy = (model(images[1400:]).argmax(dim=1) == labels[1400:]).float().mean()
        accelerator.print(f"epoch {epoch}: accuracy {accuracy:.3f}")
    accelerator.end_training()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
