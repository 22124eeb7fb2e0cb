"""`WarmStart`: dense to low-rank in the middle of training, in the user's own loop.

    warm = tk.WarmStart(rank=0.25, warmup=10)
    for epoch in range(epochs):
        model = warm(model, optimizer, epoch=epoch)
        ...

One call per epoch (or per step). When a stage is due the model changes in place and so do the optimizer's
parameter groups and state. DistributedDataParallel is rebuilt with its own options and communication hook;
a model sharded by `fully_shard` is sharded again through `wrap`.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from takifugu.errors import UsageError, near_misses
from takifugu.lowrank import unused_gradients
from takifugu.lowrank.averages import Average, Remembered
from takifugu.lowrank.candidates import Where, check_where, find, refuse_adapters, require_module
from takifugu.lowrank.choice import check_examples, check_schemes, structure_from, survey
from takifugu.lowrank.coverage import warn_if_little
from takifugu.lowrank.factorized import Factorized
from takifugu.lowrank.frames import (
    Bare,
    CommunicationHook,
    Wrap,
    check_frame,
    frame_of,
    is_sharded,
    plain_view,
    retire_,
)
from takifugu.lowrank.optimizer_state import Gradients, StateReport, check_way, mendable
from takifugu.lowrank.ranks import Fixed, StableRank, follows_from_shapes, rule_for
from takifugu.lowrank.report import FactorReport, factor_report
from takifugu.lowrank.rewarm import Rewarm
from takifugu.lowrank.stability import StableRanks
from takifugu.lowrank.surgery import build_swaps, decomposer
from takifugu.structure import Structure

AUTO = "auto"
_OPTIONS = ("scheme", "force", "example_input", "only_if_faster")


@dataclass(frozen=True)
class SwitchReport:
    """One switch: when, what became of the layers, and of the optimizer's state."""

    at: int
    unit: str
    layers: FactorReport | None
    """None if the model went back to dense."""
    state: StateReport
    structure: Structure

    def __str__(self) -> str:
        what = "dense again" if self.layers is None else self.layers.summary()
        return f"{self.unit} {self.at}: {what}; {self.state}"


class WarmStart:
    """Switches a model's structure at given epochs or steps, and carries the optimizer along.

    Args:
        rank: anything `factorize_` takes; "stable" takes each layer's stable rank at the switch, scaled
            by its value at the start if the warm-up was followed from there (Cuttlefish).
        warmup: epochs or steps (whichever the calls count) to train dense; "auto" switches when
            the stable ranks have settled.
        stages: several switches instead of one: pairs of when and rank, such as
            `[(5, 0.5), (10, 0.25), (30, None)]`; None is back to dense.
        where, scheme, svd, force, example_input, only_if_faster: as for `factorize_`.
        state: what becomes of the optimizer's state, see `takifugu.lowrank.optimizer_state`.
        wrap: takes the plain model and returns it wrapped; needed for `fully_shard`. DistributedDataParallel
            needs none: it is rebuilt with the options it has. Either way the wrapper is a new object: use
            what the call returns.
        hook: a communication hook, attached again to every new DistributedDataParallel. Without it the
            wrapper's own hook is registered again, if it keeps no state.
        rewarm: optimizer steps over which the learning rate comes back after each switch (a second warm-up,
            as large batches need), or a `Rewarm` that also says from which share of it.
    """

    def __init__(
        self,
        rank: Any = 0.25,
        warmup: int | str = 10,
        where: Where = None,
        *,
        stages: Sequence[tuple[int, Any]] | None = None,
        state: str = "auto",
        wrap: Wrap | None = None,
        hook: CommunicationHook | None = None,
        rewarm: int | Rewarm = 0,
        svd: str = "exact",
        settled: float = 0.02,
        **options: Any,
    ) -> None:
        check_way(state)
        decomposer(svd)
        check_where(where)
        _check_options(options)
        self.stages = _checked_stages(stages if stages is not None else [(warmup, rank)])
        self.where, self.state, self.svd = where, state, svd
        self.wrap, self.hook = wrap, hook
        self.rewarm = rewarm if isinstance(rewarm, Rewarm) else Rewarm(rewarm)
        self.options = options
        self.followed = StableRanks(settled) if self._follows else None
        self.done = 0
        self.reports: list[SwitchReport] = []
        self._unit: str | None = None
        self._seen: int | None = None
        self._low_rank = False  # what the last switch made of the model
        self._known: int | None = None  # id of the model that is known to be of that kind
        self._retired: weakref.ref[nn.Module] | None = None  # the wrapper that the last switch replaced

    @property
    def switched(self) -> bool:
        """Whether all stages are behind."""
        return self.done == len(self.stages)

    @property
    def report(self) -> SwitchReport | None:
        """The last switch."""
        return self.reports[-1] if self.reports else None

    def __call__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        epoch: int | None = None,
        step: int | None = None,
        gradients: Gradients | None = None,
        ema: nn.Module | Sequence[nn.Module] = (),
    ) -> nn.Module:
        """Switches if a stage is due; returns the model to go on with.

        Args:
            gradients: for `state="calibrated"`: runs a forward and a backward pass on a batch.
            ema: averages of the model (`torch.optim.swa_utils.AveragedModel`, or plain copies), which get the
                same structure, in place, with factors that can be averaged with the model's.
        """
        require_module(model)
        now = self._now(epoch, step)
        optimizer = mendable(optimizer)
        if self._seen is None:
            self._check_first(model)
        self._check_model(model)
        self.rewarm.follow_(optimizer)
        unused_gradients.follow_(optimizer)
        if self.followed is not None and not self.switched and now != self._seen:
            force = bool(self.options.get("force", False))
            self.followed.observe(plain_view(model), self.where, self._example, force=force)
        self._seen = now  # a trainer that resumes within an epoch announces it a second time
        due = [s for s in range(self.done, len(self.stages)) if self._is_due(self.stages[s][0], now)]
        if not due:
            return model
        frame = frame_of(model, self.wrap, self.hook)
        averages = [Average(copy, self.wrap) for copy in ([ema] if isinstance(ema, nn.Module) else ema)]
        return self._switch_(frame, optimizer, due[-1], now, gradients, averages)

    def _switch_(
        self,
        frame: Bare,
        optimizer: Optimizer,
        stage: int,
        now: int,
        gradients: Gradients | None,
        averages: Sequence[Average],
    ) -> nn.Module:
        rank = self.stages[stage][1]
        report: FactorReport | None = None
        module = frame.module

        def chosen() -> Structure:
            nonlocal report
            if rank is None:
                return Structure()
            verdicts = survey(module, self._rule(rank), self.where, rerank=True, **self.options)
            structure = structure_from(module, verdicts)
            if frame.crew.rank == 0:  # one warning, not one per process
                warn_if_little(module, verdicts, self.where, stacklevel=4)
            report = factor_report(module, verdicts, structure, self._example, self.where)
            return structure

        structure = frame.crew.agreed(chosen)
        swaps = frame.crew.all_or_none(lambda: build_swaps(module, structure))
        frame.crew.all_or_none(lambda: unused_gradients.warn_of_unused(optimizer, swaps))
        decompose = Remembered(decomposer(self.svd))
        errors = frame.crew.fill_(swaps, decompose)
        for average in averages:
            average.prepare_(structure, decompose.aligned(), frame.crew, swaps)

        def complete() -> None:
            nonlocal report
            if report is not None:
                report = report.completed(module, errors, self._example)

        undo = ExitStack()
        try:
            for average in averages:
                undo.callback(average.restore_)
                frame.crew.all_or_none(average.change_)
            rebuilt, kept = frame.change_(optimizer, swaps, self.state, gradients, look=complete)
        except BaseException:
            undo.close()
            raise
        if rebuilt is not frame.model:
            retire_(frame.model)
            self._retired = weakref.ref(frame.model)
        self.rewarm.begin_()
        self.done = stage + 1
        self._low_rank, self._known = not structure.is_dense, id(rebuilt)
        self.reports.append(SwitchReport(now, self._unit or "epoch", report, kept, structure))
        return rebuilt

    def _check_first(self, model: nn.Module) -> None:
        """What would fail at the switch whatever is learned until then fails before training."""
        check_frame(model, self.wrap, self.hook)
        inner = model.module if isinstance(model, DistributedDataParallel) else model
        refuse_adapters(inner)
        if callable(self.where):  # a function may look at the weights of the moment
            return
        find(inner, self.where)
        if is_sharded(model) or "only_if_faster" in self.options or any(map(is_lazy, model.parameters())):
            return
        for _, rank in self.stages:
            if rank is not None and follows_from_shapes(rule_for(rank)):
                verdicts = survey(inner, rank, self.where, rerank=True, **self.options)
                if not (isinstance(model, DistributedDataParallel) and distributed.get_rank()):
                    warn_if_little(inner, verdicts, self.where, stacklevel=3)

    def _check_model(self, model: nn.Module) -> None:
        """A second model, or one that was not loaded before the states were, would stay dense silently."""
        if self._retired is not None and self._retired() is model:
            raise UsageError(
                "WarmStart was called with the model from before the switch: the return value of the call "
                "that switched was not used; write model = warm(model, optimizer, ...) and train that model"
            )
        if not self._low_rank or id(model) == self._known:
            return
        if not any(isinstance(part, Factorized) for part in model.modules()):
            raise UsageError(
                "this WarmStart has made its model low-rank already, but the one it is called with is dense; "
                "use a WarmStart for each model, and to resume load the model first (tk.load)"
            )
        self._known = id(model)

    # ---- when ---------------------------------------------------------------------------------------

    def _now(self, epoch: int | None, step: int | None) -> int:
        if (epoch is None) == (step is None):
            raise UsageError("call it with either epoch= or step=, and always the same of the two")
        unit, now = ("epoch", epoch) if epoch is not None else ("step", step)
        if self._unit not in (None, unit):
            raise UsageError(f"called with {unit}= after {self._unit}=; count in one of the two throughout")
        self._unit = unit
        assert now is not None
        return now

    def _is_due(self, at: int | str, now: int) -> bool:
        if at == AUTO:
            assert self.followed is not None
            return self.followed.settled
        assert isinstance(at, int)
        return now >= at

    @property
    def _follows(self) -> bool:
        return any(at == AUTO or rank == "stable" for at, rank in self.stages)

    # ---- how far --------------------------------------------------------------------------------------

    def _rule(self, rank: Any) -> Any:
        if rank == "stable" and self.followed is not None:
            return StableRank(scales=self.followed.scales)
        return rank

    @property
    def _example(self) -> Any:
        gate = self.options.get("only_if_faster")
        return gate if gate is not None else self.options.get("example_input")

    # ---- resuming -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Plain data: which stages are behind, and what was followed."""
        return {
            "done": self.done,
            "unit": self._unit,
            "seen": self._seen,
            "low_rank": self._low_rank,
            "followed": None if self.followed is None else self.followed.state_dict(),
            "rewarm": self.rewarm.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        missing = {"done", "unit", "followed"} - set(state)
        if missing:
            raise UsageError(f"this is not the state of a WarmStart: it lacks {sorted(missing)[0]!r}")
        if not 0 <= int(state["done"]) <= len(self.stages):
            raise UsageError(
                f"the state has {state['done']} stages behind, this WarmStart has {len(self.stages)}"
            )
        self.done, self._unit, self._seen = int(state["done"]), state["unit"], state.get("seen")
        self._low_rank, self._known = bool(state.get("low_rank", False)), None
        self.rewarm.load_state_dict(state.get("rewarm", {}))
        if self.followed is not None and state["followed"] is not None:
            self.followed.load_state_dict(state["followed"])


def _check_options(options: Mapping[str, Any]) -> None:
    """As for the rank: a mistake shows now, not after hours of warm-up."""
    for name in options:
        if name not in _OPTIONS:
            raise UsageError(f"WarmStart has no option {name!r}{near_misses(name, _OPTIONS)}")
    check_schemes(options.get("scheme"))
    check_examples(options.get("example_input"), options.get("only_if_faster"))


def _checked_stages(stages: Sequence[tuple[int | str, Any]]) -> tuple[tuple[int | str, Any], ...]:
    if not isinstance(stages, Sequence) or not stages:
        raise UsageError(f"stages={stages!r}; give a list of pairs of when and rank, such as [(5, 0.25)]")
    checked: list[tuple[int | str, Any]] = []
    for stage in stages:
        if not isinstance(stage, tuple | list) or len(stage) != 2:
            raise UsageError(f"a stage {stage!r}; use pairs of when and rank, such as (5, 0.25)")
        at, rank = stage
        if at == AUTO:
            if len(stages) > 1:
                raise UsageError('warmup="auto" decides about one switch; give numbers for several stages')
        elif isinstance(at, bool) or not isinstance(at, int) or at < 0:
            raise UsageError(f"a stage at {at!r}; use an epoch or step number from 0 on, or 'auto'")
        elif checked and at <= checked[-1][0]:  # type: ignore[operator]
            raise UsageError(f"stages must come in order, but {at} follows {checked[-1][0]}")
        if rank is not None:
            rule = rule_for(rank)  # a mistake shows now, not after hours of warm-up
            rank = rule if rule == Fixed(1) else rank  # warned of once is enough
        checked.append((at, rank))
    return tuple(checked)
