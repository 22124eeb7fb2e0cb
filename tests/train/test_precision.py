from __future__ import annotations

import os
from pathlib import Path

import pytest

from takifugu.train.precision import avoid_faulty_amx


@pytest.mark.parametrize(
    ("promised", "product", "had_to"),
    [
        ("flags: avx512_bf16 amx_bf16", "import os, signal; os.kill(os.getpid(), signal.SIGILL)", True),
        ("flags: avx512_bf16 amx_bf16", "pass", False),
        ("flags: avx512_bf16", "import os, signal; os.kill(os.getpid(), signal.SIGILL)", False),
        (
            "flags: avx512_bf16 amx_bf16",
            "raise SystemExit(1)",
            False,
        ),  # no torch, say: not the processor's fault
    ],
)
def test_amx_is_avoided_where_it_kills(
    promised: str, product: str, had_to: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "x")
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA")
    info = tmp_path / "cpuinfo"
    info.write_text(promised)
    assert avoid_faulty_amx(info, product) is had_to
    assert os.environ.get("ONEDNN_MAX_CPU_ISA") == ("AVX512_CORE_BF16" if had_to else None)


def test_what_the_user_has_set_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    info = tmp_path / "cpuinfo"
    info.write_text("amx_bf16")
    assert not avoid_faulty_amx(info, "import os, signal; os.kill(os.getpid(), signal.SIGILL)")
    assert os.environ["ONEDNN_MAX_CPU_ISA"] == "AVX2"
    assert not avoid_faulty_amx(tmp_path / "nowhere", "pass")
