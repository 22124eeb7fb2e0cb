"""Settings for every test, made before torch is imported."""

from __future__ import annotations

import os

# Some virtual machines advertise AMX and fault on its first instruction, which 16-bit products use.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest


@pytest.fixture(autouse=True)
def _seeded_and_clean():
    """Every test starts from the same random state and leaves no process group behind."""
    import torch

    torch.manual_seed(0)
    yield
    distributed = torch.distributed
    assert not (distributed.is_available() and distributed.is_initialized()), "a process group was left open"
