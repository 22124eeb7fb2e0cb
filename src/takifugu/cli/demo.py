"""`takifugu demo`: the whole loop on real digits; `--switch` shows the switch to low-rank alone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from takifugu.errors import UsageError


def demo(
    seed: Annotated[int, typer.Option(min=0, help="Of the data, the training and the true fleet.")] = 0,
    folder: Annotated[Path, typer.Option(help="Where everything goes.")] = Path("demo"),
    as_json: Annotated[bool, typer.Option("--json", help="JSON on stdout.")] = False,
    switch: Annotated[
        bool, typer.Option("--switch", help="One network instead, dense and with the switch to low-rank.")
    ] = False,
    epochs: Annotated[
        int | None, typer.Option(min=2, help="With --switch: epochs in all; 10 if not given.")
    ] = None,
    warmup: Annotated[
        int | None, typer.Option(min=1, help="With --switch: dense epochs before it; 3 if not given.")
    ] = None,
    rank: Annotated[
        float | None, typer.Option(help="With --switch: share of the full rank; 0.25 if not given.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", hidden=True)] = False,
) -> int:
    """Eight unequal devices learn handwritten digits: profile, plan, run it and every baseline, compare.

    The training is real, the devices are simulated. It takes about three minutes, gives the same numbers each
    time on the same machine, and goes on where it was if it is stopped.
    """
    given = {"--epochs": epochs, "--warmup": warmup, "--rank": rank}
    if switch:
        from takifugu.cli.demo_switch import demo_switch

        demo_switch(epochs or 10, warmup or 3, 0.25 if rank is None else rank, seed, folder, as_json)
        return 0
    for option, value in given.items():
        if value is not None:
            raise UsageError(f"{option} belongs to `takifugu demo --switch`; add --switch, or leave it out")
    from takifugu.cli.demo_loop import demo_loop

    return demo_loop(seed, folder, as_json, quick)
