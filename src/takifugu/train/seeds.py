"""Seeds that follow from other seeds: whoever knows where a number is drawn can draw it again."""

from __future__ import annotations

import hashlib


def derived(*parts: int | str) -> int:
    """A seed from what it is for, such as the run's seed, the epoch and the step; 63 bits of it."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
