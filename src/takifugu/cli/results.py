"""The table of policies that `takifugu run` and `takifugu demo` end with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from takifugu.engine.policies import Policy


def table(
    policies: Sequence[Policy],
    results: Mapping[str, Mapping[str, Any]],
    target_loss: float,
    deadline_s: float,
    *,
    short: bool = False,
) -> Iterator[str]:
    """Prediction in brackets behind each figure. `short`: policies by what `--only` takes."""
    head = ("policy", "reached", "energy J", "time s", "loss", "rounds", "MB")
    rows = []
    for policy in policies:
        found = results[policy.slug]
        guess = found["predicted"]
        reached = "no" if not found["reached"] else "yes" if found["deadline_met"] else "late"
        rows.append(
            (
                policy.slug if short else policy.name,
                reached,
                f"{found['energy_j']:,.1f} ({guess['energy_j']:,.1f})",
                f"{found['time_s']:,.1f} ({guess['time_s']:,.1f})",
                f"{found['loss']:.4f} ({guess['loss']:.4f})",
                f"{found['rounds']} ({found['planned_rounds']})",
                f"{found['bytes'] / 1e6:,.1f}",
            )
        )
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    yield (
        f"target: loss {target_loss:g} within {deadline_s:g} s. "
        "Losses are real, times and energies simulated; in brackets what was predicted."
    )
    for row in (head, *rows):
        cells = (
            c.ljust(w) if i < 2 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))
        )
        yield "  ".join(cells).rstrip()
