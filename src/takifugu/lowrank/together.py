"""The switch on several processes: decompositions shared out, the same factors everywhere, all or none.

Every process holds the same weights. Rank 0's structure is everyone's (timings may differ between
machines). Each decomposition is done by one process and broadcast; what is left is the price of the
largest share. If one process fails, all of them raise the same error and keep the old model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import distributed, nn

from takifugu.errors import LayerError
from takifugu.lowrank.decompose import Decomposer
from takifugu.lowrank.factorized import Factorized
from takifugu.lowrank.surgery import Swap, fill_
from takifugu.structure import Structure

T = TypeVar("T")


class Alone:
    """One process: nothing to agree on."""

    rank = 0

    def agreed(self, make: Callable[[], Structure]) -> Structure:
        return make()

    def fill_(self, swaps: Sequence[Swap], decompose: Decomposer) -> dict[str, float]:
        return fill_(swaps, decompose)

    def all_or_none(self, action: Callable[[], T]) -> T:
        """Does it, if it can be done everywhere; an error on any process is everyone's."""
        return action()


class Together(Alone):
    """Several processes of a process group."""

    def __init__(self, group: Any = None) -> None:
        self.group = group
        self.rank = distributed.get_rank(group)
        self.size = distributed.get_world_size(group)

    def agreed(self, make: Callable[[], Structure]) -> Structure:
        """Rank 0's structure; an error on any rank is everyone's."""
        made = self.all_or_none(make)
        texts: list[Any] = [made.to_json()]
        distributed.broadcast_object_list(texts, self._source(0), group=self.group)
        return Structure.from_json(texts[0])

    def fill_(self, swaps: Sequence[Swap], decompose: Decomposer) -> dict[str, float]:
        owners = shares([swap.cost for swap in swaps], self.size)
        mine = [swap for swap, owner in zip(swaps, owners, strict=True) if owner == self.rank]
        errors = self.all_or_none(lambda: fill_(mine, decompose))
        for swap, owner in zip(swaps, owners, strict=True):
            if swap.unfilled is not None:
                assert isinstance(swap.new, Factorized)
                for parameter in swap.new.factor_parameters():
                    # Dense and in one piece: a channels_last factor is broadcast as it lies in memory.
                    whole = parameter.data.contiguous()
                    distributed.broadcast(whole, self._source(owner), group=self.group)
                    parameter.data.copy_(whole)
        gathered: list[Any] = [None] * self.size
        told = (errors, _digest([swap.new for swap in swaps]))
        distributed.all_gather_object(gathered, told, group=self.group)
        if len({digest for _, digest in gathered}) > 1:
            raise LayerError(
                "the processes hold different factors after the switch; make sure that all start from "
                "the same weights (DistributedDataParallel does)"
            )
        return {name: error for part, _ in gathered for name, error in part.items()}

    def all_or_none(self, action: Callable[[], T]) -> T:
        done: list[T] = []
        failure: Exception | None = None
        try:
            done.append(action())
        except Exception as error:  # whatever it is, the others must hear of it
            failure = error
        messages: list[Any] = [None] * self.size
        told = None if failure is None else f"{type(failure).__name__}: {failure}"
        distributed.all_gather_object(messages, told, group=self.group)
        failed = [(rank, message) for rank, message in enumerate(messages) if message is not None]
        if failed:
            rank, message = failed[0]
            raise LayerError(
                f"the switch failed on rank {rank} ({message}); every process keeps the old model"
            ) from failure
        return done[0]

    def _source(self, rank: int) -> int:
        return rank if self.group is None else distributed.get_global_rank(self.group, rank)


def shares(costs: Sequence[int], processes: int) -> list[int]:
    """Who does what: the costliest first, each to whoever has least to do. The same on every process."""
    load = [0] * processes
    owners = [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        owners[index] = min(range(processes), key=lambda p: (load[p], p))
        load[owners[index]] += costs[index]
    return owners


def _digest(modules: Sequence[nn.Module]) -> str:
    digest = hashlib.sha256()
    for module in modules:
        for parameter in module.parameters():
            data = parameter.detach().cpu().contiguous().reshape(-1)
            digest.update(data.view(torch.uint8).numpy().data if data.numel() else b"")
    return digest.hexdigest()
