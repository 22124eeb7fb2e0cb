"""Which phases, and which prices of time and rounds in them, make a bound by phases high.

Any are valid. Phases are cut in a few ways, and the estimate says which is best. Prices are those that suit
a plan: where it is when a phase begins, give or take a few rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from takifugu.plan.curves import Floats
from takifugu.plan.phase_borders import Focus
from takifugu.plan.phase_cuts import Mask, Phases
from takifugu.plan.phases import PhasedTerrain
from takifugu.plan.plan import Plan
from takifugu.plan.potentials import Prices
from takifugu.plan.problem import Problem
from takifugu.plan.relaxation import Offers
from takifugu.plan.values import Values

DEARER_ROUNDS = (1.0, 1.2, 1.45)
"""Where rounds have a price: how much more they may be worth when nodes come and go."""
_ASIDE = 4
"""As many of its rounds a plan may be ahead or late when a phase begins: the losses that matter there."""
_FAR = (0.25, 0.5)
"""Strong rounds lead to losses that the plan reaches later: after these parts of its rounds to come."""
_REST = (0.05, 0.1, 0.17, 0.25, 0.37, 0.5, 0.65, 0.8)
"""After these, values should be high, too."""


def spread(rates: Iterable[float], per_round: float, parts: Sequence[float] = DEARER_ROUNDS) -> list[Prices]:
    """Prices at these rates per second; rounds, where they have a price, at so many times theirs."""
    rounds = [per_round * f for f in parts] if per_round else [0.0]
    rates = sorted({0.0, *map(float, rates)})
    return [Prices(rate, price) for price in rounds for rate in rates]


Cut = tuple[float, float]
"""How long a round may be, and how short a phase (`Phases.of`)"""


def best_cut(
    problem: Problem,
    offers: Sequence[Offers | None],
    rounds: Callable[[Mask], Sequence[Offers | None]],
    most: int,
    cuts: Sequence[Cut],
    prices: Sequence[Prices],
    check: Callable[[], None],
) -> Cut:
    """The one with the highest estimate, looked at roughly; of equals the first."""
    some = prices[:: max(len(prices) // 8, 1)]
    heights = []
    for cut in cuts:
        terrain = PhasedTerrain(Phases.of(problem, rounds, most, *cut), offers, some, 100, check)
        heights.append(terrain.estimate_j(terrain.estimate()))
    return cuts[int(np.argmax(heights))]


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
    rest: tuple[Floats, ...]
    """[phase]: more of those"""

    @classmethod
    def of(cls, terrain: PhasedTerrain, values: Sequence[Values], plan: Plan) -> Way:
        problem = terrain.problem
        index = problem.version_index
        versions = [index[problem.start_version], *(index[r.version] for r in plan.rounds)]
        losses = np.array([problem.start_loss, *(r.loss for r in plan.rounds)])
        ends = np.array([problem.start_time_s, *(r.start_s + r.time_s for r in plan.rounds)])
        last, version, near, far, rest = len(losses) - 1, [], [], [], []
        aside = min(_ASIDE, 1 + last // 20)
        for begin in terrain.phases.bounds[:-1]:
            place = max(int(np.searchsorted(ends, begin, side="right")) - 1, 0)
            beside = np.clip(np.arange(place - aside, place + aside + 1), 0, last)
            version.append(versions[place])
            near.append(np.unique(losses[beside]))
            far.append(losses[[place + round(part * (last - place)) for part in _FAR]])
            rest.append(losses[[place + round(part * (last - place)) for part in _REST]])
        return cls(terrain, values, tuple(version), tuple(near), tuple(far), tuple(rest))

    def focus(self) -> list[Focus]:
        """[phase]: the best prices near the plan and all between them (to go on at the same price costs
        nothing), and those further on; losses from those further on to where the phase before began."""
        found = []
        for phase, (near, far) in enumerate(zip(self.near, self.far, strict=True)):
            best = self._best(phase, near)
            prices = {*range(int(best.min()), int(best.max()) + 1), *self._best(phase, far).tolist()}
            before = self.near[max(phase - 1, 0)]
            losses = (float(far.min()), float(before.max()))
            spots = tuple((self.version[phase], float(loss)) for loss in (*near, *self.rest[phase]))
            found.append(Focus(tuple(sorted(prices)), losses, spots))
        return found

    def few(self, count: int) -> list[Prices]:
        """About as many prices as that, where the best ones are, those next to them, and some in the middle:
        the plan may not be where it should be."""
        rates = np.unique(self.terrain.rates)
        near = np.concatenate([self._best(k, loss) for k, loss in enumerate(self.near)])
        far = np.concatenate([self._best(k, loss) for k, loss in enumerate(self.far)])
        found = {0.0, *rates[[len(rates) // 4, len(rates) // 2, 3 * len(rates) // 4]].tolist()}
        for some, number in ((near, count), (far, 3)):
            used = self.terrain.rates[some]
            found |= set(np.quantile(used, np.linspace(0.0, 1.0, number), method="nearest").tolist())
        used = self.terrain.rates[near]
        beside = np.searchsorted(rates, [used.min(), used.max()]) + np.array([-1, 1])
        found |= set(rates[np.clip(beside, 0, len(rates) - 1)].tolist())
        return [Prices(float(rate), self.terrain.prices[near[0]].per_round) for rate in sorted(found)]

    def _best(self, phase: int, loss: Floats) -> NDArray[np.int64]:
        return np.asarray(self._worth(phase, loss).argmax(axis=0))

    def _worth(self, phase: int, loss: Floats) -> Floats:
        """[price, loss]: when the phase begins. Only prices at which rounds cost what is best from the
        start."""
        problem, prices = self.terrain.problem, self.terrain.prices
        rows = [self.values[phase].at(self.version[phase], loss, k) for k in range(len(prices))]
        worth = np.array(rows) - self.terrain.held(phase)[:, None]
        per_round = np.array([p.per_round for p in prices])
        if phase == 0:
            worth = worth - (per_round * (problem.max_rounds or 0))[:, None]
            return np.where((per_round == per_round[worth[:, -1].argmax()])[:, None], worth, -np.inf)
        first = self._worth(0, np.array([problem.start_loss])).argmax()
        return np.where((per_round == per_round[first])[:, None], worth, -np.inf)
