"""Does the dense warm-up pay? A small ResNet on Fashion-MNIST: dense, low-rank after a warm-up, from scratch.

All three train for the same number of epochs on the same batches. Then, how long the switch takes: VGG-19's
on one process and shared out over four, and as a share of a CIFAR-10 epoch.

    python -m benchmarks.warmup --data FASHION-MNIST-FOLDER
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import stage
from benchmarks.switch import fashion

CIFAR_IMAGES, CIFAR_BATCH = 50_000, 128


def resnet(width: int) -> Any:
    """Nine convolutions: a stem and two stages of two basic blocks each."""
    from torch import nn

    class Block(nn.Module):
        def __init__(self, i: int, o: int, stride: int) -> None:
            super().__init__()
            self.conv1 = nn.Conv2d(i, o, 3, stride, 1, bias=False)
            self.bn1 = nn.BatchNorm2d(o)
            self.conv2 = nn.Conv2d(o, o, 3, 1, 1, bias=False)
            self.bn2 = nn.BatchNorm2d(o)
            self.shortcut = (
                nn.Identity()
                if i == o and stride == 1
                else nn.Sequential(nn.Conv2d(i, o, 1, stride, bias=False), nn.BatchNorm2d(o))
            )

        def forward(self, x: Any) -> Any:
            y = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))
            return (y + self.shortcut(x)).relu()

    w = width
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(1, w, 3, 2, 1, bias=False), nn.BatchNorm2d(w), nn.ReLU()),
        Block(w, w, 1),
        Block(w, 2 * w, 2),
        Block(2 * w, 2 * w, 1),
        Block(2 * w, 4 * w, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * w, 10),
    )


def where(name: str, module: Any) -> bool:
    """As in the paper: the stem, the first block, the shortcuts and the last layer stay dense."""
    return ".conv" in name and not name.startswith("1.")


def run(way: str, ratio: float, data: tuple[Any, ...], seed: int, options: Any) -> dict[str, float]:
    """One training: way is dense, warm-up or scratch."""
    import torch
    import torch.nn.functional as F

    import takifugu as tk

    torch.manual_seed(seed)
    model = resnet(options.width)
    if way == "scratch":
        tk.factorize_(model, rank=ratio, where=where)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=options.lr, momentum=0.9, weight_decay=1e-4, nesterov=True
    )
    steps = options.epochs * -(-len(data[0]) // options.batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.lr, steps, pct_start=0.2)
    warm = tk.WarmStart(rank=ratio, warmup=options.warmup if way == "warm-up" else 10**9, where=where)
    began = time.perf_counter()
    for epoch in range(options.epochs):
        model = warm(model, optimizer, epoch=epoch)
        model.train()
        generator = torch.Generator().manual_seed(1000 * seed + epoch)
        for rows in torch.randperm(len(data[0]), generator=generator).split(options.batch):
            loss = F.cross_entropy(model(data[0][rows]), data[1][rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    seconds = time.perf_counter() - began
    model.eval()
    with torch.no_grad():
        logits = torch.cat([model(x) for x in data[2].split(500)])
    return {
        "accuracy": 100 * (logits.argmax(1) == data[3]).float().mean().item(),
        "loss": F.cross_entropy(logits, data[3]).item(),
        "params": sum(p.numel() for p in model.parameters()),
        "seconds": seconds,
    }


# ---- how long the switch takes -------------------------------------------------------------------------


def switch_seconds(processes: int, rounds: int) -> list[float]:
    """Seconds of VGG-19's switch on so many processes; the slowest process counts."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.warmup_worker", folder, str(processes), str(rounds)]
        workers = [subprocess.Popen([*command, str(rank)]) for rank in range(processes)]
        try:
            codes = [worker.wait(600) for worker in workers]
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
        if any(codes):
            raise SystemExit("a worker failed")
        times = [
            [float(line) for line in (Path(folder) / f"{rank}.txt").read_text().split()]
            for rank in range(processes)
        ]
    return [max(of_one) for of_one in zip(*times, strict=True)]


def step_seconds(rounds: int) -> float:
    """One training step of dense VGG-19 on a batch of CIFAR-10's shape."""
    import torch

    import takifugu as tk

    model = tk.zoo.build("vgg19-cifar10")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y = torch.randn(CIFAR_BATCH, 3, 32, 32), torch.randint(10, (CIFAR_BATCH,))

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    return stage.in_turns({"step": step}, rounds)["step"]["median_s"]


def main() -> None:
    options = stage.arguments(
        __doc__, rounds=3, data="", width=24, ratios="0.25,0.125", epochs=8, warmup=3, batch=64,
        images=12000, lr=0.1, threads=1, timing=3,
    )  # fmt: skip
    import torch

    torch.set_num_threads(options.threads)
    result: dict[str, Any] = {"settings": {**vars(options), "data": bool(options.data)}}
    lines = []
    if options.data:
        x, y, vx, vy = fashion(Path(options.data))
        data = (
            x[: options.images].unflatten(1, (1, 28, 28)),
            y[: options.images],
            vx.unflatten(1, (1, 28, 28)),
            vy,
        )
        ratios = [float(ratio) for ratio in options.ratios.split(",")]
        trials = {"dense": ("dense", 1.0)}
        trials |= {f"{way} {ratio}": (way, ratio) for ratio in ratios for way in ("warm-up", "scratch")}
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in trials}
        for seed in range(options.seed, options.seed + options.rounds):
            for name, (way, ratio) in trials.items():
                runs[name].append(run(way, ratio, data, seed, options))
                print(seed, name, runs[name][-1], file=sys.stderr, flush=True)
        result["runs"] = runs
        lines.append(
            f"{options.images} images, {options.epochs} epochs, {options.rounds} seeds; accuracy in %"
        )
        for way in runs:
            values = [one["accuracy"] for one in runs[way]]
            spread = statistics.stdev(values) if len(values) > 1 else 0.0
            seconds = statistics.fmean(one["seconds"] for one in runs[way])
            lines.append(
                f"{way:13} {statistics.fmean(values):.2f} +- {spread:.2f}  "
                f"{runs[way][0]['params']:,} parameters  {seconds:.0f} s"
            )
    if options.timing:
        times = {n: statistics.median(switch_seconds(n, options.timing)) for n in (1, 4)}
        step = step_seconds(options.timing)
        epoch = step * -(-CIFAR_IMAGES // CIFAR_BATCH)
        result["switch"] = {"seconds": times, "step_s": step, "estimated_cifar10_epoch_s": epoch}
        lines.append(
            f"VGG-19's switch: {times[1]:.2f} s on one process, {times[4]:.2f} s on four "
            f"({times[4] / times[1]:.2f}x), {100 * times[1] / epoch:.2f}% and {100 * times[4] / epoch:.2f}% "
            f"of a CIFAR-10 epoch of {epoch:.0f} s (estimated from a step of {step:.2f} s)"
        )
    stage.report("warmup", result, options, lines)


if __name__ == "__main__":
    main()
