"""A recipe's `[method]` table: what it builds, and what mistakes in it are told."""

from __future__ import annotations

import subprocess
import sys

import pytest

from takifugu.errors import UsageError
from takifugu.train.methods import METHODS, method_class, method_for
from takifugu.train.methods.base import Method


@pytest.mark.parametrize("kind", METHODS)
def test_every_kind_has_defaults(kind: str) -> None:
    method = method_for({"kind": kind})
    assert type(method) is method_class(kind)
    assert isinstance(method, Method)


def test_the_layer_choice_reaches_the_low_rank_methods() -> None:
    def choice(name: str, module: object) -> bool:
        return False

    assert method_for({"kind": "low-rank"}, choice).where is choice
    assert method_for({"kind": "warm-start"}, choice).warm.where is choice


MISTAKES = [
    ({}, "method.kind: is missing; one of dense, warm-start"),
    ({"kind": "warmstart"}, "method.kind: 'warmstart' is not known; did you mean 'warm-start'"),
    ({"kind": ["dense"]}, "method.kind: ['dense'] is not known"),
    ({"kind": "low-rank", "n": 1}, "method.n: low-rank has no such option; accepted: rank, svd, scheme"),
    ({"kind": "dense", "rank": 0.25}, "method.rank: dense has no such option; it has none"),
    ({"kind": "low-rank", "rnak": 0.25}, "method.rnak: low-rank has no such option; did you mean 'rank'"),
    ({"kind": "low-rank", "where": "fc"}, "method.where: low-rank has no such option"),
    ({"kind": "low-rank", "rank": 1.5}, "method.rank: rank ratio 1.5 is not in (0, 1]"),
    ({"kind": "low-rank", "svd": "quick"}, "method.svd: unknown svd 'quick'"),
    ({"kind": "low-rank", "scheme": {"*": "tucker"}}, "method.scheme: 'tucker' is not known; one of"),
    ({"kind": "warm-start", "rank": True}, "method.rank: rank=True is a bool"),
    ({"kind": "warm-start", "warmup": -1}, "method.warmup: -1 is not a whole number of epochs"),
    ({"kind": "warm-start", "warmup": 2.5}, "method.warmup: 2.5 is not a whole number of epochs"),
    ({"kind": "warm-start", "state": "calibrated"}, "method.state: calibrated needs gradients"),
    ({"kind": "warm-start", "state": "kept"}, "method.state: unknown way 'kept'"),
    ({"kind": "warm-start", "rewarm": -3}, "method.rewarm: a re-warm-up of -3 steps"),
    ({"kind": "warm-start", "stages": [[3, 0.5], [2, 0.25]]}, "method.stages: stages must come in order"),
    ({"kind": "warm-start", "stages": [3, 0.5]}, "method.stages: 3 is not a pair"),
    ({"kind": "warm-start", "stages": [[3, 2.0]]}, "method.stages: rank ratio 2.0"),
    ({"kind": "warm-start", "stages": [[3, 0.5]], "warmup": 4}, "method.stages: `warmup` and `stages` are mutually exclusive; remove one with --set method.warmup="),
    ({"kind": "lottery-ticket", "rounds": 0}, "method.rounds: 0 is not a whole number of prunings, at least 1"),
    ({"kind": "lottery-ticket", "prune": 1}, "method.prune: 1 is not a share of the remaining weights"),
    ({"kind": "lottery-ticket", "keep": 0.0}, "method.keep: 0.0 is not a share of the model's parameters"),
    ({"kind": "lottery-ticket", "keep": 0.3, "prune": 0.2}, "method.keep: `prune` and `keep` are mutually exclusive; remove one with --set method.prune="),
    ({"kind": "lottery-ticket", "rewind": "1"}, "method.rewind: '1' is not a whole number of epochs"),
    ({"kind": "early-bird", "prune": 1.5}, "method.prune: 1.5 is not a share of the channels"),
    ({"kind": "early-bird", "prune": 0.5, "keep": 0.5}, "method.keep: `prune` and `keep` are mutually exclusive; remove one with --set method.prune="),
    ({"kind": "early-bird", "sparsity": -1e-4}, "method.sparsity: -0.0001 is not a number of at least 0"),
    ({"kind": "early-bird", "epsilon": 0.0}, "method.epsilon: 0.0 is not a share"),
    ({"kind": "early-bird", "latest": 0}, "method.latest: 0 is not a whole number of epochs, at least 1"),
]  # fmt: skip


@pytest.mark.parametrize(("table", "message"), MISTAKES, ids=lambda value: str(value)[:60])
def test_mistakes_name_the_option_and_the_way_out(table: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        method_for(table)
    assert str(caught.value).startswith(message)


def test_the_registry_itself_does_not_load_torch() -> None:
    code = "import sys, takifugu.train.methods; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
