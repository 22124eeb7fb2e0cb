from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layer_checks import assert_factor_gradients, assert_same, factorized
from torch import nn

from takifugu.lowrank.linear import FactorizedConv1D, FactorizedLinear


@settings(max_examples=30, deadline=None)
@given(
    m=st.integers(1, 12),
    n=st.integers(1, 12),
    bias=st.booleans(),
    leading=st.sampled_from([(), (3,), (2, 4)]),
)
def test_full_rank_is_the_dense_layer(m: int, n: int, bias: bool, leading: tuple[int, ...]) -> None:
    dense = nn.Linear(n, m, bias=bias).double()
    layer = factorized(dense)
    assert layer.rank == {"weight": min(m, n)}
    x = torch.randn(*leading, n, dtype=torch.float64)
    assert_same(dense, layer, x)
    assert_factor_gradients(layer, dense, x)


@pytest.mark.parametrize("ratio", [0.1, 0.5])
def test_truncated_it_is_a_dense_layer_with_the_product(ratio: float) -> None:
    dense = nn.Linear(20, 30).double()
    layer = factorized(dense, ratio=ratio)
    x = torch.randn(5, 20, dtype=torch.float64)
    assert_factor_gradients(layer, dense, x)
    again = layer.to_dense()
    assert type(again) is nn.Linear
    assert again.bias is layer.u.bias
    assert_same(again, layer, x)
    # Best approximation: the error is the tail of the spectrum (Eckart and Young).
    tail = torch.linalg.svdvals(dense.weight)[layer.rank["weight"] :]
    torch.testing.assert_close(
        torch.linalg.norm(dense.weight - again.weight), tail.norm(), rtol=1e-9, atol=1e-12
    )


def test_it_can_be_read_like_a_linear() -> None:
    layer = factorized(nn.Linear(6, 4))
    assert isinstance(layer, FactorizedLinear)
    assert (layer.in_features, layer.out_features, layer.weight.shape) == (6, 4, (4, 6))
    assert isinstance(layer.u, nn.Linear)
    assert isinstance(layer.v, nn.Linear)
    assert layer.weight.requires_grad


@pytest.mark.parametrize("ratio", [1.0, 0.4])
def test_transformers_conv1d(ratio: float) -> None:
    Conv1D = pytest.importorskip("transformers.pytorch_utils").Conv1D
    dense = Conv1D(10, 7).double()
    nn.init.normal_(dense.weight)
    nn.init.normal_(dense.bias)
    layer = factorized(dense, ratio=ratio)
    assert isinstance(layer, FactorizedConv1D)
    assert (layer.nf, layer.nx, layer.shapes["weight"]) == (10, 7, (7, 10))
    x = torch.randn(2, 3, 7, dtype=torch.float64)
    again = layer.to_dense()
    assert type(again) is Conv1D
    assert_same(dense if ratio == 1.0 else again, layer, x)
    assert_factor_gradients(layer, dense, x)
