"""Memory that is freed stays with the process, so that the next training step need not ask for it again.

A step on the processor frees all its activations and the next one wants them back. glibc hands large blocks
to the system at once, and every page that returns costs a fault: a tenth to a third of the time of a small
network. The price of keeping them is that the process stays at its peak.
"""

from __future__ import annotations

import ctypes
import os
import platform

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # the numbers of <malloc.h>
_NEVER = 2**31 - 1
_USERS_OWN = (
    "MALLOC_TRIM_THRESHOLD_",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_MMAP_MAX_",
    "GLIBC_TUNABLES",
    "LD_PRELOAD",
)


def keep_freed_memory() -> bool:
    """Says whether it could: only glibc needs it, and an allocator that the user has chosen is left alone."""
    if platform.libc_ver()[0] != "glibc" or any(os.environ.get(name) for name in _USERS_OWN):
        return False
    set_option = ctypes.CDLL(None).mallopt
    return bool(set_option(_MMAP_MAX, 0) and set_option(_TRIM_THRESHOLD, _NEVER))
