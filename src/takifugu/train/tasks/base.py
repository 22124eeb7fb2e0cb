"""What a training run is about: data in batches, the loss of a batch, and how good a model is.

A kind of task is one file beside this one and a line in `takifugu.train.tasks`. Batches are found by epoch
and step, not drawn one after another, so that a run can go on from any step: all that is random about a batch
(its samples, their augmentation, dropout) follows from the run's seed and its place.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from takifugu.train.seeds import derived

Carry = tuple[Tensor, ...] | None
"""What a batch hands to the next one of the epoch, detached: the state of a language model."""

Sums = dict[str, float]
"""Totals of an evaluation. They add up over processes, and `Task.scores` makes figures of them."""


@dataclass(frozen=True)
class Place:
    """Which of how many processes this is."""

    rank: int = 0
    world: int = 1


@dataclass(frozen=True, eq=False)
class Batch:
    inputs: tuple[Tensor, ...]
    """The arguments of the model's forward."""
    targets: Tensor
    samples: int
    """What the speed is counted in: images, words, sentences."""


class Task(ABC):
    unit: ClassVar[str]
    """What `Batch.samples` counts, in the plural."""
    headline: ClassVar[str]
    """The score that a run is judged by."""
    higher_is_better: ClassVar[bool]

    def __init__(self, batch_size: int, seed: int, place: Place = Place()) -> None:  # noqa: B008
        """`batch_size` is that of each process."""
        self.batch_size, self.seed, self.place = batch_size, seed, place

    def batch_seed(self, epoch: int, step: int, rank: int | None = None) -> int:
        """Of all that is random in this batch, on this process or another."""
        return derived(self.seed, "batch", epoch, step, self.place.rank if rank is None else rank)

    @abstractmethod
    def model_options(self) -> dict[str, Any]:
        """Options of a model's builder that follow from the data; those it does not have are left out."""

    @property
    @abstractmethod
    def steps(self) -> int:
        """Batches in an epoch, the same on every process."""

    @abstractmethod
    def batch(self, epoch: int, step: int) -> Batch:
        """The batch at this place, on the CPU; the same whenever it is asked for."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch, carry: Carry) -> tuple[Tensor, Carry]:
        """The mean loss of a batch, and what the next one needs of it; `carry` is None for the first."""

    @abstractmethod
    def evaluate(self, model: nn.Module, part: str) -> Sums:
        """This process's share of an evaluation on `part` ("validation" or "test"): totals, not means.

        The model is plain (no wrapper) and in evaluation mode; gradients are off."""

    @abstractmethod
    def scores(self, sums: Mapping[str, float]) -> dict[str, float]:
        """The figures that the totals of all processes come to; always with a "loss"."""
