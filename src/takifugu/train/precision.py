"""16-bit training on processors that promise more than they keep.

Some virtual machines advertise AMX, and the first 16-bit product that uses it kills the process. The library
underneath torch can be told to do without, but only before its first product.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_LIMIT = "ONEDNN_MAX_CPU_ISA"
_WITHOUT_AMX = "AVX512_CORE_BF16"
_PRODUCT = "import torch; a = torch.ones(64, 64, dtype=torch.bfloat16); a @ a"


def avoid_faulty_amx(cpuinfo: Path = Path("/proc/cpuinfo"), product: str = _PRODUCT) -> bool:
    """Tries a 16-bit product in a process of its own; if it dies of it, this process does without AMX.

    Call it before torch computes anything. Says whether it had to.
    """
    if _LIMIT in os.environ or not _promises_amx(cpuinfo):
        return False
    died = subprocess.run([sys.executable, "-c", product], capture_output=True, check=False).returncode < 0
    if died:
        os.environ[_LIMIT] = _WITHOUT_AMX
    return died


def _promises_amx(cpuinfo: Path) -> bool:
    try:
        return "amx_bf16" in cpuinfo.read_text(encoding="utf-8")
    except OSError:
        return False
