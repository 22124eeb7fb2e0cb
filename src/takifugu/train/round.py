"""`train_round`: one round of training on one node's data. Pilots and all engines call it.

Nothing but the model travels: the optimizer is new in every round. All that is random comes from `seed`
(the order of the samples, dropout), so that whoever repeats a round gets the same weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from takifugu.errors import DataError, TrainingError, UsageError
from takifugu.train import optimizers
from takifugu.train.step import training_step_

Loss = Callable[[Tensor, Tensor], Tensor]
"""Outputs and labels -> the mean loss of the batch."""


@dataclass(frozen=True, eq=False)
class Samples:
    """Inputs and their labels, tensors of equal length."""

    inputs: Tensor
    labels: Tensor

    def __post_init__(self) -> None:
        if self.inputs.shape[:1] != self.labels.shape[:1]:
            raise DataError(
                f"{tuple(self.inputs.shape)} inputs do not go with {tuple(self.labels.shape)} labels; "
                "both need one entry a sample"
            )

    def __len__(self) -> int:
        return int(self.labels.shape[0])

    def take(self, indices: Tensor | Sequence[int]) -> Samples:
        """The samples at these places, in this order."""
        chosen = torch.as_tensor(indices, dtype=torch.long)
        return Samples(self.inputs[chosen], self.labels[chosen])

    def histogram(self, classes: int) -> list[int]:
        """How many samples each label has."""
        return [int(count) for count in torch.bincount(self.labels.reshape(-1), minlength=classes)]


@dataclass(frozen=True)
class RoundSpec:
    """How a node trains: everything but the model, the data and the seed."""

    batch_size: int
    optimizer: Mapping[str, Any]
    passes: int = 1
    device: str = "cpu"
    loss: Loss = cross_entropy

    def __post_init__(self) -> None:
        for name in ("batch_size", "passes"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UsageError(f"{name}: {value!r} is not a whole number of at least 1")
        optimizers.check(self.optimizer)


@dataclass(frozen=True, eq=False)
class Update:
    """What a node sends back: its state (parameters and buffers, on the CPU) and how it came about."""

    state: dict[str, Tensor]
    samples: int
    steps: int
    loss: float
    """Mean training loss over the samples, each as the model was when it saw it."""


def train_round(model: nn.Module, data: Samples, spec: RoundSpec, seed: int) -> Update:
    """Trains `model` in place, from the state it has, with a new optimizer; returns a copy of its state."""
    if not len(data):
        raise TrainingError("a round on no samples; leave this node out of the round")
    device = torch.device(spec.device)
    model.to(device).train()
    optimizer = optimizers.build(spec.optimizer, [p for p in model.parameters() if p.requires_grad])
    shuffle = torch.Generator().manual_seed(seed)
    forked = [torch.cuda.current_device()] if device.type == "cuda" else []
    steps, total = 0, 0.0
    with torch.random.fork_rng(devices=forked), torch.enable_grad():
        torch.manual_seed(seed)
        for _ in range(spec.passes):
            for batch in _batches(len(data), spec.batch_size, shuffle):
                steps += 1
                total += len(batch) * _step(model, optimizer, data.take(batch), spec, seed, steps)
    state = {name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()}
    for name, tensor in state.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise _diverged(f"{name!r} is not finite", steps, seed, spec)
    return Update(state, len(data), steps, total / (len(data) * spec.passes))


def _step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: Samples, spec: RoundSpec, seed: int, step: int
) -> float:
    inputs, labels = batch.inputs.to(spec.device), batch.labels.to(spec.device)

    def check(loss: float) -> None:
        if not math.isfinite(loss):
            raise _diverged(f"the loss is {loss}", step, seed, spec)

    return training_step_(optimizer, lambda: spec.loss(model(inputs), labels), check=check)


def step_count(samples: int, spec: RoundSpec) -> int:
    """How many steps a round on so many samples takes."""
    batches, last = divmod(samples, spec.batch_size)
    return spec.passes * max(1, batches + (last > 1 or (last == 1 and batches == 0)))


def _batches(samples: int, batch_size: int, shuffle: torch.Generator) -> Iterator[Tensor]:
    """A shuffled pass. A single last sample joins the batch before it: batch norm could not train on it."""
    batches = list(torch.randperm(samples, generator=shuffle).split(batch_size))
    if len(batches) > 1 and len(batches[-1]) == 1 < batch_size:
        batches[-2:] = [torch.cat(batches[-2:])]
    yield from batches


def _diverged(what: str, step: int, seed: int, spec: RoundSpec) -> TrainingError:
    lr = spec.optimizer["lr"]
    return TrainingError(
        f"{what} at step {step} (seed {seed}, learning rate {lr:g}); lower the learning rate, "
        "or look for broken samples"
    )
