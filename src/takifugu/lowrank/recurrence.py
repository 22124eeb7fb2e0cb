"""The time loop of a factorized RNN layer, with its own backward pass.

Legend: a layer has G gates of width H and a hidden state h of width W (W = H unless an LSTM projects
it). Each gate's recurrent matrix is `U[g] @ V[g]` with U (G, H, r) and V (G*r, W), all V stacked, so
that a step costs one product with V and one batched product with U:

    P = h V^T,  gates[g] += P[g] U[g]^T,  then the cell's activations.

Sequences of any lengths lie one time step after another in flat rows, longest first, as in torch's
PackedSequence: N rows in all, `sizes[t]` of them at step t. Equal lengths are the case of equal
sizes. The input's share of the gates, (G, N, H), comes in ready-made for all steps at once.

Three things make it fast. Gate-major layout lets every product read and write its operands where
they lie. The backward loop is *linear* in the gradient of the state: all other terms are worked out
for all steps at once before it, straight into the buffer that becomes the gates' gradient. And the
gradients of U and V are one product each, after the loop.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from takifugu.errors import UsageError
from takifugu.lowrank.recurrence_plain import gru_plain, lstm_plain, rnn_plain
from takifugu.lowrank.steps import Carry, Projection, Steps

_sigmoid_backward = torch.ops.aten.sigmoid_backward
_tanh_backward = torch.ops.aten.tanh_backward

_MANY_STEPS = 16
"""From about here on a transposed copy of U saves more time than it takes (CPU, 1500 x 375)."""

_Gradient = tuple[Tensor | None, ...]


def lstm(
    gates: Tensor, h0: Tensor, c0: Tensor, U: Tensor, V: Tensor, projection: Projection | None, steps: Steps
) -> tuple[Tensor, Tensor, Tensor]:
    """(N, W) hidden states, and the last hidden and cell states. `gates` may be overwritten."""
    if is_traced():
        return lstm_plain(gates, h0, c0, U, V, projection, steps)
    U_p, V_p = (projection.U, projection.V) if projection else (None, None)
    keep = _recorded(gates, h0, c0, U, V, U_p, V_p)
    _, out, h, c = _LSTM.apply(gates, h0, c0, U, V, U_p, V_p, steps, keep)  # type: ignore[no-untyped-call]
    return out, h, c


def gru(
    gates: Tensor, h0: Tensor, U: Tensor, V: Tensor, bias: Tensor | None, steps: Steps
) -> tuple[Tensor, Tensor]:
    """(N, H) hidden states, and the last. `gates` may be overwritten.

    `bias` is the recurrent one of the gate n, the only one that cannot join the input's: the reset
    gate scales it.
    """
    if is_traced():
        return gru_plain(gates, h0, U, V, bias, steps)
    keep = _recorded(gates, h0, U, V, bias)
    _, out, h = _GRU.apply(gates, h0, U, V, bias, steps, keep)  # type: ignore[no-untyped-call]
    return out, h


def rnn(gates: Tensor, h0: Tensor, U: Tensor, V: Tensor, relu: bool, steps: Steps) -> tuple[Tensor, Tensor]:
    """(N, H) hidden states, and the last. `gates` may be overwritten."""
    if is_traced():
        return rnn_plain(gates, h0, U, V, relu, steps)
    keep = _recorded(gates, h0, U, V)
    out, h = _RNN.apply(gates, h0, U, V, relu, steps, keep)  # type: ignore[no-untyped-call]
    return out[0], h


def is_traced() -> bool:
    """Whether somebody compiles or exports: they want plain operations."""
    return torch.compiler.is_compiling() or torch.compiler.is_exporting()


def autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    """What autocast would lower products to on the tensor's device; None if it is off."""
    kind = tensor.device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def without_autocast(tensor: Tensor) -> AbstractContextManager[Any]:
    """In here every dtype is already decided."""
    kind = tensor.device.type
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()


def _recorded(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _first_order(backward: Callable[..., _Gradient]) -> Callable[..., _Gradient]:
    """Refuses to be differentiated again.

    Not torch's `once_differentiable`: it looks at the incoming gradients only, and a loss that is
    linear in the output would get a wrong second derivative without a word.
    """

    @functools.wraps(backward)
    def guarded(ctx: Any, *gradients: Tensor | None) -> _Gradient:
        if torch.is_grad_enabled():
            raise UsageError(
                "a factorized RNN has no second derivative (create_graph=True); densify it first, or "
                "leave it out with where="
            )
        return backward(ctx, *gradients)

    return guarded


class _Products:
    """The two products of a step, forward; `P` of every step is kept if a backward pass will come."""

    def __init__(self, U: Tensor, V: Tensor, steps: Steps, keep: bool) -> None:
        G, _, r = U.shape
        self.P = V.new_empty(steps.rows(keep), G * r)
        self._rows = steps.places(self.P, keep)
        self._by_gate = steps.places(self.P.view(self.P.shape[0], G, r).transpose(0, 1), keep, dim=1)
        self._V_t = V.mT
        # Read at every step: a copy in the product's own order pays for itself, if there are many.
        self.U_t = U.mT.contiguous() if len(steps.sizes) >= _MANY_STEPS else U.mT

    def project(self, t: int, h: Tensor) -> Tensor:
        torch.mm(h.to(self._V_t.dtype), self._V_t, out=self._rows[t])
        return self._by_gate[t]

    def add_(self, t: int, h: Tensor, gates: Tensor) -> None:
        # Not `baddbmm_`: FLOP counters know the operation only by this name.
        torch.baddbmm(gates, self.project(t, h), self.U_t, out=gates)


class _Gradients:
    """The two products of a step, backward, and the factors' gradients after the last one."""

    def __init__(self, U: Tensor, V: Tensor, P: Tensor, steps: Steps) -> None:
        G, _, r = U.shape
        dP = torch.empty_like(P)
        self._U, self._V, self._dP = U, V, dP
        self._P_by_gate = P.view(P.shape[0], G, r).transpose(0, 1)
        self._rows = steps.split(dP)
        self._by_gate = steps.split(dP.view(dP.shape[0], G, r).transpose(0, 1), 1)

    def through(self, t: int, d_gates: Tensor) -> Tensor:
        """The gradient that reaches the earlier hidden state through the gates of step t."""
        torch.bmm(d_gates, self._U, out=self._by_gate[t])
        return torch.mm(self._rows[t], self._V)

    def of_U(self, d_gates: Tensor) -> Tensor:
        return torch.bmm(d_gates.mT, self._P_by_gate)

    def of_V(self, h_before: Tensor) -> Tensor:
        return torch.mm(self._dP.mT, h_before.to(self._dP.dtype))


class _Incoming:
    """The gradient of a state: from its later use, from the layer's output, from the final state."""

    def __init__(self, d_out: Tensor | None, d_last: Tensor | None, like: Tensor, steps: Steps) -> None:
        self._out = None if d_out is None else steps.split(d_out)
        self._carry = Carry(torch.zeros_like(like) if d_last is None else d_last)
        self._sizes = steps.sizes

    def at(self, t: int, d_state: Tensor | None) -> Tensor:
        """A fresh tensor: the loops work on in it."""
        d_state = self._carry(d_state, self._sizes[t])
        return d_state.clone() if self._out is None else d_state + self._out[t]

    def rest(self, d_state: Tensor | None, like: Tensor) -> Tensor:
        assert d_state is not None
        return self._carry.rest(d_state).to(like.dtype)


class _LSTM(Function):
    """Gates in torch's order i, f, g, o: `c = f c + i g`, `h = o tanh(c)`, then the projection."""

    @staticmethod
    def forward(
        ctx: Any,
        gates: Tensor,
        h0: Tensor,
        c0: Tensor,
        U: Tensor,
        V: Tensor,
        U_p: Tensor | None,
        V_p: Tensor | None,
        steps: Steps,
        keep: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        N = gates.shape[1]
        h = c = Q = None
        with without_autocast(gates):
            products = _Products(U, V, steps, keep)
            out, cells = h0.new_empty(N, h0.shape[1]), c0.new_empty(steps.rows(keep), c0.shape[1])
            rows, hiddens, states = steps.split(gates, 1), steps.split(out), steps.places(cells, keep)
            if V_p is not None:
                Q = V_p.new_empty(steps.rows(keep), V_p.shape[0])
                inner = steps.places(Q, keep)
            carry_h, carry_c = Carry(h0), Carry(c0)
            for t in steps.order:
                h, c = carry_h(h, steps.sizes[t]), carry_c(c, steps.sizes[t])
                products.add_(t, h, rows[t])
                rows[t][:2].sigmoid_()
                i, f, g, o = rows[t].unbind()
                g.tanh_()
                o.sigmoid_()
                c = torch.mul(f, c, out=states[t]).add_(i * g)
                if U_p is None or V_p is None:
                    h = torch.tanh(c, out=hiddens[t]).mul_(o)
                else:
                    torch.mm((c.tanh() * o).to(V_p.dtype), V_p.mT, out=inner[t])
                    h = torch.mm(inner[t], U_p.mT, out=hiddens[t])
            assert h is not None
            assert c is not None
            last_h, last_c = carry_h.rest(h), carry_c.rest(c)
        ctx.mark_dirty(gates)
        ctx.set_materialize_grads(False)
        ctx.steps = steps
        if keep:
            ctx.save_for_backward(gates, out, cells, products.P, Q, h0, c0, U, V, U_p, V_p)
        return gates, out, last_h, last_c

    @staticmethod
    @_first_order
    def backward(
        ctx: Any, _: Tensor | None, d_out: Tensor | None, d_last_h: Tensor | None, d_last_c: Tensor | None
    ) -> _Gradient:
        steps: Steps = ctx.steps
        gates, out, cells, P, Q, h0, c0, U, V, U_p, V_p = ctx.saved_tensors
        need = ctx.needs_input_grad
        i, f, g, o = gates.unbind()
        dh = dc = dU_p = dV_p = None
        with without_autocast(gates):
            tanh_c = cells.tanh()
            # D starts as the derivative of c (for the gate o: of h) by each gate before activation.
            D = torch.empty_like(gates)
            _sigmoid_backward(g, i, grad_input=D[0])
            _sigmoid_backward(steps.before(c0, cells).to(f.dtype), f, grad_input=D[1])
            _tanh_backward(i, g, grad_input=D[2])
            _sigmoid_backward(tanh_c.to(o.dtype), o, grad_input=D[3])
            slope = _tanh_backward(o.to(tanh_c.dtype), tanh_c)
            gradients = _Gradients(U, V, P, steps)
            into_h, into_c = _Incoming(d_out, d_last_h, h0, steps), _Incoming(None, d_last_c, c0, steps)
            rows, of_c, of_h = steps.split(D, 1), steps.split(D[:3], 1), steps.split(D[3])
            forgets, slopes = steps.split(f), steps.split(slope)
            if Q is not None:
                d_hidden, dQ = torch.empty_like(out), torch.empty_like(Q)
                d_hiddens, d_inner = steps.split(d_hidden), steps.split(dQ)
            for t in reversed(steps.order):
                dh, dc = into_h.at(t, dh), into_c.at(t, dc)
                if Q is not None:
                    d_hiddens[t].copy_(dh)
                    dh = torch.mm(torch.mm(dh, U_p, out=d_inner[t]), V_p)
                dc.addcmul_(dh.to(dc.dtype), slopes[t])
                of_c[t].mul_(dc)
                of_h[t].mul_(dh)
                dc.mul_(forgets[t])
                dh = gradients.through(t, rows[t])
            dU = gradients.of_U(D) if need[3] else None
            dV = gradients.of_V(steps.before(h0, out)) if need[4] else None
            if Q is not None:
                dU_p = torch.mm(d_hidden.mT, Q) if need[5] else None
                dV_p = torch.mm(dQ.mT, (tanh_c * o).to(dQ.dtype)) if need[6] else None
        return D, into_h.rest(dh, h0), into_c.rest(dc, c0), dU, dV, dU_p, dV_p, None, None


class _GRU(Function):
    """Gates in torch's order r, z, n: `n = tanh(.. + r (W h + bias))`, `h = n + z (h - n)`."""

    @staticmethod
    def forward(
        ctx: Any,
        gates: Tensor,
        h0: Tensor,
        U: Tensor,
        V: Tensor,
        bias: Tensor | None,
        steps: Steps,
        keep: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        _, N, H = gates.shape
        h = None
        with without_autocast(gates):
            products = _Products(U, V, steps, keep)
            out, news = h0.new_empty(N, H), gates.new_empty(steps.rows(keep), H)
            rows, hiddens = steps.split(gates, 1), steps.split(out)
            new = steps.places(news, keep)
            U_rz, U_n = products.U_t[:2], products.U_t[2]
            carry = Carry(h0)
            for t in steps.order:
                h = carry(h, steps.sizes[t])
                P = products.project(t, h)
                rz = rows[t][:2]
                torch.baddbmm(rz, P[:2], U_rz, out=rz).sigmoid_()
                if bias is None:
                    torch.mm(P[2], U_n, out=new[t])
                else:
                    torch.addmm(bias, P[2], U_n, out=new[t])
                r, z, n = rows[t].unbind()
                n.addcmul_(r, new[t]).tanh_()
                h = torch.sub(h, n, out=hiddens[t]).mul_(z).add_(n)
            assert h is not None
            last = carry.rest(h)
        ctx.mark_dirty(gates)
        ctx.set_materialize_grads(False)
        ctx.steps = steps
        if keep:
            ctx.save_for_backward(gates, out, news, products.P, h0, U, V)
        return gates, out, last

    @staticmethod
    @_first_order
    def backward(ctx: Any, _: Tensor | None, d_out: Tensor | None, d_last: Tensor | None) -> _Gradient:
        steps: Steps = ctx.steps
        gates, out, news, P, h0, U, V = ctx.saved_tensors
        need = ctx.needs_input_grad
        r, z, n = gates.unbind()
        dh = None
        with without_autocast(gates):
            before = steps.before(h0, out)
            # D starts as the derivative of h by the gates before activation: r, z, n as the
            # recurrent side sees it (scaled by r), and n as the input side does.
            D = gates.new_empty(4, *r.shape)
            _tanh_backward(1 - z, n, grad_input=D[3])
            _sigmoid_backward(D[3] * news, r, grad_input=D[0])
            _sigmoid_backward((before - n).to(z.dtype), z, grad_input=D[1])
            torch.mul(D[3], r, out=D[2])
            gradients = _Gradients(U, V, P, steps)
            into = _Incoming(d_out, d_last, h0, steps)
            rows, keeps = steps.split(D, 1), steps.split(z)
            for t in reversed(steps.order):
                dh = into.at(t, dh)
                rows[t].mul_(dh)
                dh.mul_(keeps[t]).add_(gradients.through(t, rows[t][:3]))
            dU = gradients.of_U(D[:3]) if need[2] else None
            dV = gradients.of_V(before) if need[3] else None
            d_bias = D[2].sum(0) if need[4] else None
            D[2] = D[3]
        return D[:3], into.rest(dh, h0), dU, dV, d_bias, None, None


class _RNN(Function):
    """One gate, and its activation is the hidden state."""

    @staticmethod
    def forward(
        ctx: Any, gates: Tensor, h0: Tensor, U: Tensor, V: Tensor, relu: bool, steps: Steps, keep: bool
    ) -> tuple[Tensor, Tensor]:
        h = None
        with without_autocast(gates):
            products = _Products(U, V, steps, keep)
            rows, hiddens = steps.split(gates, 1), steps.split(gates[0])
            carry = Carry(h0)
            for t in steps.order:
                products.add_(t, carry(h, steps.sizes[t]), rows[t])
                h = hiddens[t].relu_() if relu else hiddens[t].tanh_()
            assert h is not None
            last = carry.rest(h)
        ctx.mark_dirty(gates)
        ctx.set_materialize_grads(False)
        ctx.steps, ctx.relu = steps, relu
        if keep:
            ctx.save_for_backward(gates, products.P, h0, U, V)
        return gates, last

    @staticmethod
    @_first_order
    def backward(ctx: Any, d_gates: Tensor | None, d_last: Tensor | None) -> _Gradient:
        steps: Steps = ctx.steps
        gates, P, h0, U, V = ctx.saved_tensors
        need = ctx.needs_input_grad
        dh = None
        with without_autocast(gates):
            D = (gates > 0).to(gates.dtype) if ctx.relu else 1 - gates.square()
            gradients = _Gradients(U, V, P, steps)
            into = _Incoming(None if d_gates is None else d_gates[0], d_last, h0, steps)
            rows = steps.split(D, 1)
            for t in reversed(steps.order):
                rows[t].mul_(into.at(t, dh))
                dh = gradients.through(t, rows[t])
            dU = gradients.of_U(D) if need[2] else None
            dV = gradients.of_V(steps.before(h0, gates[0])) if need[3] else None
        return D, into.rest(dh, h0), dU, dV, None, None, None
