"""One round of a fleet: every member trains from the same state, and their models are averaged.

Pilots and the simulation both call it, so that what was predicted and what is run are the same thing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import nn

from takifugu.errors import TrainingError
from takifugu.lowrank.averaging import average
from takifugu.train.round import RoundSpec, Samples, Update, train_round


@dataclass(frozen=True)
class MemberOutcome:
    samples: int
    steps: int
    loss: float


@dataclass(frozen=True)
class Outcome:
    """What came of a round; the model itself was changed in place."""

    members: Mapping[str, MemberOutcome]
    samples: int
    loss: float
    """Training loss of all members, weighted by samples."""
    truncation: float
    notes: tuple[str, ...] = ()


def member_seed(seed: int, round_index: int, name: str) -> int:
    """A member's own seed in a round: whoever else takes part makes no difference to it."""
    digest = hashlib.sha256(f"{seed}/{round_index}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def cooperative_round(
    model: nn.Module,
    members: Iterable[tuple[str, Samples]] | Mapping[str, Samples],
    spec: RoundSpec,
    seed: int,
    how: str = "factors",
    *,
    round_index: int = 0,
) -> Outcome:
    """`train_round` for each member from the model's state, then the average, loaded back into `model`.

    Results do not depend on the members' order.
    """
    pairs = members.items() if isinstance(members, Mapping) else members
    # Sums of floats depend on their order, so that must not depend on the caller.
    present = sorted(pairs, key=lambda member: member[0])
    if not present:
        raise TrainingError("a round without members; a round needs at least one node")
    names = [name for name, _ in present]
    if len(set(names)) < len(names):
        raise TrainingError(f"a member takes part twice in one round: {sorted(names)}")
    start = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    updates: list[Update] = []
    try:
        for name, samples in present:
            model.load_state_dict(start)
            try:
                updates.append(train_round(model, samples, spec, member_seed(seed, round_index, name)))
            except TrainingError as error:
                raise TrainingError(f"node {name!r}, round {round_index}: {error}") from error
        averaged = average(model, updates, how)
    except BaseException:
        model.load_state_dict(start)
        raise
    model.load_state_dict(averaged.state)
    total = sum(update.samples for update in updates)
    return Outcome(
        members={
            name: MemberOutcome(update.samples, update.steps, update.loss)
            for name, update in zip(names, updates, strict=True)
        },
        samples=total,
        loss=sum(update.loss * update.samples for update in updates) / total,
        truncation=averaged.truncation,
        notes=averaged.notes,
    )
