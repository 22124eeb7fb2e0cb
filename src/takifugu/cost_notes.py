"""Notes on what the costs of versions rest on: the nodes' own figures, or FLOPs, which is an assumption.

The planner and the report page both print them and do not import each other, so this module is below both.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

DEPARTS = 0.2
"""A measured speed that differs from the FLOPs' by more than this relative amount is reported."""


def cost_notes(problem: Mapping[str, Any]) -> list[str]:
    """Return lines that say what the costs of versions rest on.

    One line for each version that is priced by FLOPs alone on some node, and one for each whose speed by the
    nodes' figures differs from the FLOPs' by more than 20 %. `problem` is the content of a problem file.
    """
    versions, nodes = problem["versions"], problem["nodes"]
    if len(versions) < 2:
        return []
    # Speeds are relative to the largest version: as a rule the dense one.
    base = max(versions, key=lambda version: float(version["train_flops_per_sample"]))
    found, assumed = [], []
    for version in versions:
        name = version["name"]
        by_flops = base["train_flops_per_sample"] / version["train_flops_per_sample"]
        timed = [node for node in nodes if name in (node.get("samples_per_s") or {})]
        if version is base or by_flops == 1.0:
            continue
        if len(timed) < len(nodes):
            where = "" if not timed else f" on {len(nodes) - len(timed)} of {len(nodes)} nodes"
            assumed.append(f"{name} {by_flops:.2f}{where}")
        if not timed:
            continue
        speed = statistics.median(_seconds(node, base) / _seconds(node, version) for node in timed)
        if abs(speed / by_flops - 1.0) > DEPARTS:
            found.append(
                f"{name}: {speed:.2f} times the speed of {base['name']} by the nodes' samples_per_s, "
                f"{by_flops:.2f} times by FLOPs; the plan uses the former"
            )
    if assumed:
        found.append(
            f"assumed from FLOPs, not measured: speed relative to {base['name']}: {', '.join(assumed)}; "
            "`takifugu profile` measures it"
        )
    return found


def _seconds(node: Mapping[str, Any], version: Mapping[str, Any]) -> float:
    """Seconds for one sample."""
    speed = (node.get("samples_per_s") or {}).get(version["name"])
    return float(1.0 / speed if speed else version["train_flops_per_sample"] / node["flops_per_s"])
