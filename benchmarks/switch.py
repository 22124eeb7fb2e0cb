"""What becomes of the optimizer's state at the switch: every way, SGD and AdamW, MLPs and a CNN, real images.

The dense warm-up is shared: from the same model and optimizer each way goes on with the same batches, so the
differences are the ways'. Digits come with scikit-learn; Fashion-MNIST is read from --data (the IDX files).
`--only NAME` measures one set and keeps the others' results; `--picture FILE` draws the results file.
"""

from __future__ import annotations

import copy
import gzip
import json
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


def cnn(width: int) -> Any:
    """Four convolutions, of which the first stays dense."""
    from torch import nn

    layers: list[Any] = [nn.Unflatten(1, (1, 28, 28))]
    for i, o, stride in (
        (1, width, 2),
        (width, 2 * width, 2),
        (2 * width, 4 * width, 2),
        (4 * width,) * 2 + (1,),
    ):
        layers += [nn.Conv2d(i, o, 3, stride, 1, bias=False), nn.BatchNorm2d(o), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, 10))


MLP_LAYERS, CNN_LAYERS = ["0", "2", "4"], ["4", "7", "10"]

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
    dense: Any, optimizer: Any, way: str, where: list[str], data: tuple[Any, ...], seed: int, options: Any
) -> dict[str, float]:
    import torch
    import torch.nn.functional as F

    import takifugu as tk

    model, optimizer = copy.deepcopy((dense, optimizer))
    draws = torch.Generator().manual_seed(seed)

    def gradients() -> None:
        rows = torch.randint(len(data[0]), (options.batch,), generator=draws)
        F.cross_entropy(model(data[0][rows]), data[1][rows]).backward()

    warm = tk.WarmStart(rank=options.ratio, warmup=0, where=where, state=way)
    warm(model, optimizer, epoch=0, gradients=gradients)
    first = train(model, optimizer, data, 1000 + seed, options.batch)
    for epoch in range(1, options.after):
        train(model, optimizer, data, 1000 * (epoch + 1) + seed, options.batch)
    model.eval()
    with torch.no_grad():
        final = F.cross_entropy(model(data[2]), data[3]).item()
    return {"epoch_after": first, "validation": final}


def main() -> None:
    options = stage.arguments(
        __doc__, rounds=5, data="", ratio=0.125, warmup=3, after=5, batch=64, threads=1, only="", picture=""
    )
    if options.picture:
        kept = json.loads((stage.RESULTS / "switch.json").read_text())
        Path(options.picture).write_text(picture(kept["runs"]), encoding="utf-8")
        return
    import torch

    torch.set_num_threads(options.threads)
    sets: dict[str, Any] = {"digits": (digits(), lambda: network(64, 64), MLP_LAYERS)}
    if options.data:
        x, y, vx, vy = fashion(Path(options.data))
        sets["Fashion-MNIST"] = ((x, y, vx, vy), lambda: network(784, 512), MLP_LAYERS)
        few = (x[:4000], y[:4000], vx[:5000], vy[:5000])
        sets["Fashion-MNIST CNN"] = (few, lambda: cnn(16), CNN_LAYERS)
    result: dict[str, Any] = {"settings": {**vars(options), "data": bool(options.data)}, "runs": {}}
    if options.only:
        kept = json.loads((stage.RESULTS / "switch.json").read_text())
        result = {"settings": kept["settings"], "runs": kept["runs"]}
        sets = {options.only: sets[options.only]}
    lines = [
        f"{options.warmup} dense epochs, then rank ratio {options.ratio}; {options.rounds} seeds; "
        "mean loss (and its difference from reset's, with the spread of the differences)"
    ]
    for name, (data, build_network, where) in sets.items():
        for kind, build in OPTIMIZERS.items():
            runs: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
            for seed in range(options.seed, options.seed + options.rounds):
                torch.manual_seed(seed)
                model = build_network()
                optimizer = build(torch, model.parameters())
                for epoch in range(options.warmup):
                    train(model, optimizer, data, 100 * seed + epoch, options.batch)
                for way in WAYS:
                    runs[way].append(go_on(model, optimizer, way, where, data, seed, options))
            result["runs"][f"{name}, {kind}"] = runs
            for way in WAYS:
                lines.append(
                    f"{name:14} {kind:6} {way:11} " + "  ".join(_against(runs, way, m) for m in runs[way][0])
                )
    stage.report("switch", result, options, lines)


def picture(results: dict[str, dict[str, list[dict[str, float]]]]) -> str:
    """Every way's training loss in the epoch after the switch, less reset's: mean and spread, as an SVG."""
    left, row, gap, scale = 300, 16, 14, 4000.0
    parts, y = [], 40
    middle = left + 200
    for name, runs in results.items():
        for way in WAYS[1:]:
            apart = [
                a["epoch_after"] - b["epoch_after"] for a, b in zip(runs[way], runs["reset"], strict=True)
            ]
            mean, spread = statistics.fmean(apart), statistics.stdev(apart)
            x, half = middle + scale * mean, scale * spread
            color = "#1b7f4d" if mean + spread < 0 else "#b3261e" if mean - spread > 0 else "#666"
            parts.append(f'<text x="{left - 12}" y="{y + 4}" text-anchor="end">{name}: {way}</text>')
            parts.append(f'<path d="M{x - half:.1f} {y}H{x + half:.1f}" stroke="{color}" stroke-width="2"/>')
            parts.append(f'<circle cx="{x:.1f}" cy="{y}" r="4" fill="{color}"/>')
            parts.append(f'<text x="{left + 570}" y="{y + 4}">{mean:+.4f} ± {spread:.4f}</text>')
            y += row
        y += gap
    ticks = "".join(
        f'<path d="M{middle + scale * v:.0f} 28V{y}" stroke="#ddd"/>'
        f'<text x="{middle + scale * v:.0f}" y="22" text-anchor="middle" fill="#666">{v:+.2f}</text>'
        for v in (-0.04, -0.02, 0.0, 0.02, 0.04, 0.06)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="1020" height="{y + 10}" font-family="sans-serif" '
        f'font-size="12"><rect width="100%" height="100%" fill="#fff"/>{ticks}{"".join(parts)}</svg>\n'
    )


def _against(runs: dict[str, list[dict[str, float]]], way: str, measure: str) -> str:
    mean = statistics.fmean(run[measure] for run in runs[way])
    apart = [run[measure] - base[measure] for run, base in zip(runs[way], runs["reset"], strict=True)]
    spread = statistics.stdev(apart) if len(apart) > 1 else 0.0
    return f"{measure} {mean:.4f} ({statistics.fmean(apart):+.4f} +- {spread:.4f})"


if __name__ == "__main__":
    main()
