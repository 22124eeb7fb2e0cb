"""Communication hooks are attached to every wrapper that the switch builds, on two real processes."""

from __future__ import annotations

import pytest
from two_processes import CASES, Results, run_job

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return run_job("hooked", tmp_path_factory.mktemp("hooked"))


@pytest.mark.parametrize("name", CASES)
def test_the_hook_works_on_every_new_wrapper(results: Results, name: str) -> None:
    first, second = results[name]
    for found in (first, second):
        assert "exception" not in found, found["exception"]
        assert len(found["calls"]) == 3, "dense, low-rank, dense again"
        assert all(calls >= 2 for calls in found["calls"]), "two steps each"
        assert found["halves"], "the gradients of the last step went through 16 bits"
        assert "the model is not wrapped in it" in found["without_ddp"]
    assert first["at_the_end"] == second["at_the_end"]
