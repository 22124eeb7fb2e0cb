"""What `import takifugu` adds to `import torch`, and how long `takifugu --help` takes."""

from __future__ import annotations

import subprocess
import sys

from benchmarks import stage


def main() -> None:
    options = stage.arguments(__doc__, rounds=9)

    def run(*command: str) -> None:
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)

    python = sys.executable
    times = stage.in_turns(
        {
            "import torch": lambda: run(python, "-c", "import torch"),
            "import torch, takifugu": lambda: run(python, "-c", "import torch, takifugu"),
            "takifugu --help": lambda: run(python, "-m", "takifugu", "--help"),
        },
        options.rounds,
    )
    code = "import torch, time; t = time.perf_counter(); import takifugu; print(time.perf_counter() - t)"
    added = min(
        float(subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout)
        for _ in range(5)
    )
    code = code.replace(
        "import takifugu;", "import takifugu; takifugu.factorize_, takifugu.save, takifugu.zoo;"
    )
    everything = min(
        float(subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout)
        for _ in range(5)
    )
    result = {"times": times, "import_adds_s": added, "all_public_names_s": everything}
    lines = [
        f"import takifugu adds {added * 1e3:.1f} ms to import torch (wanted: under 50 ms); "
        f"with its low-rank half loaded as well {everything * 1e3:.0f} ms",
        f"takifugu --help: {times['takifugu --help']['median_s']:.3f} s (wanted: under 0.3 s)",
    ]
    stage.report("startup", result, options, lines)


if __name__ == "__main__":
    main()
