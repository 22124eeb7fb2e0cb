"""DistributedDataParallel is rebuilt at the switch with its own options and hooks, on two real processes."""

from __future__ import annotations

from typing import Any

import pytest
from two_processes import Results, run_job

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return run_job("all", tmp_path_factory.mktemp("rebuilt"), worker="rebuild_worker.py")


def found_by_both(results: Results, job: str) -> list[dict[str, Any]]:
    found = results[job]
    for one in found:
        assert "exception" not in one, one["exception"]
    return found


def test_readmes_diff_runs_under_ddp(results: Results) -> None:
    first, second = found_by_both(results, "readme")
    assert first == second
    assert first["wrapped"]
    assert first["low_rank"] == ["layers.2"]


def test_the_wrapper_keeps_its_options(results: Results) -> None:
    first, second = found_by_both(results, "options")
    for case, found in first.items():
        assert found["same"], (case, found["differ"])
        assert found["rank"] == 1
        assert found["weights"] == second[case]["weights"], f"{case}: gradients were not averaged"
        assert found["hook_calls"] == 6, "hooks of the wrapper itself"
    # What the new wrapper really does, besides what it says.
    for wrap in ("None", "DDP"):
        assert first[f"unused, wrap={wrap}"]["logged"]["find_unused_parameters"]
        assert first[f"view, wrap={wrap}"]["logged"]["gradient_as_bucket_view"]
        assert first[f"buckets, wrap={wrap}"]["differ"] == {"bucket_cap_mb": str(2**-10)}
        for case in ("buffers", "synced at first"):
            own = [found[f"{case}, wrap={wrap}"]["own"] for found in (first, second)]
            assert own == [0.0, 1.0], "each process keeps its own buffers"


def test_the_communication_hook_is_registered_again(results: Results) -> None:
    for found in found_by_both(results, "hooks"):
        assert found["python"]
        assert found["builtin"]
        assert found["none"]
        assert found["stateful"].startswith("UsageError: the communication hook 'powerSGD_hook' keeps state")
        assert "give WarmStart hook=" in found["stateful"]
        assert found["given"] == 1
        assert "a subclass of DistributedDataParallel with a constructor of its own" in found["subclass"]
        assert "DistributedDataParallel ignores 'layers.2.weight'" in found["ignored"]


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
def test_a_return_value_that_is_not_used_is_an_error(results: Results, wrapper: str) -> None:
    for found in found_by_both(results, "stale"):
        assert "the return value of the call that switched was not used" in found[f"{wrapper} called"]
        assert "this is the model from before the switch" in found[f"{wrapper} trained"]
        assert found[f"{wrapper} looked at"] == 1.0
        assert found[f"{wrapper} returned"]
