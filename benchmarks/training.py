"""Recipes carried out by `takifugu train`, one after another, and what came of them side by side.

    python -m benchmarks.training --work FOLDER --data FOLDER [--seeds 0,1] RECIPE...

Every run is resumable: what was stopped goes on, what is finished is only read. A result is kept in
benchmarks/results/training/ as soon as its run ends. Nothing else should run meanwhile: epochs are timed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks import stage

KEPT = stage.RESULTS / "training"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("recipes", nargs="+", metavar="RECIPE")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--work", type=Path, required=True, help="where the run folders go")
    parser.add_argument("--data", type=Path, help="where the data sets lie")
    parser.add_argument("--keep", action="store_true", help="write results to benchmarks/results/training/")
    options = parser.parse_args()
    for seed in map(int, options.seeds.split(",")):
        for recipe in options.recipes:
            found = carried_out(recipe, seed, options.work, options.data)
            if options.keep:
                KEPT.mkdir(parents=True, exist_ok=True)
                (KEPT / f"{recipe}-{seed}.json").write_text(json.dumps(found, indent=1) + "\n")
            print(line(found), flush=True)


def carried_out(recipe: str, seed: int, work: Path, data: Path | None) -> dict[str, Any]:
    out = work / f"{recipe}-{seed}"
    words = ["train", recipe, "--set", f"seed={seed}", "--out", str(out)]
    words += ["--data-dir", str(data)] if data is not None else []
    resume = ["--resume"] if (out / "run.json").exists() else []
    subprocess.run([sys.executable, "-m", "takifugu", *words, *resume], check=True, stdout=subprocess.DEVNULL)
    rows = [json.loads(text) for text in (out / "metrics.jsonl").read_text().splitlines()]
    header = json.loads((out / "run.json").read_text())
    epochs = [{key: row[key] for key in row if key != "kind"} for row in rows if row["kind"] == "epoch"]
    return {
        "command": f"takifugu train {recipe} --set seed={seed}",
        "recipe": recipe,
        "seed": seed,
        "commit": commit(),
        "machine": stage.machine(),
        "versions": header["versions"],
        "settings": header["recipe"],
        "result": json.loads((out / "result.json").read_text()),
        "epochs": epochs,
    }


def commit() -> str:
    told = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return told.stdout.strip()


def line(found: dict[str, Any]) -> str:
    """Scores on the test part, parameters, and the median time of an epoch for each size on the way."""
    result = found["result"]
    by_size: dict[int, list[float]] = {}
    for row in found["epochs"]:
        by_size.setdefault(row["parameters"], []).append(row["seconds"])
    times = ", ".join(f"{size:,}: {statistics.median(s):.1f} s" for size, s in by_size.items())
    scores = "  ".join(f"{name} {value:.4f}" for name, value in result["test"].items())
    return (
        f"{found['recipe']} seed {found['seed']}: {scores}; {result['parameters']:,} parameters; "
        f"{result['training_seconds'] / 60:.1f} min; epochs {times}"
    )


if __name__ == "__main__":
    main()
