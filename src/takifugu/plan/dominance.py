"""Which rows of three columns, all to be small, are beaten by no other row."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from takifugu.plan.curves import Floats


def undominated(a: Floats, b: Floats, c: Floats) -> NDArray[np.int64]:
    """Indices (ascending) of rows that no other row equals or beats in all three; of equal rows the first."""
    from takifugu.plan.compiled import rows

    # By a, then b, c and place: only an earlier row can beat a later one. One quick sort and few ties are
    # several times as fast as sorting by three columns.
    order = np.argsort(a)
    if not rows.settle_ties(a, b, c, order):
        order = np.lexsort((c, b, a))
    return np.sort(order[rows.unbeaten(b[order], c[order])])
