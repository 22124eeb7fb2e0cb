"""The planner's inner loops, compiled: what numpy would have to do in thousands of small calls.

Plain functions of arrays that know nothing of plans; what they compute, and why it is right, stands where
they are called. Numba translates them when they are first used and keeps the result on disk. Import them only
where they are needed: numba takes a third of a second, which `import takifugu` can do without.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

F = TypeVar("F", bound=Callable[..., Any])


def compiled(function: F) -> F:
    try:
        return cast(F, numba.njit(cache=True, nogil=True, error_model="numpy")(function))
    except RuntimeError:  # no folder that can be written to: translated anew in each process
        return cast(F, numba.njit(nogil=True, error_model="numpy")(function))
