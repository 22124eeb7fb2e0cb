"""The compiled sweep against the same sweep in numpy."""

from dataclasses import replace

import numpy as np
import pytest
from generator import small_problem

from takifugu.plan.bounds import Guide
from takifugu.plan.curves import Floats
from takifugu.plan.plan import Decision, meets_limits, replay
from takifugu.plan.problem import Problem
from takifugu.plan.solve import Solver
from takifugu.plan.sweep import Sweep
from takifugu.plan.ways import start_table


class PlainSweep(Sweep):
    """Every option of every label, all at once."""

    def _rounds(self, base, target: int, bucket: int) -> None:  # type: ignore[no-untyped-def]
        problem, options = self.problem, self.options[target]
        if options is None or not len(options):
            return
        table = start_table(options)
        start = base.clock[:, None] + np.zeros((1, len(options)))
        if table is not None:
            spans = np.maximum(base.clock[:, None, None], table[0][None])
            start = np.where(spans <= table[1][None], spans, np.inf).min(axis=2)
        clock = start + options.time_s[None, :]
        loss = problem.versions[target].curve.step(base.loss[:, None], options.share[None, :])
        energy = base.energy[:, None] + options.energy_j[None, :]
        fine = (clock <= problem.time_limit) & (energy < self.cutoff)
        if problem.max_rounds is not None:
            fine &= (base.rounds < problem.max_rounds)[:, None]
        done = fine & (loss <= problem.loss_limit)
        if done.any():
            label, option = divmod(int(np.where(done, energy, np.inf).argmin()), len(options))
            self.found.energy_j = float(energy[label, option])
            path = self.path(int(base.cell[label]))
            self.found.decisions = (*path, Decision(target, options.used(option)))
        left = self.progress.at(target, loss)
        place = ((1.0 - left / self._whole) * (self.buckets * self.slices)).astype(np.int64)
        place = np.minimum(place, (self.buckets + 1) * self.slices - 1)
        span = problem.deadline_s - problem.start_time_s
        for i, k in zip(*np.nonzero(fine & ~done & (place >= (bucket + 1) * self.slices)), strict=True):
            hour = int((clock[i, k] - problem.start_time_s) / span * self.times)
            cell = place[i, k] * len(problem.versions) + target
            cell = cell * self.times + min(max(hour, 0), self.times - 1)
            state = (loss[i, k], clock[i, k], base.rounds[i] + 1)
            rank = energy[i, k] + self._left(self.guide, target, *state)
            along = replace(self.guide, potentials=(self.progress,))
            rank = max(rank, energy[i, k] + self._left(along, target, *state))
            if rank >= min(self.rank[cell], self.cutoff * (1 + self.caution)):
                continue
            if self.guide.hopeless(target, *(np.array([x]) for x in state))[0]:
                continue
            self.rank[cell], self.energy[cell], self.clock[cell] = rank, energy[i, k], clock[i, k]
            self.loss[cell], self.rounds[cell] = loss[i, k], state[2]
            self.parent[cell], self.option[cell] = base.cell[i], k

    def _left(self, guide: Guide, version: int, loss: float, clock: float, rounds: int) -> float:
        state = (np.array([loss]), np.array([clock]), np.array([rounds]))
        return float(guide.energy_to_go(version, *state, self.caution)[0])


class Bent:
    """A curve that is not built in."""

    def __init__(self, base) -> None:  # type: ignore[no-untyped-def]
        self.base = base

    def step(self, loss: Floats, share: Floats) -> Floats:
        return np.asarray(self.base.step(loss, share))


def swept(problem: Problem, kind: type[Sweep], regret: float) -> Sweep:
    solver = Solver(problem, 0.01, None, lambda _: None)
    guide = solver.dual.guide
    progress = next(p for p in guide.potentials if p.prices == solver.dual.prices)
    sweep = kind(problem, solver.all_options, guide, progress, 60, 6, regret=regret)
    sweep.run()
    return sweep


@pytest.mark.parametrize("seed", range(12))
def test_compiled_sweep_does_what_the_plain_one_does(seed: int) -> None:
    problem = Problem.from_dict(small_problem(seed))
    plain, quick = swept(problem, PlainSweep, np.inf), swept(problem, Sweep, np.inf)
    assert quick.found.energy_j == pytest.approx(plain.found.energy_j, rel=1e-9)
    filled = np.isfinite(plain.rank)
    assert np.mean(np.isclose(plain.rank[filled], quick.rank[filled], rtol=1e-9)) > 0.98


@pytest.mark.parametrize("seed", range(6))
def test_a_curve_without_a_formula_is_asked(seed: int) -> None:
    problem = Problem.from_dict(small_problem(seed))
    solver = Solver(problem, 0.01, None, lambda _: None)
    guide = solver.dual.guide
    progress = next(p for p in guide.potentials if p.prices == solver.dual.prices)
    bent = replace(problem, versions=tuple(replace(v, curve=Bent(v.curve)) for v in problem.versions))
    found = [Sweep(p, solver.all_options, guide, progress, 60, 6).run().energy_j for p in (problem, bent)]
    assert found[1] == pytest.approx(found[0], rel=1e-9)


@pytest.mark.parametrize("seed", range(12))
def test_what_a_first_look_leaves_out_hardly_matters(seed: int) -> None:
    problem = Problem.from_dict(small_problem(seed))
    quick, all_of_them = swept(problem, Sweep, 0.3).found, swept(problem, Sweep, np.inf).found
    if not all_of_them.decisions:
        return
    assert quick.energy_j <= all_of_them.energy_j * 1.05
    plan = replay(problem, quick.decisions)
    assert plan is not None
    assert meets_limits(problem, plan)
    assert plan.energy_j == pytest.approx(quick.energy_j, rel=1e-9)
