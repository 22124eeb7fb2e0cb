"""The example script runs as its first lines say, under the real launcher."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.distributed

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_warm_start_under_torchrun() -> None:
    pytest.importorskip("sklearn")
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         str(EXAMPLES / "warm_start_ddp.py")],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "epoch 3: 2 layers factorized" in done.stdout
    accuracies = [float(value) for value in re.findall(r"accuracy ([\d.]+)", done.stdout)]
    assert len(accuracies) == 8
    assert accuracies[-1] > 0.85
