"""README's three lines with default arguments: test accuracy of low-rank against dense, on three networks.

`WarmStart(rank=0.25, warmup=...)` and nothing else, in a plain loop with AdamW: an MLP on scikit-learn's
digits, a CNN and a transformer encoder over patches on Fashion-MNIST (the IDX files in --data). Dense and
low-rank start from the same weights and see the same batches. Each network is trained on one process, and on
two in DistributedDataParallel (gloo), which share every batch. `--rounds` is the number of seeds for the
digits; the others take two fewer. `--only NAME` measures one network and keeps the others' results.
"""

from __future__ import annotations

import gzip
import json
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import stage
from benchmarks.switch import digits

FEW = 20_000
"""Images of Fashion-MNIST to train on; the test set is whole."""


@dataclass(frozen=True)
class Task:
    """A network, its data and its schedule."""

    name: str
    epochs: int
    warmup: int
    batch: int
    lr: float


TASKS = (
    Task("digits-mlp", epochs=15, warmup=5, batch=64, lr=1e-3),
    Task("fashion-cnn", epochs=8, warmup=3, batch=64, lr=1e-3),
    Task("fashion-transformer", epochs=8, warmup=3, batch=64, lr=1e-3),
)


def fashion(folder: Path) -> tuple[Any, Any, Any, Any]:
    import numpy as np
    import torch

    def idx(name: str) -> Any:
        data = gzip.decompress((folder / name).read_bytes())
        shape = [int.from_bytes(data[4 + 4 * i : 8 + 4 * i], "big") for i in range(data[3])]
        return torch.from_numpy(np.frombuffer(data, np.uint8, offset=4 + 4 * data[3]).reshape(shape).copy())

    x, test = (idx(f"{part}-images-idx3-ubyte.gz").float() / 255 for part in ("train", "t10k"))
    y, labels = (idx(f"{part}-labels-idx1-ubyte.gz").long() for part in ("train", "t10k"))
    mean, std = x.mean(), x.std()
    return (x[:FEW] - mean) / std, y[:FEW], (test - mean) / std, labels


def network(name: str) -> Any:
    import torch
    from torch import nn

    if name == "digits-mlp":
        hidden = [nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU()]
        return nn.Sequential(*hidden, nn.Linear(256, 10))
    if name == "fashion-cnn":
        layers: list[Any] = [nn.Unflatten(1, (1, 28))]
        for i, o, stride in ((1, 16, 2), (16, 32, 2), (32, 64, 1), (64, 64, 2)):
            layers += [nn.Conv2d(i, o, 3, stride, 1, bias=False), nn.BatchNorm2d(o), nn.ReLU()]
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))

    class Patches(nn.Module):
        """A transformer encoder over the 16 patches of 7x7 pixels."""

        def __init__(self, width: int = 64) -> None:
            super().__init__()
            self.embed = nn.Linear(49, width)
            self.places = nn.Parameter(0.02 * torch.randn(16, width))
            block = nn.TransformerEncoderLayer(
                width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True
            )
            self.blocks = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
            self.norm = nn.LayerNorm(width)
            self.head = nn.Linear(width, 10)

        def forward(self, x: Any) -> Any:
            patches = x.unfold(1, 7, 7).unfold(2, 7, 7).reshape(len(x), 16, 49)
            return self.head(self.norm(self.blocks(self.embed(patches) + self.places)).mean(dim=1))

    return Patches()


def trained(task: Task, data: tuple[Any, ...], seed: int, low_rank: bool, place: tuple[int, int]) -> Any:
    """Train as README says and return the test accuracy and the number of parameters."""
    import torch
    import torch.nn.functional as F
    from torch.nn.parallel import DistributedDataParallel

    import takifugu as tk

    x, y, test, labels = data
    rank, processes = place
    torch.manual_seed(seed)
    model = network(task.name)
    if processes > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.lr)
    warm = tk.WarmStart(rank=0.25, warmup=task.warmup)
    order = torch.Generator().manual_seed(seed)
    for epoch in range(task.epochs):
        if low_rank:
            model = warm(model, optimizer, epoch=epoch)
        model.train()
        for rows in torch.randperm(len(x), generator=order).split(task.batch)[: len(x) // task.batch]:
            rows = rows[rank::processes]
            loss = F.cross_entropy(model(x[rows]), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    plain = model.module if processes > 1 else model
    plain.eval()
    with torch.no_grad():
        parts = zip(test.split(500), labels.split(500), strict=True)
        right = sum(int((plain(images).argmax(1) == wanted).sum()) for images, wanted in parts)
    return {"accuracy": right / len(test), "params": sum(p.numel() for p in plain.parameters())}


def measured(name: str, folder: str, seeds: list[int], place: tuple[int, int]) -> list[dict[str, Any]]:
    task = next(task for task in TASKS if task.name == name)
    data = digits() if name == "digits-mlp" else fashion(Path(folder))
    runs = []
    for seed in seeds:
        began = time.perf_counter()
        dense = trained(task, data, seed, False, place)
        low = trained(task, data, seed, True, place)
        if place[0] == 0:
            sys.stderr.write(f"{name}, {place[1]} processes, seed {seed}: {dense} -> {low}\n")
        runs.append({"seed": seed, "dense": dense, "low_rank": low, "s": time.perf_counter() - began})
    return runs


def one_of_two(rank: int, name: str, folder: str, seeds: list[int], shared: str) -> None:
    """The work of one of two processes; the first writes what it found."""
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    store = distributed.FileStore(f"{shared}/store", 2)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    runs = measured(name, folder, seeds, (rank, 2))
    if rank == 0:
        Path(shared, "runs.json").write_text(json.dumps(runs))
    distributed.destroy_process_group()


def main() -> None:
    options = stage.arguments(__doc__, rounds=5, data="", only="")
    import torch

    torch.set_num_threads(1)
    kept = stage.RESULTS / "defaults.json"
    runs: dict[str, Any] = {}
    if options.only and kept.exists():
        runs = json.loads(kept.read_text())["runs"]
    for task in TASKS:
        on_fashion = task.name != "digits-mlp"
        if options.only not in ("", task.name) or (on_fashion and not options.data):
            continue
        seeds = list(range(options.seed, options.seed + max(1, options.rounds - 2 * on_fashion)))
        one = measured(task.name, options.data, seeds, (0, 1))
        with tempfile.TemporaryDirectory() as shared:
            arguments = (task.name, options.data, seeds, shared)
            torch.multiprocessing.spawn(one_of_two, arguments, nprocs=2)  # type: ignore[no-untyped-call]
            two = json.loads(Path(shared, "runs.json").read_text())
        runs[task.name] = {"settings": vars(task), "one_process": one, "two_processes_ddp": two}
    lines = ["test accuracy in %, mean (least to most) over seeds; rank 0.25, everything else by default"]
    for name, found in runs.items():
        for how in ("one_process", "two_processes_ddp"):
            lines.append(f"{name:20} {how:18} {_line(found[how])}")
    stage.report("defaults", {"settings": {"images": FEW}, "runs": runs}, options, lines)


def _line(runs: list[dict[str, Any]]) -> str:
    parts = []
    for kind in ("dense", "low_rank"):
        figures = [100 * run[kind]["accuracy"] for run in runs]
        spread = f"({min(figures):.2f} to {max(figures):.2f})"
        parts.append(
            f"{kind} {statistics.fmean(figures):.2f} {spread}, {runs[0][kind]['params']:,} parameters"
        )
    apart = statistics.fmean(100 * (r["low_rank"]["accuracy"] - r["dense"]["accuracy"]) for r in runs)
    return "; ".join([*parts, f"difference {apart:+.2f}"])


if __name__ == "__main__":
    main()
