"""What "package.module:name" stands for: the user's own model, data or anything else they can import."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from takifugu.errors import UsageError, near_misses

MODEL_FUNCTIONS = frozenset({"takifugu.zoo.small:cnn", "takifugu.zoo.small:mlp"})
"""Functions that a model file's header may name besides zoo networks. A fixed list: importing whatever a file
names would run code of the file's choosing."""


def named(target: str) -> Any:
    """Imports the module and returns its attribute."""
    module_name, _, attribute = target.partition(":")
    if not module_name or not attribute:
        raise UsageError(f"{target!r} is not of the form package.module:name")
    here = str(Path.cwd())
    if here not in sys.path:  # the user's own module is likely to lie where they stand
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise UsageError(f"cannot import {module_name!r} of target {target!r}: {error}") from error
    if not hasattr(module, attribute):
        public = [name for name in vars(module) if not name.startswith("_")]
        raise UsageError(f"{module_name!r} has no {attribute!r}{near_misses(attribute, public)}")
    return getattr(module, attribute)
