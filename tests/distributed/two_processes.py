"""Starts real processes for a job of `worker.py`, once, and hands their findings to the tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
CASES_FOLDER = HERE.parent / "lowrank"
RUN_FOLDER = HERE.parent / "train"
sys.path.insert(0, str(CASES_FOLDER))

from every_kind import CASES  # noqa: E402

__all__ = ["CASES", "Results", "run_job"]

Results = dict[str, list[dict[str, Any]]]
"""What every process found, by case and rank."""

TIMEOUT_S = 240


def run_job(job: str, folder: Path, count: int = 2, worker: str = "worker.py") -> Results:
    """Runs the worker's job on all processes. Nothing is left running."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(CASES_FOLDER), str(RUN_FOLDER), os.environ.get("PYTHONPATH", "")]),
    }
    logs = [folder / f"{rank}.log" for rank in range(count)]
    processes = []
    try:
        for rank, log in enumerate(logs):
            command = [sys.executable, str(HERE / worker), job, str(folder), str(rank), str(count)]
            with log.open("wb") as output:
                processes.append(
                    subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
                )
        codes = [process.wait(TIMEOUT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if any(codes):
        pytest.fail("\n".join(f"--- rank {log.stem}\n{log.read_text()[-3000:]}" for log in logs))
    names = {file.name.rsplit(".", 2)[0] for file in folder.glob("*.json")}
    return {
        name: [json.loads((folder / f"{name}.{rank}.json").read_text()) for rank in range(count)]
        for name in names
    }
