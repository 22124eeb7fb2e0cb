"""What phases share, and who is there when: against what it stands for."""

import numpy as np
from generator import small_problem

from takifugu.plan.attendance import Attendance
from takifugu.plan.curves import Exponential
from takifugu.plan.fleet import Fleet
from takifugu.plan.problem import Problem, at_most
from takifugu.plan.values import Arrivals


def test_some_shares_of_all_lead_where_they_do_alone() -> None:
    grid, shares = np.linspace(0.4, 2.3, 60), np.linspace(0.02, 1.0, 40)
    curve = Exponential(floor=0.1, data_gain=0.03, data_exponent=0.5, rate=0.8)
    some = np.array([0, 3, 4, 17, 39])
    taken, alone = Arrivals.of(curve, grid, shares).take(some), Arrivals.of(curve, grid, shares[some])
    for name in ("shares", "cell", "above", "done", "finish", "short"):
        assert np.array_equal(getattr(taken, name), getattr(alone, name)), name


def test_present_are_those_with_one_window_around_it_all() -> None:
    rng, seen = np.random.default_rng(5), 0
    for seed in range(30):
        problem = Problem.from_dict(small_problem(seed, force=("windows",)))
        attendance = Attendance(Fleet.of(problem), np.zeros((1, 1)), [None] * len(problem.versions))
        moments = [m for node in problem.nodes for pair in node.windows for m in pair if np.isfinite(m)]
        for clock in (*moments, *rng.uniform(0.0, problem.time_limit, 10)):
            until = clock + float(rng.choice([0.0, rng.uniform(0.0, problem.time_limit)]))
            expected = [any(a <= clock and until <= at_most(b) for a, b in n.windows) for n in problem.nodes]
            assert attendance.present(clock, until).tolist() == expected
            seen += 0 < sum(expected) < len(expected)
    assert seen > 100
