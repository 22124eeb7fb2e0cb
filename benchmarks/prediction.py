"""Do short pilots predict the end of a full run? Real cooperative trainings, every miss printed.

For each workload pilots of at most `share` of one full run's samples are run and fitted; then every version
is trained in full on all nodes, and the validation loss at the end is compared with what the curve said.
A full run of a low-rank version is the pilots' dense warm-up, the switch, and the remaining rounds.
"""

from __future__ import annotations

import copy
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import stage

MLP = {"model": "takifugu.zoo.small:mlp", "model_options": {"width": 64}}
# Plain SGD, at about the largest rate at which the losses of everyone fall smoothly and small skewed teams
# do not break down; weight decay, as the validation loss would rise again in the course of a full run.
WORKLOADS: dict[str, dict[str, Any]] = {
    "digits, label skew": {
        "model": "takifugu.zoo.small:mlp",
        "model_options": {"width": 64, "depth": 1},
        "data": "digits",
        "partition": {"kind": "dirichlet", "alpha": 1.0},
        "optimizer": {"kind": "sgd", "lr": 0.2, "weight_decay": 0.002},
        "batch_size": 8,
    },
    "mnist, by writer": {
        **MLP,
        "data": "mnist",
        "limit": 4000,
        "partition": {"kind": "writers"},
        "optimizer": {"kind": "sgd", "lr": 0.1, "weight_decay": 0.005},
        "batch_size": 32,
    },
    "fashion-mnist, label skew": {
        **MLP,
        "data": "fashion-mnist",
        "limit": 16000,  # of 4,000 the loss rises again long before the end of the run, as no curve does
        "partition": {"kind": "dirichlet", "alpha": 1.0},
        "optimizer": {"kind": "sgd", "lr": 0.1, "weight_decay": 0.005},
        "batch_size": 32,
    },
}
AMOUNTS = (1.0,)  # The question is the end of a run on all nodes; pilots on some of them do not answer it.
NODES = 8


def predict_and_run(table: dict[str, Any], seed: int, options: Any) -> dict[str, Any]:
    from takifugu.lowrank.surgery import apply_
    from takifugu.measure.fitting import fit_versions, predict
    from takifugu.train.cooperative import Mean, cooperative_round
    from takifugu.train.evaluation import evaluate
    from takifugu.train.ladder import ladder
    from takifugu.train.pilots import Pilots
    from takifugu.train.workload import Workload

    workload = Workload.from_dict({"validation": 0.25, "seed": seed, **table})
    data_dir = options.data_dir or None
    names = [f"node{i}" for i in range(NODES)]
    shares, data, model = (
        workload.shares(names, None, data_dir),
        workload.load(data_dir),
        workload.build(data_dir),
    )
    spec = workload.spec()
    mean = Mean.of(workload.weights, shares, spec)
    example = data.validation.inputs[:2]
    rungs = ladder(model, [0.25], workload.where(model), example, workload.batch_size)
    full = options.full_rounds
    # Half of the budget for the warm-up that all share, the rest for every version on every amount.
    budget = options.share * full
    warmup = max(1, int(budget / 2))
    rounds = int((budget - warmup) / (len(rungs) * len(AMOUNTS)))
    pilots = Pilots(
        model,
        rungs,
        shares,
        data.validation,
        data.classes,
        spec,
        workload.seed,
        rounds,
        warmup,
        AMOUNTS,
        weights=workload.weights,
    )
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        result = pilots.run(Path(folder))
    pilot_s = time.perf_counter() - began
    fits = fit_versions(result.observations(), seed=seed)
    everything = sum(map(len, shares.values()))
    used = result.samples_trained / (full * everything)
    assert used <= options.share, (used, options.share)

    found: dict[str, Any] = {"pilot_share": used, "label_weight": fits.label_weight, "versions": {}}
    jumps = {switch.target: switch.loss_jump for switch in result.switches}
    for rung in rungs:
        began = time.perf_counter()
        version = copy.deepcopy(model)
        losses = [result.start_loss]
        for index in range(1, full + 1):
            if index == warmup + 1:
                apply_(version, rung.structure)
            cooperative_round(version, shares, spec, workload.seed, round_index=index, mean=mean)
            losses.append(evaluate(version, data.validation).loss)
        fit, last = fits.versions[rung.name], losses[-1]
        # From the end of the warm-up, which the pilots have seen.
        start = losses[warmup] + jumps.get(rung.name, 0.0)
        ahead = [1.0] * (full - warmup)
        said = predict(fit.curve, start, ahead)[-1]
        drawn = sorted(predict(sample, start, ahead)[-1] for sample in fit.samples)
        found["versions"][rung.name] = {
            "predicted": said,
            "true": last,
            "error": said / last - 1,
            "best_seen_in_pilots": min(o.loss_after for o in result.rounds if o.version == rung.name),
            "samples_low": drawn[0],
            "samples_high": drawn[-1],
            "covered": drawn[0] <= last <= drawn[-1],
            "kind": fit.curve.kind,
            "r2": fit.goodness.r2,
            "held_out_error": fit.goodness.held_out_error,
            "pilot_rounds": rounds,
            "run_s": time.perf_counter() - began,
            "losses": [round(loss, 4) for loss in losses],
        }
    found["pilot_s"] = pilot_s
    return found


def main() -> None:
    options = stage.arguments(
        __doc__,
        rounds=1,
        full_rounds=200,
        share=0.1,
        within=0.15,
        seeds=1,
        data_dir=os.environ.get("TAKIFUGU_DATA", ""),
        only="",
    )
    results: dict[str, Any] = {}
    misses: list[float] = []
    for seed in range(options.seed, options.seed + options.seeds):
        for name, table in WORKLOADS.items():
            if options.only and options.only not in name:
                continue
            found = results[f"{name}, seed {seed}"] = predict_and_run(table, seed, options)
            for version, row in found["versions"].items():
                misses.append(abs(row["error"]))
                print(
                    f"{name}, seed {seed}, {version}: predicted {row['predicted']:.4f} "
                    f"({row['samples_low']:.3f} to {row['samples_high']:.3f}), true {row['true']:.4f}, "
                    f"{row['error']:+.1%}{'  MISS' if misses[-1] > options.within else ''}; "
                    f"pilots {found['pilot_share']:.1%} of the run, {row['kind']}, R2 {row['r2']:.3f}, "
                    f"best loss seen by them {row['best_seen_in_pilots']:.3f}",
                    flush=True,
                )
    missed = sum(miss > options.within for miss in misses)
    line = (
        f"{len(misses) - missed} of {len(misses)} within {options.within:.0%}; "
        f"median error {statistics.median(misses):.1%}"
    )
    # The folder is the user's own business.
    settings = {key: value for key, value in vars(options).items() if key not in ("data_dir", "json", "keep")}
    command = f"python -m benchmarks.prediction --seed {options.seed} --seeds {options.seeds}"
    summary = {"command": command, "missed": missed, "median_error": statistics.median(misses)}
    stage.report("prediction", {"settings": settings, **summary, "workloads": results}, options, [line])


if __name__ == "__main__":
    main()
