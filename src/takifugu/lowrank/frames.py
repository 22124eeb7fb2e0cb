"""What a model stands in while it trains (nothing, DDP, FSDP2), and how it changes there: all of it or none.

`frame_of` finds the frame. `module` is the plain model whose layers are looked at and decomposed; `change_`
puts the new layers in place, mends the optimizer, and returns the model to go on with. If anything fails on
the way, model and optimizer are as they were.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from takifugu.errors import UsageError
from takifugu.lowrank import ddp
from takifugu.lowrank.optimizer_state import Gradients, StateReport, carry_
from takifugu.lowrank.snapshot import Snapshot
from takifugu.lowrank.surgery import Swap, commit_
from takifugu.lowrank.together import Alone, Together

Wrap = Callable[[nn.Module], nn.Module]
"""Takes the plain model, returns it wrapped: `fully_shard`, or a function of the user's."""


class CommunicationHook(Protocol):
    """Whatever must be attached again when a wrapper has been built anew."""

    def attach_(self, model: Any) -> None:
        """Registers itself on the new wrapper. State that belongs to the old gradients must not survive."""


class Bare:
    """A model in no wrapper."""

    def __init__(self, model: nn.Module) -> None:
        self.model = self.module = model
        self.crew = Alone()

    def change_(
        self,
        optimizer: Optimizer,
        swaps: Sequence[Swap],
        way: str,
        gradients: Gradients | None = None,
        look: Callable[[], object] = lambda: None,
    ) -> tuple[nn.Module, StateReport]:
        """The model to go on with, and what became of the state. `look` is called on the changed layers."""
        undo = _Undo(self.module, optimizer, way)
        try:
            commit_(self.module, swaps)
            self.crew.all_or_none(look)
            kept = self.crew.all_or_none(lambda: carry_(self.module, optimizer, swaps, way, gradients))
            return self.crew.all_or_none(self._rebuilt), kept
        except BaseException:
            undo()
            raise

    def _rebuilt(self) -> nn.Module:
        return self.module


class Replicated(Bare):
    """In DistributedDataParallel, which knows the parameters it was built with: it is rebuilt.

    Without `wrap` the new wrapper gets the old one's options and communication hook.
    """

    def __init__(
        self, model: DistributedDataParallel, wrap: Wrap | None, hook: CommunicationHook | None
    ) -> None:
        super().__init__(model)
        self.old, self.module = model, model.module
        self.wrap, self.hook = wrap, hook
        if distributed.get_world_size(model.process_group) > 1:
            self.crew = Together(model.process_group)

    def _rebuilt(self) -> nn.Module:
        rebuilt = wrapped_again(self.old, self.module, self.wrap, carries_hook=self.hook is None)
        if self.hook is not None:
            self.hook.attach_(rebuilt)
        return rebuilt


class Sharded(Bare):
    """In `fully_shard`: a plain copy is changed and sharded anew; see `takifugu.lowrank.sharded`."""

    def __init__(self, model: nn.Module, wrap: Wrap) -> None:
        from takifugu.lowrank.sharded import Gathered

        super().__init__(model)
        self.wrap = wrap
        self.gathered = Gathered(model)
        self.module = self.gathered.module
        if distributed.get_world_size(self.gathered.group) > 1:
            self.crew = Together(self.gathered.group)

    def change_(
        self,
        optimizer: Optimizer,
        swaps: Sequence[Swap],
        way: str,
        gradients: Gradients | None = None,
        look: Callable[[], object] = lambda: None,
    ) -> tuple[nn.Module, StateReport]:
        from takifugu.lowrank.sharded import resharded_state

        if way == "calibrated":
            raise UsageError("state='calibrated' is not supported for a model sharded by fully_shard")
        stand_in = self.gathered.optimizer(optimizer, swaps)
        commit_(self.module, swaps)
        self.crew.all_or_none(look)
        kept = self.crew.all_or_none(lambda: carry_(self.module, stand_in, swaps, way))
        names = dict(self.module.named_parameters())
        rebuilt = self.crew.all_or_none(lambda: self.wrap(self.module))
        new_of = self.crew.all_or_none(lambda: self.gathered.check(names, rebuilt))
        groups, state = self.crew.all_or_none(lambda: resharded_state(stand_in, new_of))
        for group, mended, parameters in zip(
            optimizer.param_groups, stand_in.param_groups, groups, strict=True
        ):
            group.update(mended, params=parameters)
        optimizer.state.clear()
        optimizer.state.update(state)
        return rebuilt, kept


def plain_view(model: nn.Module) -> nn.Module:
    """The model as layers to look at; gathered from all processes if it is sharded."""
    if isinstance(model, DistributedDataParallel):
        inner: nn.Module = model.module
        return inner
    if is_sharded(model):
        from takifugu.lowrank.sharded import gathered

        return gathered(model)
    return model


def is_sharded(model: nn.Module) -> bool:
    """Whether `fully_shard` has been at the model; not if nobody has imported it (it is slow to load)."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and any(isinstance(module, fsdp.FSDPModule) for module in model.modules())


def check_frame(model: nn.Module, wrap: Wrap | None, hook: CommunicationHook | None = None) -> None:
    """An error if what the model stands in could not be built anew."""
    if isinstance(model, DistributedDataParallel):
        if _carries_options(wrap):
            ddp.check_rebuildable(model, carries_hook=hook is None)
    elif hook is not None:
        raise UsageError(
            "hook= is attached to DistributedDataParallel, but the model is not wrapped in it; "
            "leave hook= out, or wrap the model"
        )
    elif wrap is None and is_sharded(model):
        raise UsageError(
            "the model is sharded by fully_shard; give WarmStart wrap=, which takes the plain model "
            "and shards it as you did, such as wrap=fully_shard"
        )


def frame_of(model: nn.Module, wrap: Wrap | None, hook: CommunicationHook | None = None) -> Bare:
    check_frame(model, wrap, hook)
    if isinstance(model, DistributedDataParallel):
        return Replicated(model, wrap, hook)
    if wrap is not None and is_sharded(model):
        return Sharded(model, wrap)
    return Bare(model)


def wrapped_again(
    old: DistributedDataParallel, module: nn.Module, wrap: Wrap | None, *, carries_hook: bool = False
) -> nn.Module:
    """Return the module in a new DistributedDataParallel: by `wrap`, or with the old one's options."""
    if wrap is None or _carries_options(wrap):
        rebuilt: nn.Module = ddp.rebuilt(old, module, carries_hook=carries_hook)
        return rebuilt
    return wrap(module)


def _carries_options(wrap: Wrap | None) -> bool:
    """Return whether DistributedDataParallel is rebuilt with its own options.

    Also if `wrap` is the bare class, which would drop all of them.
    """
    return wrap is None or wrap is DistributedDataParallel


_RETIRED = (
    "this is the model from before the switch, whose wrapper does not know the new parameters; go on with "
    "the model that WarmStart returned: model = warm(model, optimizer, ...)"
)


def retire_(model: nn.Module) -> None:
    """Make the model raise if it is trained on: its wrapper does not know the new parameters."""

    def refuse(module: nn.Module, args: Any) -> None:
        if module.training and torch.is_grad_enabled():
            raise UsageError(_RETIRED)

    # The new wrapper shares the dict, so that handles of the user's hooks keep working.
    model._forward_pre_hooks = copy.copy(model._forward_pre_hooks)
    model.register_forward_pre_hook(refuse, prepend=True)


class _Undo:
    """Puts a model and its optimizer back to where they were before the layers were changed."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, way: str) -> None:
        # Only state="calibrated" runs the model, which moves buffers and drops gradients.
        self.before = Snapshot(model, values=model.buffers() if way == "calibrated" else ())
        self.gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
        self.optimizer = optimizer
        self.groups = [dict(group) for group in optimizer.param_groups]
        self.state = dict(optimizer.state)

    def __call__(self) -> None:
        self.before.restore_()
        for parameter, gradient in self.gradients:
            if parameter.grad is not gradient:
                parameter.grad = gradient
        for group, former in zip(self.optimizer.param_groups, self.groups, strict=True):
            group.update(former)
        self.optimizer.state.clear()
        self.optimizer.state.update(self.state)
