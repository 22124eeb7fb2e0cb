"""EB Train: which channels go, when, how many, and that a run goes on from a checkpoint of the cut network."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from small_run import assert_same_weights, bottlenecks, count, resnet, resumed, started, train_, vgg
from torch import nn

from takifugu import zoo
from takifugu.errors import UsageError
from takifugu.train.methods import method_for
from takifugu.train.methods.base import Method
from takifugu.train.methods.early_bird import EarlyBird


def bird(**options: object) -> EarlyBird:
    method = method_for({"kind": "early-bird", **options})
    assert isinstance(method, EarlyBird)
    return method


def scales(model: nn.Module, method: EarlyBird) -> list[np.ndarray]:
    return [model.get_submodule(chain.norm).weight.detach().abs().numpy() for chain in method._chains]


@pytest.mark.parametrize("build", [vgg, resnet, bottlenecks])
@pytest.mark.parametrize("share", [0.3, 0.7])
def test_the_smallest_scales_go_but_a_tenth_of_every_layer_stays(build, share: float) -> None:
    method = bird(prune=share, latest=1)
    run = started(build, method)
    train_(run, method, stop=(0, 1))
    sizes = scales(run.module, method)
    # An oracle that walks: take the smallest that is left, unless its layer would fall below the floor.
    total = sum(map(len, sizes))
    alive = [np.ones(len(size), dtype=bool) for size in sizes]
    everything = sorted((value, layer, i) for layer, size in enumerate(sizes) for i, value in enumerate(size))
    wanted = round(share * total)
    for _, layer, i in everything:
        if wanted and alive[layer].sum() > max(1, np.ceil(0.1 * len(alive[layer]))):
            alive[layer][i] = False
            wanted -= 1
    before, optimizer = count(run.module), run.optimizer
    run.epoch = 1
    method.before_epoch_(run)
    assert run.optimizer is optimizer
    for parameter in run.module.parameters():
        assert optimizer.state[parameter]["momentum_buffer"].shape == parameter.shape
    for chain, mask in zip(method._chains, alive, strict=True):
        assert method.kept[chain.norm].tolist() == np.flatnonzero(mask).tolist()
    (told,) = run.told("ticket")
    assert told["params_before"] == before
    assert told["params"] == count(run.module) < before
    assert told["channels"] == sum(int(mask.sum()) for mask in alive)
    assert (told["channels_before"], told["epoch"], told["settled"]) == (total, 1, False)
    train_(run, method, (0, 1))
    assert run.told("ticket") == [told], "drawn once"


@pytest.mark.parametrize("build", [vgg, bottlenecks])
@pytest.mark.parametrize("keep", [0.75, 0.9])
def test_keep_is_met_and_one_channel_more_would_be_too_many(build, keep: float) -> None:
    method = bird(keep=keep, latest=1)
    run = started(build, method)
    before = count(run.module)
    train_(run, method, stop=(0, 2))
    assert count(run.module) <= keep * before
    channels = run.told("ticket")[0]["channels"]
    # With one channel fewer cut it would be above: cut by share instead, which counts channels.
    total = run.told("ticket")[0]["channels_before"]
    other = bird(prune=(total - channels - 1) / total, latest=1)
    again = started(build, other)
    train_(again, other, stop=(0, 2))
    assert again.told("ticket")[0]["channels"] == channels + 1
    assert count(again.module) > keep * before


def test_a_keep_that_cannot_be_had_is_refused_before_training() -> None:
    method = bird(keep=0.05)
    run = started(resnet, method)
    with pytest.raises(
        UsageError, match=r"method.keep: 0.05 of [\d,]+ parameters cannot be had .* still [\d,]+"
    ):
        method.before_epoch_(run)


def test_the_ticket_is_drawn_when_five_choices_in_a_row_agree() -> None:
    method = bird(prune=0.5, epsilon=0.1, latest=50)
    run = started(vgg, method, epochs=60)

    def set_(order: list[float]) -> None:
        with torch.no_grad():
            for chain in method._chains:
                norm = run.module.get_submodule(chain.norm)
                norm.weight.copy_(torch.linspace(0.1, 1, chain.channels).roll(int(order[0] * chain.channels)))

    method.before_epoch_(run)
    drawn_at = None
    for epoch, shift in enumerate([0.0, 0.5, 0.0, 0.5, 0.0, 0.0, 0.0, 0.0, 0.0], start=1):
        set_([shift])
        run.epoch = epoch
        method.before_epoch_(run)
        if method.kept and drawn_at is None:
            drawn_at = epoch
    assert drawn_at == 9, "the fifth after the last that differed"
    assert run.told("ticket")[0]["settled"]
    assert run.told("ticket")[0]["apart"] == 0


def test_the_penalty_is_the_subgradient_of_l1_and_ends_with_the_ticket() -> None:
    method = bird(sparsity=0.01, latest=1)
    run = started(resnet, method)
    norm = run.module.get_submodule(method._chains[0].norm)
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([0.5, -0.5, 0.0, 2.0]))
    for parameter in run.module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    method.before_step_(run.module)
    torch.testing.assert_close(norm.weight.grad, torch.tensor([0.01, -0.01, 0.0, 0.01]))
    pressed = {chain.norm + ".weight" for chain in method._chains}
    for name, parameter in run.module.named_parameters():
        assert bool(parameter.grad.any()) == (name in pressed), name
    train_(run, method, stop=(0, 2))
    for parameter in run.module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    method.before_step_(run.module)
    assert not any(parameter.grad.any() for parameter in run.module.parameters())


def test_the_penalty_presses_scales_down() -> None:
    sums = []
    for sparsity in (0.0, 0.05):
        method = bird(sparsity=sparsity, latest=3)
        run = started(vgg, method)
        train_(run, method, stop=(0, 3))
        sums.append(sum(float(size.sum()) for size in scales(run.module, method)))
    assert sums[1] < 0.95 * sums[0]


@pytest.mark.parametrize("build", [vgg, resnet])
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
@pytest.mark.parametrize("stop", [1, 2, 3], ids=["at first", "before the ticket", "after it"])
def test_a_run_goes_on_bit_for_bit(build, kind: str, stop: int) -> None:
    options = {"keep": 0.7, "latest": 2}
    method, new = bird(**options), bird(**options)
    run = started(build, method, kind=kind)
    train_(run, method, stop=(0, stop))
    again = resumed(run, method, new, build(7))
    train_(run, method, (0, stop))
    train_(again, new, (0, stop))
    assert_same_weights(run.model, again.model)
    assert count(again.model) <= 0.7 * count(build(0))


def test_the_queue_survives_a_checkpoint() -> None:
    method, new = bird(latest=3), bird(latest=3)
    run = started(vgg, method)
    train_(run, method, stop=(0, 3))
    resumed(run, method, new, vgg(seed=7))
    assert len(new.queue) == 2
    assert all(torch.equal(some, other) for some, other in zip(method.queue, new.queue, strict=True))
    # A run that resumes within an epoch announces it a second time.
    new.before_epoch_(run)
    assert len(new.queue) == 2


def test_networks_and_runs_that_it_does_not_support() -> None:
    with pytest.raises(UsageError, match="early-bird does not support this network: .* has no BatchNorm2d"):
        bird().build_(zoo.build("lstm-wikitext2", hidden=8, vocabulary=20))
    with pytest.raises(UsageError, match="FSDP2 keeps in shards; use sharding none or ddp"):
        bird().before_epoch_(started(vgg, bird(), sharding="fsdp"))
    method: Method = bird(latest=4)
    with pytest.raises(UsageError, match="method.latest: a ticket drawn after 4 epochs has none left of 4"):
        method.before_epoch_(started(vgg, method))
