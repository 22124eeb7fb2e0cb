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


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name the browser tests that were skipped, and why: a green run has not seen the page in a browser."""
    reasons: dict[str, dict[str, int]] = {}
    for report in terminalreporter.stats.get("skipped", []):
        if not report.nodeid.startswith("tests/browser/"):
            continue
        # A test, or the whole file if selenium could not be imported.
        name = report.nodeid.partition("::")[2].partition("[")[0] or report.nodeid
        *_, reason = report.longrepr if isinstance(report.longrepr, tuple) else (str(report.longrepr),)
        cases = reasons.setdefault(reason.removeprefix("Skipped: "), {})
        cases[name] = cases.get(name, 0) + 1
    for reason, cases in reasons.items():
        terminalreporter.section("BROWSER TESTS NOT RUN", yellow=True)
        terminalreporter.line(reason)
        for name, count in cases.items():
            terminalreporter.line(f"  {name}" + (f" ({count} cases)" if count > 1 else ""))
