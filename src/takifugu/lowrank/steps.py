"""Sequences of any lengths as flat rows, one time step after another, longest first.

That is how torch's PackedSequence has them; a plain batch is the case of equal lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Steps:
    """How many sequences are alive at each time step, and which way time runs."""

    sizes: tuple[int, ...]
    reverse: bool = False

    @property
    def order(self) -> range:
        steps = range(len(self.sizes))
        return steps[::-1] if self.reverse else steps

    def split(self, flat: Tensor, dim: int = 0) -> Sequence[Tensor]:
        return torch.split_with_sizes(flat, self.sizes, dim)

    def rows(self, keep: bool) -> int:
        """How many rows a buffer needs: all, or those of one step if none is looked at again."""
        return sum(self.sizes) if keep else max(self.sizes)

    def places(self, flat: Tensor, keep: bool, dim: int = 0) -> Sequence[Tensor]:
        """Where in such a buffer each step writes."""
        return self.split(flat, dim) if keep else [flat.narrow(dim, 0, size) for size in self.sizes]

    def before(self, first: Tensor, flat: Tensor) -> Tensor:
        """For every row of `flat` the state one step earlier; `first` is the initial one."""
        rows, state, carry = self.split(flat), None, Carry(first)
        found: list[Sequence[Tensor]] = [()] * len(rows)
        for t in self.order:
            found[t] = carry.pieces(state, self.sizes[t])
            state = rows[t]
        return torch.cat([piece for pieces in found for piece in pieces])


class Carry:
    """Hands a state from step to step while sequences end or begin.

    `spare` holds the rows of sequences that begin later than the first step. Forward in time it is
    the initial state and what remains is the final state; for gradients it is the other way round.
    """

    def __init__(self, spare: Tensor) -> None:
        self.spare = spare
        self.ended: list[Tensor] = []

    def pieces(self, state: Tensor | None, size: int) -> Sequence[Tensor]:
        if state is None:
            return (self.spare[:size],)
        alive = state.shape[0]
        return (state[:size],) if size <= alive else (state, self.spare[alive:size])

    def __call__(self, state: Tensor | None, size: int) -> Tensor:
        """The state for a step with `size` sequences; None before the first step."""
        if state is not None:
            if state.shape[0] == size:
                return state
            if state.shape[0] > size:
                self.ended.append(state[size:])
        pieces = self.pieces(state, size)
        return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces))

    def rest(self, state: Tensor) -> Tensor:
        """The state of every sequence after its own last step."""
        return torch.cat([state, *reversed(self.ended)])


@dataclass(frozen=True)
class Projection:
    """An LSTM's hidden state is `U @ V` times the cell's output, if it projects: U (W, r), V (r, H)."""

    U: Tensor
    V: Tensor
