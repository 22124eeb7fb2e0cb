"""Compiled functions are kept on disk, and never outlive a change of the sources."""

import shutil
import subprocess
import sys
from pathlib import Path

import takifugu

READ = (
    "import numpy as np\n"
    "from takifugu.plan.compiled.trails import left_at\n"
    "print(left_at(np.arange(4.0), np.arange(4.0) ** 2, 2.5))\n"
    "print(left_at.stats.cache_path)\n"
)


def read(source: Path) -> tuple[float, str]:
    found = subprocess.run(
        [sys.executable, "-c", READ],
        env={"PYTHONPATH": str(source), "PATH": "", "HOME": str(source)},
        capture_output=True,
        text=True,
        check=True,
    )
    value, path = found.stdout.splitlines()
    return float(value), path


def test_an_edit_in_one_file_is_seen_by_callers_in_another(tmp_path: Path) -> None:
    package = Path(takifugu.__file__).parent
    copy = tmp_path / "takifugu"
    shutil.copytree(package, copy, ignore=shutil.ignore_patterns("__pycache__", "*.toml"))
    first, where = read(tmp_path)
    assert first == 6.5
    assert any(Path(where).rglob("*.nbi"))
    again, same = read(tmp_path)
    assert (again, same) == (first, where)
    # `left_at` calls `point_below`, which lives in another file and is compiled into it.
    paths = copy / "plan" / "compiled" / "paths.py"
    text = paths.read_text()
    assert text.count("    return low\n") == 1
    paths.write_text(text.replace("    return low\n", "    return 0 * low\n"))
    changed, elsewhere = read(tmp_path)
    assert changed != first
    assert elsewhere != where
