"""What a simulation costs: 100 nodes train a small CNN on digits for 50 rounds; seconds and memory.

The peak of the memory is read after 10 rounds and at the end: a simulation that kept anything of its rounds
would show it there. Where others use the machine too, the processor's seconds say more than the clock's.
"""

from __future__ import annotations

import resource
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import stage


def problem_dict(nodes: int, samples: int) -> dict[str, Any]:
    """Only the clock reads the figures, so any will do; the training is real."""
    return {
        "format": 1,
        "target": {"loss": 1e-6, "deadline_s": 1e9},
        "start": {"version": "dense", "loss": 2.3},
        "workload": {
            "model": "takifugu.zoo.small:cnn",
            "model_options": {"width": 8},
            "data": "digits",
            "partition": {"kind": "dirichlet", "alpha": 0.3},
            "batch_size": 16,
            "optimizer": {"kind": "sgd", "lr": 0.1},
            "validation": 0.1,
        },
        "versions": [
            {
                "name": name,
                "train_flops_per_sample": 1e6,
                "payload_bytes": 3e4,
                "curve": {"kind": "exponential", "floor": 0.1, "rate": 0.3},
                **({} if name == "dense" else {"structure": "low.json"}),
            }
            for name in ("dense", "low")
        ],
        "switches": [{"from": "dense", "to": "low", "time_s": 1.0, "energy_j": 1.0}],
        "nodes": [
            {
                "name": f"node-{i:03}",
                "flops_per_s": 1e8,
                "joules_per_flop": 1e-9,
                "up_bytes_per_s": 1e5,
                "down_bytes_per_s": 1e6,
                "latency_s": 0.02,
                "joules_per_byte": 1e-6,
                "samples": samples,
            }
            for i in range(nodes)
        ],
    }


def one(options: Any) -> dict[str, float]:
    import takifugu as tk
    from takifugu.engine.policies import Policy
    from takifugu.engine.setting import Setting
    from takifugu.engine.simulate import simulate
    from takifugu.engine.world import World
    from takifugu.plan.plan import Decision, replay
    from takifugu.plan.problem import Problem
    from takifugu.train.workload import Workload

    data = problem_dict(options.nodes, options.samples)
    data["target"]["max_rounds"] = options.rounds
    problem = Problem.from_dict(data)
    model = Workload.from_dict(problem.workload).build()
    structures = {"dense": tk.Structure(), "low": tk.choose(model, 0.25)}
    setting = Setting.of(
        problem, World.draw(problem, options.seed), structures, options.seed, options.averaging
    )
    everyone = dict.fromkeys(range(options.nodes), options.samples)
    plan = replay(problem, [Decision(int(k >= 5), everyone) for k in range(options.rounds)])
    assert plan is not None
    policy = Policy("plan", "plan", plan, {"rounds": [r.to_dict() for r in plan.rounds]})
    peaks: dict[int, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        began, worked = time.perf_counter(), time.process_time()

        def watch(row: dict[str, Any]) -> None:
            peaks[row["round"]] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

        run = setting.folder(Path(folder) / "run", policy)
        result = simulate(policy, setting, run, watch)
        seconds, cpu_s = time.perf_counter() - began, time.process_time() - worked
        size = sum(p.stat().st_size for p in Path(folder).rglob("*") if p.is_file())
    return {
        "seconds": seconds,
        "cpu_s": cpu_s,
        "cpu_s_a_round": cpu_s / options.rounds,
        "peak_mb_after_10": peaks[min(10, options.rounds)],
        "peak_mb_at_the_end": peaks[options.rounds],
        "folder_mb": size / 2**20,
        "start_loss": result["start_loss"],
        "loss": result["loss"],
    }


def main() -> None:
    options = stage.arguments(__doc__, rounds=50, nodes=100, samples=16, averaging="factors", threads=1)
    import torch

    torch.set_num_threads(options.threads)
    told = one(options)
    lines = [f"{options.nodes} nodes, {options.rounds} rounds, five dense and the others at rank ratio 0.25"]
    lines += [f"{name:20} {value:.4g}" for name, value in told.items()]
    stage.report("simulation", {"settings": vars(options), "run": told}, options, lines)


if __name__ == "__main__":
    main()
