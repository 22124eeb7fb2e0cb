"""`takifugu demo --switch`: a network goes low-rank in the middle of its training, on real digits."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from takifugu.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor, nn

_NETWORK, _WIDTH, _BATCH = "resnet18-cifar10", 32, 64


def demo_switch(epochs: int, warmup: int, rank: float, seed: int, folder: Path, as_json: bool) -> None:
    """Trains a small ResNet on handwritten digits, dense and with the switch to low-rank."""
    if warmup >= epochs:
        raise UsageError(f"--warmup {warmup} leaves no low-rank epoch of {epochs}; use less than {epochs}")
    import takifugu as tk
    from takifugu.lowrank.probe import race

    data = _digits()
    folder.mkdir(parents=True, exist_ok=True)
    _say(
        f"digits: {len(data[0])} images to train on, {len(data[2])} to test on; {_NETWORK} at width {_WIDTH}"
    )
    dense = _run("dense", data, epochs, None, rank, seed)
    low = _run("low-rank", data, epochs, warmup, rank, seed)

    model, report = low.pop("model"), low.pop("report")
    # In turns, on the same batch: a machine's speed drifts between one training and the next.
    # On copies: batch norms move their averages when they train.
    runners = {"dense": copy.deepcopy(dense.pop("model")), "low": copy.deepcopy(model)}
    times = race(runners, (data[0][:_BATCH],), {}, most_rounds=15, budget_s=5)
    dense["step_s"], low["step_s"] = times["dense"], times["low"]
    dense.pop("report")
    path = folder / "digits.safetensors"
    tk.save(model, path)
    same = _accuracy(tk.load(path), data[2], data[3]) == low["accuracy"]
    exactness = tk.densify_(model)
    result = {
        "dense": dense,
        "low_rank": low,
        "step_time_ratio": dense["step_s"] / low["step_s"],
        "parameter_ratio": dense["parameters"] / low["parameters"],
        "loaded_model_agrees": same,
        "densified_rounding": exactness.largest,
        "settings": {"epochs": epochs, "warmup": warmup, "rank": rank, "seed": seed, "batch": _BATCH},
    }
    (folder / "result.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    (folder / "layers.txt").write_text(f"{report}\n", encoding="utf-8")
    if as_json:
        typer.echo(json.dumps(result, indent=2))
    else:
        _show(result, folder)


def _run(
    title: str, data: tuple[Tensor, ...], epochs: int, warmup: int | None, rank: float, seed: int
) -> dict[str, Any]:
    import torch

    import takifugu as tk

    torch.manual_seed(seed)
    model: nn.Module = tk.zoo.build(_NETWORK, width=_WIDTH, in_channels=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    # A warm-up that never ends is a dense run.
    warm = tk.WarmStart(rank, epochs if warmup is None else warmup, where=tk.zoo.where(_NETWORK))
    shuffle = torch.Generator().manual_seed(seed)
    for epoch in range(epochs):
        model = warm(model, optimizer, epoch=epoch)
        if warm.report is not None and warm.report.at == epoch:
            _say(f"{title}: {warm.report}")
        for group in optimizer.param_groups:
            group["lr"] = 0.05 * (1 - epoch / epochs)
        model.train()
        for batch in torch.randperm(len(data[0]), generator=shuffle).split(_BATCH):
            loss = torch.nn.functional.cross_entropy(model(data[0][batch]), data[1][batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        accuracy = _accuracy(model, data[2], data[3])
        _say(f"{title}: epoch {epoch + 1}/{epochs}  accuracy {accuracy:.3f}")
    parameters = sum(p.numel() for p in model.parameters())
    return {
        "accuracy": accuracy,
        "parameters": parameters,
        "gradient_bytes": 4 * parameters,
        "model": model,
        "report": warm.report.layers if warm.report is not None else None,
    }


def _digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The handwritten digits that come with scikit-learn: 1797 real images of 8 x 8."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise UsageError("the demo needs scikit-learn; pip install 'takifugu[demo]'") from error
    import torch

    bunch = load_digits()
    images = torch.tensor(bunch.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(bunch.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, test = order[:1437], order[1437:]
    return images[train], labels[train], images[test], labels[test]


def _accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    import torch

    model.eval()
    with torch.no_grad():
        right = (model(images).argmax(dim=1) == labels).float().mean()
    return float(right)


def _show(result: dict[str, Any], folder: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="handwritten digits, test set", box=None)
    for title in ("", "accuracy", "parameters", "gradient bytes a step", "forward and backward"):
        table.add_column(title, justify="left" if not title else "right")
    for name, key in (("dense", "dense"), ("dense, then low-rank", "low_rank")):
        run = result[key]
        step = f"{run['step_s'] * 1e3:.1f} ms"
        table.add_row(
            name, f"{run['accuracy']:.3f}", f"{run['parameters']:,}", f"{run['gradient_bytes']:,}", step
        )
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table)
    console.print(
        f"{result['parameter_ratio']:.2f}x fewer parameters and bytes, "
        f"steps {result['step_time_ratio']:.2f}x as fast. "
        f"Saved, loaded again: {'same accuracy' if result['loaded_model_agrees'] else 'DIFFERENT accuracy'}. "
        f"Dense again: exact but for rounding of {result['densified_rounding']:.0e}. Files in {folder}/.",
        highlight=False,
    )


def _say(message: str) -> None:
    sys.stderr.write(message + "\n")
