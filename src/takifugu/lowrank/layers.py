"""The types of layers that can be factorized. A new one is a new file and a line here."""

from __future__ import annotations

from torch import nn

from takifugu.errors import StructureError, near_misses
from takifugu.lowrank.attention import FactorizedMultiheadAttention
from takifugu.lowrank.conv import (
    FactorizedConv1d,
    FactorizedConv2d,
    FactorizedConv3d,
    FactorizedConvTranspose1d,
    FactorizedConvTranspose2d,
    FactorizedConvTranspose3d,
)
from takifugu.lowrank.embedding import FactorizedEmbedding
from takifugu.lowrank.factorized import Factorized
from takifugu.lowrank.linear import FactorizedConv1D, FactorizedLinear
from takifugu.lowrank.rnn import FactorizedGRU, FactorizedLSTM, FactorizedRNN

_ALL: tuple[type[Factorized], ...] = (
    FactorizedLinear,
    FactorizedConv1d,
    FactorizedConv2d,
    FactorizedConv3d,
    FactorizedConvTranspose1d,
    FactorizedConvTranspose2d,
    FactorizedConvTranspose3d,
    FactorizedLSTM,
    FactorizedGRU,
    FactorizedRNN,
    FactorizedMultiheadAttention,
    FactorizedEmbedding,
    FactorizedConv1D,
)

KINDS: dict[str, type[Factorized]] = {layer.kind: layer for layer in _ALL}

OPT_IN = frozenset({FactorizedEmbedding.kind})
"""Kinds that `where=None` leaves alone."""

SCHEMES: tuple[str, ...] = tuple(
    dict.fromkeys(scheme for layer in _ALL for scheme in (*layer.schemes, *layer.named_schemes))
)


def kind_of(module: nn.Module) -> type[Factorized] | None:
    """The factorized layer that stands for this dense module, if there is one."""
    return next((layer for layer in _ALL if layer.takes(module)), None)


def kind_named(name: str) -> type[Factorized]:
    if name not in KINDS:
        raise StructureError(f"unknown layer kind {name!r}{near_misses(name, KINDS)}")
    return KINDS[name]
