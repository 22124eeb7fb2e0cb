"""What becomes of the optimizer's state at the switch: every way, SGD and AdamW, on real images.

The dense warm-up is shared: from the same model and optimizer each way goes on with the same batches, so the
differences are the ways'. Digits come with scikit-learn; Fashion-MNIST is read from --data (the IDX files).
"""

from __future__ import annotations

import copy
import gzip
import statistics
from pathlib import Path
from typing import Any

from benchmarks import stage

WAYS = ("reset", "fresh", "projected", "calibrated")


def fashion(folder: Path) -> tuple[Any, Any, Any, Any]:
    import numpy as np
    import torch

    def idx(name: str) -> Any:
        data = gzip.decompress((folder / name).read_bytes())
        shape = [int.from_bytes(data[4 + 4 * i : 8 + 4 * i], "big") for i in range(data[3])]
        return torch.from_numpy(np.frombuffer(data, np.uint8, offset=4 + 4 * data[3]).reshape(shape).copy())

    x = idx("train-images-idx3-ubyte.gz").float().flatten(1) / 255
    y = idx("train-labels-idx1-ubyte.gz").long()
    x = (x - x.mean()) / x.std()
    return x[:20000], y[:20000], x[50000:], y[50000:]


def digits() -> tuple[Any, Any, Any, Any]:
    import torch
    from sklearn.datasets import load_digits

    bunch = load_digits()
    x, y = torch.tensor(bunch.data, dtype=torch.float32), torch.tensor(bunch.target)
    x = (x - x.mean()) / x.std()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, test = order[:1437], order[1437:]
    return x[train], y[train], x[test], y[test]


def network(inputs: int, width: int) -> Any:
    from torch import nn

    layers: list[Any] = []
    for n in (inputs, width, width):
        layers += [nn.Linear(n, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 10))


OPTIMIZERS = {
    "SGD": lambda torch, p: torch.optim.SGD(p, lr=0.02, momentum=0.9),
    "AdamW": lambda torch, p: torch.optim.AdamW(p, lr=1e-3),
}


def train(model: Any, optimizer: Any, data: tuple[Any, ...], seed: int, batch: int) -> float:
    """One epoch; its mean training loss."""
    import torch
    import torch.nn.functional as F

    losses = []
    for rows in torch.randperm(len(data[0]), generator=torch.Generator().manual_seed(seed)).split(batch):
        loss = F.cross_entropy(model(data[0][rows]), data[1][rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return statistics.fmean(losses)


def go_on(
    dense: Any, optimizer: Any, way: str, data: tuple[Any, ...], seed: int, options: Any
) -> dict[str, float]:
    import torch
    import torch.nn.functional as F

    import takifugu as tk

    model, optimizer = copy.deepcopy((dense, optimizer))
    draws = torch.Generator().manual_seed(seed)

    def gradients() -> None:
        rows = torch.randint(len(data[0]), (options.batch,), generator=draws)
        F.cross_entropy(model(data[0][rows]), data[1][rows]).backward()

    warm = tk.WarmStart(rank=options.ratio, warmup=0, where=["0", "2", "4"], state=way)
    warm(model, optimizer, epoch=0, gradients=gradients)
    first = train(model, optimizer, data, 1000 + seed, options.batch)
    for epoch in range(1, options.after):
        train(model, optimizer, data, 1000 * (epoch + 1) + seed, options.batch)
    with torch.no_grad():
        final = F.cross_entropy(model(data[2]), data[3]).item()
    return {"epoch_after": first, "validation": final}


def main() -> None:
    options = stage.arguments(__doc__, rounds=5, data="", ratio=0.125, warmup=3, after=5, batch=64, threads=1)
    import torch

    torch.set_num_threads(options.threads)
    sets: dict[str, Any] = {"digits": (digits(), 64)}
    if options.data:
        sets["Fashion-MNIST"] = (fashion(Path(options.data)), 512)
    result: dict[str, Any] = {"settings": {**vars(options), "data": bool(options.data)}, "runs": {}}
    lines = [
        f"{options.warmup} dense epochs, then rank ratio {options.ratio}; {options.rounds} seeds; "
        "mean loss (and its difference from reset's, with the spread of the differences)"
    ]
    for name, (data, width) in sets.items():
        for kind, build in OPTIMIZERS.items():
            runs: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
            for seed in range(options.seed, options.seed + options.rounds):
                torch.manual_seed(seed)
                model = network(data[0].shape[1], width)
                optimizer = build(torch, model.parameters())
                for epoch in range(options.warmup):
                    train(model, optimizer, data, 100 * seed + epoch, options.batch)
                for way in WAYS:
                    runs[way].append(go_on(model, optimizer, way, data, seed, options))
            result["runs"][f"{name}, {kind}"] = runs
            for way in WAYS:
                lines.append(
                    f"{name:14} {kind:6} {way:11} " + "  ".join(_against(runs, way, m) for m in runs[way][0])
                )
    stage.report("switch", result, options, lines)


def _against(runs: dict[str, list[dict[str, float]]], way: str, measure: str) -> str:
    mean = statistics.fmean(run[measure] for run in runs[way])
    apart = [run[measure] - base[measure] for run, base in zip(runs[way], runs["reset"], strict=True)]
    spread = statistics.stdev(apart) if len(apart) > 1 else 0.0
    return f"{measure} {mean:.4f} ({statistics.fmean(apart):+.4f} +- {spread:.4f})"


if __name__ == "__main__":
    main()
