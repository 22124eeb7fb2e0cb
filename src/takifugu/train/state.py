"""What of a training run is kept, and how it comes back."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from torch import nn
from torch.optim import Optimizer

from takifugu.lowrank.surgery import apply_, structure_of
from takifugu.train.snapshot import (
    Snapshot,
    fill_model_,
    fill_optimizer_,
    model_tensors,
    optimizer_tensors,
)
from takifugu.train.standing import Standing

if TYPE_CHECKING:
    from takifugu.train.loop import Training


def state_of(training: Training, log_size: int = 0) -> Snapshot:
    """The run as it stands. Every process has to call it; the leader's is the one to keep."""
    module, optimizer = _plain(training)
    tensors, groups, plain = optimizer_tensors(module, optimizer)
    method_data, method_tensors = training.method.state_dict()
    tensors |= model_tensors(module)
    tensors |= {f"method.{name}": t.detach().cpu().contiguous() for name, t in method_tensors.items()}
    standing, scaler = training.standing, training.scaler
    carried = None if training.carry is None else [tensor.cpu() for tensor in training.carry]
    own = {"loss_sum": standing.loss_sum, "samples": standing.samples}
    everyone = training.processes.collected((carried, own))
    for rank, (carry, _) in enumerate(everyone):
        for index, tensor in enumerate(carry or ()):
            tensors[f"carry.{rank}.{index}"] = tensor.contiguous()
    header = {
        "standing": asdict(standing),
        "of_each": [of_one for _, of_one in everyone],
        "groups": groups,
        "plain_state": plain,
        "structure": structure_of(module).to_dict(),
        "method": method_data,
        "scaler": None if scaler is None else scaler.state_dict(),
        "events": training.events,
        "log_size": log_size,
    }
    return Snapshot(tensors, header)


def restore_(training: Training, snapshot: Snapshot) -> None:
    """Brings a new run to where the snapshot was taken; its model is fresh and in no wrapper."""
    header, rank = snapshot.header, training.processes.place.rank
    module = training.model
    training.method.load_state_dict(header["method"], snapshot.part("method"))
    training.method.rebuild_(module)
    apply_(module, snapshot.structure)
    module = training.laid_out(module.to(training.device))
    fill_model_(module, snapshot.part("model"))
    optimizer = training.fresh_optimizer(module)
    fill_optimizer_(module, optimizer, snapshot)
    plain = dict(module.named_parameters())
    training.model = training.wrap(module)
    if training.sharding == "fsdp":
        _shard_(optimizer, plain, training.model)
    training.optimizer = optimizer
    if training.scaler is not None:
        training.scaler.load_state_dict(header["scaler"])
    training.standing = Standing(**(header["standing"] | header["of_each"][rank]))
    kept = snapshot.part(f"carry.{rank}")
    training.carry = tuple(kept[str(i)].to(training.device) for i in range(len(kept))) or None
    training.events = list(header["events"])


def _plain(training: Training) -> tuple[nn.Module, Optimizer]:
    """Model and optimizer with whole tensors, whatever the model is wrapped in."""
    if training.sharding != "fsdp":
        return training.module, training.optimizer
    from takifugu.lowrank.sharded import Gathered

    gathered = Gathered(training.model)
    return gathered.module, gathered.optimizer(training.optimizer)


def _shard_(optimizer: Optimizer, plain: dict[str, nn.Parameter], model: nn.Module) -> None:
    """Lets an optimizer of plain parameters go on with the sharded ones of the same names."""
    from takifugu.lowrank.sharded import resharded_state

    sharded = dict(model.named_parameters())
    groups, state = resharded_state(optimizer, {plain[name]: sharded[name] for name in plain})
    for group, parameters in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = parameters
    optimizer.state.clear()
    optimizer.state.update(state)
