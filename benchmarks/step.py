"""A training step of ResNet-18 (CIFAR), dense against low-rank: time in fp32 and bf16, and peak memory."""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from benchmarks import stage

NAME = "resnet18-cifar10"


def training_step(low_rank: bool, dtype: str, batch: int, seed: int) -> Callable[[], None]:
    import torch

    import takifugu as tk

    torch.manual_seed(seed)
    model = tk.zoo.build(NAME)
    if low_rank:
        tk.factorize_(model, 0.25, where=tk.zoo.where(NAME))
    model = model.to(memory_format=torch.channels_last).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    images = torch.randn(batch, 3, 32, 32).to(memory_format=torch.channels_last)
    labels = torch.randint(10, (batch,))

    def step() -> None:
        context: Any = torch.autocast("cpu", torch.bfloat16) if dtype == "bf16" else nullcontext()
        with context:
            loss = torch.nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def peak_memory(low_rank: bool, batch: int, seed: int) -> int:
    """Peak resident bytes of the steps above what the process needs before them, in a process of its own."""
    code = (
        "import torch, takifugu as tk\n"
        "from benchmarks.step import training_step, memory_bytes\n"
        "tk.factorize_(torch.nn.Sequential(torch.nn.Linear(64, 64)), 0.25)\n"  # everything is imported
        "before = memory_bytes('VmRSS')\n"
        f"step = training_step({low_rank}, 'fp32', {batch}, {seed})\n"
        "[step() for _ in range(4)]\n"
        "print(memory_bytes('VmHWM') - before)\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return int(out.stdout)


def memory_bytes(field: str) -> int:
    """This process's resident memory now (VmRSS) or at its peak (VmHWM).

    Not getrusage: its maximum is inherited from the parent process, and would hide the difference.
    """
    status = Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith(field))) * 1024


def main() -> None:
    options = stage.arguments(__doc__, rounds=9, batch=64)
    result: dict[str, Any] = {"network": NAME, "batch": options.batch, "times": {}, "speed_up": {}}
    lines = []
    for dtype in ("fp32", "bf16"):
        variants = {
            kind: training_step(kind == "low-rank", dtype, options.batch, options.seed)
            for kind in ("dense", "low-rank")
        }
        times = stage.in_turns(variants, options.rounds, warm_up=2)
        ratio = times["dense"]["median_s"] / times["low-rank"]["median_s"]
        result["times"][dtype], result["speed_up"][dtype] = times, ratio
        lines.append(
            f"{dtype}, channels_last, batch {options.batch}: dense {times['dense']['median_s']:.3f} s, "
            f"low-rank {times['low-rank']['median_s']:.3f} s: {ratio:.2f}x as fast (wanted: 1.9x)"
        )
    # The allocator's luck differs from process to process: five of each, in turns.
    peaks: dict[str, list[int]] = {"dense": [], "low-rank": []}
    for _ in range(5):
        for kind, found in peaks.items():
            found.append(peak_memory(kind == "low-rank", options.batch, options.seed))
    memory = {kind: statistics.median(found) for kind, found in peaks.items()}
    result["peak_memory_bytes_all"] = peaks
    result["peak_memory_bytes"], result["memory_ratio"] = memory, memory["low-rank"] / memory["dense"]
    lines.append(
        f"peak memory of a step: dense {memory['dense'] / 2**20:.0f} MiB, "
        f"low-rank {memory['low-rank'] / 2**20:.0f} MiB: "
        f"{result['memory_ratio']:.2f}x (wanted: at most 1.1x)"
    )
    stage.report("step", result, options, lines)


if __name__ == "__main__":
    main()
