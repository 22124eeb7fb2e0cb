"""Low-rank from scratch: the fresh model is factorized, and nothing is left to do when a run goes on."""

from __future__ import annotations

from small_run import assert_same_weights, count, resumed, started, train_, vgg

import takifugu as tk
from takifugu import zoo
from takifugu.train.methods import method_for

WHERE = zoo.where("vgg19-cifar10")


def test_the_fresh_model_is_factorized_by_the_choice() -> None:
    method = method_for({"kind": "low-rank", "rank": 0.25}, WHERE)
    run = started(vgg, method)
    expected = vgg()
    tk.factorize_(expected, 0.25, WHERE)
    assert_same_weights(run.model, expected)
    train_(run, method)
    (told,) = run.told("low-rank")
    assert told == {
        "params_before": count(vgg()),
        "params": count(run.model),
        "layers": len(tk.structure_of(run.model)),
    }
    assert count(run.model) < count(vgg())


def test_a_run_goes_on_bit_for_bit() -> None:
    table = {"kind": "low-rank", "rank": 0.5}
    method, new = method_for(table, WHERE), method_for(table, WHERE)
    run = started(vgg, method)
    train_(run, method, stop=(0, 2))
    again = resumed(run, method, new, vgg(seed=7))
    train_(run, method, (0, 2))
    train_(again, new, (0, 2))
    assert_same_weights(run.model, again.model)
    assert again.told("low-rank") == [], "told once, at the start of the run"
