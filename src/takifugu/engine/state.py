"""A run on its way: where it stands after a round, a round that was set off, what came of the training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from takifugu.durable import Row
from takifugu.engine.world import Outcome
from takifugu.plan.plan import Decision, Round
from takifugu.plan.problem import Switch


@dataclass(frozen=True)
class State:
    """Where a run stands after a round (0: before the first)."""

    round: int
    version: str
    clock_s: float
    energy_j: float
    bytes: float
    loss: float
    accuracy: float
    believed: float
    """The loss, less of the scatter of single rounds; what replanning goes by."""
    members: int = 0

    @classmethod
    def after(cls, row: Row) -> State:
        total = row["total"]
        return cls(
            row["round"],
            row["version"],
            row["end_s"],
            total["energy_j"],
            total["bytes"],
            row["loss"],
            row["accuracy"],
            row["believed_loss"] if "believed_loss" in row else row["loss"],
            row["members"],
        )


@dataclass(frozen=True)
class Begun:
    """A round that has been set off: who takes part, and what will become of them."""

    number: int
    decision: Decision
    version: str
    switch: Switch | None
    predicted: Round | None
    ready_s: float
    start_s: float
    planned_s: float
    """How long it should take by the profile, without the switch."""
    members: Mapping[str, int]
    outcomes: Mapping[str, Outcome]
    absent: tuple[str, ...]
    """Whose windows are over by the true clock."""

    @cached_property
    def returned(self) -> dict[str, int]:
        return {name: n for name, n in self.members.items() if self.outcomes[name].status != "dropped"}


@dataclass(frozen=True)
class Trained:
    losses: Mapping[str, float]
    loss: float | None
    truncation: float
