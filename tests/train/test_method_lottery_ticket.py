"""Iterative magnitude pruning: what is pruned, what is rewound, what is counted, and going on from a checkpoint."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from small_run import assert_same_weights, count, resnet, resumed, started, train_, vgg
from torch import nn

from takifugu import zoo
from takifugu.errors import UsageError
from takifugu.train.methods import method_for
from takifugu.train.methods.base import Method
from takifugu.train.methods.lottery_ticket import prunable


def ticket(**options: object) -> Method:
    return method_for({"kind": "lottery-ticket", **options})


def nonzero(model: nn.Module) -> int:
    return sum(int(weight.count_nonzero()) for weight in prunable(model).values())


def test_which_weights_are_pruned() -> None:
    model = vgg()
    names = set(prunable(model))
    assert "classifier.last.weight" not in names
    assert {"stage1.0.conv.weight", "classifier.hidden1.weight"} <= names
    assert not [name for name in names if "norm" in name or name.endswith("bias")]
    assert "fc.weight" not in prunable(resnet())


def test_a_weight_shared_with_an_embedding_is_left_alone() -> None:
    model = zoo.build("transformer-multi30k", width=8, heads=2, layers=1, vocabulary=20)
    assert not [name for name in prunable(model) if "output" in name or "embedding" in name]
    with pytest.raises(UsageError, match="no convolution or Linear but its last"):
        prunable(nn.Sequential(nn.Flatten(), nn.Linear(4, 2)))


@pytest.mark.parametrize("build", [vgg, resnet])
def test_each_round_drops_the_smallest_of_those_left_and_returns_to_the_start(build) -> None:
    method = ticket(rounds=2, prune=0.3)
    run = started(build, method, epochs=2)
    first = {name: value.clone() for name, value in run.module.state_dict().items()}
    total = sum(weight.numel() for weight in prunable(run.module).values())
    alive = np.ones(total, dtype=bool)
    for cycle in (1, 2):
        train_(run, method, (cycle - 1, 0), (cycle, 0))
        trained = np.concatenate([w.detach().numpy().ravel() for w in prunable(run.module).values()])
        assert not trained[~alive].any(), "what was pruned stays zero while training"
        old_optimizer = run.optimizer
        run.cycle, run.epoch = cycle, 0
        method.before_epoch_(run)

        # An oracle that knows nothing of masks: sort all that is alive by magnitude.
        by_size = sorted(np.flatnonzero(alive), key=lambda i: -abs(trained[i]))
        alive = np.zeros(total, dtype=bool)
        alive[by_size[: round(total * 0.7**cycle)]] = True
        now = np.concatenate([w.detach().numpy().ravel() for w in prunable(run.module).values()])
        at_first = np.concatenate([first[name].numpy().ravel() for name in prunable(run.module)])
        assert np.array_equal(now, np.where(alive, at_first, 0))
        for name, value in run.module.state_dict().items():
            if name not in prunable(run.module):
                assert torch.equal(value, first[name]), f"{name} is rewound, statistics included"
        assert run.optimizer is not old_optimizer
        assert not run.optimizer.state
    assert [note["round"] for note in run.told("pruned")] == [1, 2]
    left = run.told("pruned")[-1]["params"]
    assert left == count(run.module) - total + round(total * 0.49)


def test_the_run_has_one_more_cycle_than_prunings_and_ends_sparse() -> None:
    method = ticket(rounds=3, prune=0.2)
    run = started(vgg, method, epochs=1)
    assert method.cycles == 4
    train_(run, method)
    total = sum(weight.numel() for weight in prunable(run.module).values())
    assert nonzero(run.module) == round(0.8**3 * total)


def test_keep_is_a_share_of_all_parameters() -> None:
    method = ticket(rounds=3, keep=0.4)
    run = started(vgg, method, epochs=1)
    train_(run, method)
    every, total = count(run.module), sum(weight.numel() for weight in prunable(run.module).values())
    left = [note["params"] for note in run.told("pruned")]
    assert abs(left[-1] - 0.4 * every) <= 1
    assert left[-1] == every - total + nonzero(run.module)
    shares = [(n - every + total) / (m - every + total) for m, n in zip([every, *left], left, strict=False)]
    assert max(shares) - min(shares) < 1e-3, "every round prunes the same share of what is left"


def test_a_keep_below_what_is_never_pruned_is_refused_before_training() -> None:
    method = ticket(keep=0.001)
    with pytest.raises(
        UsageError, match=r"method.keep: 0.001 of [\d,]+ parameters are \d+, but [\d,]+ are never"
    ):
        method.before_epoch_(started(vgg, method))


def test_rewinding_to_a_later_epoch() -> None:
    method = ticket(rounds=1, prune=0.5, rewind=1)
    run = started(vgg, method, epochs=3)
    train_(run, method, stop=(0, 1))
    then = {name: value.clone() for name, value in run.module.state_dict().items()}
    train_(run, method, (0, 1), (1, 0))
    run.cycle, run.epoch = 1, 0
    method.before_epoch_(run)
    for name, value in run.module.state_dict().items():
        expected = then[name] * method.masks[name] if name in method.masks else then[name]
        assert torch.equal(value, expected), name


def test_a_pruned_weight_that_was_moved_is_zero_after_the_step() -> None:
    method = ticket(rounds=1, prune=0.5)
    run = started(vgg, method, epochs=1)
    train_(run, method, stop=(1, 0))
    run.cycle = 1
    method.before_epoch_(run)
    with torch.no_grad():
        for parameter in run.module.parameters():
            parameter.fill_(1.0)
    method.after_step_(run.module)
    for name, parameter in run.module.named_parameters():
        assert torch.equal(parameter, method.masks.get(name, torch.ones_like(parameter)).float()), name


def test_gradients_of_pruned_weights_do_not_count_in_a_norm() -> None:
    method = ticket(rounds=1, prune=0.5)
    run = started(vgg, method, epochs=1)
    train_(run, method, stop=(1, 0))
    run.cycle = 1
    method.before_epoch_(run)
    for weight in prunable(run.module).values():
        weight.grad = torch.ones_like(weight)
    method.before_step_(run.module)
    for name, weight in prunable(run.module).items():
        assert torch.equal(weight.grad, method.masks[name].float())


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
@pytest.mark.parametrize("stop", [(0, 1), (1, 0), (1, 1)], ids=["cycle 0", "between", "cycle 1"])
def test_a_run_goes_on_bit_for_bit(kind: str, stop: tuple[int, int]) -> None:
    options = {"rounds": 2, "prune": 0.4, "rewind": 1}
    method, new = ticket(**options), ticket(**options)
    run = started(vgg, method, kind=kind, epochs=2)
    train_(run, method, stop=stop)
    again = resumed(run, method, new, vgg(seed=7))
    train_(run, method, stop)
    train_(again, new, stop)
    assert_same_weights(run.model, again.model)


def test_announcing_an_epoch_twice_changes_nothing() -> None:
    method = ticket(rounds=2, prune=0.4)
    run = started(vgg, method, epochs=1)
    train_(run, method, stop=(2, 0))
    before = {name: value.clone() for name, value in run.module.state_dict().items()}
    run.cycle, run.epoch = 1, 0
    method.before_epoch_(run)
    assert all(torch.equal(value, before[name]) for name, value in run.module.state_dict().items())


def test_mistakes_that_show_when_the_run_is_known() -> None:
    method = ticket(rewind=3)
    with pytest.raises(UsageError, match="method.rewind: epoch 3 is never reached; the run has 3 a cycle"):
        method.before_epoch_(started(vgg, method, epochs=3))
    with pytest.raises(UsageError, match="FSDP2 keeps in shards; use sharding none or ddp"):
        ticket().before_epoch_(started(vgg, ticket(), sharding="fsdp"))
    old = ticket(rounds=3)
    old.pruned = 3
    with pytest.raises(UsageError, match="method.rounds: 1, but the checkpoint has 3"):
        ticket(rounds=1).load_state_dict(*old.state_dict())
