"""What is proven by phases, as the exact search needs it: what is left to pay at least, from any state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from takifugu.plan.bounds import Guide, Ints
from takifugu.plan.curves import Floats
from takifugu.plan.phases import PhasedTerrain, Proven


@dataclass(frozen=True)
class ProvenGuide(Guide):
    """The higher of two bounds: that of the potentials, and that by phases."""

    terrain: PhasedTerrain
    proven: Sequence[Sequence[Proven]]

    @classmethod
    def of(cls, plain: Guide, terrain: PhasedTerrain, proven: Sequence[Sequence[Proven]]) -> ProvenGuide:
        least = (plain.least_time, plain.least_rounds)
        return cls(plain.potentials, *least, plain.time_limit, plain.rounds_limit, terrain, proven)

    def energy_to_go(
        self, version: int, loss: Floats, clock: Floats, rounds_done: int | Ints, caution: float = 0.0
    ) -> Floats:
        plain = super().energy_to_go(version, loss, clock, rounds_done, caution)
        states = np.broadcast_arrays(loss, clock, rounds_done)
        where, times, rounds = (x.ravel() for x in states)
        left = self.terrain.left(self.proven, version, where, times) - self.terrain.slack_j(self.proven)
        per_round = self.terrain.per_round(self.proven)
        if per_round:  # without a cap there may be endlessly many
            left = left - per_round * (self.rounds_limit - rounds)
        return np.maximum(plain, left.reshape(states[0].shape))
