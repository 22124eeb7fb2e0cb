"""Dense to low-rank in the middle of training, under DDP, on two and on four real processes."""

from __future__ import annotations

import pytest
from two_processes import CASES, Results, run_job

pytestmark = pytest.mark.distributed


@pytest.fixture(
    scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)], ids="{} processes".format
)
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    return run_job("switched", tmp_path_factory.mktemp("switched"), request.param)


@pytest.mark.parametrize("name", CASES)
def test_switched_together_or_not_at_all(results: Results, name: str) -> None:
    for found in results[name]:
        assert "exception" not in found, found["exception"]
    first, *others = results[name]
    for found in others:
        for moment in (
            "failure",
            "failure_on_one",
            "at_the_switch",
            "three_steps_later",
            "averages",
            "error",
        ):
            assert found[moment] == first[moment], f"the processes disagree: {moment}"
    assert first["averages"][0] == first["averages"][1] != first["three_steps_later"]
    assert first["failure"].startswith(f"LayerError: the switch failed on rank {len(others)} (LayerError: ")
    assert "contains NaN" in first["failure"]
    assert "every process keeps the old model" in first["failure"]
    for found in results[name]:
        assert found["still_dense"]
        assert "RuntimeError: out of memory" in found["failure_on_one"]
        assert found["undone"]
        assert found["rebuilt"]
        assert found["kept"]
        assert found["projected"] == found["factors"] > 0
        assert found["moved"]
        assert found["decayed"] == found["factors"], "Frobenius decay finds its layers behind the wrapper"
        assert 0 <= found["error"] < 1
