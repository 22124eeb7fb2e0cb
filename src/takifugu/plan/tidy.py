"""The same rounds in an order that is easier to read and to carry out.

Searches care for totals, so a plan may go back and forth between two teams where either order costs the same.
Rounds of one version are brought together by team, small amounts of data first: with most data last a plan
ends no higher on most curves, and a small team shows more loss than its model is worth (docs/decisions/205).
An order counts only if it keeps every limit at no more energy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

from takifugu.plan.fleet import Fleet
from takifugu.plan.plan import Decision, Plan, meets_limits, replay
from takifugu.plan.problem import Problem

MOST_TRIES = 100

Block = tuple[Decision, int]
"""A decision, and how many rounds in a row it is taken. Equal decisions are one object: compared often."""


def teams(plan: Plan) -> int:
    """How many different ones, with their versions, a plan asks for."""
    known = {(d.version, id(d.used)): d for d in plan.decisions}  # most rounds share theirs with others
    return len({_team(decision) for decision in known.values()})


def tidied(problem: Problem, fleet: Fleet, plan: Plan, check: Callable[[], None]) -> Plan:
    """The plan with fewer changes of team, or as it is."""
    best, blocks = plan, _blocks(plan.decisions)
    if len(blocks) <= teams(plan):
        return plan

    def kept(candidate: Sequence[Block]) -> Plan | None:
        check()
        found = _until_met(problem, fleet, [d for d, count in candidate for _ in range(count)])
        return found if found is not None and found.energy_j <= best.energy_j * (1 + 1e-12) else None

    def share(block: Block) -> float:
        return fleet.round_cost(block[0].version, block[0].used).share

    ordered: list[Block] = []
    for _, stretch in groupby(blocks, key=lambda block: block[0].version):
        ordered += sorted(stretch, key=lambda block: (share(block), _team(block[0])))
    whole = _joined(ordered)
    if (found := kept(whole)) is not None:
        return found
    for _ in range(MOST_TRIES):  # one block at a time, while that goes
        for candidate in _closer(blocks):
            if (found := kept(candidate)) is not None:
                best, blocks = found, _blocks(found.decisions)
                break
        else:
            break
    return best


def _closer(blocks: Sequence[Block]) -> Iterator[list[Block]]:
    """Every way to bring a block to the next one of the same team, the nearest first."""
    pairs = []
    for place, (decision, _) in enumerate(blocks):
        for other in range(place + 2, len(blocks)):
            if blocks[other][0].version != decision.version:
                break
            if blocks[other][0] is decision:
                pairs.append((place, other))
                break
    for place, other in sorted(pairs, key=lambda pair: pair[1] - pair[0]):
        between, together = blocks[place + 1 : other], (blocks[place], blocks[other])
        for way in ((*between, *together), (*together, *between)):
            yield _joined([*blocks[:place], *way, *blocks[other + 1 :]])


def _until_met(problem: Problem, fleet: Fleet, decisions: Sequence[Decision]) -> Plan | None:
    """The plan of these decisions until the target is met; nothing if it is not, or breaks a limit."""
    plan = replay(problem, decisions, fleet)
    if plan is None:
        return None
    needed = next((n for n, row in enumerate(plan.rounds, start=1) if row.loss <= problem.loss_limit), None)
    if needed is None:
        return None
    if needed < len(decisions):
        plan = replay(problem, decisions[:needed], fleet)
    return plan if plan is not None and meets_limits(problem, plan) else None


def _team(decision: Decision) -> tuple[int, tuple[tuple[int, int], ...]]:
    return decision.version, tuple(sorted(decision.used.items()))


def _blocks(decisions: Sequence[Decision]) -> list[Block]:
    """One decision stands for all that are equal, so that they can be told by identity."""
    known: dict[tuple[int, tuple[tuple[int, int], ...]], Decision] = {}
    seen: dict[tuple[int, int], Decision] = {}
    for decision in decisions:  # most share their team already, and sorting thousands of nodes takes long
        key = (decision.version, id(decision.used))
        if key not in seen:
            seen[key] = known.setdefault(_team(decision), decision)
    return _joined([(seen[decision.version, id(decision.used)], 1) for decision in decisions])


def _joined(blocks: Sequence[Block]) -> list[Block]:
    joined: list[Block] = []
    for decision, count in blocks:
        if joined and joined[-1][0] is decision:
            joined[-1] = (decision, joined[-1][1] + count)
        else:
            joined.append((decision, count))
    return joined
