"""Dense to low-rank in the middle of training, under `fully_shard`, on two and on four real processes."""

from __future__ import annotations

import pytest
from two_processes import CASES, Results, run_job

pytestmark = pytest.mark.distributed


@pytest.fixture(
    scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)], ids="{} processes".format
)
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    return run_job("switched_in_shards", tmp_path_factory.mktemp("switched_in_shards"), request.param)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("name", CASES)
def test_trained_stopped_resumed_switched_densified(results: Results, name: str, optimizer: str) -> None:
    for both in results[name]:
        assert "exception" not in both, both["exception"]
    first, *others = (both[optimizer] for both in results[name])
    for found in others:
        for moment in ("failure", "failure_on_one", "three_steps_later"):
            assert found[moment] == first[moment], f"the processes disagree: {moment}"
    for found in (first, *others):
        assert found["not_sharded"] == found["state_not_sharded"] == []
        assert found["names"]
        assert found["held"]
        assert found["kept"]
        assert found["projected"] == found["factors"] > 0
        assert found["off"] < 0.01, "relative to how far the weights of the one-process run went"
        assert found["densified_difference"] < 1e-5
        assert found["plain_has_no_traces"]


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("name", CASES)
def test_all_or_none(results: Results, name: str, optimizer: str) -> None:
    """That the old model trains on as if nothing had been tried is seen in `off` above."""
    for both in results[name]:
        found = both[optimizer]
        assert found["still_dense"]
        assert found["failure"].startswith("LayerError: the switch failed on rank 0 (LayerError: ")
        assert "contains NaN" in found["failure"]
        last = len(results[name]) - 1
        assert found["failure_on_one"] == (
            f"LayerError: the switch failed on rank {last} (RuntimeError: out of memory); "
            "every process keeps the old model"
        )
        assert "unsharded; its gradients would differ between processes" in found["partly"]
        assert found["without_wrap"].startswith("UsageError: the model is sharded by fully_shard; give")


def test_what_is_found_in_the_wild(tmp_path_factory: pytest.TempPathFactory) -> None:
    first, second = run_job("odd_shards", tmp_path_factory.mktemp("odd_shards"))["embedding"]
    for both in (first, second):
        assert "exception" not in both, both["exception"]
    for found in (*first.values(), *second.values()):
        assert found["structures"] == [
            [],
            [["embed", 4, None], ["first", 4, None], ["decoder", 4, "embed"]],
            [["embed", 2, None], ["first", 2, None], ["decoder", 2, "embed"]],
            [],
        ]
        assert found["held"]
        assert found["groups"] == [6, 1]
        assert found["gain_is_the_same"]
        assert found["tied"]
        assert found["frozen"]
        assert found["list_follows"]
        assert found["hook_calls"] == 2 * 4
        assert found["plain"] == ["gain"]
