"""The layers that `where=None` factorizes: Pufferfish's hybrid network (Section 3 of the paper), generalised.

The paper keeps the first layers and the last one dense. Here the output layer always stays dense (it is as
narrow as there are labels, and a lower rank mixes them up), the first layer too if another layer remains, and
so does any layer that a ratio or a rule would give a rank below `LEAST_RANK`. Embeddings are opt-in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from takifugu.lowrank import probe
from takifugu.lowrank.candidates import Candidate, Where, find, layer_of, walk
from takifugu.lowrank.factorized import Factorized
from takifugu.lowrank.layers import OPT_IN

LEAST_RANK = 8
"""A smaller rank loses more than it saves: the layers concerned are narrow and hold few of the parameters."""

EMBEDDING = "an embedding stays dense by default; name it with where=, or pass where=tk.everything"
OUTPUT = "the output layer stays dense by default; name it with where=, or pass where=tk.everything"
FIRST = "the first layer stays dense by default; name it with where=, or pass where=tk.everything"
_FACTORIZED = "it is factorized already and keeps its rank by default; name it with where= to change it"


def everything(name: str, module: nn.Module) -> bool:
    """Return True for every layer: `where=tk.everything` takes all of them, embeddings included."""
    return True


def all_candidates(model: nn.Module) -> list[Candidate]:
    """Return every layer of a supported type, embeddings included, in registration order."""
    find(model, None)  # the checks of the model, and an error if there is nothing but embeddings
    return [Candidate(name, module, layer) for name, module in walk(model) if (layer := layer_of(module))]


def meant_layers(
    model: nn.Module, where: Where, example: Any = None, *, force: bool = False
) -> list[Candidate]:
    """Return the layers that `where` means; for None those of the default rule, whatever their rank."""
    candidates = find(model, where)
    if where is not None or force:
        return candidates
    first, last = ends(model, candidates, example)
    inner = [c for c in candidates if c.name != last]
    rest = [c for c in inner if c.name != first]
    return rest or inner


def ends(model: nn.Module, candidates: Sequence[Candidate], example: Any) -> tuple[str | None, str | None]:
    """Return the names of the first and the last Linear or Conv.

    Execution order where an example input is given, else registration order. A layer that runs several times
    counts by its first call for the beginning and by its last call for the end.
    """
    names = [candidate.name for candidate in candidates if is_linear_or_conv(candidate)]
    if example is not None and names:
        names = _calls(model, names, example) or names
    return (names[0], names[-1]) if names else (None, None)


def is_linear_or_conv(candidate: Candidate) -> bool:
    return candidate.layer.kind.startswith(("linear", "conv", "transformers_conv"))


def reason_for(candidate: Candidate, reason: str) -> str:
    """Return the reason as it reads for this layer, which may be factorized already."""
    return _FACTORIZED if isinstance(candidate.module, Factorized) else reason


def embeddings(candidates: Sequence[Candidate]) -> list[Candidate]:
    return [candidate for candidate in candidates if candidate.layer.kind in OPT_IN]


def _calls(model: nn.Module, names: Sequence[str], example: Any) -> list[str]:
    """Return the names in the order in which the layers are called, once per call."""
    calls: list[str] = []

    def note(name: str) -> Any:
        return lambda module, args: calls.append(name)

    handles = [model.get_submodule(name).register_forward_pre_hook(note(name)) for name in names]
    try:
        probe.observe(model, (), example, lambda *_: None)
    finally:
        for handle in handles:
            handle.remove()
    return calls
