"""The example scripts run as their first lines say, under the real launcher."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.distributed

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, processes: int = 2, layers: str = "2 layers") -> str:
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes),
         str(EXAMPLES / name)],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"epoch 3: {layers} factorized" in done.stdout
    assert f"{2 * int(layers[0])} projected" in done.stdout
    accuracies = [float(value) for value in re.findall(r"accuracy ([\d.]+)", done.stdout)]
    assert len(accuracies) == 8
    assert accuracies[-1] > 0.85
    return done.stdout


def test_warm_start_under_torchrun() -> None:
    pytest.importorskip("sklearn")
    run("warm_start_ddp.py", layers="1 layer")


@pytest.mark.parametrize("processes", [1, 2])
def test_warm_start_with_accelerate(processes: int) -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("accelerate")
    run("warm_start_accelerate.py", processes)


def test_warm_start_with_lightning_under_ddp() -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("lightning")
    said = run("warm_start_lightning.py")
    assert said.count("alike on all processes: True") == 8
