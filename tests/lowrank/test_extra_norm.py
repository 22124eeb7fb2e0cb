"""Batch norm between the factors of a convolution: scheme "kxk-1x1+bn"."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import SGD

import takifugu as tk
from takifugu.errors import LayerError, UsageError

SCHEME = "kxk-1x1+bn"


class Net(nn.Module):
    def __init__(self, groups: int = 1, bias: bool = False, transposed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        build = nn.ConvTranspose2d if transposed else nn.Conv2d
        self.conv = build(8, 12, 3, stride=2, padding=1, groups=groups, bias=bias)
        self.head = nn.Conv2d(12, 3, 1)

    def forward(self, x):
        return self.head(torch.relu(self.conv(x)))


def train_(model: nn.Module, steps: int = 5) -> None:
    optimizer = SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        x = torch.randn(4, 8, 6, 6, generator=torch.Generator().manual_seed(step)) + 0.5
        optimizer.zero_grad()
        (model(x) - 1).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("groups", "bias"), [(1, False), (2, True)])
def test_folded_it_computes_the_same(groups: int, bias: bool, transposed: bool) -> None:
    model = Net(groups, bias, transposed)
    x = torch.randn(2, 8, 6, 6)
    plain = copy.deepcopy(model)
    tk.factorize_(plain, rank=2, where="conv")
    report = tk.factorize_(model, rank=2, where="conv", scheme=SCHEME)
    assert report.params == sum(p.numel() for p in plain.parameters()) + 2 * 2 * groups
    model.eval()
    torch.testing.assert_close(model(x), plain(x), msg="before training it is the identity")
    model.train()
    train_(model)
    assert model.conv.norm.running_mean.abs().max() > 0.01
    model.eval()
    before = model(x)
    tk.densify_(model)
    assert type(model.conv) is (nn.ConvTranspose2d if transposed else nn.Conv2d)
    assert model.conv.bias is not None
    torch.testing.assert_close(model(x), before, rtol=1e-4, atol=1e-5)


def test_it_travels(tmp_path: Path) -> None:
    model = Net()
    tk.factorize_(model, rank=0.5, where="conv", scheme=SCHEME)
    train_(model)
    structure = tk.structure_of(model)
    assert structure["conv"].scheme == SCHEME
    assert tk.Structure.from_json(structure.to_json()) == structure
    tk.save(model, tmp_path / "m.safetensors")
    again = tk.load(tmp_path / "m.safetensors", Net())
    assert tk.structure_of(again) == structure
    x = torch.randn(2, 8, 6, 6)
    assert torch.equal(again.eval()(x), model.eval()(x))


def test_through_the_switch_its_parameters_are_optimized() -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 8, 6, 6)).mean().backward()
    optimizer.step()
    warm = tk.WarmStart(stages=[(0, 0.5), (1, 0.25), (2, None)], where="conv", scheme=SCHEME)
    model = warm(model, optimizer, epoch=0)
    held = {p for group in optimizer.param_groups for p in group["params"]}
    assert held == set(model.parameters())
    assert set(warm.report.state.reset) == {"conv.norm.weight", "conv.norm.bias"}
    model = warm(model, optimizer, epoch=1)
    assert "batch norm between its factors" in warm.report.layers.layers[0].reason
    model = warm(model, optimizer, epoch=2)
    assert {p for group in optimizer.param_groups for p in group["params"]} == set(model.parameters())


def test_what_it_cannot_do() -> None:
    model = Net()
    tk.factorize_(model, rank=0.5, where="conv", scheme=SCHEME)
    other = Net()
    tk.factorize_(other, rank=0.25, where="conv", scheme=SCHEME)
    with pytest.raises(LayerError, match="cannot change its rank: the batch norm between its factors"):
        tk.apply_(model, tk.structure_of(other))
    with pytest.raises(UsageError, match=r"unknown scheme 'tucker2\+bn'"):
        tk.factorize_(Net(), where="conv", scheme="tucker2+bn")
    chosen = tk.choose(Net(), rank=2, where="conv", scheme="fastest", example_input=torch.randn(1, 8, 6, 6))
    assert "+bn" not in chosen["conv"].scheme


def test_the_papers_count_for_resnet50() -> None:
    with torch.device("meta"):
        model = tk.zoo.build("resnet50-imagenet")
    where = tk.zoo.where("resnet50-imagenet")
    names = [spec.name for spec in tk.choose(model, rank=0.25, where=where)]
    # The shortcut's factors have none.
    schemes = {name: "kxk-1x1" if "conv" not in name.rpartition(".")[2] else SCHEME for name in names}
    tk.factorize_(model, rank=0.25, where=where, scheme=schemes)
    assert sum(p.numel() for p in model.parameters()) == 15_204_648
