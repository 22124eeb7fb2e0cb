"""Factorized LSTM, GRU and RNN: every gate's matrix on its own, as the paper does.

Legend: a matrix `weight_ih_l0` holds G gates (LSTM 4, GRU 3, RNN 1) of H x n each. Gate g becomes
`U[g] @ V[g]`, all of one rank r: `weight_ih_l0_u` is (G, H, r), and `weight_ih_l0_v` is (G*r, n), the V
of all gates stacked, so that one product serves them all. An LSTM's projection `weight_hr_l0` is one
matrix: `weight_hr_l0_u` (W, r), `weight_hr_l0_v` (r, H).

The input side is two products over all time steps at once; `recurrence` walks through time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from takifugu.errors import UsageError
from takifugu.lowrank import recurrence
from takifugu.lowrank.decompose import Factors
from takifugu.lowrank.factorized import Factorized, Pairs, Unfolding, empty_like_weight, hollow, product
from takifugu.lowrank.steps import Projection, Steps

_OPTIONS = (
    "mode",
    "input_size",
    "hidden_size",
    "num_layers",
    "bias",
    "batch_first",
    "dropout",
    "bidirectional",
    "proj_size",
)
"""What other people's code reads of an RNN; all of them are plain values."""

State = Any
"""As torch hands it around: a tensor, or for an LSTM the pair of hidden and cell states."""


class _FactorizedRecurrent(Factorized):
    dense: ClassVar[type[nn.RNNBase]]
    gates: ClassVar[int]
    states: ClassVar[tuple[str, ...]] = ("hidden",)

    mode: str
    input_size: int
    hidden_size: int
    num_layers: int
    bias: bool
    batch_first: bool
    dropout: float
    bidirectional: bool
    proj_size: int

    # ---- looking at a dense module --------------------------------------------------------------

    @classmethod
    def takes(cls, module: nn.Module) -> bool:
        return isinstance(module, cls.dense)

    @classmethod
    def obstacle(cls, module: nn.Module, scheme: str) -> str | None:
        for name in _matrices(module):
            if not isinstance(module._parameters.get(name), nn.Parameter):
                return f"{name} is not a plain parameter (weight norm, pruning?)"
        return None

    @classmethod
    def weights_of(cls, module: nn.Module) -> dict[str, nn.Parameter]:
        return {name: getattr(module, name) for name in _matrices(module)}

    @classmethod
    def unfoldings(cls, module: nn.Module, scheme: str) -> list[Unfolding]:
        return [cls._unfolding(name, weight) for name, weight in cls.weights_of(module).items()]

    @classmethod
    def _unfolding(cls, name: str, weight: Tensor) -> Unfolding:
        count = cls._count(name)
        m, n = weight.shape[0] // count, weight.shape[1]
        return Unfolding(name, m, n, count, lambda weights: weights[name].reshape(count, m, n))

    @classmethod
    def _count(cls, name: str) -> int:
        return 1 if name.startswith("weight_hr") else cls.gates

    @classmethod
    def shell(cls, module: nn.Module, scheme: str, rank: Mapping[str, int]) -> Self:
        layer = cls()
        layer.describe_(scheme, rank, module)
        for option in _OPTIONS:
            setattr(layer, option, getattr(module, option))
        for name, weight in cls.weights_of(module).items():
            count, (m, n), r = cls._count(name), weight.shape, rank[name]
            u = (m, r) if name.startswith("weight_hr") else (count, m // count, r)
            layer.register_parameter(f"{name}_u", empty_like_weight(weight, *u))
            layer.register_parameter(f"{name}_v", empty_like_weight(weight, count * r, n))
        for name in _biases(module):
            layer.register_parameter(name, getattr(module, name))
        return layer.train(module.training)

    # ---- being one -------------------------------------------------------------------------------

    @torch.no_grad()
    def factors_(self, factors: Mapping[str, list[Factors]]) -> None:
        for name, found in factors.items():
            u, v = self._pair(name)
            u.copy_(torch.stack([one.A for one in found]).view_as(u))
            v.copy_(torch.cat([one.B for one in found]))

    def pairs(self) -> Pairs:
        found = {}
        for name in self.shapes:
            u, v = (factor.detach() for factor in self._pair(name))
            count = self._count(name)
            found[name] = (u.reshape(count, -1, u.shape[-1]), v.reshape(count, -1, v.shape[-1]))
        return found

    def dense_shell(self, device: torch.device | str) -> nn.Module:
        options = {option: getattr(self, option) for option in _OPTIONS}
        if options.pop("mode").startswith("RNN"):
            options["nonlinearity"] = self.nonlinearity
        if self.dense is not nn.LSTM:
            del options["proj_size"]
        # Set afterwards: a single layer with dropout would warn, as it did when the user built it.
        del options["dropout"]
        dense: nn.RNNBase = hollow(self.dense, **options)
        dense.dropout = self.dropout
        for name, shape in self.shapes.items():
            u, _ = self._pair(name)
            data = torch.empty(shape, dtype=u.dtype, device=device)
            setattr(dense, name, nn.Parameter(data, requires_grad=u.requires_grad))
        for name in _biases(self):
            setattr(dense, name, getattr(self, name))
        # torch keeps a second list of an RNN's weights, and has weak references to the former ones.
        dense._init_flat_weights()
        return dense

    def dense_weights(self, precise: bool = False) -> dict[str, Tensor]:
        found = {}
        for name, shape in self.shapes.items():
            u, v = self._pair(name)
            found[name] = product(u, v.reshape(*u.shape[:-2], -1, v.shape[-1]), precise).reshape(shape)
        return found

    def factor_parameters(self) -> list[nn.Parameter]:
        return [factor for name in self.shapes for factor in self._pair(name)]

    def factor_pairs(self) -> list[tuple[Tensor, Tensor]]:
        found = []
        for name in self.shapes:
            u, v = self._pair(name)
            count = self._count(name)
            found.append((u.reshape(count, -1, u.shape[-1]), v.reshape(count, -1, v.shape[-1])))
        return found

    def _pair(self, name: str) -> tuple[nn.Parameter, nn.Parameter]:
        return getattr(self, f"{name}_u"), getattr(self, f"{name}_v")

    # ---- forward -----------------------------------------------------------------------------------

    def forward(self, input: Tensor | PackedSequence, hx: State = None) -> tuple[Any, State]:
        if isinstance(input, PackedSequence):
            return self._packed(input, hx)
        if input.dim() not in (2, 3):
            raise UsageError(f"{self._name}: expected a 2-D or 3-D input, got {input.dim()}-D; reshape it")
        batched = input.dim() == 3
        x = input if batched else input[:, None]
        if batched and self.batch_first:
            x = x.transpose(0, 1)
        self._check_input(x)
        T, B, n = x.shape
        states = self._initial(hx, x, B, batched)
        out, states = self._layers(x.reshape(T * B, n), (B,) * T, states, packed=False)
        out = out.view(T, B, out.shape[1])
        if not batched:
            return out[:, 0], self._handed([state[:, 0] for state in states])
        return out.transpose(0, 1) if self.batch_first else out, self._handed(states)

    def _packed(self, input: PackedSequence, hx: State) -> tuple[PackedSequence, State]:
        if recurrence.is_traced():
            raise UsageError(
                f"{self._name}: a PackedSequence cannot be compiled or exported, as its batch sizes are "
                "data; pass a padded tensor, or leave this layer out with torch.compiler.disable"
            )
        x, batch_sizes, order, inverse = input
        self._check_input(x[:, None])
        sizes = tuple(batch_sizes.tolist())
        states = [
            state if hx is None else _permuted(state, order) for state in self._initial(hx, x, sizes[0], True)
        ]
        out, states = self._layers(x, sizes, states, packed=True)
        packed = PackedSequence(out, batch_sizes, order, inverse)
        return packed, self._handed([_permuted(state, inverse) for state in states])

    def _layers(
        self, x: Tensor, sizes: tuple[int, ...], states: list[Tensor], packed: bool
    ) -> tuple[Tensor, list[Tensor]]:
        """Flat rows in, flat rows out, with all layers' final states."""
        dtype, state_dtypes = self._dtypes(x, states, packed)
        states = [state.to(wanted) for state, wanted in zip(states, state_dtypes, strict=True)]
        last: list[tuple[Tensor, ...]] = []
        with recurrence.without_autocast(x):
            for layer in range(self.num_layers):
                outs = []
                for direction in range(1 + self.bidirectional):
                    suffix = _suffix(layer, direction)
                    first = tuple(state[len(last)] for state in states)
                    steps = Steps(sizes, reverse=bool(direction))
                    out, *final = self._cell(x.to(dtype), suffix, first, steps)
                    outs.append(out)
                    last.append(tuple(final))
                x = outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)
                if self.training and self.dropout and layer + 1 < self.num_layers:
                    x = F.dropout(x, self.dropout)
        return x, [torch.stack(list(of_layers)) for of_layers in zip(*last, strict=True)]

    def _cell(self, x: Tensor, suffix: str, first: tuple[Tensor, ...], steps: Steps) -> tuple[Tensor, ...]:
        """One layer in one direction: its output, then its final states."""
        raise NotImplementedError

    def _input_side(self, x: Tensor, suffix: str, bias: Tensor | None) -> Tensor:
        """(N, n) -> (G, N, H): what the input contributes to the gates, at all time steps."""
        U, V = self._cast(f"weight_ih_{suffix}", x.dtype)
        P = F.linear(x, V).view(x.shape[0], *U.shape[::2]).transpose(0, 1)
        if bias is None:
            return torch.bmm(P, U.mT)
        return torch.baddbmm(bias.to(x.dtype).view(self.gates, 1, self.hidden_size), P, U.mT)

    def _cast(self, name: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        u, v = self._pair(name)
        return u.to(dtype), v.to(dtype)

    def _both_biases(self, suffix: str) -> tuple[Tensor, Tensor] | None:
        return (getattr(self, f"bias_ih_{suffix}"), getattr(self, f"bias_hh_{suffix}")) if self.bias else None

    def _summed_bias(self, suffix: str) -> Tensor | None:
        both = self._both_biases(suffix)
        return None if both is None else both[0] + both[1]

    # ---- dtypes --------------------------------------------------------------------------------------

    def _dtypes(self, x: Tensor, states: list[Tensor], packed: bool) -> tuple[torch.dtype, list[torch.dtype]]:
        """What to multiply in, and what each state is kept in: under autocast, what torch's RNN does."""
        lowered = recurrence.autocast_dtype(x)
        if lowered is None or self._weight.dtype == torch.float64:
            return x.dtype, [x.dtype for _ in states]
        wide = self._wide_states(packed) if x.device.type == "cpu" else (False,) * len(states)
        return lowered, [
            torch.promote_types(state.dtype, lowered) if wanted else lowered
            for state, wanted in zip(states, wide, strict=True)
        ]

    def _wide_states(self, packed: bool) -> tuple[bool, ...]:
        """Which states torch's own loop on the CPU leaves in their own dtype under autocast."""
        return (False,)

    @property
    def _weight(self) -> nn.Parameter:
        return cast(nn.Parameter, self.weight_ih_l0_u)

    # ---- states and checks ---------------------------------------------------------------------------

    @property
    def _name(self) -> str:
        return type(self).__name__

    def _check_input(self, x: Tensor) -> None:
        T, _, n = x.shape
        if n != self.input_size:
            raise UsageError(
                f"{self._name}: the input has {n} features, but input_size is {self.input_size}; "
                f"the last dimension must be {self.input_size}"
            )
        if T == 0:
            raise UsageError(f"{self._name}: the sequence has no time steps; pass at least one")
        if x.dtype != self._weight.dtype and recurrence.autocast_dtype(x) is None:
            raise UsageError(
                f"{self._name}: the input is {x.dtype} and the factors are {self._weight.dtype}; "
                f"use input.to({self._weight.dtype}) or module.to({x.dtype})"
            )

    def _initial(self, hx: State, x: Tensor, B: int, batched: bool) -> list[Tensor]:
        """The initial states (layers x directions, B, width), zeros if none are given."""
        rows = self.num_layers * (1 + self.bidirectional)
        shapes = [(rows, B, width) for width in self._state_widths()]
        if hx is None:
            return [x.new_zeros(shape) for shape in shapes]
        given = [hx] if isinstance(hx, Tensor) else list(hx)
        if len(given) != len(shapes):
            raise UsageError(
                f"{self._name}: hx must be {' and '.join(self.states)}, got {len(given)} tensors"
            )
        found = []
        for what, state, shape in zip(self.states, given, shapes, strict=True):
            wanted = shape if batched else (shape[0], shape[2])
            if tuple(state.shape) != wanted:
                raise UsageError(f"{self._name}: expected {what} state {wanted}, got {tuple(state.shape)}")
            if state.dtype != x.dtype and recurrence.autocast_dtype(x) is None:
                raise UsageError(
                    f"{self._name}: the {what} state is {state.dtype} and the input {x.dtype}; "
                    f"use state.to({x.dtype})"
                )
            found.append(state if batched else state[:, None])
        return found

    def _state_widths(self) -> tuple[int, ...]:
        return (self.hidden_size,)

    def _handed(self, states: list[Tensor]) -> State:
        return states[0] if len(states) == 1 else tuple(states)

    # ---- what other people's code calls ----------------------------------------------------------------

    def flatten_parameters(self) -> None:
        """Nothing to do: only cuDNN's own kernels want their weights in one piece."""

    @property
    def nonlinearity(self) -> str:
        return "relu" if self.mode == "RNN_RELU" else "tanh"

    def extra_repr(self) -> str:
        return f"{self.input_size}, {self.hidden_size}, num_layers={self.num_layers}, {super().extra_repr()}"


class FactorizedLSTM(_FactorizedRecurrent):
    kind = "lstm"
    dense = nn.LSTM
    gates = 4
    states = ("hidden", "cell")

    def _cell(self, x: Tensor, suffix: str, first: tuple[Tensor, ...], steps: Steps) -> tuple[Tensor, ...]:
        gates = self._input_side(x, suffix, self._summed_bias(suffix))
        U, V = self._cast(f"weight_hh_{suffix}", x.dtype)
        projection = Projection(*self._cast(f"weight_hr_{suffix}", x.dtype)) if self.proj_size else None
        h0, c0 = first
        return recurrence.lstm(gates, h0, c0, U, V, projection, steps)

    def _state_widths(self) -> tuple[int, ...]:
        return (self.proj_size or self.hidden_size, self.hidden_size)

    def _wide_states(self, packed: bool) -> tuple[bool, ...]:
        return (packed and not self.proj_size, packed or bool(self.proj_size))


class FactorizedGRU(_FactorizedRecurrent):
    kind = "gru"
    dense = nn.GRU
    gates = 3

    def _cell(self, x: Tensor, suffix: str, first: tuple[Tensor, ...], steps: Steps) -> tuple[Tensor, ...]:
        both = self._both_biases(suffix)
        bias = bias_n = None
        if both is not None:
            H = self.hidden_size
            bias = both[0] + F.pad(both[1][: 2 * H], (0, H))
            bias_n = both[1][2 * H :].to(x.dtype)
        gates = self._input_side(x, suffix, bias)
        U, V = self._cast(f"weight_hh_{suffix}", x.dtype)
        return recurrence.gru(gates, first[0], U, V, bias_n, steps)

    def _wide_states(self, packed: bool) -> tuple[bool, ...]:
        return (True,)


class FactorizedRNN(_FactorizedRecurrent):
    kind = "rnn"
    dense = nn.RNN
    gates = 1

    def _cell(self, x: Tensor, suffix: str, first: tuple[Tensor, ...], steps: Steps) -> tuple[Tensor, ...]:
        gates = self._input_side(x, suffix, self._summed_bias(suffix))
        U, V = self._cast(f"weight_hh_{suffix}", x.dtype)
        return recurrence.rnn(gates, first[0], U, V, self.mode == "RNN_RELU", steps)


def _suffix(layer: int, direction: int) -> str:
    return f"l{layer}_reverse" if direction else f"l{layer}"


def _suffixes(module: Any) -> Iterator[str]:
    for layer in range(module.num_layers):
        for direction in range(1 + module.bidirectional):
            yield _suffix(layer, direction)


def _matrices(module: Any) -> list[str]:
    sorts = ("ih", "hh", "hr") if module.proj_size else ("ih", "hh")
    return [f"weight_{sort}_{suffix}" for suffix in _suffixes(module) for sort in sorts]


def _biases(module: Any) -> list[str]:
    return [f"bias_{sort}_{suffix}" for suffix in _suffixes(module) if module.bias for sort in ("ih", "hh")]


def _permuted(state: Tensor, order: Tensor | None) -> Tensor:
    return state if order is None else state.index_select(1, order)
