"""The processes of a run: who is there, what they agree on, and how a model is spread over them.

One process needs none of this; the null object keeps one code path.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import distributed, nn
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from takifugu.errors import RunError, TakifuguError, UsageError, near_misses
from takifugu.train.tasks.base import Place, Sums

SHARDINGS = ("ddp", "fsdp")

T = TypeVar("T")


class LeaderFailed(RunError):
    """The leading process could not go on, and has said why."""


def under_launcher() -> bool:
    """Whether torchrun, or whoever sets its variables, has started this process as one of several."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


@contextmanager
def joined(device: str, timeout_s: float = 1800.0) -> Iterator[Processes]:
    """The processes this one belongs to; leaves the group at the end.

    They wait for each other that long at most: the leader may have to download first.
    """
    if not under_launcher():
        yield Processes(Place(), device)
        return
    device = _own_device(device)
    backend = "nccl" if device.startswith("cuda") else "gloo"
    timeout = timedelta(seconds=timeout_s)
    try:
        store, rank, world = next(rendezvous("env://", timeout=timeout))
    except ValueError as error:
        raise UsageError(
            f"RANK and WORLD_SIZE are set, as torchrun does, but not all that belongs to it ({error}); "
            "start it with torchrun, or unset them"
        ) from None
    # Workers that were started again must not find the addresses that those before them have left.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = PrefixStore(f"takifugu/{attempt}", store)
    distributed.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
    try:
        yield Together(Place(distributed.get_rank(), distributed.get_world_size()), device)
    finally:
        distributed.destroy_process_group()


@dataclass(frozen=True)
class Processes:
    """One process alone."""

    place: Place
    device: str

    @property
    def leads(self) -> bool:
        """Whether this is the one that writes files and talks."""
        return self.place.rank == 0

    def leader_first(self, make: Callable[[], T]) -> T:
        """What everyone makes, the leader before the others: it may download. If it fails, all do."""
        return make()

    def leader_only(self, make: Callable[[], T]) -> T | None:
        """What only the leader has. If it fails, all do."""
        return make()

    def most(self, values: Sequence[int]) -> list[int]:
        """The largest of each value over all processes."""
        return list(values)

    def total(self, sums: Sums) -> Sums:
        return dict(sums)

    def collected(self, value: Any) -> list[Any]:
        """Everyone's value, in the order of ranks."""
        return [value]

    def from_leader(self, content: bytes | None) -> bytes | None:
        """The leader's bytes, to everyone."""
        return content

    def same_buffers_(self, module: nn.Module) -> None:
        """The leader's buffers (statistics of batch norm), to everyone."""

    def wrapped(self, module: nn.Module, sharding: str) -> nn.Module:
        return module

    def sent_bytes(self, model: nn.Module, sharding: str) -> int:
        """What this process sends in a step for parameters and gradients, counted, not measured."""
        return 0


class Together(Processes):
    """Several processes in torch's default group."""

    def leader_first(self, make: Callable[[], T]) -> T:
        made = self.leader_only(make)
        return made if made is not None else make()

    def leader_only(self, make: Callable[[], T]) -> T | None:
        made, failure = None, None
        if self.leads:
            try:
                made = make()
            except TakifuguError as error:
                failure = error
        if self.most([int(failure is not None)])[0]:
            raise failure or LeaderFailed("the leading process failed; its message says why")
        return made

    def most(self, values: Sequence[int]) -> list[int]:
        tensor = torch.tensor(values, dtype=torch.int64, device=self.device)
        distributed.all_reduce(tensor, distributed.ReduceOp.MAX)
        return [int(value) for value in tensor]

    def total(self, sums: Sums) -> Sums:
        keys = sorted(sums)
        # Doubles where the device has them; sums of one evaluation fit into either.
        exact = torch.float32 if self.device.startswith("mps") else torch.float64
        tensor = torch.tensor([sums[key] for key in keys], dtype=exact, device=self.device)
        distributed.all_reduce(tensor)
        return dict(zip(keys, tensor.tolist(), strict=True))

    def collected(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.place.world
        distributed.all_gather_object(values, value)
        return values

    def from_leader(self, content: bytes | None) -> bytes | None:
        size = self.most([-1 if content is None or not self.leads else len(content)])[0]
        if size < 0:
            return None
        if self.leads:
            assert content is not None
            tensor = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(self.device)
        else:
            tensor = torch.empty(size, dtype=torch.uint8, device=self.device)
        distributed.broadcast(tensor, 0)
        return bytes(tensor.cpu().numpy().tobytes())

    def same_buffers_(self, module: nn.Module) -> None:
        for buffer in module.buffers():
            distributed.broadcast(buffer, 0)

    def wrapped(self, module: nn.Module, sharding: str) -> nn.Module:
        if sharding == "none":  # torchrun may start one process alone
            return module
        if sharding == "fsdp":
            from torch.distributed.fsdp import fully_shard

            fully_shard(module)  # in place: the same object, of another class
            return module
        from torch.nn.parallel import DistributedDataParallel

        own = [torch.device(self.device)] if self.device.startswith("cuda") else None
        return DistributedDataParallel(module, device_ids=own)

    def sent_bytes(self, model: nn.Module, sharding: str) -> int:
        size = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
        # A ring sends (N-1)/N of the size for a gather or a scatter. All-reduce is one of each; a sharded
        # model gathers its weights twice and scatters its gradients once.
        passes = 3 if sharding == "fsdp" else 2
        return passes * size * (self.place.world - 1) // self.place.world


def check_sharding(sharding: str) -> None:
    if sharding not in SHARDINGS:
        raise UsageError(
            f"--sharding {sharding!r} is not known{near_misses(sharding, SHARDINGS)}; "
            f"one of {', '.join(SHARDINGS)}"
        )


def _own_device(device: str) -> str:
    if device != "cuda":
        return device
    own = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    torch.cuda.set_device(own)
    return own
