"""Factorized layers under FSDP2 (`fully_shard`) on two real processes."""

from __future__ import annotations

import pytest
from two_processes import CASES, Results, run_job

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return run_job("sharded", tmp_path_factory.mktemp("sharded"))


@pytest.mark.parametrize("how", ["root", "each"])
@pytest.mark.parametrize("name", CASES)
def test_in_shards_it_trains_as_in_one_piece(results: Results, name: str, how: str) -> None:
    for both in results[name]:
        assert "exception" not in both, both["exception"]
        found = both[how]
        assert found["not_sharded"] == []
        assert found["names"]
        assert found["still"] == []
        assert found["off"] < 0.01, "relative to how far the weights went"
        assert found["gathered_difference"] < 1e-5


@pytest.mark.parametrize("how", ["root", "each"])
@pytest.mark.parametrize("name", CASES)
def test_a_sharded_model_is_not_changed(results: Results, name: str, how: str) -> None:
    for both in results[name]:
        refusals = both[how]["refusals"]
        for call in ("factorize_", "densify_", "factorize_ dense"):
            assert refusals[call].startswith("LayerError: the weight of 'layer' is a DTensor"), call
            assert "factorize the model before it is sharded" in refusals[call]
        assert refusals["save"].startswith("CheckpointError: ")
        assert "DTensor (quantized or sharded); save the plain model instead" in refusals["save"]
