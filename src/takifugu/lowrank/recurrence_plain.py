"""The time loops in plain operations, for compilers and exporters. Legend as in `recurrence`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from takifugu.lowrank.steps import Carry, Projection, Steps


def lstm_plain(
    gates: Tensor, h0: Tensor, c0: Tensor, U: Tensor, V: Tensor, projection: Projection | None, steps: Steps
) -> tuple[Tensor, Tensor, Tensor]:
    def step(given: Tensor, states: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        h, c = states
        i, f, g, o = (given + _recurrent(h, U, V)).unbind()
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        if projection is not None:
            h = h.to(V.dtype) @ projection.V.mT @ projection.U.mT
        return h, c

    out, (h, c) = _plain(step, gates, (h0, c0), steps)
    return out, h, c


def gru_plain(
    gates: Tensor, h0: Tensor, U: Tensor, V: Tensor, bias: Tensor | None, steps: Steps
) -> tuple[Tensor, Tensor]:
    def step(given: Tensor, states: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        (h,) = states
        recurrent = _recurrent(h, U, V)
        r, z = (given[:2] + recurrent[:2]).sigmoid().unbind()
        n = (given[2] + r * (recurrent[2] if bias is None else recurrent[2] + bias)).tanh()
        return (n + z * (h - n),)

    out, (h,) = _plain(step, gates, (h0,), steps)
    return out, h


def rnn_plain(
    gates: Tensor, h0: Tensor, U: Tensor, V: Tensor, relu: bool, steps: Steps
) -> tuple[Tensor, Tensor]:
    def step(given: Tensor, states: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        total = (given + _recurrent(states[0], U, V))[0]
        return (total.relu() if relu else total.tanh(),)

    out, (h,) = _plain(step, gates, (h0,), steps)
    return out, h


def _recurrent(h: Tensor, U: Tensor, V: Tensor) -> Tensor:
    P = h.to(V.dtype) @ V.mT
    return torch.bmm(P.view(P.shape[0], *U.shape[::2]).transpose(0, 1), U.mT)


def _plain(
    step: Callable[[Tensor, tuple[Tensor, ...]], tuple[Tensor, ...]],
    gates: Tensor,
    states: tuple[Tensor, ...],
    steps: Steps,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    carries = [Carry(state) for state in states]
    given = steps.split(gates, 1)
    out: dict[int, Tensor] = {}
    now: Sequence[Tensor | None] = [None] * len(states)
    for t in steps.order:
        size = steps.sizes[t]
        now = step(given[t], tuple(carry(state, size) for carry, state in zip(carries, now, strict=True)))
        out[t] = now[0]
    last = tuple(carry.rest(state) for carry, state in zip(carries, now, strict=True) if state is not None)
    return torch.cat([out[t] for t in range(len(steps.sizes))]), last
