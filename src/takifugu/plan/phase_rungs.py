"""The rungs of a solve that know who is there when: plans along values by phase, and their bound.

Phases are cut in a few ways, values are estimated at many prices, plans follow them; where the estimate says
that phases matter, a certificate at prices that suit the plan is the bound (docs/decisions/105-phases.md).
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
from takifugu.plan.certificate import LOST
from takifugu.plan.options import Options
from takifugu.plan.parts import Parts
from takifugu.plan.phase_cuts import Phases
from takifugu.plan.phase_guide import ProvenGuide
from takifugu.plan.phase_prices import DEARER_ROUNDS, Cut, Way, best_cut, spread
from takifugu.plan.phases import PhasedTerrain
from takifugu.plan.plan import Plan
from takifugu.plan.potentials import Potential, Prices
from takifugu.plan.prices import Priced
from takifugu.plan.prices import around as prices_around
from takifugu.plan.values import Terrain, Values

Width = tuple[int, int, float]
"""Of a sweep: buckets, labels in each, and what it holds back"""
SWEEP: Width = (300, 8, 0.003)
WIDE_SWEEP: Width = (600, 24, 0.003)
PHASES_GAIN = 1.002
"""By how much phases must raise the estimate of the least energy to be worth a certificate."""
QUICKLY = 0.55
"""Where the estimate leaves this part of the tolerance to the proof, a quick certificate is tried first."""
CLEARLY = 0.6
"""Within this part of the tolerance of the estimate, a plan is left as it is until the proof is better."""
_LISTED_CELLS = 300
_ROUNDS = (0.5, 0.8, 1.0, 1.2, 1.5, 3.0)
"""Where rounds have a price: parts of it that plans are led by."""


@dataclass(frozen=True)
class Look:
    """How closely time in phases is looked at, where nodes come and go."""

    phases: int
    rates: int
    """Prices of a second, to look at"""
    few: int
    """and about how many of them to prove"""
    sweeps: tuple[Width, ...]
    cells: tuple[int, ...]
    """Of certificates, finer ones if the estimate says that they will do"""
    range: float = 5.0
    """Prices go up to so many times the best one without phases, and down likewise"""
    first: bool = False
    """Whether there will be a closer one"""


LOOKS = (
    Look(12, 13, 6, (SWEEP,), (800,), first=True),
    Look(14, 25, 6, (WIDE_SWEEP,), (800,)),
)
LISTED = Look(24, 49, 12, ((200, 6, 0.003), WIDE_SWEEP, (1500, 64, 0.002)), (1000, 2500), 20.0)
"""Where all node sets are listed, values take milliseconds."""


class PhaseRungs(Parts, ABC):
    plan: Plan | None
    tolerance: float
    thorough: bool
    by_phases: bool
    """Whether phases matter, and the bound without them is of no use"""
    phases_matter: bool | None
    """Whether they may, as far as that is known: whether they raise the estimate by enough if no round
    reached over a border. Deductions there only lower it."""

    @abstractmethod
    def _follow(self, priced: Priced, phases: Sequence[tuple[float, float, Values]] = ()) -> None: ...

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
        self._led_by_phases(priced, LISTED, LISTED.sweeps if self.thorough else LISTED.sweeps[:1])
        if self.plan is None:
            return False
        proven = None if self._good() else self._in_phases(priced, LISTED)
        if self._good():
            return True
        return (proven is not None and self._exact(max_labels, proven)) or not self.thorough

    def _led_by_phases(self, priced: Priced, look: Look, sweeps: Sequence[Width] = ()) -> None:
        """Plans along values of all phases, as if no round reached over a border: what makes a bound a bound
        there would lead a plan astray."""
        if self.prices.per_round:  # then there are many prices already
            look = replace(look, rates=max(look.rates // 4, 9))
        prices = self._spread(priced, look, _ROUNDS)
        # Where labels count, the rounds of a phase take long to find: those that a bound needs must do.
        few = look.first or self.fleet.mix is not None
        phases = Phases.of(self.problem, self.rounds_of, look.phases if few else 2 * look.phases)
        if len(phases) == 1:
            return
        terrain = PhasedTerrain(phases, self.offers, prices, 150, self.check, taxed=False)
        values = terrain.estimate()
        estimate_j = terrain.estimate_j(values)
        self.phases_matter = estimate_j > PHASES_GAIN * terrain.without_phases_j(self.offers)
        self._follow(Priced(values[0], 0, estimate_j), terrain.posts(values))
        matter = estimate_j > PHASES_GAIN * priced.energy_j
        for sweep in sweeps if matter else sweeps[:1]:
            if not self._good() and not self._near(estimate_j, CLEARLY):
                self._sweep_along(terrain, values, priced, sweep)

    def _in_phases(self, priced: Priced, look: Look) -> Guide | None:
        """Plans and a bound that know who is there when, along values by phase; what is proven, if it is for
        the exact search."""
        if look.first and self.phases_matter is None:
            self._led_by_phases(priced, look)
        if look.first and not self.phases_matter:
            return None
        cut, prices = self._cut(priced, look)
        phases = Phases.of(self.problem, self.rounds_of, look.phases, *cut)
        if len(phases) == 1:
            return None
        for cells in (150, 300):
            terrain = PhasedTerrain(phases, self.offers, prices, cells, self.check)
            values = terrain.estimate()
            estimate_j = terrain.estimate_j(values)
            self._follow(Priced(values[0], 0, estimate_j), terrain.posts(values))
            if self.plan is None:
                return None
            prices = Way.of(terrain, values, self.plan).few(look.few)
        assert self.plan is not None
        if estimate_j <= PHASES_GAIN * priced.energy_j:
            return None
        self.by_phases = not self.complete
        if not self.complete and not self._near(estimate_j, CLEARLY):
            self._sweep_along(terrain, values, priced, look.sweeps[0])
            # One that does not know who is there when may do better.
            if not self._near(estimate_j, 2.0 if self.fleet.mix is None else 1.0):
                self._sweep_along(None, values, priced, look.sweeps[0])
        # What cannot do is left to the closer look; where labels make that slow it may not come to an end.
        if look.first and not self._near(estimate_j, 1.0 if self.fleet.mix is None else 2.0):
            return None
        most_j = 1.05 * self.plan.energy_j + terrain.prices[0].per_round * (self.problem.max_rounds or 0)
        focus = Way.of(terrain, values, self.plan).focus()
        ways = [(cells, LOST) for cells in look.cells]
        if self._near(estimate_j, 1.0 - QUICKLY):
            ways.insert(0, (look.cells[0] // 2, 0.4 * self.tolerance))
        for cells, lost in ways:
            proven = terrain.certified(values, focus, cells, most_j, max(lost, LOST))
            self._raise_bound(terrain.bound_j(proven), "bound by phases")
            if self._good() or not self.thorough or not self._near(estimate_j, 1.0):
                break
        return ProvenGuide.of(self.dual.guide, terrain, proven) if self.complete else None

    def _cut(self, priced: Priced, look: Look) -> tuple[Cut, list[Prices]]:
        """How phases are cut, and prices that are worth looking at."""
        prices, cut = self._spread(priced, look), (np.inf, 0.0)
        if self.plan is not None:
            double_s = 2.0 * max(r.time_s for r in self.plan.rounds)
            cuts = (cut, (double_s, 0.0), (double_s, double_s))
            cut = best_cut(self.problem, self.offers, self.rounds_of, look.phases, cuts, prices, self.check)
        return cut, prices

    def _spread(self, priced: Priced, look: Look, rounds: Sequence[float] = DEARER_ROUNDS) -> list[Prices]:
        known_j = priced.energy_j if self.plan is None else self.plan.energy_j
        span = self.problem.time_limit - self.problem.start_time_s
        # Label prices follow the plan, and the best prices of time and rounds follow them.
        best = self.prices if self.fleet.mix is None else priced.values.prices[priced.best]
        rate = best.per_second or 0.3 * known_j / max(span, 1e-9)
        rates = rate * np.geomspace(1.0 / look.range, look.range, look.rates)
        return spread(rates, best.per_round, rounds)

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
