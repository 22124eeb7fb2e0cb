"""A plain DDP training script that goes low-rank on the way. The three lines that matter are marked.

    torchrun --nproc-per-node 2 examples/warm_start_ddp.py

Handwritten digits from scikit-learn, on the CPU; runs in seconds.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import takifugu as tk  # 1


def main() -> None:
    distributed.init_process_group("gloo")
    rank, size = distributed.get_rank(), distributed.get_world_size()
    torch.manual_seed(0)
    bunch = load_digits()
    images = torch.tensor(bunch.data, dtype=torch.float32) / 16
    labels = torch.tensor(bunch.target)
    train = torch.arange(rank, 1400, size)

    model: nn.Module = DistributedDataParallel(
        nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    warm = tk.WarmStart(rank=0.25, warmup=3)  # 2
    for epoch in range(8):
        model = warm(model, optimizer, epoch=epoch)  # 3
        if rank == 0 and warm.report is not None and warm.report.at == epoch:
            print(warm.report)
        for batch in train[torch.randperm(len(train), generator=torch.Generator().manual_seed(epoch))].split(
            32
        ):
            loss = F.cross_entropy(model(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            accuracy = (model(images[1400:]).argmax(dim=1) == labels[1400:]).float().mean()
        if rank == 0:
            print(f"epoch {epoch}: accuracy {accuracy:.3f}")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
