"""The end of a test run says what was not tested."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_skipped_browser_tests_are_named_with_the_reason(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "tests/browser",
        "tests/test_structure.py",
    ]
    environment = {**os.environ, "PATH": str(tmp_path)}  # where there is no Chromium
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    _, _, told = done.stdout.partition("BROWSER TESTS NOT RUN")
    told, _, _ = told.partition("short test summary")
    if "selenium is not installed" not in told:  # then only the file is known
        assert "no Chromium: install Debian's chromium and chromium-driver\n" in told
        assert "  test_charts_are_there_and_labelled (3 cases)\n" in told
        assert "  test_a_key_hides_its_traces\n" in told
