"""A small model around a layer of every kind and scheme, for tests that must hold for all of them.

A kind joins by an entry in `CASES`; `test_lives_with_torch` checks that none is missing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import takifugu as tk

Call = Callable[..., Tensor]

# Two sequences, so that a padding mask and both ends of a recurrence matter.
BATCH, LENGTH = 2, 5


class Around(nn.Module):
    """`layer` with a dense head behind it. The head stays dense: only `layer` is meant."""

    def __init__(self, layer: nn.Module, call: Call, width: int) -> None:
        super().__init__()
        self.layer = layer
        self.head = nn.Linear(width, 3)
        self.call = call

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.head(torch.tanh(self.call(self.layer, *inputs)))


@dataclass(frozen=True)
class Case:
    kind: str
    layer: Callable[[], nn.Module]
    call: Call
    width: int
    """How many features the layer hands to the head."""
    inputs: Callable[[int, torch.Generator], tuple[Tensor, ...]]
    scheme: str | None = None
    variant: str = ""

    @property
    def name(self) -> str:
        return "-".join(part for part in (self.kind, self.variant, self.scheme) if part)

    def build(self, seed: int = 0) -> Around:
        """The dense model; equal seeds give equal weights."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return Around(self.layer(), self.call, self.width)

    def example(self, batch: int = BATCH, seed: int = 1) -> tuple[Tensor, ...]:
        return self.inputs(batch, torch.Generator().manual_seed(seed))

    def factorize_(self, model: nn.Module, rank: Any = 0.5, **options: Any) -> tk.FactorReport:
        report = tk.factorize_(model, rank, where="layer", scheme=self.scheme, force=True, **options)
        assert [spec.kind for spec in report.structure] == [self.kind]
        return report

    def factorized(self, rank: Any = 0.5, seed: int = 0) -> Around:
        model = self.build(seed)
        self.factorize_(model, rank)
        return model


def _direct(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x)


def _channels(layer: nn.Module, x: Tensor) -> Tensor:
    """A convolution's output with the channels behind, where the head takes them."""
    return layer(x).flatten(2).transpose(1, 2)


def _states(layer: nn.Module, x: Tensor) -> Tensor:
    """All that a recurrent layer returns, each sequence for itself."""
    out, last = layer(x)
    for state in last if isinstance(last, tuple) else (last,):
        out = out + state.mean(dim=(0, 2))[:, None, None]
    return out


def _attended(layer: nn.Module, x: Tensor) -> Tensor:
    mixed, weights = layer(x, x, x)
    return mixed + weights.mean(dim=-1, keepdim=True) * weights.amax(dim=-1, keepdim=True)


def _masked(layer: nn.Module, query: Tensor, key: Tensor, value: Tensor, padding: Tensor) -> Tensor:
    return layer(query, key, value, key_padding_mask=padding, need_weights=False)[0]


def _noise(*shape: int) -> Callable[[int, torch.Generator], tuple[Tensor, ...]]:
    return lambda batch, generator: (torch.randn(batch, *shape, generator=generator),)


def _words(batch: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    return (torch.randint(0, 20, (batch, LENGTH), generator=generator),)


def _cross(batch: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    query, key, value = (torch.randn(batch, LENGTH, n, generator=generator) for n in (8, 6, 4))
    padding = torch.zeros(batch, LENGTH, dtype=torch.bool)
    padding[-1, -2:] = True
    return query, key, value, padding


def _transformers_conv1d() -> nn.Module:
    from transformers.pytorch_utils import Conv1D

    layer = Conv1D(10, 12)
    nn.init.normal_(layer.weight)
    return layer


def _conv(dimensions: int, transposed: bool, scheme: str | None, groups: int = 2) -> Case:
    build = getattr(nn, f"Conv{'Transpose' if transposed else ''}{dimensions}d")
    options: dict[str, Any] = {"stride": 2, "padding": 1, "groups": groups}
    if transposed:
        options["output_padding"] = 1
    return Case(
        kind=f"conv_transpose{dimensions}d" if transposed else f"conv{dimensions}d",
        layer=lambda: build(8, 12, 3, **options),
        call=_channels,
        width=12,
        inputs=_noise(8, *([6, 5, 4][:dimensions])),
        scheme=scheme,
    )


def ungrouped(case: Case) -> Case:
    """ONNX's reference evaluator gets grouped transposed convolutions wrong."""
    if not case.kind.startswith("conv_transpose"):
        return case
    return replace(_conv(int(case.kind[-2]), True, case.scheme, groups=1), variant="ungrouped")


def _recurrent(kind: str, variant: str = "", width: int = 7, **options: Any) -> Case:
    build = getattr(nn, kind.upper())
    return Case(
        kind=kind,
        layer=lambda: build(6, 7, batch_first=True, **options),
        call=_states,
        width=width,
        inputs=_noise(3, 6),  # few steps: compilers unroll them
        variant=variant,
    )


_CONV_SCHEMES = (None, "1x1-kxk", "tucker2", "separable")

_ALL = (
    Case("linear", lambda: nn.Linear(12, 10), _direct, 10, _noise(LENGTH, 12)),
    *(
        _conv(dimensions, transposed, scheme)
        for transposed in (False, True)
        for dimensions in (1, 2, 3)
        for scheme in _CONV_SCHEMES
        if scheme != "separable" or dimensions == 2
    ),
    Case(
        "attention",
        lambda: nn.MultiheadAttention(8, 2, batch_first=True),
        _attended,
        8,
        _noise(LENGTH, 8),
    ),
    Case(
        "attention",
        lambda: nn.MultiheadAttention(8, 2, batch_first=True, kdim=6, vdim=4),
        _masked,
        8,
        _cross,
        variant="cross",
    ),
    Case("embedding", lambda: nn.Embedding(20, 10), _direct, 10, _words),
    Case("transformers_conv1d", _transformers_conv1d, _direct, 10, _noise(LENGTH, 12)),
    _recurrent("lstm"),
    _recurrent("lstm", "stacked", width=8, num_layers=2, bidirectional=True, proj_size=4),
    _recurrent("gru"),
    _recurrent("gru", "stacked", width=14, num_layers=2, bidirectional=True),
    _recurrent("rnn"),
    _recurrent("rnn", "relu", nonlinearity="relu", bias=False),
)

CASES: dict[str, Case] = {case.name: case for case in _ALL}
assert len(CASES) == len(_ALL), "two cases have one name"
