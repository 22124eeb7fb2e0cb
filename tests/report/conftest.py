from __future__ import annotations

from pathlib import Path

import pytest
from run_folder import write_run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", nodes=4, rounds=6, baselines=3)
