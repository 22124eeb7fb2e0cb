"""Cutting channels: which can go, that nothing else changes, and that training goes on where it was."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_run import OPTIMIZERS, bottlenecks, count, digits, resnet, vgg
from torch import Tensor, nn
from torch.nn import functional as F

from takifugu import zoo
from takifugu.errors import UsageError
from takifugu.train.methods.channels import Chain, carry_, cut_, find_chains
from takifugu.zoo.registry import BUILDER

Build = Callable[[int], nn.Module]


def flattened(seed: int = 0) -> nn.Module:
    """Four pixels are left when the image is flattened: four columns of the Linear for each channel."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 5, 3, padding=1), nn.BatchNorm2d(5), nn.ReLU6(), nn.AvgPool2d(2), nn.Flatten(), nn.Dropout(0.0),
        nn.Linear(20, 10),
    )  # fmt: skip


NETWORKS: dict[str, Build] = {
    "vgg": vgg,
    "resnet": resnet,
    "bottlenecks": bottlenecks,
    "flattened": flattened,
}
networks = pytest.mark.parametrize("name", NETWORKS)


def lively(build: Build) -> nn.Module:
    """In float64, with batch norms that have seen something and are not all alike."""
    model = build(0).double()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, std=0.3)
            nn.init.normal_(module.running_mean, std=0.1)
            nn.init.uniform_(module.running_var, 0.5, 2.0)
    return model


def with_numbers(model: nn.Module) -> nn.Module:
    """The same network; every entry of a parameter is its own place in it."""
    numbered = copy.deepcopy(model)
    for parameter in numbered.parameters():
        parameter.data = torch.arange(parameter.numel(), dtype=torch.float64).reshape(parameter.shape)
    return numbered


def loss_of(model: nn.Module, start: int = 0) -> Tensor:
    inputs, labels = digits(12, start)
    return F.cross_entropy(model(inputs.double()), labels)


@torch.no_grad()
def silence_(model: nn.Module, chains: tuple[Chain, ...], kept: dict[str, Tensor]) -> None:
    for chain in chains:
        norm = model.get_submodule(chain.norm)
        dead = torch.ones(chain.channels, dtype=torch.bool)
        dead[kept[chain.norm]] = False
        norm.weight[dead] = 0
        norm.bias[dead] = 0


def some_kept(chains: tuple[Chain, ...], draw: Callable[[int], list[int]]) -> dict[str, Tensor]:
    return {chain.norm: torch.tensor(sorted(draw(chain.channels))) for chain in chains}


@networks
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_silent_channels_can_go_without_a_trace(name: str, data: st.DataObject) -> None:
    full = lively(NETWORKS[name])
    chains = find_chains(full)
    kept = some_kept(
        chains, lambda n: data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=n, unique=True))
    )
    silence_(full, chains, kept)
    small, places = copy.deepcopy(full), with_numbers(full)
    cut_(small, chains, kept)
    cut_(places, chains, kept)
    for mode in (True, False):
        full.train(mode)
        small.train(mode)
        inputs = digits(12)[0].double()
        torch.testing.assert_close(small(inputs), full(inputs), rtol=1e-9, atol=1e-9)
        for model in (full, small):
            model.zero_grad()
            loss_of(model).backward()
        gradients = dict(full.named_parameters())
        where = dict(places.named_parameters())
        for parameter_name, parameter in small.named_parameters():
            expected = gradients[parameter_name].grad.reshape(-1)[where[parameter_name].long()]
            torch.testing.assert_close(parameter.grad, expected, rtol=1e-7, atol=1e-10, msg=parameter_name)


@networks
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_training_goes_on_as_if_the_silent_channels_were_still_there(name: str, kind: str) -> None:
    full = lively(NETWORKS[name])
    optimizer = OPTIMIZERS[kind](full.parameters())

    def step_(model: nn.Module, steps: torch.optim.Optimizer, start: int) -> None:
        steps.zero_grad()
        loss_of(model, start).backward()
        steps.step()

    for start in (0, 12, 24):
        step_(full, optimizer, start)
    chains = find_chains(full)
    generator = torch.Generator().manual_seed(3)
    kept = some_kept(chains, lambda n: torch.randperm(n, generator=generator)[: max(1, n // 2)].tolist())
    silence_(full, chains, kept)
    for chain in chains:  # nothing may wake them up again
        norm = full.get_submodule(chain.norm)
        for parameter in (norm.weight, norm.bias):
            for value in optimizer.state[parameter].values():
                if value.dim():
                    value[parameter == 0] = 0
    small = copy.deepcopy(full)
    smaller = OPTIMIZERS[kind](small.parameters())
    smaller.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    carry_(smaller, cut_(small, chains, kept))
    assert {p for group in smaller.param_groups for p in group["params"]} == set(small.parameters())
    assert set(smaller.state) == set(small.parameters())
    for start in (36, 48, 60):
        step_(full, optimizer, start)
        step_(small, smaller, start)
    inputs = digits(12)[0].double()
    assert count(small) < count(full)
    torch.testing.assert_close(small.eval()(inputs), full.eval()(inputs), rtol=1e-6, atol=1e-6)


def test_only_channels_inside_a_block_are_found_in_residual_networks() -> None:
    norms = {chain.norm for chain in find_chains(resnet())}
    assert norms == {f"layer{stage}.0.bn1" for stage in (1, 2, 3, 4)}
    deep = find_chains(bottlenecks())
    assert not [chain for chain in deep if "bn3" in chain.norm or "downsample" in chain.norm]
    stem = next(chain for chain in deep if chain.norm == "bn1")
    assert [consumer.name for consumer in stem.consumers] == ["layer1.0.conv1", "layer1.0.downsample.0"]


def test_every_norm_of_the_full_size_vgg_is_found() -> None:
    with torch.device("meta"):
        model = zoo.build("vgg19-cifar10")
    chains = find_chains(model)
    assert len(chains) == 16
    assert sum(chain.channels for chain in chains) == 2 * 64 + 2 * 128 + 4 * 256 + 8 * 512


class Odd(nn.Module):
    """A way for channels that they must not be cut on."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        groups = 2 if way == "made in groups" else 1
        self.conv = nn.Conv2d(groups, 4, 3, padding=1, groups=groups)
        self.norm = nn.BatchNorm2d(4)
        self.next = nn.Conv2d(
            8 if way == "joined" else 4, 4, 3, padding=1, groups=4 if way == "grouped" else 1
        )
        self.last = nn.Linear(8 if way == "over the width" else 4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = made = self.conv(x)
        x = self.norm(x)
        if self.way == "sigmoid":
            x = torch.sigmoid(x)
        elif self.way == "softmax":
            x = x.softmax(1)
        elif self.way == "added":
            x = x + x.flip(3)
        elif self.way == "joined":
            x = torch.cat([x, x], 1)
        elif self.way == "output":
            return x
        elif self.way == "over the width":
            return self.last(x)
        elif self.way == "weight read":
            return self.last(self.next(x).mean((2, 3))) + self.conv.weight.sum()
        elif self.way == "used before the norm":
            return self.last(self.next(x).mean((2, 3))) + made.sum()
        elif self.way == "twice":
            return self.next(self.next(x))
        return self.last(self.next(x).mean((2, 3)))


@pytest.mark.parametrize(
    "way",
    [
        "sigmoid",
        "softmax",
        "added",
        "joined",
        "output",
        "over the width",
        "weight read",
        "twice",
        "grouped",
        "made in groups",
        "used before the norm",
    ],
)
def test_channels_that_cannot_be_followed_are_left_alone(way: str) -> None:
    with pytest.raises(UsageError, match="Odd has no channels that can be cut"):
        find_chains(Odd(way))
    assert len(find_chains(Odd("plain"))) == 1


def test_networks_without_a_graph_or_a_norm_are_refused() -> None:
    class Branching(Odd):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x if x.sum() > 0 else -x)

    with pytest.raises(UsageError, match="the forward of Branching cannot be followed by torch.fx"):
        find_chains(Branching("plain"))
    with pytest.raises(UsageError, match="has no BatchNorm2d"):
        find_chains(zoo.build("lstm-wikitext2", hidden=8, vocabulary=20))


def test_a_tied_convolution_stays_as_it_is() -> None:
    model = Odd("plain")
    model.beside = nn.Conv2d(1, 4, 3)
    model.beside.weight = model.conv.weight
    with pytest.raises(UsageError, match="no channels that can be cut"):
        find_chains(model)


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        ({"stage1.0.nrom": [0]}, "no channels to cut at 'stage1.0.nrom'; did you mean 'stage1.0.norm'"),
        ({"stage1.0.norm": []}, "at least one; got"),
        ({"stage1.0.norm": [2, 1]}, "must be ascending indices of its 4"),
        ({"stage1.0.norm": [0, 4]}, "must be ascending indices of its 4"),
    ],
)
def test_a_wrong_choice_leaves_the_network_as_it_was(kept: dict[str, list[int]], message: str) -> None:
    model = vgg()
    chains, before = find_chains(model), count(model)
    with pytest.raises(UsageError, match=message):
        cut_(
            model,
            chains,
            {"stage2.0.norm": torch.tensor([1]), **{k: torch.tensor(v) for k, v in kept.items()}},
        )
    assert count(model) == before


def test_layers_know_their_new_sizes_and_layout() -> None:
    model = vgg().to(memory_format=torch.channels_last)
    cut_(
        model,
        find_chains(model),
        {"stage3.0.norm": torch.tensor([0, 3, 5]), "stage5.1.norm": torch.tensor([7])},
    )
    block, after = model.stage3[0], model.stage4[0]
    assert (block.conv.out_channels, block.norm.num_features, after.conv.in_channels) == (3, 3, 3)
    assert model.classifier.hidden1.in_features == 1
    assert after.conv.weight.is_contiguous(memory_format=torch.channels_last)
    widths = getattr(model, BUILDER)["widths"]
    assert widths["stage3.0.conv"][0] == widths["stage3.0.norm"][0] == widths["stage4.0.conv"][1] == 3
    assert widths["classifier.hidden1"] == [32, 1]
