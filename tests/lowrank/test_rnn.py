"""Factorized LSTM, GRU and RNN against torch's own, over all their options."""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from takifugu.errors import TakifuguError
from takifugu.lowrank import recurrence, recurrence_plain
from takifugu.lowrank.decompose import exact
from takifugu.lowrank.rnn import FactorizedGRU, FactorizedLSTM, FactorizedRNN, _FactorizedRecurrent
from takifugu.lowrank.steps import Projection, Steps

CLASSES: dict[type[nn.Module], type[_FactorizedRecurrent]] = {
    nn.LSTM: FactorizedLSTM,
    nn.GRU: FactorizedGRU,
    nn.RNN: FactorizedRNN,
}
KINDS = ("lstm", "projected", "gru", "tanh", "relu")
INPUT, HIDDEN, PROJECTED = 3, 4, 2


def dense_rnn(kind: str, **options: Any) -> nn.RNNBase:
    if kind == "gru":
        return nn.GRU(INPUT, HIDDEN, **options)
    if kind in ("tanh", "relu"):
        return nn.RNN(INPUT, HIDDEN, nonlinearity=kind, **options)
    return nn.LSTM(INPUT, HIDDEN, proj_size=PROJECTED if kind == "projected" else 0, **options)


def shell(dense: nn.Module, rank: int | None = None) -> _FactorizedRecurrent:
    cls = CLASSES[type(dense)]
    ranks = {u.name: min(rank or u.limit, u.limit) for u in cls.unfoldings(dense, "uv")}
    return cls.shell(dense, "uv", ranks)


def factorized(dense: nn.Module, rank: int | None = None) -> _FactorizedRecurrent:
    layer = shell(dense, rank)
    weights = {name: weight.detach() for name, weight in layer.weights_of(dense).items()}
    layer.fill_(weights, layer.unfoldings(dense, "uv"), exact)
    return layer


def tensors(returned: Any) -> list[Tensor]:
    """What an RNN returned, as plain tensors."""
    output, state = returned
    return [output.data if isinstance(output, PackedSequence) else output, *tree_leaves(state)]


def initial(dense: Any, batch: int | None, **options: Any) -> Any:
    """A random initial state, as the module wants it; `batch` is None for unbatched input."""
    rows = dense.num_layers * (1 + dense.bidirectional)
    lead = (rows,) if batch is None else (rows, batch)
    hidden = torch.randn(*lead, dense.proj_size or dense.hidden_size, **options)
    return (hidden, torch.randn(*lead, dense.hidden_size, **options)) if dense.mode == "LSTM" else hidden


@dataclass(frozen=True)
class Case:
    """One way to build and call an RNN; `given` says what comes in."""

    kind: str
    num_layers: int
    bidirectional: bool
    batch_first: bool
    bias: bool
    given: str
    with_state: bool
    rank: int | None
    seed: int

    def dense(self) -> nn.RNNBase:
        options = {
            name: getattr(self, name) for name in ("num_layers", "bidirectional", "batch_first", "bias")
        }
        return dense_rnn(self.kind, **options, dtype=torch.float64)

    def call(self, dense: nn.RNNBase) -> tuple[Any, Any, list[Tensor]]:
        """Input, initial state, and the tensors in them that want a gradient."""
        options = {"dtype": torch.float64, "requires_grad": True}
        batch: int | None = 4
        if self.given == "plain":
            x: Any = torch.randn(*((4, 5) if self.batch_first else (5, 4)), INPUT, **options)
            leaves = [x]
        elif self.given == "unbatched":
            x, batch = torch.randn(5, INPUT, **options), None
            leaves = [x]
        else:
            lengths = [5, 3, 3, 1] if self.given == "sorted" else [2, 5, 1, 5]
            leaves = [torch.randn(length, INPUT, **options) for length in lengths]
            x = pack_sequence(leaves, enforce_sorted=self.given == "sorted")
        state = initial(dense, batch, **options) if self.with_state else None
        return x, state, leaves + (tree_leaves(state) if self.with_state else [])


cases = st.builds(
    Case,
    kind=st.sampled_from(KINDS),
    num_layers=st.integers(1, 2),
    bidirectional=st.booleans(),
    batch_first=st.booleans(),
    bias=st.booleans(),
    given=st.sampled_from(("plain", "unbatched", "sorted", "unsorted")),
    with_state=st.booleans(),
    rank=st.sampled_from((None, 1, 2)),
    seed=st.integers(0, 1000),
)


def assert_all_close(got: Any, expected: Any, tolerance: float = 1e-9) -> None:
    got, expected = list(got), list(expected)
    assert len(got) == len(expected)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


# ---- the same function as the dense module ---------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(cases)
def test_reproduces_dense_output_and_all_gradients(case: Case) -> None:
    """At full rank the original module; at a lower one the dense module that holds the products."""
    torch.manual_seed(case.seed)
    original = case.dense()
    layer = factorized(original, case.rank)
    dense: Any = original if case.rank is None else layer.to_dense()
    x, state, leaves = case.call(original)
    expected, got = dense(x, state), layer(x, state)

    assert type(got[0]) is type(expected[0])
    if isinstance(got[0], PackedSequence):
        assert got[0].batch_sizes.equal(expected[0].batch_sizes)
        padded = [pad_packed_sequence(packed)[0] for packed in (got[0], expected[0])]
        torch.testing.assert_close(*padded)
    assert isinstance(got[1], tuple) == isinstance(expected[1], tuple)
    assert_all_close(tensors(got), tensors(expected))

    probes = [torch.randn_like(t) for t in tensors(expected)]
    biases = [p for name, p in layer.named_parameters() if name.startswith("bias")]
    matrices = list(layer.weights_of(dense).values())
    of_dense = torch.autograd.grad(tensors(expected), leaves + biases + matrices, probes, retain_graph=True)
    of_layer = torch.autograd.grad(tensors(got), leaves + biases + layer.factor_parameters(), probes)
    shared = len(leaves) + len(biases)
    assert_all_close(of_layer[:shared], of_dense[:shared])

    # The chain rule takes the dense gradient of each gate to its two factors.
    for k, unfolding in enumerate(layer.unfoldings(dense, "uv")):
        dW = of_dense[shared + k].view(unfolding.count, unfolding.m, unfolding.n)
        U, V = layer.factor_parameters()[2 * k : 2 * k + 2]
        dU, dV = of_layer[shared + 2 * k : shared + 2 * k + 2]
        U, V = U.view(unfolding.count, unfolding.m, -1), V.view(unfolding.count, -1, unfolding.n)
        assert_all_close([dU.view_as(U), dV.view_as(V)], [dW @ V.mT, U.mT @ dW])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("given_as", ["plain", "unsorted"])
def test_without_gradients_the_output_is_the_same(kind: str, given_as: str) -> None:
    """Inference reuses its buffers from step to step."""
    case = Case(kind, 2, True, False, True, given_as, True, 2, 0)
    layer = factorized(case.dense(), 2)
    x, state, _ = case.call(case.dense())
    expected = tensors(layer(x, state))
    with torch.no_grad():
        assert_all_close(tensors(layer(x, state)), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_only_what_asks_for_a_gradient_gets_one(kind: str) -> None:
    dense = dense_rnn(kind, dtype=torch.float64)
    for weight in FactorizedLSTM.weights_of(dense).values():
        weight.requires_grad_(False)
    layer = factorized(dense, 2)
    assert not any(factor.requires_grad for factor in layer.factor_parameters())
    x = torch.randn(5, 2, INPUT, dtype=torch.float64)
    layer(x)[0].sum().backward()
    got = layer.bias_hh_l0.grad.clone()
    dense = layer.to_dense()
    layer.bias_hh_l0.grad = None
    dense(x)[0].sum().backward()
    torch.testing.assert_close(got, layer.bias_hh_l0.grad)
    assert all(factor.grad is None for factor in layer.factor_parameters())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("used", ["output", "state"])
def test_every_parameter_takes_part(kind: str, used: str) -> None:
    """DDP waits for the gradient of each; and the loss may look at one of the results only."""
    layer = factorized(dense_rnn(kind, num_layers=2, bidirectional=True), 2)
    output, state = layer(torch.randn(5, 2, INPUT))
    (output if used == "output" else sum(t.sum() for t in tree_leaves(state))).sum().backward()
    names = [name for name, p in layer.named_parameters() if p.grad is None or not p.grad.any()]
    assert names == []


@pytest.mark.parametrize("kind", KINDS)
def test_many_steps(kind: str) -> None:
    """Long sequences multiply by a transposed copy."""
    dense = dense_rnn(kind, dtype=torch.float64)
    x = torch.randn(recurrence._MANY_STEPS + 4, 2, INPUT, dtype=torch.float64)
    assert_all_close(tensors(factorized(dense)(x)), tensors(dense(x)))


def test_an_empty_batch_passes_through() -> None:
    layer = factorized(dense_rnn("lstm", bidirectional=True), 2)
    output, (h, c) = layer(torch.randn(5, 0, INPUT))
    assert (output.shape, h.shape, c.shape) == ((5, 0, 2 * HIDDEN), (2, 0, HIDDEN), (2, 0, HIDDEN))
    output.sum().backward()
    assert not layer.weight_hh_l0_u.grad.any()


# ---- the loops themselves --------------------------------------------------------------------------------

SIZES = [(2, 2, 2), (3, 2, 2, 1)]


def loop_inputs(kind: str, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
    """gates, h0, U, V, and what else the kind has: c0 and the projection, or a bias."""

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, requires_grad=True)

    G, H, r = {"lstm": 4, "projected": 4, "gru": 3, "tanh": 1, "relu": 1}[kind], 3, 2
    W = 2 if kind == "projected" else H
    rest: tuple[Tensor, ...] = ()
    if kind in ("lstm", "projected"):
        rest = (random(max(sizes), H),)
    if kind == "projected":
        rest += (random(W, 1), random(1, H))
    if kind == "gru":
        rest = (random(H),)
    return random(G, sum(sizes), H), random(max(sizes), W), random(G, H, r), random(G * r, W), *rest


def run_loop(kind: str, steps: Steps, inputs: tuple[Tensor, ...], plain: bool = False) -> tuple[Tensor, ...]:
    gates, h0, U, V, *rest = inputs
    gates = gates.clone()  # the loop overwrites it
    if kind in ("lstm", "projected"):
        projection = Projection(*rest[1:]) if kind == "projected" else None
        loop = recurrence_plain.lstm_plain if plain else recurrence.lstm
        return loop(gates, h0, rest[0], U, V, projection, steps)
    if kind == "gru":
        return (recurrence_plain.gru_plain if plain else recurrence.gru)(gates, h0, U, V, rest[0], steps)
    return (recurrence_plain.rnn_plain if plain else recurrence.rnn)(gates, h0, U, V, kind == "relu", steps)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("reverse", [False, True])
def test_gradients_against_finite_differences(kind: str, sizes: tuple[int, ...], reverse: bool) -> None:
    inputs, steps = loop_inputs(kind, sizes), Steps(sizes, reverse)
    assert torch.autograd.gradcheck(lambda *given: run_loop(kind, steps, given), inputs, fast_mode=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("reverse", [False, True])
def test_plain_loop_is_the_same(kind: str, sizes: tuple[int, ...], reverse: bool) -> None:
    inputs, steps = loop_inputs(kind, sizes), Steps(sizes, reverse)
    fast, plain = (run_loop(kind, steps, inputs, plain) for plain in (False, True))
    assert_all_close(fast, plain)
    probes = [torch.randn_like(t) for t in plain]
    assert_all_close(*(torch.autograd.grad(found, inputs, probes) for found in (fast, plain)))


def test_a_second_derivative_is_refused() -> None:
    layer = factorized(dense_rnn("lstm"), 2)
    x = torch.randn(3, 2, INPUT, requires_grad=True)
    with pytest.raises(TakifuguError, match="no second derivative"):
        torch.autograd.grad(layer(x)[0].sum(), x, create_graph=True)


# ---- options, parameters, and the way back ---------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_options_and_parameters(kind: str) -> None:
    dense: Any = dense_rnn(kind, num_layers=2, bidirectional=True, batch_first=True, dropout=0.25)
    layer: Any = factorized(dense.eval(), 2)
    options = ["mode", "input_size", "hidden_size", "num_layers", "bias", "batch_first", "dropout"]
    for option in [*options, "bidirectional", "proj_size", "training"]:
        assert getattr(layer, option) == getattr(dense, option)
    if kind in ("tanh", "relu"):
        assert layer.nonlinearity == dense.nonlinearity
    layer.flatten_parameters()

    G, W = layer.gates, dense.proj_size or HIDDEN
    assert layer.weight_ih_l1_reverse_v.shape == (G * 2, 2 * W)
    assert layer.weight_ih_l1_reverse_u.shape == (G, HIDDEN, 2)
    assert layer.weight_hh_l0_v.shape == (G * 2, W)
    if kind == "projected":
        assert layer.weight_hr_l0_v.shape == (2, HIDDEN)
        assert layer.weight_hr_l0_u.shape == (PROJECTED, 2)
    for name, parameter in dense.named_parameters():
        assert name.startswith("weight") or getattr(layer, name) is parameter
    assert set(layer.spec("rnn").shapes) == set(layer.weights_of(dense))
    assert len(layer.factor_parameters()) == 2 * len(layer.shapes)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bias", [True, False])
def test_dense_round_trip(kind: str, bias: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of dropout with a single layer
        dense: Any = dense_rnn(kind, bias=bias, bidirectional=True, dropout=0.5, dtype=torch.float64)
    layer = factorized(dense)
    before = torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # but once is enough
        back: Any = layer.to_dense()
    assert before.equal(torch.get_rng_state())
    assert type(back) is type(dense)
    assert back.extra_repr() == dense.extra_repr()
    for name, parameter in dense.named_parameters():
        torch.testing.assert_close(back.get_parameter(name), parameter, rtol=1e-12, atol=1e-12)
        assert name.startswith("weight") or back.get_parameter(name) is parameter
    assert all(
        weight is back.get_parameter(n)
        for n, weight in zip(back._flat_weights_names, back._flat_weights, strict=True)
    )
    assert not back._weights_have_changed()

    # And there again: what has this rank already comes back as it is.
    low = factorized(dense, 2)
    again = factorized(low.to_dense(), 2)
    assert_all_close(again.dense_weights().values(), low.dense_weights().values(), 1e-12)


def test_dense_weights_are_differentiable() -> None:
    layer: Any = factorized(dense_rnn("lstm"), 2)
    layer.dense_weights()["weight_hh_l0"].square().sum().backward()
    assert layer.weight_hh_l0_u.grad.any()
    assert layer.weight_hh_l0_v.grad.any()
    assert layer.dense_weights(precise=True)["weight_ih_l0"].dtype == torch.float64


def test_a_parametrized_weight_is_an_obstacle() -> None:
    dense = dense_rnn("gru")
    assert FactorizedGRU.takes(dense)
    assert not FactorizedLSTM.takes(dense)
    assert FactorizedGRU.obstacle(dense, "uv") is None
    parametrize.register_parametrization(dense, "weight_hh_l0", nn.Identity())
    assert "weight_hh_l0 is not a plain parameter" in str(FactorizedGRU.obstacle(dense, "uv"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("given_as", ["plain", "unsorted"])
def test_dropout_falls_between_layers_as_in_the_dense_module(kind: str, given_as: str) -> None:
    case = Case(kind, 3, True, False, True, given_as, False, None, 0)
    dense = dense_rnn(kind, num_layers=3, bidirectional=True, dropout=0.5, dtype=torch.float64)
    layer = factorized(dense)
    x, _, _ = case.call(dense)

    def seeded(module: nn.Module, seed: int) -> list[Tensor]:
        torch.manual_seed(seed)
        return tensors(module(x))

    assert_all_close(seeded(layer, 1), seeded(dense, 1))
    assert not torch.allclose(seeded(layer, 1)[0], seeded(layer, 2)[0])
    assert_all_close(seeded(layer.eval(), 1), seeded(dense.eval(), 2))


# ---- life with PyTorch -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_compiles_in_one_graph(kind: str) -> None:
    layer = factorized(dense_rnn(kind, bidirectional=kind == "gru"), 2)
    x = torch.randn(3, 2, INPUT, requires_grad=True)
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    got, expected = tensors(compiled(x)), tensors(layer(x))
    assert_all_close(got, expected, 1e-5)
    wanted = [x, *layer.parameters()]
    probes = [torch.randn_like(t) for t in expected]
    assert_all_close(*(torch.autograd.grad(found, wanted, probes) for found in (got, expected)), 1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_exports(kind: str) -> None:
    layer = factorized(dense_rnn(kind), 2).eval()
    x = torch.randn(3, 2, INPUT)
    state = initial(layer, 2)
    exported = torch.export.export(layer, (x, state)).module()
    other = torch.randn_like(x)
    assert_all_close(tensors(exported(other, state)), tensors(layer(other, state)), 1e-5)


def test_a_packed_sequence_does_not_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = factorized(dense_rnn("lstm"), 2)
    packed = pack_sequence([torch.randn(3, INPUT), torch.randn(2, INPUT)])
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with pytest.raises(TakifuguError, match="PackedSequence cannot be compiled"):
        layer(packed)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("given_as", ["plain", "sorted"])
@pytest.mark.parametrize("with_state", [False, True])
def test_autocast_is_like_dense_under_autocast(
    kind: str, dtype: torch.dtype, given_as: str, with_state: bool
) -> None:
    dense = dense_rnn(kind, num_layers=2)
    layer = factorized(dense)
    x: Any = torch.randn(5, 2, INPUT)
    if given_as == "sorted":
        x = pack_sequence([torch.randn(5, INPUT), torch.randn(3, INPUT)])
    state = initial(dense, 2) if with_state else None

    def run(module: nn.Module, lowered: bool = True) -> tuple[list[torch.dtype], Tensor]:
        """The outputs' dtypes, and all outputs and some gradients in one vector."""
        with torch.autocast("cpu", dtype=dtype, enabled=lowered):
            found = tensors(module(x, state))
        loss = sum(t.float().square().sum() for t in found)
        gradients = torch.autograd.grad(loss, [layer.bias_ih_l0, layer.bias_hh_l1])
        return [t.dtype for t in found], torch.cat([t.float().flatten() for t in (*found, *gradients)])

    _, truth = run(dense, lowered=False)
    try:
        expected_dtypes, expected = run(dense)
    except RuntimeError as error:
        pytest.skip(f"dense fails too: {str(error)[:60]}")
    dtypes, got = run(layer)
    assert dtypes == expected_dtypes
    # The factors and their inner products are rounded too, so twice dense's own error is to be expected.
    assert 0 < (got - truth).norm() <= 4 * (expected - truth).norm()


def test_autocast_around_the_backward_pass_changes_nothing() -> None:
    layer = factorized(dense_rnn("gru"), 2)
    x = torch.randn(5, 2, INPUT)
    expected = torch.autograd.grad(layer(x)[0].sum(), list(layer.parameters()))
    loss = layer(x)[0].sum()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = torch.autograd.grad(loss, [layer.weight_hh_l0_u, layer.weight_hh_l0_v])
    names = [name for name, _ in layer.named_parameters()]
    assert_all_close(got, [expected[names.index(f"weight_hh_l0_{side}")] for side in "uv"], 1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_meta_device_and_flops(kind: str) -> None:
    """One MAC is two FLOPs, every factor's entry takes part once per row, backward costs two forwards."""
    layer = shell(dense_rnn(kind, num_layers=2, bidirectional=True, device="meta"), 2)
    x = torch.empty(5, 3, INPUT, device="meta", requires_grad=True)
    with FlopCounterMode(display=False) as forward:
        output, state = layer(x)
    real_output, real_state = factorized(dense_rnn(kind, num_layers=2, bidirectional=True), 2)(
        torch.randn(5, 3, INPUT)
    )
    assert output.shape == real_output.shape
    assert [t.shape for t in tree_leaves(state)] == [t.shape for t in tree_leaves(real_state)]
    entries = sum(factor.numel() for factor in layer.factor_parameters())
    assert forward.get_total_flops() == 2 * 5 * 3 * entries
    with FlopCounterMode(display=False) as backward:
        output.sum().backward()
    assert backward.get_total_flops() == 2 * forward.get_total_flops()


@pytest.mark.parametrize("kind", KINDS)
def test_checkpointing_deepcopy_and_state_dict(kind: str) -> None:
    layer = factorized(dense_rnn(kind, num_layers=2), 2)
    x = torch.randn(5, 2, INPUT, requires_grad=True)
    wanted = [x, *layer.parameters()]
    expected = layer(x)[0]
    again = checkpoint(layer, x, use_reentrant=False)[0]
    assert_all_close(
        torch.autograd.grad(again.sum(), wanted), torch.autograd.grad(expected.sum(), wanted), 1e-6
    )

    twin = copy.deepcopy(layer)
    assert twin.weight_hh_l0_u is not layer.weight_hh_l0_u
    assert torch.equal(twin(x)[0], expected)

    other = factorized(dense_rnn(kind, num_layers=2), 2)
    assert not torch.allclose(other(x)[0], expected)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x)[0], expected)


# ---- mistakes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "hx", "message"),
    [
        (torch.zeros(5, 2, 7), None, "7 features, but input_size is 3"),
        (torch.zeros(7), None, "expected a 2-D or 3-D input, got 1-D"),
        (torch.zeros(0, 2, 3), None, "no time steps"),
        (torch.zeros(5, 2, 3, dtype=torch.float64), None, r"module.to\(torch.float64\)"),
        (torch.zeros(5, 2, 3), torch.zeros(1, 2, 4), "hx must be hidden and cell"),
        (
            torch.zeros(5, 2, 3),
            (torch.zeros(1, 3, 4), torch.zeros(1, 2, 4)),
            r"expected hidden state \(1, 2, 4\)",
        ),
        (torch.zeros(5, 2, 3), (torch.zeros(1, 2, 4), torch.zeros(2, 4)), r"expected cell state \(1, 2, 4\)"),
        (torch.zeros(5, 3), (torch.zeros(1, 1, 4), torch.zeros(1, 4)), r"expected hidden state \(1, 4\)"),
        (torch.zeros(5, 2, 3), (torch.zeros(1, 2, 4).double(),) * 2, "hidden state is torch.float64"),
    ],
)
def test_mistakes_are_explained(x: Tensor, hx: Any, message: str) -> None:
    with pytest.raises(TakifuguError, match=message):
        factorized(dense_rnn("lstm"), 2)(x, hx)


def test_a_wrong_packed_input_is_explained() -> None:
    packed = pack_sequence([torch.randn(3, INPUT + 1)])
    with pytest.raises(TakifuguError, match="4 features, but input_size is 3"):
        factorized(dense_rnn("gru"), 2)(packed)
