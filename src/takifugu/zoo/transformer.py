"""The Transformer for Multi30k: six layers each way, one embedding for source, target and output.

Post-norm layers, a final norm per stack, no bias in attention. Projections are plain `nn.Linear`
children, so that whatever works on Linears works on attention as well.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from takifugu.errors import UsageError
from takifugu.zoo.options import fixed_tokens, require_counts, require_dropout


class Attention(nn.Module):
    """Multi-head attention from `x` (B, T, width) to `memory` (B, S, width)."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, width, bias=False)
        self.v = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        """`mask` is True where a position may look, and broadcasts to (B, heads, T, S)."""
        q, k, v = self._split(self.q(x)), self._split(self.k(memory)), self._split(self.v(memory))
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)
        output: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return output

    def _split(self, x: Tensor) -> Tensor:
        return x.reshape(*x.shape[:2], self.heads, -1).transpose(1, 2)


class FeedForward(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down(F.relu(self.up(x)))
        return output


class EncoderLayer(nn.Module):
    def __init__(self, width: int, heads: int, feed_forward: int, dropout: float) -> None:
        super().__init__()
        self.attention = Attention(width, heads, dropout)
        self.attention_norm = nn.LayerNorm(width)
        self.feed_forward = FeedForward(width, feed_forward)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.attention_norm(x + self.dropout(self.attention(x, x, mask)))
        output: Tensor = self.feed_forward_norm(x + self.dropout(self.feed_forward(x)))
        return output


class DecoderLayer(nn.Module):
    def __init__(self, width: int, heads: int, feed_forward: int, dropout: float) -> None:
        super().__init__()
        self.attention = Attention(width, heads, dropout)
        self.attention_norm = nn.LayerNorm(width)
        self.cross_attention = Attention(width, heads, dropout)
        self.cross_attention_norm = nn.LayerNorm(width)
        self.feed_forward = FeedForward(width, feed_forward)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor, memory_mask: Tensor) -> Tensor:
        x = self.attention_norm(x + self.dropout(self.attention(x, x, mask)))
        x = self.cross_attention_norm(x + self.dropout(self.cross_attention(x, memory, memory_mask)))
        output: Tensor = self.feed_forward_norm(x + self.dropout(self.feed_forward(x)))
        return output


class Encoder(nn.Module):
    def __init__(self, width: int, heads: int, layers: int, feed_forward: int, dropout: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(EncoderLayer(width, heads, feed_forward, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, mask)
        output: Tensor = self.norm(x)
        return output


class Decoder(nn.Module):
    def __init__(self, width: int, heads: int, layers: int, feed_forward: int, dropout: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DecoderLayer(width, heads, feed_forward, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor, memory_mask: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, memory, mask, memory_mask)
        output: Tensor = self.norm(x)
        return output


class Positions(nn.Module):
    """Adds sinusoidal positions to (B, T, width). Nothing of it is trained or saved."""

    table: Tensor

    def __init__(self, width: int, max_length: int) -> None:
        super().__init__()
        self.register_buffer("table", torch.empty(max_length, width), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fill the table. `to_empty` leaves it undefined, and no checkpoint brings it back."""
        max_length, width = self.table.shape
        device = self.table.device
        position = torch.arange(max_length, dtype=torch.float32, device=device).unsqueeze(1)
        even = torch.arange(0, width, 2, dtype=torch.float32, device=device)
        angle = position * torch.exp(even * (-math.log(10_000.0) / width))
        self.table[:, 0::2] = angle.sin()
        self.table[:, 1::2] = angle.cos()[:, : width // 2]

    def forward(self, x: Tensor) -> Tensor:
        length, limit = x.shape[1], self.table.shape[0]
        if length > limit:
            raise UsageError(
                f"a sequence of {length} tokens exceeds max_length {limit}; shorten it, or build with more"
            )
        return x + self.table[:length]


class Transformer(nn.Module):
    """Source (B, S) and target (B, T) token ids to logits (B, T, vocabulary).

    Logits at position t see the target up to and including t: feed the target without its last token
    and compare with the target without its first.
    """

    def __init__(
        self,
        vocabulary: int,
        width: int,
        heads: int,
        layers: int,
        feed_forward: int,
        dropout: float,
        pad: int,
        max_length: int,
    ) -> None:
        super().__init__()
        self.pad = pad
        self.scale = math.sqrt(width)
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = Positions(width, max_length)
        self.dropout = nn.Dropout(dropout)
        self.encoder = Encoder(width, heads, layers, feed_forward, dropout)
        self.decoder = Decoder(width, heads, layers, feed_forward, dropout)
        self.output = nn.Linear(width, vocabulary, bias=False)
        self.output.weight = self.embedding.weight
        self._initialize_()

    def _initialize_(self) -> None:
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear) and name != "output":
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        # Unit variance both for the scaled embedding that goes in and for the logits that come out.
        nn.init.normal_(self.embedding.weight, std=1 / self.scale)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory, visible = self.encode(source)
        return self.decode(target, memory, visible)

    def encode(self, source: Tensor) -> tuple[Tensor, Tensor]:
        """The encoded source (B, S, width), and which of its positions may be looked at (B, S)."""
        visible = source != self.pad
        # A sentence of padding alone would leave nothing to look at, and attention undefined.
        visible = visible | ~visible.any(dim=1, keepdim=True)
        return self.encoder(self._embed(source), visible[:, None, None, :]), visible

    def decode(self, target: Tensor, memory: Tensor, visible: Tensor, last: bool = False) -> Tensor:
        """Logits (B, T, vocabulary) for a target prefix, given what `encode` returned.

        `last`: those of the last position only (B, 1, vocabulary), which is what a search looks at.
        """
        length = target.shape[1]
        square = torch.ones(length, length, dtype=torch.bool, device=target.device)
        own = torch.eye(length, dtype=torch.bool, device=target.device)
        # A position always sees itself, so that padding in front of a target leaves no row empty.
        mask = (square.tril() & (target != self.pad)[:, None, :]) | own
        x = self.decoder(self._embed(target), memory, mask[:, None], visible[:, None, None, :])
        logits: Tensor = self.output(x[:, -1:] if last else x)
        return logits

    def _embed(self, tokens: Tensor) -> Tensor:
        embedded: Tensor = self.dropout(self.positions(self.embedding(tokens) * self.scale))
        return embedded


def transformer(
    *,
    vocabulary: int = 9_521,
    width: int = 512,
    heads: int = 8,
    layers: int = 6,
    feed_forward: int = 2048,
    dropout: float = 0.1,
    pad: int = 0,
    max_length: int = 256,
) -> Transformer:
    """`layers` counts each stack's; `pad` is the token id that fills up sentences."""
    require_counts(width=width, heads=heads, layers=layers, feed_forward=feed_forward, max_length=max_length)
    require_counts(least=2, vocabulary=vocabulary)
    require_dropout(dropout=dropout)
    _check_pad(pad, vocabulary)
    if width % heads:
        raise UsageError(f"option 'width' ({width}) must be divisible by option 'heads' ({heads})")
    return Transformer(vocabulary, width, heads, layers, feed_forward, dropout, pad, max_length)


def sentences(
    batch_size: int, *, vocabulary: int = 9_521, pad: int = 0, max_length: int = 256, length: int = 32
) -> tuple[Tensor, Tensor]:
    """A source and a target of the same length, without padding."""
    require_counts(batch_size=batch_size, max_length=max_length, length=length)
    require_counts(least=2, vocabulary=vocabulary)
    _check_pad(pad, vocabulary)
    length = min(length, max_length)
    # Ids from the padding's on move up by one, so that it does not occur.
    ids = fixed_tokens((2, batch_size, length), below=vocabulary - 1)
    source, target = ids + (ids >= pad)
    return source, target


def _check_pad(pad: int, vocabulary: int) -> None:
    require_counts(least=0, pad=pad)
    if pad >= vocabulary:
        raise UsageError(f"option 'pad' ({pad}) must be below option 'vocabulary' ({vocabulary})")
