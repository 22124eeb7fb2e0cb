"""A layer counts when it trains on two real processes, is checkpointed, resumed and densified."""

from __future__ import annotations

import pytest
from two_processes import CASES, Results, run_job

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return run_job("composed", tmp_path_factory.mktemp("composed"))


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("name", CASES)
def test_trained_checkpointed_resumed_densified(results: Results, name: str, optimizer: str) -> None:
    for found in results[name]:
        assert "exception" not in found, found["exception"]
    first, second = (found[optimizer] for found in results[name])

    # Each has its own data, all parameters learn, and both stay the same model to the last bit.
    assert first["losses"] != second["losses"]
    assert first["without_gradient"] == []
    assert first["start"] != first["after_3"]
    for moment in ("start", "after_3", "uninterrupted", "resumed", "dense_after_1"):
        assert first[moment] == second[moment], f"the processes disagree: {moment}"

    for found in (first, second):
        assert found["loaded"] == found["after_3"]
        assert found["uninterrupted"] != found["after_3"]
        assert found["resumed"] == found["uninterrupted"]
        assert found["densified_difference"] < 1e-5
        assert found["densified_structure"] == 0
        assert found["densified_is_plain"]
        assert found["refusal"].startswith("UsageError: the model is wrapped in DistributedDataParallel")
        assert "use model.module, and wrap it again afterwards" in found["refusal"]
