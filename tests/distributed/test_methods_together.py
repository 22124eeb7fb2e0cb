"""Every training method on two real processes with different data: what they change stays the same on both."""

from __future__ import annotations

import pytest
from two_processes import Results, run_job

from takifugu.train.methods import METHODS

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def ddp(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return run_job("ddp", tmp_path_factory.mktemp("methods_ddp"), worker="methods_worker.py")


@pytest.fixture(scope="module")
def fsdp(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return run_job("fsdp", tmp_path_factory.mktemp("methods_fsdp"), worker="methods_worker.py")


EVENTS = {
    "dense": [],
    "warm-start": ["switch"],
    "low-rank": ["low-rank"],
    "lottery-ticket": ["pruned", "pruned"],
    "early-bird": ["ticket"],
}


@pytest.mark.parametrize("kind", METHODS)
def test_the_processes_agree_under_ddp(ddp: Results, kind: str) -> None:
    first, second = ddp[kind]
    for found in (first, second):
        assert "exception" not in found, found["exception"]
        assert found["events"] == EVENTS[kind]
        assert found["held"], "the optimizer holds the model's parameters, all of them and no others"
        assert found["without_gradient"] == []
        assert found["rewrapped"] == (kind in ("warm-start", "early-bird"))
    assert first["weights"] == second["weights"]
    assert first["state"] == second["state"]
    if kind == "lottery-ticket":
        assert first["entries"] == first["before"], "pruned weights are zeros"
        assert first["nonzero"] <= first["left"] <= 0.5 * first["before"] + 1
    elif kind != "dense":
        assert first["entries"] == first["left"] < first["before"]


@pytest.mark.parametrize("kind", METHODS)
def test_under_fsdp2_a_method_works_or_says_that_it_does_not(fsdp: Results, kind: str) -> None:
    first, second = fsdp[kind]
    for found in (first, second):
        assert "exception" not in found, found["exception"]
        if kind in ("lottery-ticket", "early-bird"):
            assert "use sharding none or ddp" in found["refused"]
        else:
            assert all(params == found["entries"] for params in found["told"])
    assert first == second
