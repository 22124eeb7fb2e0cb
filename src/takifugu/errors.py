"""Every error a user can cause. Messages say what happened, where, and what to do about it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class TakifuguError(Exception):
    """Base of every error a user can cause."""


class StructureError(TakifuguError):
    """A structure is malformed, or does not fit the model it is applied to."""


class RankError(TakifuguError):
    """A rank or a rank rule that cannot be used."""


class LayerError(TakifuguError):
    """A layer that cannot be factorized or densified the way it was asked for."""


class CheckpointError(TakifuguError):
    """A model file that is damaged, foreign, or made for another model."""


class UsageError(TakifuguError):
    """Wrong arguments: an unknown name, a missing input, a combination that makes no sense."""


class DataError(TakifuguError):
    """A data set that is missing, damaged, or cannot be shared out the way it was asked for."""


class TrainingError(TakifuguError):
    """Training that went wrong: a loss or a weight that is no number, or a round nobody took part in."""


class ProblemError(TakifuguError):
    """A problem or plan file that cannot be used; carries one message per mistake."""

    def __init__(self, mistakes: Iterable[str]) -> None:
        self.mistakes = tuple(mistakes)
        super().__init__("\n".join(self.mistakes))


class RunError(TakifuguError):
    """A run that cannot start or go on: a damaged or foreign folder, a full disk, nodes that do not fit."""


class ReportError(TakifuguError):
    """A run folder or plan file that no page can be made of."""


class InternalError(RuntimeError):
    """A result that contradicts another one: a mistake in Takifugu itself, never the user's. Nothing that was
    computed on the way may be used."""


class TakifuguWarning(UserWarning):
    """Something was done, but not quite as the user may believe."""


def near_misses(wanted: str, known: Iterable[str], most: int = 3) -> str:
    """A half sentence for an error message: what the user may have meant, or nothing.

    >>> near_misses("layer1.conv", ["layer1.conv1", "fc"])
    "; did you mean 'layer1.conv1'?"
    """
    close = difflib.get_close_matches(wanted, list(known), n=most, cutoff=0.5)
    return f"; did you mean {', '.join(repr(name) for name in close)}?" if close else ""
