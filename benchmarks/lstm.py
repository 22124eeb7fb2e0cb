"""Recurrent layers of 1500 x 1500 (T 35, B 20), forward and backward: factorized against torch's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks import stage


def one_pass(module: Any, x: Any, d_out: Any, bf16: bool) -> Callable[[], None]:
    import torch

    def run() -> None:
        module.zero_grad(set_to_none=True)
        x.grad = None
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            out, _ = module(x)
        out.backward(d_out.to(out.dtype))

    return run


def main() -> None:
    options = stage.arguments(__doc__, rounds=9, width=1500, steps=35, batch=20, ratio=0.25)
    import torch
    from torch import nn

    import takifugu as tk

    torch.manual_seed(options.seed)
    x = torch.randn(options.steps, options.batch, options.width, requires_grad=True)
    d_out = torch.randn(options.steps, options.batch, options.width)
    result: dict[str, Any] = {"shape": vars(options), "times": {}, "speed_up": {}}
    lines = []
    for build, layers, dtype in [
        (nn.LSTM, 1, "fp32"),
        (nn.LSTM, 2, "fp32"),
        (nn.LSTM, 1, "bf16"),
        (nn.GRU, 1, "fp32"),
        (nn.RNN, 1, "fp32"),
    ]:
        dense = build(options.width, options.width, layers)
        holder = nn.Sequential(build(options.width, options.width, layers))
        tk.factorize_(holder, options.ratio)
        times = stage.in_turns(
            {
                "dense": one_pass(dense, x, d_out, dtype == "bf16"),
                "low-rank": one_pass(holder[0], x, d_out, dtype == "bf16"),
            },
            options.rounds,
            warm_up=2,
        )
        name = f"{build.__name__}, {layers} layer{'s' if layers > 1 else ''}, {dtype}"
        ratio = times["dense"]["median_s"] / times["low-rank"]["median_s"]
        result["times"][name], result["speed_up"][name] = times, ratio
        wanted = " (wanted: 1.5x)" if name == "LSTM, 1 layer, fp32" else ""
        lines.append(
            f"{name}: dense {times['dense']['median_s']:.3f} s, "
            f"low-rank {times['low-rank']['median_s']:.3f} s: "
            f"{ratio:.2f}x as fast{wanted}"
        )
    stage.report("lstm", result, options, lines)


if __name__ == "__main__":
    main()
