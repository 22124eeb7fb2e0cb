"""Multipliers of labels for the rounds that a bound rests on (decision 102: any are valid).

The bound is as low as the cheapest way through relaxed rounds. So the rounds of that way are looked at: their
own linear programs have multipliers at which they cost more, and so on with the way that is cheapest then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from takifugu.plan.curves import Floats
from takifugu.plan.families import Family
from takifugu.plan.prices import Priced
from takifugu.plan.problem import Problem
from takifugu.plan.relaxation import Offers
from takifugu.plan.rollout import Guideposts

_HELD_BACK = (0.0, 0.01, 0.05)
MOST = 14
"""Rounds that are looked at, those there are most of."""


def cheapest_rounds(
    problem: Problem, offers: Sequence[Offers | None], priced: Priced
) -> list[tuple[int, float, float]]:
    """Version, share and slowest node's time of the relaxed rounds that the values lead through."""
    prices = priced.values.prices[priced.best]
    rounds = [None if o is None else _as_family(o, prices.per_second) for o in offers]
    posts = Guideposts(problem, [None if r is None else r[0] for r in rounds], priced.values)
    for caution in _HELD_BACK:
        trail = posts.follow(caution)
        if trail is not None:
            count = Counter((r.version, r.row) for r in trail.rounds)
            found = []
            for (version, row), _ in count.most_common(MOST):
                family_and_times = rounds[version]
                assert family_and_times is not None
                family, slowest_s = family_and_times
                found.append((version, float(family.share[row]), float(slowest_s[row])))
            return found
    return []


def _as_family(offers: Offers, per_second: float) -> tuple[Family, Floats]:
    """The cheapest relaxed round of every share, as if it were one of real nodes; and its slowest node's
    time."""
    slowest_s = offers.time_s if offers.slowest_s is None else offers.slowest_s
    row = (offers.tangent_j + per_second * offers.time_s[:, None]).argmin(axis=0)
    energy: Floats = offers.tangent_j[row, np.arange(len(row))]
    fine = np.flatnonzero(np.isfinite(energy))
    nothing = np.zeros(len(fine), dtype=np.int64)
    family = Family(
        offers.time_s[row[fine]], energy[fine], offers.share[fine], nothing, nothing, *(nothing[:0],) * 3
    )
    return family, slowest_s[row[fine]]
