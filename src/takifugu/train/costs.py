"""What versions cost to train: step times measured on this machine, and what they say of other nodes.

FLOPs tell how much there is to compute, not how long it takes: small matrices leave a processor waiting.
Where a node has no figures of its own, its versions are priced by the ratio of step times measured here, at
the workload's batch size.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from takifugu import durable
from takifugu.errors import DataError, TakifuguError, UsageError
from takifugu.lowrank.surgery import apply_
from takifugu.measure import machine
from takifugu.train.ladder import DENSE, Rung
from takifugu.train.round import RoundSpec, Samples, train_round

MEASURED, FLOPS = "measured", "flops"
EACH_S, ERROR, BUDGET_S = 1.0, 0.01, 20.0
"""Each version is timed for so many seconds at least, until its median is known within this relative error,
or until the budget for all versions is used up."""
_STEPS, _CALL_S = 8, 0.1
"""Steps of a timed call: enough that what a round costs beside its steps hardly counts, and fewer where a
step takes long."""

FORMAT = "takifugu.costs/1"


@dataclass(frozen=True)
class StepTimes:
    """Training steps of each version, timed in turns on this machine."""

    turns: machine.Turns
    steps: int
    """Steps of one call."""
    batch_size: int
    threads: int

    def timing(self, version: str) -> machine.Timing:
        """The time of one step."""
        return self.turns.timing(version).divided(self.steps)


@dataclass(frozen=True)
class Speedup:
    """How many times faster than the dense version a version trains."""

    measured: float
    error: float
    """Relative, of the measured one."""
    flops: float
    """As the FLOPs say."""
    count: int
    """Timed calls."""


@dataclass(frozen=True)
class Costs:
    """The speed of each version, measured on this machine."""

    speedups: Mapping[str, Speedup]
    threads: int
    batch_size: int

    @classmethod
    def of(cls, times: StepTimes, rungs: Sequence[Rung]) -> Costs:
        dense = rungs[0]
        found = {}
        for rung in rungs[1:]:
            ratio, error = times.turns.speedup(rung.name, dense.name)
            flops = dense.train_flops_per_sample / rung.train_flops_per_sample
            found[rung.name] = Speedup(ratio, error, flops, times.turns.timing(rung.name).count)
        return cls(found, times.threads, times.batch_size)

    def rounded(self, to: float) -> Costs:
        """The measured ratios rounded, so that a little noise does not change what follows from them."""
        return replace(
            self,
            speedups={
                name: replace(one, measured=max(to, round(one.measured / to) * to))
                for name, one in self.speedups.items()
            },
        )

    def to_dict(self) -> dict[str, Any]:
        return {"format": FORMAT, **asdict(self)}

    @classmethod
    def load(cls, path: Path) -> Costs:
        try:
            data = durable.read_json(path)
            speedups = {name: Speedup(**one) for name, one in data["speedups"].items()}
            return cls(speedups, data["threads"], data["batch_size"])
        except (TakifuguError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{path}: is damaged ({error}); delete the file to measure again") from error

    def save(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            durable.write_json(path, self.to_dict())
        except OSError as error:
            raise UsageError(f"{path}: cannot be written ({error.strerror}); choose another folder") from None

    def describe(self) -> str:
        """One line: the ratios with their errors, and how they were measured."""
        ratios = ", ".join(
            f"{name} {one.measured:.2f} (+-{one.error:.1%}; by FLOPs {one.flops:.2f})"
            for name, one in self.speedups.items()
        )
        threads = f"{self.threads} thread{'s' if self.threads > 1 else ''}"
        how = f"{threads}, batches of {self.batch_size}"
        return f"times the speed of {DENSE}, measured on this machine ({how}): {ratios}"

    def fill(self, node: Mapping[str, Any], rungs: Sequence[Rung]) -> dict[str, Any]:
        """The node with a speed and an energy for every version it has no own figures for.

        Its dense speed and energy, scaled by the measured ratio. Energy follows time: power under load is
        taken to be the same for all versions.
        """
        names = [rung.name for rung in rungs]
        flops = rungs[0].train_flops_per_sample
        own_speed, own_joules = (dict(node.get(key) or {}) for key in ("samples_per_s", "joules_per_sample"))
        if all(name in own_speed and name in own_joules for name in names):
            return dict(node)
        speed, joules = dict(own_speed), dict(own_joules)
        speed.setdefault(names[0], node["flops_per_s"] / flops)
        joules.setdefault(names[0], node["joules_per_flop"] * flops)
        for name in names[1:]:
            speed.setdefault(name, speed[names[0]] * self.speedups[name].measured)
            joules.setdefault(name, joules[names[0]] * speed[names[0]] / speed[name])
        return {**node, "samples_per_s": speed, "joules_per_sample": joules, "source": "estimated"}


def check_costs(costs: str) -> None:
    if costs not in (MEASURED, FLOPS):
        raise UsageError(f"costs {costs!r} is not known; one of {MEASURED}, {FLOPS}")


def time_steps(
    model: nn.Module,
    rungs: Sequence[Rung],
    samples: Samples,
    spec: RoundSpec,
    budget_s: float | None = None,
) -> StepTimes:
    """Times short rounds, optimizer and all, of every version in turns. The model is not touched."""
    budget_s = BUDGET_S if budget_s is None else budget_s
    calls: dict[str, Callable[[], object]] = {}
    one_s = machine.in_turns({DENSE: _round_of(model, rungs[0], samples, spec, 1)}, least=2, most=2)
    steps = min(max(int(_CALL_S / one_s.timing(DENSE).median_s), 1), _STEPS)
    for rung in rungs:
        calls[rung.name] = _round_of(model, rung, samples, spec, steps)
    turns = machine.in_turns(calls, each_s=EACH_S, error=ERROR, budget_s=budget_s)
    return StepTimes(turns, steps, spec.batch_size, torch.get_num_threads())


def _round_of(
    model: nn.Module, rung: Rung, samples: Samples, spec: RoundSpec, steps: int
) -> Callable[[], object]:
    batches = samples.take([i % len(samples) for i in range(steps * spec.batch_size)])
    version = copy.deepcopy(model)
    apply_(version, rung.structure)
    start = {name: tensor.clone() for name, tensor in version.state_dict().items()}

    def one_round() -> object:
        version.load_state_dict(start)  # always the same round: weights that drift could diverge
        return train_round(version, batches, spec, 0)

    return one_round
