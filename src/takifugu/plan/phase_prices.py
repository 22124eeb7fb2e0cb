"""Which phases, and which prices of time and rounds in them, make a bound by phases high.

Any are valid. Phases are cut in a few ways, and the estimate says which is best. Prices are those that suit
a plan: where it is when a phase begins, give or take a few rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from takifugu.plan.curves import Floats
from takifugu.plan.phases import PhasedTerrain, Proven
from takifugu.plan.plan import Plan
from takifugu.plan.rounds import Prices
from takifugu.plan.values import Values

_ASIDE = 4
"""As many of its rounds a plan may be ahead or late when a phase begins: the losses that matter there."""
_FAR = (0.25, 0.5)
"""Strong rounds lead to losses that the plan reaches later: after these parts of its rounds to come."""
_CLOSER = np.array([0.2, 0.45])
"""Parts of the way to the next price at which closer ones lie."""
_BESIDE = 1
"""So many prices next to the best ones are looked at as well: the plan may not be where it should be."""


@dataclass(frozen=True)
class Way:
    """Where a plan is when: near there bounds have to be good."""

    terrain: PhasedTerrain
    values: Sequence[Values]
    version: tuple[int, ...]
    """[phase]: when it begins"""
    near: tuple[Floats, ...]
    """[phase]: losses around the plan's when it begins"""
    far: tuple[Floats, ...]
    """[phase]: some that it reaches later"""

    @classmethod
    def of(cls, terrain: PhasedTerrain, values: Sequence[Values], plan: Plan) -> Way:
        problem = terrain.problem
        index = problem.version_index
        versions = [index[problem.start_version], *(index[r.version] for r in plan.rounds)]
        losses = np.array([problem.start_loss, *(r.loss for r in plan.rounds)])
        ends = np.array([problem.start_time_s, *(r.start_s + r.time_s for r in plan.rounds)])
        last, version, near, far = len(losses) - 1, [], [], []
        aside = min(_ASIDE, 1 + last // 20)
        for begin in terrain.phases.bounds[:-1]:
            place = max(int(np.searchsorted(ends, begin, side="right")) - 1, 0)
            beside = np.clip(np.arange(place - aside, place + aside + 1), 0, last)
            version.append(versions[place])
            near.append(np.unique(losses[beside]))
            far.append(losses[[place + round(part * (last - place)) for part in _FAR]])
        return cls(terrain, values, tuple(version), tuple(near), tuple(far))

    def prices(self) -> list[list[Prices]]:
        """[phase]: the best prices near the plan, all between them and those beside them; and those further
        on."""
        alike, found = self._alike, []
        for phase, (near, far) in enumerate(zip(self.near, self.far, strict=True)):
            place = np.searchsorted(alike, self._best(phase, near))
            low, high = max(int(place.min()) - _BESIDE, 0), min(int(place.max()) + _BESIDE, len(alike) - 1)
            best = {*alike[low : high + 1].tolist(), *self._best(phase, far).tolist()}
            found.append([self.terrain.prices[k] for k in sorted(best)])
        return found

    @property
    def per_round(self) -> float:
        """The best price of a round, as far as the estimate knows."""
        return self.terrain.prices[int(self._alike[0])].per_round

    def closer(self, proven: Sequence[Sequence[Proven]]) -> list[list[Prices]]:
        """[phase]: the same prices, and more around those that are best near the plan, by what is proven."""
        found = []
        for phase, (row, near) in enumerate(zip(proven, self.near, strict=True)):
            worth = np.array([p.values.at(self.version[phase], near) - p.held_j for p in row])
            rates = np.array([p.values.prices.per_second for p in row])
            best = worth.argmax(axis=0)
            more = set(rates.tolist())
            for k in np.unique(best).tolist():
                for beside in (max(k - 1, 0), min(k + 1, len(rates) - 1)):
                    more |= set((rates[k] + _CLOSER * (rates[beside] - rates[k])).tolist())
            per_round = row[0].values.prices.per_round
            found.append([Prices(rate, per_round) for rate in sorted(more)])
        return found

    @cached_property
    def _alike(self) -> NDArray[np.int64]:
        """Prices at which rounds cost what is best from the start: they cost the same in all phases."""
        problem, per_round = self.terrain.problem, np.array([p.per_round for p in self.terrain.prices])
        start, loss = problem.version_index[problem.start_version], np.array([problem.start_loss])
        worth = self._worth(0, start, loss)[:, 0] - per_round * (problem.max_rounds or 0)
        return np.flatnonzero(per_round == per_round[worth.argmax()])

    def _best(self, phase: int, loss: Floats) -> NDArray[np.int64]:
        """[loss]: the best of those prices when the phase begins."""
        worth = self._worth(phase, self.version[phase], loss)[self._alike]
        return np.asarray(self._alike[worth.argmax(axis=0)])

    def _worth(self, phase: int, version: int, loss: Floats) -> Floats:
        """[price, loss]: when the phase begins."""
        rows = [self.values[phase].at(version, loss, k) for k in range(len(self.terrain.prices))]
        return np.array(rows) - self.terrain.held(phase)[:, None]
