"""Averages of a model's weights (EMA, SWA) through the switch.

An average W' of the weights is near W, but its singular vectors need not be near W's: signs are arbitrary,
and neighbouring ones mix. Factors taken from each on its own could not be averaged later on. Any orthogonal Q
gives the same product, `(A' Q)(Q^T B')`, so we take the one that brings the average's factors nearest to the
model's (orthogonal Procrustes): the product is still the best of its rank, and averaging goes on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from takifugu.errors import UsageError
from takifugu.lowrank.decompose import Decomposer, Factors
from takifugu.lowrank.frames import Wrap, is_sharded, wrapped_again
from takifugu.lowrank.snapshot import Snapshot
from takifugu.lowrank.surgery import Swap, build_swaps, commit_
from takifugu.lowrank.together import Alone
from takifugu.structure import Structure


class Remembered:
    """Decomposes, and keeps what it found: the average's factors are made in the same order."""

    def __init__(self, decompose: Decomposer) -> None:
        self.decompose = decompose
        self.found: list[Factors] = []

    def __call__(self, W: Tensor, r: int) -> Factors:
        self.found.append(self.decompose(W, r))
        return self.found[-1]

    def aligned(self) -> Decomposer:
        models = deque(self.found)

        def decompose(W: Tensor, r: int) -> Factors:
            return align(self.decompose(W, r), models.popleft())

        return decompose


def align(factors: Factors, near: Factors) -> Factors:
    """The same product, with the factors turned as near as possible to `near`."""
    A, B = factors.A.double(), factors.B.double()
    P, _, Q_t = torch.linalg.svd(A.mT @ near.A.to(A) + B @ near.B.to(B).mT)
    Q = P @ Q_t
    return Factors((A @ Q).to(factors.A), (Q.mT @ B).to(factors.B), factors.error)


class Average:
    """One average: prepared while the model can still refuse, changed once it has changed."""

    def __init__(self, ema: nn.Module, wrap: Wrap | None) -> None:
        self.outer = ema if isinstance(ema, AveragedModel) else None
        inner: nn.Module = ema.module if isinstance(ema, AveragedModel) else ema
        self.wrap, self.old = wrap, inner if isinstance(inner, DistributedDataParallel) else None
        self.module: nn.Module = inner.module if isinstance(inner, DistributedDataParallel) else inner
        if is_sharded(self.module):
            raise UsageError(
                "an average that is sharded by fully_shard is not supported; average whole weights"
            )
        if self.old is not None and self.outer is None:
            raise UsageError("the average is wrapped in DistributedDataParallel; pass ema.module")
        self.swaps: Iterable[Swap] = ()
        self._before: Snapshot | None = None

    def prepare_(
        self, structure: Structure, decompose: Decomposer, crew: Alone, like: Sequence[Swap]
    ) -> None:
        """`like` are the model's own swaps."""
        swaps = crew.all_or_none(lambda: build_swaps(self.module, structure))
        if _filled(swaps) != _filled(like):
            raise UsageError(
                "the average has other factorized layers than the model, so their factors could not be "
                "averaged; make it a copy of the model as it is now"
            )
        crew.fill_(swaps, decompose)
        self.swaps = swaps

    def change_(self) -> None:
        self._before = Snapshot(self.module if self.outer is None else self.outer)
        commit_(self.module, list(self.swaps))
        if self.outer is not None and self.old is not None:
            self.outer.module = wrapped_again(self.old, self.module, self.wrap)

    def restore_(self) -> None:
        """Undo `change_`, also one that failed half way."""
        if self._before is not None:
            self._before.restore_()


def _filled(swaps: Iterable[Swap]) -> list[str]:
    return [swap.name for swap in swaps if swap.unfilled is not None]
