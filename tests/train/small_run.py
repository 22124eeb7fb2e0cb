"""A run as small as can be: real digits, small real networks, a loop that calls a method as the protocol says."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors.torch import load as read_tensors
from safetensors.torch import save as write_tensors
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW, Optimizer

import takifugu as tk
from takifugu import zoo
from takifugu.train.methods.base import Method
from takifugu.zoo import datasets

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda parameters: SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-4),
    "adamw": lambda parameters: AdamW(parameters, lr=1e-3),
}
STEPS = 3


def vgg(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return zoo.build("vgg19-cifar10", width=1 / 16, depths=(1, 1, 1, 2, 2), in_channels=1, dropout=0.0)


def resnet(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return zoo.build("resnet18-cifar10", width=4, blocks=(1, 1, 1, 1), in_channels=1)


def bottlenecks(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return zoo.build("resnet50-imagenet", width=4, blocks=(1, 2, 1, 1), in_channels=1, classes=10)


def digits(count: int, start: int = 0) -> tuple[Tensor, Tensor]:
    data = datasets.load("digits")
    return data.inputs[start : start + count], data.labels[start : start + count]


def batch(cycle: int, epoch: int, step: int, rank: int = 0, size: int = 16) -> tuple[Tensor, Tensor]:
    place = (((cycle * 7 + epoch) * STEPS + step) * 2 + rank) * size
    return digits(size, place % 1200)


@dataclass
class SmallRun:
    model: nn.Module
    kind: str = "sgd"
    sharding: str = "none"
    epochs: int = 4
    cycle: int = 0
    epoch: int = 0
    rank: int = 0
    wrapper: Callable[[nn.Module], nn.Module] = lambda module: module
    notes: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    optimizer: Optimizer = field(init=False)

    def __post_init__(self) -> None:
        self.new_optimizer_()

    @property
    def module(self) -> nn.Module:
        return self.model.module if self.sharding == "ddp" else self.model

    def wrap(self, module: nn.Module) -> nn.Module:
        return self.wrapper(module)

    def new_optimizer_(self) -> None:
        self.optimizer = OPTIMIZERS[self.kind](self.model.parameters())

    def note(self, event: str, **fields: Any) -> None:
        self.notes.append((event, fields))

    def told(self, event: str) -> list[dict[str, Any]]:
        return [fields for name, fields in self.notes if name == event]


def train_(
    run: SmallRun, method: Method, start: tuple[int, int] = (0, 0), stop: tuple[int, int] | None = None
):
    """All epochs from `start` on, up to `stop` (both: cycle and epoch)."""
    for cycle in range(method.cycles):
        for epoch in range(run.epochs):
            if (cycle, epoch) < start or (stop is not None and (cycle, epoch) >= stop):
                continue
            run.cycle, run.epoch = cycle, epoch
            method.before_epoch_(run)
            run.model.train()
            for step in range(STEPS):
                inputs, labels = batch(cycle, epoch, step, run.rank)
                run.optimizer.zero_grad(set_to_none=True)
                F.cross_entropy(run.model(inputs), labels).backward()
                method.before_step_(run.module)
                run.optimizer.step()
                method.after_step_(run.module)


def started(build: Callable[[int], nn.Module], method: Method, **options: Any) -> SmallRun:
    model = build(0)
    method.build_(model)
    return SmallRun(model, **options)


def resumed(run: SmallRun, old: Method, new: Method, fresh: nn.Module) -> SmallRun:
    """A new run from nothing but what a checkpoint has: JSON, tensors, structure, weights, optimizer."""
    data, tensors = old.state_dict()
    new.load_state_dict(json.loads(json.dumps(data)), read_tensors(write_tensors(tensors)) if tensors else {})
    new.rebuild_(fresh)
    tk.apply_(fresh, tk.structure_of(run.module))
    fresh.load_state_dict(run.module.state_dict())
    again = SmallRun(fresh, kind=run.kind, epochs=run.epochs)
    again.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
    return again


def assert_same_weights(some: nn.Module, other: nn.Module) -> None:
    one, two = some.state_dict(), other.state_dict()
    assert list(one) == list(two)
    for name in one:
        assert torch.equal(one[name], two[name]), name


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
