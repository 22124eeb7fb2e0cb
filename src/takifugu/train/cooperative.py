"""One round of a fleet: every member trains from the same state, and their models are averaged.

Pilots and the simulation both call it, so that what was predicted and what is run are the same thing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from takifugu.errors import TrainingError, UsageError, near_misses
from takifugu.lowrank.averaging import average
from takifugu.train.round import RoundSpec, Samples, Update, step_count, train_round
from takifugu.train.seeds import derived

WEIGHTS = ("normalized", "fleet", "members")
"""The mean is over the whole fleet, where whoever sits out counts as unchanged, with a node's change counted
by step or by its samples; or it is over the members alone (docs/decisions/204, 208)."""
DEFAULT_WEIGHTS = WEIGHTS[0]


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
class _Weighed:
    """A state, and for how many samples it counts in the mean."""

    state: Mapping[str, Tensor]
    samples: float


def check_weights(weights: str, where: str = "weights") -> None:
    if weights not in WEIGHTS:
        raise UsageError(
            f"{where}: {weights!r} is not known{near_misses(weights, WEIGHTS)}; one of {', '.join(WEIGHTS)}"
        )


@dataclass(frozen=True)
class Mean:
    """What the server's mean is taken over."""

    fleet: int | None = None
    """Samples of the whole fleet: those that a round does not use count as unchanged, so that it moves the
    model in proportion to its data (docs/decisions/204). None: the mean is over the members alone."""
    even: float | None = None
    """By how much the samples of a step are multiplied to be what its change counts for: whoever has more
    samples takes more steps, and would otherwise count for them twice (docs/decisions/208)."""

    @classmethod
    def of(cls, weights: str, shares: Mapping[str, Samples], spec: RoundSpec) -> Mean:
        """For a fleet with these shares of the data."""
        check_weights(weights)
        if weights == "members":
            return cls()
        whole = sum(map(len, shares.values()))
        if weights == "fleet":
            return cls(whole)
        each = sum(len(own) / step_count(len(own), spec) for own in shares.values() if len(own))
        return cls(whole, whole / each)  # so that all together count for all samples

    def weighed(self, updates: Sequence[Update], start: Mapping[str, Tensor]) -> list[_Weighed]:
        """The updates with what they count for, and the state before the round for what is left."""
        found = [_Weighed(update.state, self._counts(update)) for update in updates]
        left = 0.0 if self.fleet is None else self.fleet - sum(one.samples for one in found)
        # What rounding leaves of nothing must not count.
        return [*found, _Weighed(start, left)] if left > 1e-9 * (self.fleet or 0) else found

    def _counts(self, update: Update) -> float:
        return update.samples if self.even is None else self.even * update.samples / update.steps


MEMBERS = Mean()


def cooperative_round(
    model: nn.Module,
    members: Iterable[tuple[str, Samples]] | Mapping[str, Samples],
    spec: RoundSpec,
    seed: int,
    how: str = "factors",
    *,
    round_index: int = 0,
    mean: Mean = MEMBERS,
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
        total = sum(update.samples for update in updates)
        if mean.fleet is not None and mean.fleet < total:
            raise TrainingError(
                f"round {round_index} used {total} samples out of {mean.fleet}; give those of the whole fleet"
            )
        averaged = average(model, mean.weighed(updates, start), how)
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
