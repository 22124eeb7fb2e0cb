"""Takifugu trains compact models.

Low-rank while they train (Pufferfish), and planned for the least energy (PACT). Importing this
module is light: everything below is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0.dev0"

_HOME = {
    "FactorReport": "takifugu.lowrank.report",
    "Problem": "takifugu.plan.problem",
    "Structure": "takifugu.structure",
    "TakifuguError": "takifugu.errors",
    "WarmStart": "takifugu.lowrank.warmstart",
    "apply_": "takifugu.lowrank.surgery",
    "choose": "takifugu.lowrank.choice",
    "densify_": "takifugu.lowrank.surgery",
    "everything": "takifugu.lowrank.default_layers",
    "factorize_": "takifugu.lowrank.surgery",
    "load": "takifugu.lowrank.checkpoint",
    "ranks": "takifugu.lowrank",
    "save": "takifugu.lowrank.checkpoint",
    "solve": "takifugu.plan.solve",
    "structure_of": "takifugu.lowrank.surgery",
    "zoo": "takifugu",
}

__all__ = [*sorted(_HOME), "__version__"]

if TYPE_CHECKING:
    from takifugu import zoo as zoo
    from takifugu.errors import TakifuguError as TakifuguError
    from takifugu.lowrank import ranks as ranks
    from takifugu.lowrank.checkpoint import load as load
    from takifugu.lowrank.checkpoint import save as save
    from takifugu.lowrank.choice import choose as choose
    from takifugu.lowrank.default_layers import everything as everything
    from takifugu.lowrank.report import FactorReport as FactorReport
    from takifugu.lowrank.surgery import apply_ as apply_
    from takifugu.lowrank.surgery import densify_ as densify_
    from takifugu.lowrank.surgery import factorize_ as factorize_
    from takifugu.lowrank.surgery import structure_of as structure_of
    from takifugu.lowrank.warmstart import WarmStart as WarmStart
    from takifugu.plan.problem import Problem as Problem
    from takifugu.plan.solve import solve as solve
    from takifugu.structure import Structure as Structure


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'takifugu' has no attribute {name!r}")
    home = _HOME[name]
    if home == "takifugu" or name == "ranks":  # a submodule
        value: Any = importlib.import_module(f"{home}.{name}")
    else:
        value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, *globals()])
