"""Which samples each node owns. One function a kind, and a registry.

A kind gets the whole set's labels and the nodes with their sizes, and returns the places of each node's
samples. Everything comes from the seed. Sizes found with nothing given, and given again, share out the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from takifugu.errors import DataError, UsageError, near_misses

Places = NDArray[np.int64]


@dataclass(frozen=True)
class Request:
    """What is to be shared out among whom."""

    labels: NDArray[np.int64]
    names: Sequence[str]
    sizes: Mapping[str, int]
    """Samples of the nodes that say so; the others share what is left."""
    seed: int
    options: Mapping[str, Any] = field(default_factory=dict)
    writers: NDArray[np.int64] | None = None

    def generator(self) -> np.random.Generator:
        # A stream of its own, apart from the split of the validation set.
        return np.random.default_rng([self.seed, 1])


def iid(request: Request) -> dict[str, Places]:
    """Every node has a random sample of the whole."""
    sizes = _all_sizes(request)
    order = request.generator().permutation(len(request.labels))
    ends = np.cumsum([sizes[name] for name in request.names])
    return dict(zip(request.names, np.split(order[: ends[-1]], ends[:-1]), strict=True))


def dirichlet(request: Request) -> dict[str, Places]:
    """Every node's label mix is drawn from a Dirichlet distribution; the smaller alpha, the more skew.

    The drawn mixes are brought to the nodes' sizes and to the labels there are by iterative proportional
    fitting, so that no node is left with what the others did not want.
    """
    alpha = request.options.get("alpha", 0.3)
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not 0 < alpha < float("inf"):
        raise UsageError(f"workload.partition.alpha: {alpha!r} is not a number above 0")
    sizes = _all_sizes(request)
    rng = request.generator()
    classes = int(request.labels.max()) + 1
    pools = [rng.permutation(np.flatnonzero(request.labels == label)) for label in range(classes)]
    there = np.array([len(pool) for pool in pools])
    wanted = np.array([sizes[name] for name in request.names])
    mixes = rng.dirichlet(np.full(classes, float(alpha)), size=len(wanted))
    counts = _fitted(mixes, wanted, there)
    taken = np.zeros(classes, dtype=int)
    found: dict[str, Places] = {}
    for name, row in zip(request.names, counts, strict=True):
        pieces = [pools[k][taken[k] : taken[k] + row[k]] for k in range(classes)]
        taken += row
        found[name] = np.concatenate(pieces)
    return found


def writers(request: Request) -> dict[str, Places]:
    """Every node has the samples of some writers: people differ, and so do the nodes."""
    if request.writers is None:
        raise UsageError(
            "workload.partition: kind 'writers' needs data = 'mnist'; only its writers are known"
        )
    who, counts = np.unique(request.writers, return_counts=True)
    if len(who) < len(request.names):
        raise DataError(f"{len(request.names)} nodes cannot share {len(who)} writers; take fewer nodes")
    order = request.generator().permutation(len(who))
    node_of = np.empty(len(who), dtype=int)
    load = np.zeros(len(request.names), dtype=int)
    for index in order:  # each writer to whoever has least, so that all have about as much
        node_of[index] = int(np.argmin(load))
        load[node_of[index]] += counts[index]
    owner = node_of[np.searchsorted(who, request.writers)]
    return {name: np.flatnonzero(owner == node) for node, name in enumerate(request.names)}


KINDS: dict[str, Callable[[Request], dict[str, Places]]] = {
    "iid": iid,
    "dirichlet": dirichlet,
    "writers": writers,
}
"""Kinds that share out one data set; "files" has a file for each node, and `workload` reads those."""

OPTIONS: dict[str, frozenset[str]] = {
    "iid": frozenset(),
    "dirichlet": frozenset({"alpha"}),
    "writers": frozenset(),
    "files": frozenset({"pattern", "validation"}),
}


def check(table: Mapping[str, Any]) -> None:
    """Raises `UsageError` unless the table is a partition."""
    kind = table.get("kind")
    if not isinstance(kind, str) or kind not in OPTIONS:
        raise UsageError(
            f"workload.partition.kind: {kind!r} is not known{near_misses(str(kind), OPTIONS)}; "
            f"one of {', '.join(OPTIONS)}"
        )
    for option in table:
        if option != "kind" and option not in OPTIONS[kind]:
            accepted = ", ".join(sorted(OPTIONS[kind])) or "none"
            raise UsageError(f"workload.partition.{option}: {kind} has no such option; accepted: {accepted}")
    for option in ("pattern", "validation"):
        if option in table and not isinstance(table[option], str):
            raise UsageError(f"workload.partition.{option}: {table[option]!r} is not a path")


def share_out(kind: str, request: Request) -> dict[str, Places]:
    """The places of each node's samples, checked: all that were asked for, none twice, none empty."""
    if not request.names:
        raise DataError("there are no nodes to share the data out to; give at least one")
    if len(set(request.names)) < len(request.names):
        raise DataError(f"two nodes have one name: {sorted(request.names)}")
    found = KINDS[kind](request)
    for name in request.names:
        have, wanted = len(found[name]), request.sizes.get(name)
        if not have:
            raise DataError(f"node {name!r} would own no sample; take fewer nodes, or another partition")
        if wanted is not None and wanted != have:
            raise DataError(
                f"node {name!r}: samples = {wanted}, but its share of the data is {have}; "
                "correct it, or leave samples out and let `takifugu profile model` fill it in"
            )
    return found


def validation_split(labels: NDArray[np.int64], share: float, seed: int) -> tuple[Places, Places]:
    """Places to train on and to validate on; every label gives its share, rounded by largest remainder."""
    rng = np.random.default_rng([seed, 0])
    classes = int(labels.max()) + 1 if len(labels) else 0
    counts = np.bincount(labels, minlength=classes)
    exact = counts * share
    held = np.floor(exact).astype(int)
    short = round(float(exact.sum())) - int(held.sum())
    held[np.argsort(held - exact, kind="stable")[:short]] += 1
    if not 0 < held.sum() < len(labels):
        raise DataError(
            f"validation = {share:g} of {len(labels)} samples leaves {len(labels) - held.sum()} to train on "
            f"and {held.sum()} to validate on; both need some"
        )
    back = np.concatenate(
        [rng.permutation(np.flatnonzero(labels == label))[: held[label]] for label in range(classes)]
    )
    return np.setdiff1d(np.arange(len(labels)), back), np.sort(back)


def _all_sizes(request: Request) -> dict[str, int]:
    """A size for every node: those without one share what is left equally."""
    there = len(request.labels)
    for name, size in request.sizes.items():
        if size < 1:
            raise DataError(f"node {name!r}: samples = {size}; a node needs at least one")
    open_ = [name for name in request.names if name not in request.sizes]
    given = sum(request.sizes.get(name, 0) for name in request.names)
    if given + len(open_) > there:
        largest = max(request.names, key=lambda name: request.sizes.get(name, 1))
        raise DataError(
            f"the nodes ask for {given + len(open_)} samples, and there are {there} to share out (most by "
            f"{largest!r}); lower samples, take fewer nodes, or lower validation"
        )
    each, more = divmod(there - given, len(open_)) if open_ else (0, 0)
    rest = {name: each + (index < more) for index, name in enumerate(open_)}
    return {name: request.sizes.get(name, rest.get(name, 0)) for name in request.names}


def _fitted(mixes: NDArray[np.float64], rows: Places, columns: Places) -> NDArray[np.int64]:
    """Whole numbers with these row sums, column sums within the limits, near the mixes asked for."""
    table = np.maximum(mixes, 1e-9) * (columns > 0)
    limits = columns * (rows.sum() / columns.sum())
    for _ in range(200):
        table *= (rows / table.sum(axis=1))[:, None]
        table *= limits / np.maximum(table.sum(axis=0), 1e-300)
    table *= np.minimum(1.0, rows / table.sum(axis=1))[:, None]
    counts = np.floor(table + 1e-9).astype(np.int64)
    room = columns - counts.sum(axis=0)
    for node, missing in enumerate(rows - counts.sum(axis=1)):
        # What rounding left over goes where the node wanted most, as long as there is some.
        for k in np.argsort(counts[node] - table[node], kind="stable"):
            if missing and room[k] > 0 and table[node, k] > 0.5:
                counts[node, k] += 1
                room[k] -= 1
                missing -= 1
        while missing > 0:
            k = int(np.argmax(np.where(room > 0, table[node] + 1e-12 * room, -1.0)))
            more = min(missing, int(room[k]))
            counts[node, k] += more
            room[k] -= more
            missing -= more
    return counts
