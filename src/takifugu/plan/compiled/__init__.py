"""The planner's inner loops, compiled: what numpy would have to do in thousands of small calls.

Plain functions of arrays that know nothing of plans; what they compute, and why it is right, stands where
they are called. Numba translates them when they are first used and keeps the result on disk. Import them only
where they are needed: numba takes a third of a second, which `import takifugu` can do without.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import numba

F = TypeVar("F", bound=Callable[..., Any])


def compiled(function: F) -> F:
    try:
        with _cache_folder():
            return cast(F, numba.njit(cache=True, nogil=True, error_model="numpy")(function))
    except RuntimeError:  # no folder that can be written to: compiled again in each process
        return cast(F, numba.njit(nogil=True, error_model="numpy")(function))


@contextmanager
def _cache_folder() -> Iterator[None]:
    """Let numba keep the function compiled inside this block in a folder of these very sources.

    Numba compiles called functions into their callers, but checks only the caller's own file when it loads a
    cached one: after an edit in another file it would run the old code.
    """
    config: Any = numba.config
    before = config.CACHE_DIR
    config.CACHE_DIR = str(_cache_base(before) / f"takifugu-{sources_hash()}")
    try:
        yield
    finally:
        config.CACHE_DIR = before


@cache
def _cache_base(configured: str) -> Path:
    """Return `NUMBA_CACHE_DIR` if it is set, else the folder of the sources, else the user's cache folder."""
    if configured:
        return Path(configured)
    beside = Path(__file__).parent / "__pycache__"
    if os.access(beside if beside.is_dir() else beside.parent, os.W_OK):
        return beside
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "takifugu"


@cache
def sources_hash() -> str:
    """Return a hash of all compiled source files."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]
