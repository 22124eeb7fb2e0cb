"""What the benchmarks share: taking turns, the machine's description, and the results file."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Some virtual machines advertise AMX and fault on its first instruction, which 16-bit products use.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

RESULTS = Path(__file__).parent / "results"


def arguments(description: str, **defaults: Any) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--rounds", type=int, default=defaults.pop("rounds", 7), help="measurements of each variant"
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--keep", action="store_true", help="write the result to benchmarks/results/")
    for name, value in defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    return parser.parse_args()


def in_turns(
    variants: dict[str, Callable[[], Any]], rounds: int, warm_up: int = 1
) -> dict[str, dict[str, float]]:
    """Seconds of each variant, measured in turns: what disturbs the machine disturbs them all."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for run in range(warm_up + rounds):
        for name, call in variants.items():
            began = time.perf_counter()
            call()
            if run >= warm_up:
                times[name].append(time.perf_counter() - began)
    return {
        name: {"median_s": statistics.median(t), "least_s": min(t), "most_s": max(t)}
        for name, t in times.items()
    }


def machine() -> dict[str, Any]:
    import torch

    model = platform.processor() or "unknown"
    info = Path("/proc/cpuinfo")
    if info.exists():
        model = next(
            (line.split(":")[1].strip() for line in info.read_text().splitlines() if "model name" in line),
            model,
        )
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "onednn_max_isa": os.environ["ONEDNN_MAX_CPU_ISA"],
    }


def report(name: str, result: dict[str, Any], options: argparse.Namespace, lines: list[str]) -> None:
    """Prints the lines (or JSON), and keeps the result where asked."""
    command = f"python -m benchmarks.{name} --seed {options.seed} --rounds {options.rounds}"
    full = {"command": command, "machine": machine(), **result}
    text = json.dumps(full, indent=2)
    sys.stdout.write((text if options.json else "\n".join(lines)) + "\n")
    if options.keep:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{name}.json").write_text(text + "\n")
