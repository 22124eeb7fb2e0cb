from __future__ import annotations

from typing import Any

import pytest

from takifugu.cost_notes import cost_notes


def problem(*speeds: dict[str, float] | None) -> dict[str, Any]:
    """Three versions, and a node for each table of speeds."""
    versions = [("small", 1e6), ("dense", 4e6), ("middle", 2e6)]
    nodes = [{"name": f"n{i}", "flops_per_s": 8e6} for i in range(len(speeds))]
    return {
        "versions": [{"name": name, "train_flops_per_sample": flops} for name, flops in versions],
        "nodes": [
            node if table is None else {**node, "samples_per_s": table}
            for node, table in zip(nodes, speeds, strict=True)
        ],
    }


def test_speeds_that_depart_from_flops_are_named_with_both_ratios() -> None:
    (note,) = cost_notes(problem({"dense": 2.0, "middle": 4.4, "small": 3.0}))
    assert note.startswith("small: 1.50 times the speed of dense")
    assert "4.00 times by FLOPs" in note
    slower = cost_notes(problem({"middle": 1.6, "small": 8.0}))  # dense by FLOPs: 2 samples a second
    assert [note.partition(" by")[0] for note in slower] == ["middle: 0.80 times the speed of dense"]


@pytest.mark.parametrize(("speed", "named"), [(1.62, 0), (1.58, 1), (2.38, 0), (2.42, 1)])
def test_a_fifth_is_the_limit(speed: float, named: int) -> None:
    assert len(cost_notes(problem({"dense": 1.0, "middle": speed, "small": 4.0}))) == named


def test_costs_by_flops_are_called_assumed() -> None:
    (note,) = cost_notes(problem(None, None))
    assert note.startswith(
        "assumed from FLOPs, not measured: speed relative to dense: small 4.00, middle 2.00"
    )
    (note,) = cost_notes(problem(None, {"dense": 1.0, "middle": 2.0}))
    assert "small 4.00, middle 2.00 on 1 of 2 nodes" in note


def test_one_version_has_nothing_to_compare() -> None:
    alone = problem(None)
    assert cost_notes({**alone, "versions": alone["versions"][:1]}) == []
