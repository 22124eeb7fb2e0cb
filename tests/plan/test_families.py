"""Node sets of large fleets against integer programs: the cheapest sets there are, round by round."""

from dataclasses import replace

import numpy as np
import pytest
from benchmarks.plan_instances import instance
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp

from takifugu.plan.families import SPREAD, _thresholds, prefixes
from takifugu.plan.fleet import Fleet
from takifugu.plan.parts import Parts

hour = st.integers(0, 12).map(float)
window = st.tuples(hour, hour).filter(lambda w: w[0] < w[1])


def cheapest_set_j(fleet: Fleet, version: int, share: float, limit_s: float) -> float:
    """The least energy of whole nodes that are done by `limit_s` and give at least the share."""
    costs, amount = fleet.by_version[version], fleet.samples / fleet.total
    time_s = costs.fixed_s + costs.sample_s * fleet.samples
    who = np.flatnonzero(costs.can_join & (time_s <= limit_s * (1 + 1e-12)))
    joules = costs.fixed_j[who] + costs.sample_j[who] * fleet.samples[who]
    joules = joules + fleet.idle_w[who] * (limit_s - time_s[who])
    lean = ((fleet.mix[who] - fleet.fleet_mix) * amount[who, None]).T
    labels = len(lean)
    # At least the share: samples, less half the weight of d_c, which is at least each label's excess or lack.
    eye, weight = np.eye(labels), fleet.problem.label_weight
    rows = np.vstack(
        [
            np.concatenate([amount[who], np.full(labels, -0.5 * weight)]),
            np.hstack([-lean, eye]),
            np.hstack([lean, eye]),
        ]
    )
    answer = milp(
        np.concatenate([joules, np.zeros(labels)]),
        integrality=np.concatenate([np.ones(len(who)), np.zeros(labels)]),
        bounds=Bounds(0, np.concatenate([np.ones(len(who)), np.full(labels, np.inf)])),
        constraints=LinearConstraint(rows, np.concatenate([[share], np.zeros(2 * labels)]), np.inf),
    )
    return float(answer.fun) if answer.success else np.inf


@pytest.mark.parametrize(("seed", "close"), [(93, 1.01), (38, 1.02)])
def test_families_are_close_to_the_best_sets_there_are(seed: int, close: float) -> None:
    """With labels, so that prefixes are no optimum by construction; also at the best length of rounds."""
    parts = Parts(instance(seed))
    fleet, version = parts.fleet, 2
    assert fleet.mix is not None
    family = parts.families[version]
    assert family is not None
    costs = fleet.by_version[version]
    lengths = np.unique((costs.fixed_s + costs.sample_s * fleet.samples)[costs.can_join])
    per_second = parts.prices.per_second
    for share in (0.2, 0.35, 0.5):
        enough = family.share >= share
        priced = family.energy_j + per_second * (family.time_s - parts.problem.overhead_s)
        ours = float(priced[enough].min()) - parts.problem.overhead_j
        near = [t for t in lengths if per_second * t < ours][-40:]
        best = min(cheapest_set_j(fleet, version, share, float(t)) + per_second * t for t in near)
        assert best * (1 - 1e-6) <= ours <= best * close


def test_favoured_round_times_come_first_and_all_if_there_is_room() -> None:
    distinct = np.linspace(1.0, 100.0, 100)
    assert (_thresholds(distinct, 100, None) == distinct).all()
    some = _thresholds(distinct, 20, np.array([57.5, 57.9, 31.0, 0.5]))
    assert {57.0, 31.0, 1.0, 100.0} <= set(some)  # 0.5 is shorter than any round
    assert SPREAD <= len(some) <= 20
    many = _thresholds(distinct, 20, distinct[::-1])
    assert {100.0, 99.0, 98.0, 90.0} <= set(many)
    assert many.min() == 1.0


def test_prefixes_count_what_a_round_of_them_costs() -> None:
    parts = Parts(instance(21))  # labels, parts of nodes and windows
    family = prefixes(parts.fleet, 1, parts.multipliers[:3])
    assert family is not None
    for row in np.random.default_rng(0).choice(len(family.share), 40):
        cost = parts.fleet.round_cost(1, family.used(int(row)))
        assert cost.time_s == pytest.approx(family.time_s[row])
        assert cost.energy_j == pytest.approx(family.energy_j[row])
        assert cost.share == pytest.approx(family.share[row])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(st.none(), st.lists(window, min_size=1, max_size=5)), min_size=1, max_size=6))
def test_windows_of_many_sets_are_those_of_each(lists: list[list[tuple[float, float]] | None]) -> None:
    base = instance(21)
    nodes = [
        replace(node, available=None if w is None else tuple(w))
        for node, w in zip(base.nodes, lists, strict=False)
    ]
    fleet = Fleet.of(replace(base, nodes=tuple(nodes)))
    sets = [list(range(k)) for k in range(1, len(nodes) + 1)] + [[k] for k in range(len(nodes))]
    begin = np.cumsum([0, *map(len, sets)])
    found = fleet.windows_of_many(np.concatenate(sets), begin[:-1], np.diff(begin))
    assert found == [fleet.common_windows(members) for members in sets]
