"""The LSTM language model for WikiText-2: two layers of 1500, embedding and decoder tied.

`torch.nn.LSTM` keeps two biases per gate where the paper's own cell keeps one. Both counts are
therefore 12,000 above the paper's: 85,974,278 parameters dense and 67,974,278 low-rank.
"""

from __future__ import annotations

from torch import Tensor, nn

from takifugu.zoo.options import fixed_tokens, require_counts, require_dropout

State = tuple[Tensor, Tensor]


class LSTMLanguageModel(nn.Module):
    """Tokens (time, batch) and a state to logits (time, batch, vocabulary) and the next state."""

    def __init__(self, vocabulary: int, hidden: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        # Between layers only: torch warns when a single layer is given a dropout it cannot apply.
        self.lstm = nn.LSTM(hidden, hidden, layers, dropout=dropout if layers > 1 else 0.0)
        self.decoder = nn.Linear(hidden, vocabulary)
        self.decoder.weight = self.embedding.weight
        self.dropout = nn.Dropout(dropout)
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)

    def forward(self, tokens: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """`state` is `(h, c)`, each (layers, batch, hidden); None starts from zeros.

        Detach the returned state between windows, or backward reaches through all of them.
        """
        output, state = self.lstm(self.dropout(self.embedding(tokens)), state)
        assert state is not None
        return self.decoder(self.dropout(output)), state


def lstm_lm(
    *, vocabulary: int = 33_278, hidden: int = 1500, layers: int = 2, dropout: float = 0.65
) -> LSTMLanguageModel:
    """`hidden` is the width of the embedding too: the two are tied."""
    require_counts(vocabulary=vocabulary, hidden=hidden, layers=layers)
    require_dropout(dropout=dropout)
    return LSTMLanguageModel(vocabulary, hidden, layers, dropout)


def tokens(batch_size: int, *, vocabulary: int = 33_278, length: int = 35) -> tuple[Tensor]:
    require_counts(batch_size=batch_size, vocabulary=vocabulary, length=length)
    return (fixed_tokens((length, batch_size), below=vocabulary),)
