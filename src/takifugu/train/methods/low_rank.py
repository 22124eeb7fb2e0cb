"""Low-rank from the first step on: what a warm start is compared with.

The factors come from the truncated SVD of the fresh network's random weights. That way a layer begins as
close as its rank allows to the layer the network's author meant, scale included, and its two factors are
balanced; factors drawn on their own would need an initialization of their own for every scheme, or signals
fade or blow up.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from takifugu.lowrank.candidates import Where
from takifugu.lowrank.ranks import rule_for
from takifugu.lowrank.report import FactorReport
from takifugu.lowrank.surgery import decomposer, factorize_
from takifugu.train.methods.base import Method, Run
from takifugu.train.methods.options import told_as
from takifugu.train.methods.warm_start import RANK, require_scheme


class LowRank(Method):
    """Options: rank (0.25), svd and scheme, as for warm-start."""

    def __init__(
        self,
        *,
        rank: Any = RANK,
        svd: str = "exact",
        scheme: str | Mapping[str, str] | None = None,
        where: Where = None,
    ) -> None:
        with told_as("rank"):
            rule_for(rank)
        with told_as("svd"):
            decomposer(svd)
        require_scheme(scheme)
        self.rank, self.svd, self.scheme, self.where = rank, svd, scheme, where
        self._untold: FactorReport | None = None

    def build_(self, module: nn.Module) -> None:
        self._untold = factorize_(module, self.rank, self.where, scheme=self.scheme, svd=self.svd)

    def before_epoch_(self, run: Run) -> None:
        if self._untold is not None:  # there is no run to tell before the first epoch
            report, self._untold = self._untold, None
            layers = len(report.factorized)
            run.note("low-rank", params_before=report.params_before, params=report.params, layers=layers)
