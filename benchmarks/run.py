"""All benchmarks one after the other, each in a process of its own; results go to benchmarks/results/."""

from __future__ import annotations

import subprocess
import sys

NAMES = ("startup", "factorize", "step", "lstm", "augment")


def main() -> int:
    failed = []
    for name in NAMES:
        print(f"== {name}", flush=True)
        if subprocess.run([sys.executable, "-m", f"benchmarks.{name}", "--keep"], check=False).returncode:
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
