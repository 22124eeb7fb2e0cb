"""The rungs of a solve that know who is there when: plans along values by phase, and their bound.

Values are estimated at many prices, and plans follow them; where the estimate says that phases matter, a
bound is proven at prices that suit the plan, then at closer ones (docs/decisions/105-phases.md).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from takifugu.plan import relaxation
from takifugu.plan.bounds import Guide
from takifugu.plan.options import Options
from takifugu.plan.parts import Parts
from takifugu.plan.phase_cuts import Phases
from takifugu.plan.phase_guide import ProvenGuide
from takifugu.plan.phase_prices import Way
from takifugu.plan.phases import PhasedTerrain
from takifugu.plan.plan import Plan
from takifugu.plan.potentials import Potential
from takifugu.plan.prices import Priced
from takifugu.plan.prices import around as prices_around
from takifugu.plan.rounds import Prices
from takifugu.plan.values import Terrain, Values

Width = tuple[int, int, float]
"""Of a sweep: buckets, labels in each, and what it holds back"""
SWEEP: Width = (300, 8, 0.003)
WIDE_SWEEP: Width = (600, 24, 0.003)
PHASES_GAIN = 1.002
"""By how much phases must raise the estimate of the least energy to be worth a bound of their own."""
CLEARLY = 0.6
"""Within this part of the tolerance of the estimate, a plan is left as it is until the proof is better."""
_PROMISING = 2.5
"""Within so many tolerances of the plan, prices are looked for more closely."""
_ROUNDS_EACH, _FEWEST = 4, 6
"""A phase should have about so many rounds; but so many phases will do in any case."""
_LISTED_CELLS = 300
_ROUNDS, _CLOSER_ROUNDS = (0.5, 0.8, 1.0, 1.2, 1.5, 2.0, 3.0), (0.9, 0.95, 1.0, 1.05, 1.12)
"""Where rounds have a price: parts of the best one without phases that plans are led by; and of the best of
these, for the bound."""


@dataclass(frozen=True)
class Look:
    """How closely time in phases is looked at, where nodes come and go."""

    phases: int
    rates: int
    """Prices of a second, to look at"""
    sweeps: tuple[Width, ...]
    range: float = 5.0
    """Prices go up to so many times the best one without phases, and down likewise"""
    closer: int = 2
    """So often prices are looked for more closely"""
    first: bool = False
    """Whether there will be a closer look"""


LOOKS = (
    Look(12, 13, (SWEEP,), closer=1, first=True),
    Look(14, 25, (WIDE_SWEEP,)),
)
LISTED = Look(24, 49, ((200, 6, 0.003), WIDE_SWEEP, (1500, 64, 0.002)), 20.0)
"""Where all node sets are listed, values take milliseconds."""


class PhaseRungs(Parts, ABC):
    plan: Plan | None
    tolerance: float
    thorough: bool
    by_phases: bool
    """Whether phases matter, and the bound without them is of no use"""

    @abstractmethod
    def _follow(self, priced: Priced, phases: Sequence[tuple[float, Values]] = ()) -> None: ...

    @abstractmethod
    def _sweeps(
        self,
        options: list[Options | None],
        rungs: tuple[Width, ...],
        along: tuple[Guide, Potential] | None = None,
    ) -> None: ...

    @abstractmethod
    def _raise_bound(self, bound_j: float, rung: str) -> None: ...

    @abstractmethod
    def _good(self) -> bool: ...

    @abstractmethod
    def _simple(self) -> None: ...

    @abstractmethod
    def _exact(self, max_labels: int, guide: Guide | None = None) -> bool: ...

    def _near(self, estimate_j: float, part: float) -> bool:
        """Whether the plan is within this part of the tolerance of the estimate."""
        return self.plan is not None and estimate_j >= self.plan.energy_j * (1.0 - part * self.tolerance)

    def _listed_in_phases(self, max_labels: int) -> bool:
        """Where all node sets are listed: plans and a bound by phases, and the exact search along that bound.
        True if nothing is left to do."""
        terrain = Terrain(self.problem, self.offers, _LISTED_CELLS, self.check)
        if not terrain.sound:
            return False
        if self.plan is None:
            self._simple()
        priced = prices_around(terrain, self.prices)
        proven = self._in_phases(
            priced, LISTED if self.thorough else replace(LISTED, sweeps=LISTED.sweeps[:1])
        )
        if self.plan is None:
            return False
        if self._good():
            return True
        return (proven is not None and self._exact(max_labels, proven)) or not self.thorough

    def _in_phases(self, priced: Priced, look: Look, prove: bool = True) -> Guide | None:
        """Plans along values that know who is there when, and a bound that does; what is proven, if it is for
        the exact search."""
        # Every border loses a little.
        most = look.phases if self.plan is None else max(len(self.plan.rounds) // _ROUNDS_EACH, _FEWEST)
        phases = Phases.of(self.problem, self.rounds_of, min(look.phases, most))
        if len(phases) == 1:
            return None
        terrain = PhasedTerrain(phases, self.offers, self._spread(priced, look), 150, self.check)
        values = terrain.estimate()
        estimate_j = terrain.estimate_j(values)
        matter = estimate_j > PHASES_GAIN * terrain.without_phases_j(self.offers)
        self._follow(Priced(values[0], 0, estimate_j), terrain.posts(values))
        for sweep in look.sweeps if matter or self.fleet.mix is None else look.sweeps[:1]:
            if not self._good() and not self._near(estimate_j, CLEARLY):
                self._sweep_along(terrain, values, priced, sweep)
                # One that does not know who is there when may do better.
                if not self.complete and not self._near(estimate_j, 2.0 if self.fleet.mix is None else 1.0):
                    self._sweep_along(None, values, priced, sweep)
        if self.plan is None or self._good() or not prove or not matter:
            return None
        self.by_phases = not self.complete
        way = Way.of(terrain, values, self.plan)
        if self.prices.per_round:
            way = self._price_of_rounds(way, priced, look)
        prices, terrain = way.prices(), way.terrain
        most_j = 1.05 * self.plan.energy_j + prices[0][0].per_round * (self.problem.max_rounds or 0)
        proven = terrain.certified(self.ground, prices, most_j)
        bound_j = terrain.bound_j(proven)
        self._raise_bound(bound_j, "bound by phases")
        for _ in range(look.closer):
            if self._good() or not self._near(bound_j, _PROMISING):
                break
            closer = terrain.certified(self.ground, way.closer(proven), most_j)
            if terrain.bound_j(closer) <= bound_j:
                break
            proven, bound_j = closer, terrain.bound_j(closer)
            self._raise_bound(bound_j, "bound by phases")
        return ProvenGuide.of(self.dual.guide, terrain, proven) if self.complete else None

    def _price_of_rounds(self, way: Way, priced: Priced, look: Look) -> Way:
        """The best price of a round more closely, then more prices of time with that one."""
        assert self.plan is not None
        for parts in (_CLOSER_ROUNDS, ()):
            best = way.per_round
            rounds = [part * best for part in parts] or [best]
            spread = self._spread(priced, look, rounds)
            terrain = PhasedTerrain(way.terrain.phases, self.offers, spread, 150, self.check)
            way = Way.of(terrain, terrain.estimate(), self.plan)
        return way

    def _spread(self, priced: Priced, look: Look, rounds: Sequence[float] = ()) -> list[Prices]:
        """Prices of time around the best one without phases; where rounds have a price, too, fewer of them
        with several of those (or with some that are given)."""
        known_j = priced.energy_j if self.plan is None else self.plan.energy_j
        span = self.problem.time_limit - self.problem.start_time_s
        # Label prices follow the plan, and the best prices of time and rounds follow them.
        best = self.prices if self.fleet.mix is None else priced.values.prices[priced.best]
        rate = best.per_second or 0.3 * known_j / max(span, 1e-9)
        rounds = rounds or ([part * best.per_round for part in _ROUNDS] if best.per_round else [0.0])
        count = max(look.rates // 2, 9) if len(rounds) > 1 else look.rates * (2 if best.per_round else 1)
        rates = {0.0, *(rate * np.geomspace(1.0 / look.range, look.range, count)).tolist()}
        return [Prices(rate, price) for price in rounds for rate in sorted(rates)]

    def _sweep_along(
        self, terrain: PhasedTerrain | None, values: Sequence[Values], priced: Priced, width: Width
    ) -> None:
        """A sweep that knows who is there when, or one that does not."""
        rows = priced.values.potentials()
        guide = replace(self.limits, potentials=rows)
        if terrain is not None:
            guide = terrain.guide(values, guide)
        options = self.all_options if self.complete else self.family_options(10)
        self._sweeps(options, (width,), (guide, rows[priced.best]))

    def rounds_of(self, present: NDArray[np.bool_]) -> list[relaxation.Offers | None]:
        """[version]: rounds of those who are there, relaxed or all there are; remembered as long as label
        prices stay as they are."""
        key = (present.tobytes(), self.multipliers.tobytes())
        if key not in self._rounds and self.complete:
            listed = [self.listed(v, present) for v in self.versions]
            self._rounds[key] = [None if o is None else relaxation.exact_offers(o) for o in listed]
        elif key not in self._rounds:
            self._rounds[key] = self.relaxed(self.multipliers, present, points=relaxation.SHARES)
        return self._rounds[key]

    @cached_property
    def _rounds(self) -> dict[tuple[bytes, bytes], list[relaxation.Offers | None]]:
        return {}
