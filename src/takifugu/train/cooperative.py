"""One round of a fleet: every member trains from the same state, and their models are averaged.

Pilots and the simulation both call it, so that what was predicted and what is run are the same thing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from takifugu.errors import TrainingError, UsageError, near_misses
from takifugu.lowrank.averaging import Trained, average
from takifugu.train.round import RoundSpec, Samples, Update, train_round
from takifugu.train.seeds import derived

WEIGHTS = ("fleet", "members")
"""The mean is over the whole fleet, where whoever sits out counts as unchanged, or over the members alone."""


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
    return derived(seed, round_index, name)


@dataclass(frozen=True, eq=False)
class _Unchanged:
    """The part of the fleet that sat out, or did not come back: it still has the server's state."""

    state: Mapping[str, Tensor]
    samples: int


def check_weights(weights: str, where: str = "weights") -> None:
    if weights not in WEIGHTS:
        raise UsageError(
            f"{where}: {weights!r} is not known{near_misses(weights, WEIGHTS)}; one of {', '.join(WEIGHTS)}"
        )


def out_of(weights: str, shares: Mapping[str, Samples]) -> int | None:
    """`cooperative_round`'s argument of that name, for a fleet with these shares of the data."""
    return sum(map(len, shares.values())) if weights == "fleet" else None


def cooperative_round(
    model: nn.Module,
    members: Iterable[tuple[str, Samples]] | Mapping[str, Samples],
    spec: RoundSpec,
    seed: int,
    how: str = "factors",
    *,
    round_index: int = 0,
    out_of: int | None = None,
) -> Outcome:
    """`train_round` for each member from the model's state, then the average, loaded back into `model`.

    `out_of` are the samples of the whole fleet: the model's state before the round enters the average for
    all that were not used, so that a round moves the model in proportion to its data (docs/decisions/204).
    None: the average is over the members alone. Results do not depend on the members' order.
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
        total = sum(update.samples for update in updates)
        if out_of is not None and out_of < total:
            raise TrainingError(
                f"round {round_index} used {total} samples out of {out_of}; give those of the whole fleet"
            )
        weighed: list[Trained] = [*updates]
        if out_of is not None and out_of > total:
            weighed.append(_Unchanged(start, out_of - total))
        averaged = average(model, weighed, how)
    except BaseException:
        model.load_state_dict(start)
        raise
    model.load_state_dict(averaged.state)
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
