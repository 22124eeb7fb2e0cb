"""One call from a problem to a plan with a certificate: the least energy found, and a proven bound below it.

The way there is a ladder, cheap rungs first, and it stops as soon as the gap is small enough. Small fleets,
whose node sets can all be listed: the bound, a sweep, the exact search. Others: plans along estimated values
and the bound at the best prices (by phases, where nodes come and go), up to three times, closer and closer,
with a sweep in between; then baselines and wider sweeps. No rung looks at the clock except to stop at a time
limit, so the same problem gives the same plan.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from takifugu.errors import UsageError
from takifugu.plan.baselines import run_baselines
from takifugu.plan.bench import MOST_ROUNDS as MOST_BASELINE_ROUNDS
from takifugu.plan.bounds import Guide, start_bound
from takifugu.plan.curves import Floats
from takifugu.plan.options import Options
from takifugu.plan.phase_rungs import LOOKS, SWEEP, WIDE_SWEEP, PhaseRungs
from takifugu.plan.plan import Decision, Plan, meets_limits, replay
from takifugu.plan.polish import polish
from takifugu.plan.potentials import Landscape, Potential
from takifugu.plan.prices import Priced
from takifugu.plan.prices import around as prices_around
from takifugu.plan.prices import at as prices_at
from takifugu.plan.problem import Problem
from takifugu.plan.reach import Reach, Reached, fastest
from takifugu.plan.result import Result, check_bound, status_of
from takifugu.plan.rollout import Guideposts, Trail
from takifugu.plan.search import OutOfTime, Search
from takifugu.plan.sweep import Sweep
from takifugu.plan.tidy import teams, tidied
from takifugu.plan.values import Terrain, Values

CAUTION = (0.0, 0.0003, 0.0006, 0.001, 0.002, 0.003, 0.005, 0.008, 0.012, 0.02, 0.04, 0.08)
"""Parts of the deadline and of the round cap that plans hold back when they choose their prices."""
ENOUGH, CAREFUL = 1.001, 0.003
"""A plan this close to the estimate of the least energy is not improved by more caution; from so much caution
on, half of the tolerance will do."""
LARGE_FLEET, MANY = 2000, 200
"""From so many nodes on only what grows slowly with them is tried; and where they come and go, baselines come
first, so that there is a plan in time."""
_SPLITS, _PIECES = 2, 4
"""On large fleets, how often merged round times that matter are split, and in how many."""
PASSES = ((300, 320), (700, 800))
"""Losses and shares of an estimate: the second pass looks closer."""
SMALL_ROWS = 20_000
"""Most rows (node sets, all versions) for which the exact search is tried first."""
FEW_ROUNDS = 2000
"""Up to so many rounds the exact search is worth a try: its work grows with their square."""


def solve(
    problem: Problem,
    tolerance: float = 0.01,
    time_limit_s: float | None = None,
    progress: Callable[[str], None] | None = None,
    explain_infeasible: bool = True,
    thorough: bool = True,
) -> Result:
    """The least-energy plan within the tolerance, or the proof that there is none.

    At the time limit, or on Ctrl-C (then `stats["interrupted"]` is set), the best plan so far is returned
    with its honest gap. `thorough=False` stops after the first rungs, whatever the gap.
    """
    if not 0.0 <= tolerance < 1.0:
        raise UsageError(f"tolerance {tolerance:g} is not between 0 and 1; 0.01 asks for one percent")
    if problem.met_at_start:
        empty = Plan((), 0.0, problem.start_time_s, problem.start_loss)
        return Result("optimal", empty, 0.0, problem, "start")
    solver = Solver(problem, tolerance, time_limit_s, progress or (lambda _: None))
    solver.thorough = thorough
    return solver.run(explain_infeasible)


def _energy_j(plan: Plan | None) -> float:
    return np.inf if plan is None else plan.energy_j


def _halved(grid: Floats) -> Floats:
    return np.sort(np.concatenate([grid, 0.5 * (grid[1:] + grid[:-1])]))


class Solver(PhaseRungs):
    """The state of one solve: what is known so far. What rungs share is in `parts.py`."""

    def __init__(
        self,
        problem: Problem,
        tolerance: float,
        time_limit_s: float | None,
        progress: Callable[[str], None],
    ) -> None:
        super().__init__(problem, self._in_time)
        self.tolerance = tolerance
        self.say = progress
        self._ends = np.inf if time_limit_s is None else time.monotonic() + time_limit_s
        self.plan: Plan | None = None
        self.bound_j = 0.0
        self.rungs: list[str] = []
        self.infeasible = False
        self.thorough = True
        self.simple_tried = False
        self.simplest: Plan | None = None
        """The cheapest of the baselines"""
        self.by_phases = False
        self.reached: Reached | None = None

    def _in_time(self) -> None:
        if time.monotonic() > self._ends:
            raise OutOfTime

    def run(self, explain_infeasible: bool = True) -> Result:
        interrupted = cut = False
        try:
            self._ladder()
            if self.plan is not None and self.thorough and self.plan.energy_j > self.bound_j:
                self._simple()  # within the tolerance is not enough to be no dearer than these
            if self.plan is not None and self.thorough:
                self._simplify()
                self.plan = tidied(self.problem, self.fleet, self.plan, self.check)
        except OutOfTime:
            cut = True
        except KeyboardInterrupt:
            interrupted = True
        result = self._result(cut or interrupted)
        if result.status == "infeasible" and explain_infeasible and not interrupted:
            from takifugu.plan.infeasible import explained

            result = explained(self, result)
        result.stats.update(interrupted=interrupted, cut=cut)
        return result

    def _ladder(self) -> None:
        self.check()
        small = self.complete and sum(len(o) for o in self.all_options if o is not None) <= SMALL_ROWS
        if small:
            if self._hopeless():
                return
            self._raise_bound(self.dual.bound_j, "continuous bound")
            self._sweeps(self.all_options, ((200, 6, 0.003),))
            come_and_go = self.attendance is not None
            if self._good() or (self.plan is not None and not self.thorough and not come_and_go):
                return
            labels = 30_000 if self.thorough else 4_000
            few = self.fewest_rounds <= FEW_ROUNDS
            if few and self._exact(3_000_000 if self.tolerance == 0.0 else labels):
                return
            if few and come_and_go and self._listed_in_phases(labels):
                return
        if self._passes():
            return
        if self.plan is not None and len(self.problem.nodes) > LARGE_FLEET:
            return
        if self.plan is None and self._hopeless():
            return
        self._raise_bound(self.dual.bound_j, "continuous bound")
        self.check()
        self._sweeps(self.family_options(12), ((300, 8, 0.002), (300, 8, 0.02)))
        if self.plan is None:
            # Where rounds are many and small, a child must not have to come forward by much.
            self._sweeps(self.family_options(12), ((1500, 3, 0.02),))
        if self.plan is None:
            self._fast()
            self._sweeps(self.family_options(12), ((300, 8, 0.1),))
        if self._good() or not self.thorough:
            return
        self._simple()
        self._sweeps(self.family_options(40), ((500, 24, 0.001), (500, 24, 0.005), (500, 24, 0.05)))
        if self._good():
            return
        self._sweeps(self.family_options(100), ((900, 64, 0.0005), (900, 64, 0.003)))
        untried = self.tolerance == 0.0 and not (small and self.fewest_rounds <= FEW_ROUNDS)
        if self.complete and (self.plan is None or untried):
            self._exact(3_000_000)

    def _passes(self) -> bool:
        """Plans along values, and bounds; true if nothing is left to do."""
        large = len(self.problem.nodes) > LARGE_FLEET
        for _ in range(_SPLITS if large else 0):
            self.split_(_PIECES)  # of thousands of round times most are merged
        for number, (cells, points) in enumerate(PASSES):
            if points != self.points and not large:
                self.sharpen_(self.plan, points)
            terrain = Terrain(self.problem, self.offers, cells, self.check)
            if not terrain.sound:
                return False
            priced = prices_around(terrain, self.prices)
            if self.plan is None and self.attendance is not None and len(self.problem.nodes) > MANY:
                self._simple()  # plans of whoever is there take longer: first any plan at all
            self._follow(priced)
            if number == 0 and self.fleet.mix is not None and self.plan is not None and self.thorough:
                self.sharpen_(self.plan, points)  # label prices that suit the plan
                terrain = Terrain(self.problem, self.offers, cells, self.check, terrain.grid)
                priced = prices_around(terrain, self.prices)
                self._follow(priced)
            if self.plan is None:
                if self._hopeless():
                    return True
                self._simple()
            self._certify(priced)
            come_and_go = self.attendance is not None and not self.complete and not large
            if come_and_go and not self._good():
                self._in_phases(priced, LOOKS[number], prove=self.thorough)
            if self._good() or (self.plan is not None and not self.thorough):
                return True
            if self.by_phases or (large and self.plan is not None):
                continue  # they were led by phases already (and sweeps are slow on large fleets)
            width = WIDE_SWEEP if number else SWEEP
            rows = priced.values.potentials()
            along = (replace(self.limits, potentials=rows), rows[priced.best])
            self._sweeps(self.family_options(10), (width,), along)
            if self._good():
                return True
        if large or not self._promising(priced, 1.0):
            return False
        finer = Terrain(self.problem, self.offers, check=self.check, points=_halved(terrain.grid))
        self._follow(prices_around(finer, self.prices))  # plans gain a little from finer values, too
        if self._good():
            return True
        self._certify(prices_at(finer, priced.values.prices[priced.best]))
        return self._good()

    def _follow(self, priced: Priced, phases: Sequence[tuple[float, Values]] = ()) -> None:
        """Plans along the values, the deadline and the round cap held back more and more."""
        values = priced.values
        posts = Guideposts(self.problem, self.families, values, self.attendance, self.check, phases)
        best: Trail | None = None
        try:
            for caution in CAUTION:
                self.check()
                trail = posts.follow(caution)
                if trail is not None and (best is None or trail.energy_j < best.energy_j):
                    best = trail
                enough = ENOUGH if caution < CAREFUL else 1.0 + 0.5 * self.tolerance
                if best is not None and best.energy_j <= priced.energy_j * enough:
                    break
        finally:
            if best is not None:
                self._offer(best.decisions(), "values")

    def _certify(self, priced: Priced) -> None:
        """The bound at the best prices."""
        prices, problem = priced.values.prices[priced.best], self.problem
        limits = prices.per_second * (problem.time_limit - problem.start_time_s)
        limits += prices.per_round * (problem.max_rounds or 0)
        known = priced.energy_j if self.plan is None else self.plan.energy_j
        land = Landscape(problem, tuple(self.offers), self.ground, self.check)
        found = land.potential(prices, most_j=1.3 * (known + limits))
        self._raise_bound(start_bound(land, found), "bound")

    def _good(self) -> bool:
        if self.plan is None:
            return False
        return self.plan.energy_j - self.bound_j <= (self.tolerance + 1e-12) * self.plan.energy_j

    def _promising(self, priced: Priced | None, part: float) -> bool:
        """Whether the plan would be within this part of the tolerance if the estimate were a bound."""
        return priced is not None and self._near(priced.energy_j, part)

    def _raise_bound(self, bound_j: float, rung: str) -> None:
        if bound_j > self.bound_j:
            if self.plan is not None:
                check_bound(self.problem, self.plan.energy_j, bound_j)
            self.bound_j = bound_j
            self.rungs.append(rung)
            self.say(f"{rung}: at least {bound_j:,.1f} J")

    def _offer(self, decisions: tuple[Decision, ...], rung: str) -> None:
        plan = replay(self.problem, decisions, self.fleet)
        if plan is None or not meets_limits(self.problem, plan):
            return
        check_bound(self.problem, plan.energy_j, self.bound_j)
        if self.plan is None or plan.energy_j < self.plan.energy_j:
            self.plan = plan
            self.rungs.append(rung)
            self.say(f"{rung}: {plan.energy_j:,.1f} J in {len(plan.rounds)} rounds")

    def _hopeless(self) -> bool:
        """Proofs that need no search: even the relaxed fleet comes too late, or needs too many rounds."""
        problem, guide = self.problem, self.limits
        start = problem.version_index[problem.start_version]
        where = (np.array([problem.start_loss]), np.array([problem.start_time_s]))
        late = problem.start_time_s > problem.time_limit
        self.infeasible = late or bool(guide.hopeless(start, *where, 0)[0])
        return self.infeasible

    def _sweeps(
        self,
        options: list[Options | None],
        rungs: tuple[tuple[int, int, float], ...],
        along: tuple[Guide, Potential] | None = None,
    ) -> None:
        """Sweeps along values where there are some, else along the continuous bounds."""
        if along is not None:
            guide, progress = along
        else:
            guide = self.dual.guide
            progress = next(p for p in guide.potentials if p.prices == self.dual.prices)
        for buckets, width, caution in rungs:
            known = np.inf if self.plan is None else self.plan.energy_j
            sweep = Sweep(self.problem, options, guide, progress, buckets, width, caution=caution)
            sweep.known_j, sweep.check = known, self.check
            try:
                found = sweep.run()
            except OutOfTime:
                if sweep.found.decisions:
                    self._offer(sweep.found.decisions, "sweep")
                raise
            if found.decisions:
                self._offer(found.decisions, "sweep")
                if not self._good():
                    self._polish()
            if self._good():
                return

    def _polish(self) -> None:
        if self.plan is not None:
            better = polish(self.problem, self.fleet, self.plan, self.check)
            if better is not None:
                self._offer(better.decisions, "polish")

    def _fast(self) -> None:
        """The quickest plan, where every cheap one ran out of time or rounds."""
        options = self.all_options if self.complete else self.quick_options()
        reach = Reach(self.problem, [fastest(o) for o in options], self.limits.least_time, check=self.check)
        self.reached = reach.run()
        if self.reached.time_s <= self.problem.time_limit:
            self._offer(self.reached.decisions, "quickest")

    def _simple(self) -> None:
        """What one would do without a planner: a plan is never dearer than the best of the baselines."""
        if self.simple_tried or self.fewest_rounds > MOST_BASELINE_ROUNDS:
            return
        # Dearer ones than this are neither better nor within the tolerance.
        most_j = _energy_j(self.plan) * (1 + 1e-9) / (1.0 - self.tolerance)
        for name, plan in run_baselines(self.problem, most_j).items():
            self.check()
            if plan is None:
                continue
            self._offer(plan.decisions, name)
            if meets_limits(self.problem, plan) and plan.energy_j < _energy_j(self.simplest):
                self.simplest = plan
        self.simple_tried = True

    def _simplify(self) -> None:
        """Of two plans within the tolerance the one with fewer teams: curves do not know what a change of
        team costs, and a team that stays together does a little better than they say (decision 207)."""
        assert self.plan is not None
        other = self.simplest
        if other is None or other.energy_j - self.bound_j > self.tolerance * other.energy_j:
            return
        if teams(other) < teams(self.plan):
            self.plan = other
            self.rungs.append("fewer teams")

    def _exact(self, max_labels: int, guide: Guide | None = None) -> bool:
        """The exact search; true if it proved what it had to."""
        known = np.inf if self.plan is None else self.plan.energy_j
        guide = guide or self.dual.guide
        search = Search(self.problem, self.all_options, guide, self.tolerance, max_labels, known)
        search.check = self.check
        try:
            found = search.run()
        except (OutOfTime, KeyboardInterrupt):
            self._offer(search.found.decisions, "exact search")
            raise
        if found.decisions:
            self._offer(found.decisions, "exact search")
        if not found.complete:
            return False
        if self.plan is None:
            self.infeasible = True
            self.rungs.append("exact search")
            return True
        self._raise_bound(min(self.plan.energy_j, found.least_pruned_j), "exact search")
        return True

    def _result(self, cut: bool) -> Result:
        rungs = " + ".join(dict.fromkeys(self.rungs)) or "none"
        stats = {"rungs": tuple(self.rungs)}
        if self.infeasible:
            return Result("infeasible", None, None, self.problem, rungs, stats=stats)
        if self.plan is None:
            return Result("unknown", None, None, self.problem, rungs, stats=stats)
        bound = check_bound(self.problem, self.plan.energy_j, self.bound_j)
        gap = (self.plan.energy_j - bound) / self.plan.energy_j if self.plan.energy_j > 0 else 0.0
        return Result(status_of(gap, self.tolerance), self.plan, bound, self.problem, rungs, stats=stats)
