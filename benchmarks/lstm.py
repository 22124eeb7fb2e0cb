"""Factorized against dense LSTM: one forward and backward pass, at the paper's language-model size.

    python benchmarks/lstm.py            # a table
    python benchmarks/lstm.py --json     # the same for a program

Dense and factorized passes take turns, so that whatever else the machine does hits both; the ratio is
that of the medians. Exit code 1 if a float32 ratio misses the target. bfloat16 is for information.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable

# Some virtual machines advertise AMX and fault on its first instruction, which 16-bit products use.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import torch
from torch import Tensor, nn

from takifugu.lowrank.factorized import Factorized
from takifugu.lowrank.rnn import FactorizedGRU, FactorizedLSTM, FactorizedRNN

TARGET = 1.5
KINDS: dict[str, tuple[type[nn.RNNBase], type[Factorized]]] = {
    "lstm": (nn.LSTM, FactorizedLSTM),
    "gru": (nn.GRU, FactorizedGRU),
    "rnn": (nn.RNN, FactorizedRNN),
}


def main() -> int:
    options = arguments()
    torch.manual_seed(0)
    results = [
        compare(options, layers, dtype)
        for dtype in ("float32", "bfloat16")
        if dtype == "float32" or not options.no_bf16
        for layers in options.layers
    ]
    if options.json:
        print(json.dumps({"benchmark": options.kind, "target": TARGET, "results": results}, indent=2))
    else:
        shape = f"{options.width} x {options.width}, T {options.steps}, B {options.batch}"
        print(f"{options.kind} {shape}, rank ratio {options.ratio}, {torch.get_num_threads()} threads")
        print(
            f"{'layers':>6} {'dtype':>9} {'dense s':>9} {'low-rank s':>10} {'ratio':>6}   (forward, backward)"
        )
        for row in results:
            print(
                f"{row['layers']:>6} {row['dtype']:>9} {row['dense_s']:>9.4f} {row['lowrank_s']:>10.4f} "
                f"{row['ratio']:>6.2f}   ({row['forward_ratio']:.2f}, {row['backward_ratio']:.2f})"
            )
    return int(any(row["dtype"] == "float32" and row["ratio"] < TARGET for row in results))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kind", choices=sorted(KINDS), default="lstm")
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 2], help="numbers of layers to try")
    parser.add_argument("--width", type=int, default=1500, help="input and hidden size")
    parser.add_argument("--steps", type=int, default=35, help="time steps")
    parser.add_argument("--batch", type=int, default=20)
    parser.add_argument("--ratio", type=float, default=0.25, help="rank over full rank")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--no-bf16", action="store_true", help="leave bfloat16 autocast out")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def compare(options: argparse.Namespace, layers: int, dtype: str) -> dict[str, float | int | str]:
    build, factorized = KINDS[options.kind]
    dense = build(options.width, options.width, layers)
    rank = int(options.ratio * options.width + 1e-9)
    names = [unfolding.name for unfolding in factorized.unfoldings(dense, "uv")]
    lowrank = factorized.shell(dense, "uv", dict.fromkeys(names, rank))
    with torch.no_grad():
        for factor in lowrank.factor_parameters():
            factor.normal_(std=0.05)  # the speed does not depend on what the factors stand for
    x = torch.randn(options.steps, options.batch, options.width, requires_grad=True)
    d_out = torch.randn(options.steps, options.batch, options.width)

    taken: dict[str, list[tuple[float, float]]] = {"dense": [], "lowrank": []}
    for repeat in range(-2, options.repeats):
        for name, module in (("dense", dense), ("lowrank", lowrank)):
            seconds = one_pass(module, x, d_out, autocast=dtype == "bfloat16")
            if repeat >= 0:
                taken[name].append(seconds)
    part = {
        name: [statistics.median(column) for column in zip(*rows, strict=True)]
        for name, rows in taken.items()
    }
    dense_s, lowrank_s = (statistics.median(sum(row) for row in taken[name]) for name in taken)
    return {
        "layers": layers,
        "dtype": dtype,
        "rank": rank,
        "dense_s": dense_s,
        "lowrank_s": lowrank_s,
        "ratio": dense_s / lowrank_s,
        "forward_ratio": part["dense"][0] / part["lowrank"][0],
        "backward_ratio": part["dense"][1] / part["lowrank"][1],
    }


def one_pass(
    module: Callable[[Tensor], tuple[Tensor, object]], x: Tensor, d_out: Tensor, autocast: bool
) -> tuple[float, float]:
    """Seconds of the forward and of the backward pass."""
    assert isinstance(module, nn.Module)
    module.zero_grad(set_to_none=True)
    x.grad = None
    start = time.perf_counter()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        out, _ = module(x)
    half = time.perf_counter()
    out.backward(d_out.to(out.dtype))
    return half - start, time.perf_counter() - half


if __name__ == "__main__":
    sys.exit(main())
