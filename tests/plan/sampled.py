"""Small problems whose curves have samples."""

from __future__ import annotations

from typing import Any


def sampled_problem(
    floors: tuple[float, ...] = (0.19, 0.2, 0.21, 0.24), rates: tuple[float, ...] = (1.1, 0.9, 0.8, 0.6)
) -> dict[str, Any]:
    """Three nodes, two versions, and as many samples as floors; only some reach the target as fast."""

    def version(name: str, cost: float, floor: float, rate: float) -> dict[str, Any]:
        drawn = [{"floor": f + floor, "rate": r * rate} for f, r in zip(floors, rates, strict=True)]
        curve = {"kind": "exponential", "floor": 0.2 + floor, "rate": 0.9 * rate, "samples": drawn}
        return {
            "name": name,
            "train_flops_per_sample": 4.0 * cost,
            "payload_bytes": 6.0 * cost,
            "curve": curve,
        }

    return {
        "format": 1,
        "target": {"loss": 0.8, "deadline_s": 400.0, "max_rounds": 12},
        "start": {"version": "dense", "loss": 2.3},
        "data": {"parts": 1},
        "versions": [version("dense", 1.0, 0.0, 1.0), version("low", 0.5, 0.05, 0.9)],
        "switches": [{"from": "dense", "to": "low", "time_s": 1.0, "energy_j": 2.0, "loss_jump": 0.05}],
        "nodes": [
            {
                "name": f"n{i}",
                "flops_per_s": 12.0 - 3.0 * i,
                "joules_per_flop": 0.2 + 0.15 * i,
                "up_bytes_per_s": 5.0,
                "down_bytes_per_s": 10.0,
                "latency_s": 0.1,
                "joules_per_byte": 0.3,
                "samples": 20 + 7 * i,
            }
            for i in range(3)
        ],
    }
