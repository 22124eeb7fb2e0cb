"""What the files of a run say, as frozen data. `read.py` fills it; charts and page only look at it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from takifugu.structure import Structure


@dataclass(frozen=True)
class Problem:
    """The few fields a page needs by name; `data` is the canonical problem itself."""

    data: Mapping[str, Any]
    sha256: str
    target_loss: float
    deadline_s: float
    start_version: str
    start_loss: float
    start_time_s: float
    versions: Mapping[str, Mapping[str, Any]]
    nodes: Mapping[str, Mapping[str, Any]]
    planned_for_s: float | None = None
    """The deadline that was planned for, if the run has until later: the rest is its reserve."""


@dataclass(frozen=True)
class PlannedRound:
    version: str
    nodes: Mapping[str, int]
    start_s: float
    time_s: float
    """With the switch before it, as `energy_j`."""
    energy_j: float
    loss: float


@dataclass(frozen=True)
class Plan:
    status: str
    energy_j: float | None
    lower_bound_j: float | None
    gap: float | None
    time_s: float | None
    loss: float | None
    solver: str
    rounds: tuple[PlannedRound, ...]
    problem_sha256: str | None
    reasons: tuple[str, ...] = ()
    best_loss_by_deadline: float | None = None
    earliest_time_to_loss_s: float | None = None
    samples: tuple[int, int] | None = None
    """In how many of the curves' samples it reaches the target, and how many there are."""


@dataclass(frozen=True)
class Expected:
    """What was predicted: of one round, or of the whole."""

    energy_j: float | None
    time_s: float | None
    loss: float | None


@dataclass(frozen=True)
class Round:
    number: int
    version: str
    structure: str | None
    switched: bool
    start_s: float
    end_s: float
    time_s: float
    energy_j: float
    loss: float
    accuracy: float | None
    bytes: float
    samples: int
    truncation: float | None
    predicted: Expected | None
    total_energy_j: float
    total_bytes: float


@dataclass(frozen=True)
class Member:
    """What one node did in one round."""

    round: int
    node: str
    samples: int
    time_s: float
    energy_j: float
    bytes: float
    status: str


@dataclass(frozen=True)
class Outcome:
    """`result.json`: how it ended."""

    reached: bool
    loss: float
    accuracy: float | None
    time_s: float
    energy_j: float
    bytes: float
    rounds: int
    planned_rounds: int | None
    deadline_met: bool | None
    reason: str
    predicted: Expected
    start_loss: float | None = None


@dataclass(frozen=True)
class Run:
    """A run folder. Without an outcome it is still in progress, or was stopped."""

    name: str
    header: Mapping[str, Any]
    problem: Problem
    plan: Plan | None
    rounds: tuple[Round, ...]
    members: tuple[Member, ...]
    events: tuple[Mapping[str, Any], ...]
    outcome: Outcome | None
    structures: Mapping[str, Structure] = field(default_factory=dict)
    baselines: tuple[Run, ...] = ()

    @property
    def reached(self) -> bool:
        return self.outcome is not None and self.outcome.reached

    @property
    def late(self) -> bool:
        """The target was reached, but after the deadline."""
        return self.outcome is not None and self.outcome.reached and self.outcome.deadline_met is False

    @property
    def met(self) -> bool:
        """The target was reached in time."""
        return self.reached and not self.late

    @property
    def energy_j(self) -> float:
        """Spent so far."""
        if self.outcome is not None:
            return self.outcome.energy_j
        return self.rounds[-1].total_energy_j if self.rounds else 0.0

    @property
    def best_baseline(self) -> Run | None:
        """The one that reached the target in time with the least energy."""
        return min((b for b in self.baselines if b.met), key=lambda b: b.energy_j, default=None)


@dataclass(frozen=True)
class PlanFile:
    name: str
    plan: Plan
    problem: Problem
