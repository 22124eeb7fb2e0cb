from __future__ import annotations

import json
import platform
import subprocess
import sys

import pytest

_STEPS = """
import json, resource, torch
from takifugu.train.memory import keep_freed_memory
kept = {wanted} and keep_freed_memory()
def step():
    blocks = [torch.ones(16 * 2**20) for _ in range(3)]  # 64 MB each: above anything glibc keeps by itself
for _ in range(6):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    step()
print(json.dumps([kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before]))
"""


def _faults(wanted: bool, **environment: str) -> tuple[bool, int]:
    told = subprocess.run(
        [sys.executable, "-c", _STEPS.format(wanted=wanted)],
        env={"PATH": "/usr/bin:/bin", **environment},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    kept, faults = json.loads(told)
    return kept, faults


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc gives memory back so eagerly")
def test_the_pages_of_a_step_are_there_for_the_next() -> None:
    assert _faults(False)[1] > 10_000
    kept, faults = _faults(True)
    assert kept
    assert faults < 100


def test_an_allocator_of_the_users_is_left_alone() -> None:
    assert _faults(True, MALLOC_TRIM_THRESHOLD_="131072")[0] is False
