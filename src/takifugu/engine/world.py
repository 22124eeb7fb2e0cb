"""The true fleet of a simulation: what the profile says, and how reality parts from it.

Nothing in here has a state. Every draw is a hash of what it is for (the seed, the node, the round), so an
outcome does not depend on who else takes part, on the order of calls, or on where a run was resumed.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from statistics import NormalDist
from typing import Any

from takifugu.errors import RunError, UsageError
from takifugu.plan.problem import Node, Problem, Version

SLOWEST = (1.5, 3.0)
"""Between these factors a slowed node takes longer to compute."""


@dataclass(frozen=True)
class Spread:
    """Standard deviations of the logarithm: 0.1 is about ten percent either way.

    `bias` is drawn once for the whole fleet and once for each quantity. Without it the errors of a hundred
    nodes would average out, and every predictor would look better than it is.
    """

    speed: float = 0.10
    link: float = 0.15
    energy: float = 0.10
    bias: float = 0.05

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not 0.0 <= value <= 2.0:
                raise UsageError(f"spread {name} = {value:g} is not between 0 and 2; 0.1 is usual")

    def times(self, factor: float) -> Spread:
        return Spread(**{name: value * factor for name, value in asdict(self).items()})


NO_SPREAD = Spread(0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Outcome:
    """What became of one member in one round."""

    status: str
    """ok, slow or dropped"""
    time_s: float
    """Until its update is back at the server; of a dropped node, until it would have been."""
    energy_j: float
    """Of computing and transfer; waiting for others is not in it."""
    bytes: float


@dataclass(frozen=True)
class World:
    """`nodes` are the true ones, in the problem's own terms."""

    seed: int
    nodes: Mapping[str, Node]
    spread: Spread = NO_SPREAD
    dropout: float = 0.0
    slowdown: float = 0.0
    versions: Mapping[str, Version] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        for name, value in (("dropout", self.dropout), ("slowdown", self.slowdown)):
            if not 0.0 <= value <= 1.0:
                raise UsageError(f"{name} {value:g} is not a share of rounds between 0 and 1; 0.01 is usual")
        if self.dropout + self.slowdown > 1.0:
            raise UsageError(f"dropout {self.dropout:g} and slowdown {self.slowdown:g} add up to more than 1")

    @classmethod
    def draw(
        cls,
        problem: Problem,
        seed: int,
        spread: Spread | None = None,
        dropout: float = 0.01,
        slowdown: float = 0.03,
    ) -> World:
        """True nodes, log-normal around the profile, and how often they fail or slow down."""
        spread = Spread() if spread is None else spread
        nodes = {node.name: _true(node, seed, spread) for node in problem.nodes}
        return cls(seed, nodes, spread, dropout, slowdown, {v.name: v for v in problem.versions})

    @classmethod
    def as_profile(cls, problem: Problem) -> World:
        """The fleet exactly as the problem describes it, without faults."""
        return cls.draw(problem, 0, NO_SPREAD, 0.0, 0.0)

    def outcome(self, round: int, node: str, version: str, samples: int) -> Outcome:
        if node not in self.nodes:
            raise RunError(f"there is no node {node!r} in this world; its nodes are the problem's")
        true, kind = self.nodes[node], self.versions[version]
        transfer_s, compute_s = true.transfer_s(kind), true.sample_s(kind) * samples
        transfer_j, compute_j = true.transfer_j(kind), true.sample_j(kind) * samples
        fate = uniform("fate", self.seed, round, node)
        if fate < self.dropout:
            # It has the model and has trained; only the way back is missing.
            return Outcome(
                "dropped", transfer_s + compute_s, transfer_j / 2.0 + compute_j, kind.payload_bytes
            )
        both_ways = 2.0 * kind.payload_bytes
        if fate < self.dropout + self.slowdown:
            least, most = SLOWEST
            factor = least + (most - least) * uniform("slow", self.seed, round, node)
            # The work, and so its energy, stays the same: something else had the processor meanwhile.
            return Outcome("slow", transfer_s + compute_s * factor, transfer_j + compute_j, both_ways)
        return Outcome("ok", transfer_s + compute_s, transfer_j + compute_j, both_ways)

    def to_dict(self) -> dict[str, Any]:
        """Enough to draw it again from the same problem."""
        return {
            "seed": self.seed,
            "spread": asdict(self.spread),
            "dropout": self.dropout,
            "slowdown": self.slowdown,
        }


def uniform(*what: object) -> float:
    """A number in (0, 1) that is the same on every machine for the same things."""
    digest = hashlib.sha256("/".join(map(str, what)).encode()).digest()
    return ((int.from_bytes(digest[:8], "big") >> 11) + 0.5) * 2.0**-53


_NORMAL = NormalDist()


def _true(node: Node, seed: int, spread: Spread) -> Node:
    def factor(what: str, deviation: float) -> float:
        if deviation == 0.0 and spread.bias == 0.0:
            return 1.0
        own = _NORMAL.inv_cdf(uniform("node", seed, node.name, what))
        shared = _NORMAL.inv_cdf(uniform("fleet", seed, what))
        return math.exp(deviation * own + spread.bias * shared)

    speed, energy = factor("speed", spread.speed), factor("energy", spread.energy)
    return replace(
        node,
        flops_per_s=node.flops_per_s * speed,
        samples_per_s={name: rate * speed for name, rate in node.samples_per_s.items()},
        joules_per_flop=node.joules_per_flop * energy,
        joules_per_sample={name: joules * energy for name, joules in node.joules_per_sample.items()},
        up_bytes_per_s=node.up_bytes_per_s * factor("up", spread.link),
        down_bytes_per_s=node.down_bytes_per_s * factor("down", spread.link),
        latency_s=node.latency_s * factor("latency", spread.link),
        joules_per_byte=node.joules_per_byte * factor("radio", spread.energy),
        idle_watts=node.idle_watts * factor("idle", spread.energy),
    )
