from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layer_checks import assert_factor_gradients, assert_same, factorized
from torch import nn

from takifugu.errors import LayerError
from takifugu.lowrank.layers import kind_of

B, L, S, E, H = 3, 5, 7, 8, 2


@settings(max_examples=80, deadline=None)
@given(
    batch_first=st.booleans(),
    bias=st.booleans(),
    kdim=st.sampled_from([None, 6]),
    vdim=st.sampled_from([None, 10]),
    batched=st.booleans(),
    mask=st.sampled_from([None, "bool", "float", "per head"]),
    padding=st.sampled_from([None, "bool", "float"]),
    need_weights=st.booleans(),
    average=st.booleans(),
    ratio=st.sampled_from([1.0, 0.5]),
)
def test_is_the_dense_attention(
    batch_first: bool, bias: bool, kdim: int | None, vdim: int | None, batched: bool, mask: str | None,
    padding: str | None, need_weights: bool, average: bool, ratio: float,
) -> None:  # fmt: skip
    torch.manual_seed(0)
    dense = nn.MultiheadAttention(E, H, bias=bias, kdim=kdim, vdim=vdim, batch_first=batch_first).double()
    for name, parameter in dense.named_parameters():
        if "bias" in name:  # torch starts them at zero, which would hide mistakes
            nn.init.normal_(parameter)
    layer = factorized(dense, ratio=ratio)
    reference = dense if ratio == 1.0 else layer.to_dense()

    def sequence(length: int, width: int) -> torch.Tensor:
        x = torch.randn(B, length, width, dtype=torch.float64)
        return x[0] if not batched else x if batch_first else x.transpose(0, 1)

    query, key, value = sequence(L, E), sequence(S, kdim or E), sequence(S, vdim or E)
    options: dict[str, object] = {"need_weights": need_weights, "average_attn_weights": average}
    allowed = torch.rand(L, S) < 0.7
    allowed[:, 0] = True  # nobody is left with nothing to look at
    if mask == "bool":
        options["attn_mask"] = ~allowed
    elif mask == "float":
        options["attn_mask"] = torch.randn(L, S, dtype=torch.float64)
    elif mask == "per head":
        options["attn_mask"] = torch.randn((B if batched else 1) * H, L, S, dtype=torch.float64)
    if padding is not None:
        padded = torch.zeros(B, S, dtype=torch.bool)
        padded[1, 4:] = padded[0, 6:] = True
        hidden = (
            padded if padding == "bool" else torch.zeros(B, S).double().masked_fill(padded, float("-inf"))
        )
        options["key_padding_mask"] = hidden if batched else hidden[0]
    masks = {name: value for name, value in options.items() if "mask" in name}
    plain = {name: value for name, value in options.items() if "mask" not in name}

    def with_masks(module: nn.Module) -> nn.Module:
        class Masked(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = module

            def forward(self, q, k, v):  # type: ignore[no-untyped-def]
                return self.inner(q, k, v, **masks, **plain)

        return Masked()

    assert_same(with_masks(reference), with_masks(layer), query, key, value)
    assert_factor_gradients(layer, dense, query, key, value, **options)


def test_to_dense_is_torchs_module_with_the_same_biases() -> None:
    dense = nn.MultiheadAttention(E, H, kdim=6, dropout=0.1, batch_first=True)
    layer = factorized(dense, ratio=0.5)
    again = layer.to_dense()
    assert type(again) is nn.MultiheadAttention
    assert set(again.state_dict()) == set(dense.state_dict())
    assert again.in_proj_bias is layer.in_proj_bias
    assert again.out_proj.bias is layer.out_proj.bias
    assert (again.dropout, again.batch_first, again.kdim) == (0.1, True, 6)


def test_dropout_only_in_training() -> None:
    layer = factorized(nn.MultiheadAttention(E, H, dropout=0.5))
    x = torch.randn(L, B, E)
    for need_weights in (True, False):
        first, second = (layer.train()(x, x, x, need_weights=need_weights)[0] for _ in range(2))
        assert not torch.equal(first, second)
        first, second = (layer.eval()(x, x, x, need_weights=need_weights)[0] for _ in range(2))
        assert torch.equal(first, second)


@pytest.mark.parametrize("option", ["add_bias_kv", "add_zero_attn"])
def test_what_it_cannot_do_is_refused(option: str) -> None:
    dense = nn.MultiheadAttention(E, H, **{option: True})
    assert option in kind_of(dense).obstacle(dense, "uv")


def test_bad_calls_name_the_fix() -> None:
    layer = factorized(nn.MultiheadAttention(E, H))
    x = torch.randn(L, B, E)
    with pytest.raises(LayerError, match="pass attn_mask"):
        layer(x, x, x, is_causal=True)
    with pytest.raises(LayerError, match="attn_mask has shape"):
        layer(x, x, x, attn_mask=torch.zeros(L, L + 1))
