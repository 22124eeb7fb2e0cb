"""The warm start as a method: when it switches, what it tells, and that a run goes on from a checkpoint."""

from __future__ import annotations

import pytest
from small_run import SmallRun, assert_same_weights, count, resumed, started, train_, vgg

import takifugu as tk
from takifugu import zoo
from takifugu.errors import TakifuguError, UsageError
from takifugu.train.methods import method_for
from takifugu.train.methods.base import Method

WHERE = zoo.where("vgg19-cifar10")


def warm(**options: object) -> Method:
    return method_for({"kind": "warm-start", **options}, WHERE)


def test_the_switch_is_the_same_as_in_a_loop_of_ones_own() -> None:
    method = warm(rank=0.25, warmup=2)
    run = started(vgg, method)
    train_(run, method)

    by_hand = tk.WarmStart(rank=0.25, warmup=2, where=WHERE)
    own = SmallRun(vgg())
    for epoch in range(own.epochs):
        own.model = by_hand(own.model, own.optimizer, epoch=epoch)
        train_(own, Method(), (0, epoch), (0, epoch + 1))
    assert_same_weights(run.model, own.model)
    assert len(tk.structure_of(run.model)) > 0


@pytest.mark.parametrize(
    ("options", "where", "message"),
    [
        ({"warmup": 2}, ["nothing"], "where='nothing' matches no layer"),
        ({"warmup": 2, "rank": "energy:0.9"}, ["nothing"], "where='nothing' matches no layer"),
        ({"warmup": 2, "rank": {"nothing": 0.5, "*": 3}}, WHERE, "rank pattern 'nothing' matches no layer"),
        ({"stages": [[1, 0.5], [2, 4000]]}, WHERE, "rank 4000 exceeds"),
        ({"warmup": 2, "scheme": {"nothing": "uv"}}, WHERE, "scheme pattern 'nothing' matches no layer"),
    ],
)
def test_what_fits_no_layer_is_told_before_the_first_step(
    options: dict[str, object], where: object, message: str
) -> None:
    method = method_for({"kind": "warm-start", **options}, where)
    with pytest.raises(TakifuguError, match=message):
        started(vgg, method)


def test_it_tells_once_what_it_did() -> None:
    method = warm(warmup=2)
    run = started(vgg, method)
    train_(run, method)
    (told,) = run.told("switch")
    assert told["epoch"] == 2
    assert told["params_before"] == count(vgg())
    assert told["params"] == count(run.model) < told["params_before"]
    assert told["layers"] == len(tk.structure_of(run.model))
    assert told["seconds"] > 0


def test_stages_may_lead_back_to_dense() -> None:
    method = warm(stages=[[1, 0.5], [2, 0.25], [3, "dense"]])
    run = started(vgg, method)
    train_(run, method)
    first, second, third = run.told("switch")
    assert first["params"] > second["params"]
    assert third["params"] == first["params_before"]
    assert third["layers"] == 0
    assert len(tk.structure_of(run.model)) == 0


# After so few steps the stable ranks are near the full ones, and all layers may stay dense.
@pytest.mark.filterwarnings("ignore:no layer becomes low-rank:takifugu.errors.TakifuguWarning")
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
@pytest.mark.parametrize("stop", [1, 3], ids=["before the switch", "after it"])
def test_a_run_goes_on_bit_for_bit(kind: str, stop: int) -> None:
    options = {"rank": "stable", "warmup": 2, "rewarm": 5}
    method = warm(**options)
    run = started(vgg, method, kind=kind)
    train_(run, method, stop=(0, stop))
    new = warm(**options)
    again = resumed(run, method, new, vgg(seed=7))
    train_(run, method, (0, stop))
    train_(again, new, (0, stop))
    assert_same_weights(run.model, again.model)


def test_a_switch_that_never_comes_is_refused_at_the_start() -> None:
    method = warm(warmup=4)
    with pytest.raises(UsageError, match="the switch at epoch 4 is never reached, the run has 4"):
        method.before_epoch_(started(vgg, method))
