"""Small improvements of a finished plan: rounds' node sets are thinned while the limits still hold."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from takifugu.plan.fleet import Fleet
from takifugu.plan.plan import Decision, Plan, meets_limits, replay
from takifugu.plan.problem import Problem

_MOST_TRIES = 60


def polish(problem: Problem, fleet: Fleet, plan: Plan, check: Callable[[], None]) -> Plan | None:
    """A cheaper plan with one node fewer here and there, or nothing.

    Rounds late in the plan come first: what they lose in loss, nothing later can dilute, and the slack
    below the target is usually small.
    """
    best = plan
    tries = 0
    for number in range(len(plan.decisions) - 1, -1, -1):
        decision = best.decisions[number]
        if len(decision.used) < 2:
            continue
        costs = fleet.by_version[decision.version]
        who = np.array(sorted(decision.used))
        amount = np.array([decision.used[int(i)] for i in who], dtype=float)
        joules = costs.fixed_j[who] + costs.sample_j[who] * amount
        # Little data for much energy goes first.
        for place in np.argsort(-joules / amount, kind="stable")[:3]:
            check()
            tries += 1
            used = {i: n for i, n in decision.used.items() if i != int(who[place])}
            decisions = list(best.decisions)
            decisions[number] = Decision(decision.version, used)
            tried = replay(problem, decisions, fleet)
            if tried is not None and tried.energy_j < best.energy_j and meets_limits(problem, tried):
                best, decision = tried, decisions[number]
                break
        if tries >= _MOST_TRIES // max(1, len(plan.decisions) * len(problem.nodes) // 5000):
            break
    return best if best is not plan else None
