from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from layer_checks import assert_factor_gradients, assert_same, factorized
from torch import nn

from takifugu.errors import LayerError

PLAIN = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
SCHEMES = ["kxk-1x1", "1x1-kxk", "tucker2", "separable"]


@st.composite
def convolutions(draw: st.DrawFn, transposed: bool) -> tuple[nn.Module, str, int]:
    """Any convolution torch accepts, with a scheme that suits it, and an input size."""
    d = draw(st.integers(1, 3))
    scheme = draw(st.sampled_from(SCHEMES if d == 2 else SCHEMES[:3]))
    each = lambda low, high: tuple(draw(st.integers(low, high)) for _ in range(d))  # noqa: E731
    groups = draw(st.sampled_from([1, 1, 2, 3]))
    options: dict[str, Any] = {
        "in_channels": groups * draw(st.integers(1, 3)),
        "out_channels": groups * draw(st.integers(1, 3)),
        "kernel_size": each(2 if scheme == "separable" else 1, 3),
        "groups": groups,
        "bias": draw(st.booleans()),
        "dilation": each(1, 2),
        "stride": each(1, 2),
        "padding": each(0, 2),
    }
    if transposed:
        limits = [max(s, dil) - 1 for s, dil in zip(options["stride"], options["dilation"], strict=True)]
        options["output_padding"] = tuple(draw(st.integers(0, limit)) for limit in limits)
    else:
        options["padding_mode"] = draw(st.sampled_from(["zeros", "reflect", "replicate", "circular"]))
        if draw(st.booleans()):
            options |= {"padding": draw(st.sampled_from(["same", "valid"])), "stride": (1,) * d}
    return (TRANSPOSED if transposed else PLAIN)[d](**options).double(), scheme, d


@settings(max_examples=150, deadline=None)
@given(data=st.data(), transposed=st.booleans(), seed=st.integers(0, 1000))
def test_full_rank_is_the_dense_layer(data: st.DataObject, transposed: bool, seed: int) -> None:
    torch.manual_seed(seed)
    dense, scheme, d = data.draw(convolutions(transposed))
    x = torch.randn(2, dense.in_channels, *[6, 7, 5][:d], dtype=torch.float64)
    try:
        dense(x)
    except RuntimeError:
        assume(False)  # torch itself refuses: the output would be empty
    layer = factorized(dense, scheme)
    assert_same(dense, layer, x)
    assert_factor_gradients(layer, dense, x)
    assert_same(dense, layer.to_dense(), x)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), transposed=st.booleans(), seed=st.integers(0, 1000))
def test_truncated_it_is_a_dense_layer_with_the_product(
    data: st.DataObject, transposed: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    dense, scheme, d = data.draw(convolutions(transposed))
    x = torch.randn(2, dense.in_channels, *[6, 7, 5][:d], dtype=torch.float64)
    try:
        dense(x)
    except RuntimeError:
        assume(False)
    layer = factorized(dense, scheme, ratio=0.5)
    again = layer.to_dense()
    assert type(again) is type(dense)
    for name in ("kernel_size", "stride", "padding", "dilation", "groups", "padding_mode", "output_padding"):
        assert getattr(again, name) == getattr(dense, name)
    assert_same(again, layer, x)
    assert_factor_gradients(layer, dense, x)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_reported_error_is_the_real_one(scheme: str) -> None:
    dense = nn.Conv2d(12, 16, 3, groups=2).double()
    layer = factorized(dense, scheme, ratio=0.5)
    unfoldings = layer.unfoldings(dense, scheme)
    from takifugu.lowrank.decompose import exact

    reported = layer.fill_({"weight": dense.weight.detach()}, unfoldings, exact)
    real = torch.linalg.norm(layer.weight - dense.weight) / torch.linalg.norm(dense.weight)
    assert reported == pytest.approx(float(real), rel=1e-6)
    assert 0 < reported < 1


def test_the_papers_scheme_is_k_by_k_then_1_by_1() -> None:
    layer = factorized(nn.Conv2d(8, 16, 3, stride=2, padding=1), ratio=0.25)
    assert layer.scheme == "kxk-1x1"
    assert (layer.v.weight.shape, layer.u.weight.shape) == ((4, 8, 3, 3), (16, 4, 1, 1))
    assert (layer.v.stride, layer.v.padding, layer.u.stride) == ((2, 2), (1, 1), (1, 1))
    assert layer.v.bias is None
    assert layer.u.bias is not None


def test_tucker2_stages_have_the_same_norm() -> None:
    layer = factorized(nn.Conv2d(8, 12, 3, groups=2), "tucker2", ratio=0.5)
    norms = [float(p.norm()) for p in layer.factor_parameters()]
    assert max(norms) == pytest.approx(min(norms), rel=1e-5)


@pytest.mark.parametrize("scheme", SCHEMES[:3])
def test_output_size_of_a_transposed_convolution(scheme: str) -> None:
    dense = nn.ConvTranspose2d(3, 4, 3, stride=2, padding=1).double()
    x = torch.randn(1, 3, 5, 5, dtype=torch.float64)
    layer = factorized(dense, scheme)
    torch.testing.assert_close(layer(x, output_size=[10, 9]), dense(x, output_size=[10, 9]))


def test_separable_transposed_refuses_an_output_size() -> None:
    layer = factorized(nn.ConvTranspose2d(3, 4, 3, stride=2), "separable")
    with pytest.raises(LayerError, match="does not take output_size"):
        layer(torch.randn(1, 3, 5, 5), output_size=[12, 12])


@pytest.mark.parametrize(
    ("dense", "expected"),
    [(nn.Conv2d(2, 2, 1), True), (nn.Conv1d(2, 2, 3), True), (nn.Conv2d(2, 2, 3), False)],
)
def test_separable_needs_a_real_two_dimensional_kernel(dense: nn.Module, expected: bool) -> None:
    from takifugu.lowrank.layers import kind_of

    obstacle = kind_of(dense).obstacle(dense, "separable")
    assert (obstacle is not None) is expected


def test_unbatched_input() -> None:
    dense = nn.Conv2d(3, 4, 3).double()
    x = torch.randn(3, 6, 6, dtype=torch.float64)
    assert_same(dense, factorized(dense), x)
