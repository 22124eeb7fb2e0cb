"""What the singular values of a model's layers look like."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from torch import nn

from takifugu.lowrank.candidates import Candidate, Where, find, refusal
from takifugu.lowrank.choice import checked_weights
from takifugu.lowrank.decompose import singular_values
from takifugu.lowrank.ranks import Spectrum

_POINTS = 32


@dataclass(frozen=True)
class MatrixSpectrum:
    """One matrix; of several gates or groups the root mean square at each index."""

    full_rank: int
    stable_rank: float
    """`||W||_F^2 / ||W||_2^2`"""
    rank_90: int
    rank_99: int
    """The least ranks that keep 90% and 99% of the squared singular values."""
    curve: tuple[float, ...]
    """Singular values relative to the largest, at up to 32 evenly spaced indices."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def spectra(
    model: nn.Module, where: Where = None, progress: Callable[[str], None] = lambda name: None
) -> dict[str, dict[str, MatrixSpectrum]]:
    """The spectra of the layers that `where` means, by layer and matrix; those refused are left out."""
    found: dict[str, dict[str, MatrixSpectrum]] = {}
    for candidate in find(model, where):
        progress(candidate.name)
        scheme = candidate.layer.schemes[0]
        if refusal(candidate, scheme) is None:
            found[candidate.name] = _of_layer(candidate, scheme)
    return found


def _of_layer(candidate: Candidate, scheme: str) -> dict[str, MatrixSpectrum]:
    weights = checked_weights(candidate)
    unfoldings = candidate.layer.unfoldings(candidate.dense, scheme)
    return {u.name: summarize(singular_values(u.unfold(weights)).numpy()) for u in unfoldings}


def summarize(values: Spectrum) -> MatrixSpectrum:
    """From singular values (count, full rank), descending."""
    energy = np.square(values).mean(axis=0)
    total, kept = float(energy.sum()), np.cumsum(energy)
    if total <= 0:
        return MatrixSpectrum(len(energy), 0.0, 1, 1, (0.0,) * min(_POINTS, len(energy)))
    places = np.unique(np.linspace(0, len(energy) - 1, _POINTS).round().astype(int))
    curve = np.sqrt(energy / energy[0])[places]
    return MatrixSpectrum(
        full_rank=len(energy),
        stable_rank=total / float(energy[0]),
        rank_90=int(np.argmax(kept >= 0.90 * total * (1 - 1e-12))) + 1,
        rank_99=int(np.argmax(kept >= 0.99 * total * (1 - 1e-12))) + 1,
        curve=tuple(float(value) for value in curve),
    )
