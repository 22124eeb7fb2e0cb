"""Replays a plan file by the formulas of the problem format and says whether it keeps its word.

Independent on purpose: it reads plain dictionaries, works on single numbers with `math` alone, and
imports nothing of the planner, so that it cannot share a mistake with the solver.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

LIMIT_SLACK = 1e-9
CLAIM_SLACK = 1e-6
"""How far the plan's own figures may lie from the replayed ones, relatively."""

CHECKED = (
    "each round: version, switch, nodes, samples used, memory, windows, start, time, energy and loss",
    "the target loss, the deadline and the round cap",
    "the plan's energy, time and loss",
    "gap and status against energy_j and lower_bound_j",
)
SAMPLES_CHECKED = "the number of curve samples in which the target is reached"


@dataclass(frozen=True)
class Verdict:
    ok: bool
    complaints: tuple[str, ...]
    energy_j: float
    time_s: float
    loss: float
    samples_reached: int | None = None
    """In how many of the curves' samples the replayed plan reaches the target; None: there are none."""
    checked: tuple[str, ...] = CHECKED
    not_checked: tuple[str, ...] = ()


STATUSES = ("optimal", "within_tolerance", "feasible", "infeasible", "unknown")


def verify(problem: Mapping[str, Any], plan: Mapping[str, Any]) -> Verdict:
    """`problem`: the canonical dictionary (nodes inline). `plan`: the plan file's dictionary."""
    complaints: list[str] = []
    say = complaints.append
    versions = {v["name"]: v for v in problem["versions"]}
    nodes = {n["name"]: n for n in problem["nodes"]}
    switches = {(s["from"], s["to"]): s for s in problem.get("switches", [])}
    extra = problem.get("round", {})
    version, loss = problem["start"]["version"], float(problem["start"]["loss"])
    clock, energy = float(problem["start"].get("time_s", 0.0)), 0.0
    rounds = plan.get("rounds")
    if not isinstance(rounds, list):
        return Verdict(False, ("the plan has no list of rounds",), energy, clock, loss)

    count = max((len(v["curve"].get("samples", ())) for v in versions.values()), default=0)
    sampled = [loss] * count
    cap = problem["target"].get("max_rounds")
    if cap is not None and len(rounds) > cap:
        say(f"{len(rounds)} rounds, at most {cap} are allowed")
    for number, row in enumerate(rounds, start=1):
        here = f"round {number}"
        if not isinstance(row, dict):
            say(f"{here}: is {row!r}, not a table with version and nodes")
            break
        name, used = row.get("version"), row.get("nodes")
        if not isinstance(name, str) or name not in versions:
            say(f"{here}: there is no version {name!r}")
            break
        if not isinstance(used, dict) or not used:
            say(f"{here}: no node takes part")
            break
        if strangers := [n for n in used if n not in nodes]:
            say(f"{here}: there is no node {strangers[0]!r}")
            break
        kind = versions[name]
        switch_s = switch_j = 0.0
        if name != version:
            switch = switches.get((version, name))
            if switch is None:
                say(f"{here}: there is no switch from {version!r} to {name!r}")
                break
            switch_s, switch_j = switch.get("time_s", 0.0), switch.get("energy_j", 0.0)
            loss += switch.get("loss_jump", 0.0)
            sampled = [x + switch.get("loss_jump", 0.0) for x in sampled]
            version = name
        refused = {m: c for m, amount in used.items() if (c := _cannot(nodes[m], kind, amount, problem))}
        if refused:
            complaints.extend(f"{here}: {member} {complaint}" for member, complaint in refused.items())
            break  # such a round has no figures to compare with
        times = {member: _seconds(nodes[member], kind, amount) for member, amount in used.items()}
        slowest = max(times.values())
        length = slowest + extra.get("overhead_s", 0.0)
        joules = switch_j + extra.get("overhead_j", 0.0)
        for member, amount in used.items():
            waiting = nodes[member].get("idle_watts", 0.0) * (slowest - times[member])
            joules += _joules(nodes[member], kind, amount) + waiting
        start = _start([nodes[m].get("available") for m in used], clock + switch_s, length)
        if start is None:
            say(f"{here}: its members share no window of {length:g} s after {clock + switch_s:g} s")
            break
        everything = sum(n["samples"] for n in nodes.values())
        effective, curve = _effective(problem, used), kind["curve"]
        drawn = [{"kind": curve["kind"], **row} for row in curve.get("samples", ())] or [curve] * count
        loss = _after(loss, curve, effective, everything)
        sampled = [_after(x, c, effective, everything) for x, c in zip(sampled, drawn, strict=True)]
        clock = start + length
        energy += joules
        claims = {"start_s": start, "time_s": length + switch_s, "energy_j": joules, "loss": loss}
        for key, value in claims.items():
            if not _close(row.get(key), value):
                say(f"{here}: {key} is given as {row.get(key)!r}, replayed {value!r}")

    target, deadline = problem["target"]["loss"], problem["target"]["deadline_s"]
    if loss > target + LIMIT_SLACK * abs(target):
        say(f"loss {loss:g} at the end, the target is {target:g}")
    if rounds and clock > deadline + LIMIT_SLACK * abs(deadline):
        say(f"ends at {clock:g} s, the deadline is {deadline:g} s")
    for key, value in {"energy_j": energy, "time_s": clock, "loss": loss}.items():
        if not _close(plan.get(key), value):
            say(f"{key} is given as {plan.get(key)!r}, replayed {value!r}")
    complaints.extend(_claims(plan, energy))
    reached = sum(x <= target + LIMIT_SLACK * abs(target) for x in sampled) if count else None
    complaints.extend(_sample_claims(plan, reached, count))
    checked = (*CHECKED, SAMPLES_CHECKED) if plan.get("samples") is not None else CHECKED
    bound = plan.get("lower_bound_j")
    left = () if bound is None else (f"that no plan needs less than lower_bound_j = {bound!r}",)
    return Verdict(not complaints, tuple(complaints), energy, clock, loss, reached, checked, left)


def _claims(plan: Mapping[str, Any], energy: float) -> Iterator[str]:
    """What status, bound and gap say, against each other and the replayed energy."""
    status, bound, gap = plan.get("status"), plan.get("lower_bound_j"), plan.get("gap")
    if status is not None and status not in STATUSES:  # rounds alone claim nothing
        yield f"status {status!r} is not one of {', '.join(STATUSES)}"
    if bound is None:
        if status in ("optimal", "within_tolerance"):
            yield f"status is {status}, but the file has no lower_bound_j"
        if gap is not None:
            yield f"gap is given as {gap!r}, but the file has no lower_bound_j"
        return
    if not _number(bound) or bound > energy + LIMIT_SLACK * abs(energy):
        yield f"lower_bound_j {bound!r} is above the energy {energy!r}"
        return
    real = (energy - bound) / energy if energy > 0 else 0.0
    if gap is None or not _number(gap) or abs(gap - real) > CLAIM_SLACK:
        yield f"gap is given as {gap!r}, from the energy and the bound it is {real:g}"
    if status == "optimal" and real > 2 * LIMIT_SLACK:
        yield f"status is optimal, and the gap is {real:g}; it may be at most {LIMIT_SLACK:g}"


def _sample_claims(plan: Mapping[str, Any], reached: int | None, count: int) -> Iterator[str]:
    """What the file says of the curves' samples, against the replay."""
    claim = plan.get("samples")
    if claim is None:
        return
    if not isinstance(claim, dict) or reached is None:
        yield f"samples is given as {claim!r}, but the problem's curves have {count} samples"
        return
    for key, value in (("count", count), ("reached", reached)):
        if claim.get(key) != value:
            yield f"samples.{key} is given as {claim.get(key)!r}, replayed {value!r}"
    confidence = claim.get("confidence")
    if confidence is None:
        return
    if not _number(confidence) or not 0 < confidence <= 1:
        yield f"samples.confidence is given as {confidence!r}; it must be above 0 and at most 1"
    elif reached < math.ceil(confidence * count - LIMIT_SLACK):
        yield (
            f"reaches the target in {reached} of {count} samples, "
            f"samples.confidence is given as {confidence:g}"
        )


def _number(value: object) -> bool:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond any float
        return False


def _close(claimed: Any, value: float) -> bool:
    return _number(claimed) and abs(claimed - value) <= CLAIM_SLACK * max(abs(value), 1e-12)


def _cannot(
    node: Mapping[str, Any], version: Mapping[str, Any], amount: Any, problem: Mapping[str, Any]
) -> str:
    parts, own = problem.get("data", {}).get("parts", 1), node["samples"]
    whole = isinstance(amount, int) and not isinstance(amount, bool)
    if not whole or amount not in {-((-k * own) // parts) for k in range(1, parts + 1)}:
        return f"cannot use {amount!r} of its {own} samples in {parts} parts"
    have, need = node.get("memory_bytes"), version.get("memory_bytes")
    if have is not None and need is not None and have < need * (1 - LIMIT_SLACK):
        return f"has {have:g} bytes of memory, {version['name']!r} needs {need:g}"
    return ""


def _seconds(node: Mapping[str, Any], version: Mapping[str, Any], amount: int) -> float:
    measured = node.get("samples_per_s", {}).get(version["name"])
    compute = (
        amount / measured if measured else version["train_flops_per_sample"] * amount / node["flops_per_s"]
    )
    payload = version["payload_bytes"]
    there_and_back = payload / node["down_bytes_per_s"] + payload / node["up_bytes_per_s"]
    return float(compute + there_and_back + 2 * node["latency_s"])


def _joules(node: Mapping[str, Any], version: Mapping[str, Any], amount: int) -> float:
    measured = node.get("joules_per_sample", {}).get(version["name"])
    each = version["train_flops_per_sample"] * node["joules_per_flop"] if measured is None else measured
    return float(each * amount + 2 * version["payload_bytes"] * node["joules_per_byte"])


def _effective(problem: Mapping[str, Any], used: Mapping[str, int]) -> float:
    amount = float(sum(used.values()))
    weight = problem.get("data", {}).get("label_weight", 0.0)
    if weight == 0:
        return amount
    nodes = {n["name"]: n for n in problem["nodes"]}
    everyone = [sum(column) for column in zip(*(n["labels"] for n in nodes.values()), strict=True)]
    mixed = [0.0] * len(everyone)
    for name, count in used.items():
        own = nodes[name]["labels"]
        for label, samples in enumerate(own):
            mixed[label] += count * samples / sum(own)
    distance = 0.5 * sum(abs(m / amount - e / sum(everyone)) for m, e in zip(mixed, everyone, strict=True))
    return float(amount * (1 - weight * distance))


def _after(loss: float, curve: Mapping[str, Any], effective: float, everything: float) -> float:
    share = effective / everything
    try:
        rise = (everything / effective) ** curve.get("data_exponent", 0.5) - 1
    except OverflowError:
        rise = math.inf
    gain = curve.get("data_gain", 0.0)
    asymptote = curve["floor"] + (gain * rise if gain else 0.0)
    if loss <= asymptote:
        return loss
    above = loss - asymptote
    if curve["kind"] == "exponential":
        return float(asymptote + above * math.exp(-curve["rate"] * share))
    scale, exponent = curve["scale"], curve["exponent"]
    try:
        return float(asymptote + scale * ((above / scale) ** (-1 / exponent) + share) ** -exponent)
    except OverflowError:  # so close to the asymptote that the round moves nothing
        return loss


def _start(windows: list[Any], ready: float, length: float) -> float | None:
    """The earliest common start: it is `ready` or the opening of some window."""
    limited = [w for w in windows if w is not None]
    for start in sorted({ready, *(a for w in limited for a, _ in w if a > ready)}):
        if all(any(a <= start and start + length <= b + LIMIT_SLACK * abs(b) for a, b in w) for w in limited):
            return float(start)
    return None
