"""Averaging low-rank models: the mean of the factors against the exact mean of the products, recompressed.

Nodes own label-skewed shares (Dirichlet) of real images. A few dense rounds are shared; from that model on
each way goes on with the same members, samples and seeds, so the differences are the ways'. Digits come with
scikit-learn; Fashion-MNIST is read from --data (the folder that holds fashion-mnist/).
"""

from __future__ import annotations

import copy
import statistics
import sys
import time
from typing import Any

from benchmarks import stage

WAYS = ("factors", "products")


def workload(name: str, model: str, options: Any, seed: int, lr: float) -> Any:
    from takifugu.train.workload import Workload

    table: dict[str, Any] = {
        "model": f"takifugu.zoo.small:{model}",
        "model_options": {"width": options.width if model == "mlp" else options.channels},
        "data": name,
        "partition": {"kind": "dirichlet", "alpha": options.alpha},
        "batch_size": options.batch,
        "optimizer": {"kind": "sgd", "lr": lr},
        "validation": 0.25,
        "seed": seed,
    }
    if name != "digits":
        table["limit"] = options.limit
    return Workload.from_dict(table)


def one(name: str, model: str, options: Any, seed: int, lr: float) -> dict[str, Any] | None:
    """Both ways from one shared start; nothing where the shared start breaks down."""
    import takifugu as tk
    from takifugu.errors import TrainingError
    from takifugu.train.cooperative import cooperative_round
    from takifugu.train.evaluation import evaluate

    work = workload(name, model, options, seed, lr)
    data_dir = options.data or None
    held = work.load(data_dir).validation
    shares = work.shares([f"node-{i}" for i in range(options.nodes)], None, data_dir)
    net, spec = work.build(data_dir), work.spec()
    try:
        for number in range(1, options.warmup + 1):
            cooperative_round(net, shares, spec, seed, round_index=number)
    except TrainingError:
        return None
    tk.factorize_(net, options.ratio)
    found: dict[str, Any] = {"loss_at_switch": evaluate(net, held).loss}
    for way in WAYS:
        own, truncations, began = copy.deepcopy(net), [], time.perf_counter()
        try:
            for number in range(options.warmup + 1, options.warmup + options.after + 1):
                outcome = cooperative_round(own, shares, spec, seed, way, round_index=number)
                truncations.append(outcome.truncation)
            score = evaluate(own, held)
            found[way] = {
                "loss": score.loss,
                "accuracy": score.accuracy,
                "truncation": statistics.fmean(truncations),
                "round_s": (time.perf_counter() - began) / options.after,
            }
        except TrainingError:
            found[way] = None
    return found


def summary(runs: list[dict[str, Any] | None]) -> dict[str, Any]:
    """Means, and the spread of the differences between the ways, over the seeds where neither broke down."""
    both = [r for r in runs if r is not None and r["factors"] and r["products"]]
    told: dict[str, Any] = {"seeds": len(runs), "compared": len(both)}
    told["broke_down"] = {way: sum(r is not None and r[way] is None for r in runs) for way in WAYS}
    told["broke_down"]["before_the_switch"] = sum(r is None for r in runs)
    if both:
        apart = [r["products"]["loss"] - r["factors"]["loss"] for r in both]
        told["products_minus_factors"] = {
            "mean": statistics.fmean(apart),
            "spread": statistics.stdev(apart) if len(apart) > 1 else 0.0,
            "products_better": sum(a < 0 for a in apart),
        }
        for way in WAYS:
            losses = [r[way]["loss"] for r in both]
            told[way] = {
                "loss": statistics.fmean(losses),
                "spread": statistics.stdev(losses) if len(losses) > 1 else 0.0,
                "accuracy": statistics.fmean(r[way]["accuracy"] for r in both),
                "truncation": statistics.fmean(r[way]["truncation"] for r in both),
                "round_s": statistics.median(r[way]["round_s"] for r in both),
            }
    return told


def main() -> None:
    options = stage.arguments(
        __doc__,
        rounds=5,
        data="",
        ratio=0.25,
        alpha=0.3,
        nodes=8,
        warmup=3,
        after=8,
        batch=16,
        limit=2000,
        width=128,
        channels=8,
        threads=1,
    )
    import torch

    torch.set_num_threads(options.threads)
    rates = (0.02, 0.05, 0.1, 0.2, 0.4)
    cases = [("fashion-mnist", "mlp"), ("fashion-mnist", "cnn")] if options.data else [("digits", "mlp")]
    result: dict[str, Any] = {"settings": {**vars(options), "data": bool(options.data)}, "runs": {}}
    lines = [
        f"{options.warmup} dense rounds, then rank ratio {options.ratio} for {options.after}; "
        f"{options.nodes} nodes, Dirichlet {options.alpha}; {options.rounds} seeds; validation loss"
    ]
    for name, model in cases:
        for lr in rates:
            seeds = range(options.seed, options.seed + options.rounds)
            told = summary([one(name, model, options, seed, lr) for seed in seeds])
            result["runs"][f"{name}, {model}, lr {lr:g}"] = told
            line = f"{name:14} {model:4} lr {lr:<5g}"
            if "factors" in told:
                apart = told["products_minus_factors"]
                for way in WAYS:
                    own = told[way]
                    line += f" {way} {own['loss']:.4f} +- {own['spread']:.4f} (lost {own['truncation']:.1e})"
                line += (
                    f"  apart {apart['mean']:+.4f} +- {apart['spread']:.4f}, products better in "
                    f"{apart['products_better']} of {told['compared']}"
                )
            if any(told["broke_down"].values()):
                line += f"  broke down: {told['broke_down']}"
            lines.append(line)
            print(line, file=sys.stderr, flush=True)
    stage.report("averaging", result, options, lines)


if __name__ == "__main__":
    main()
