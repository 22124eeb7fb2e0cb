"""`takifugu profile`: measure what a plan rests on. `model` runs pilots, `node` times this machine."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from takifugu.errors import UsageError

if TYPE_CHECKING:
    from takifugu.train.pilots import PilotRound
    from takifugu.train.profile import Finding

profile = typer.Typer(
    help="Measure what a plan rests on: the model's versions, or this machine.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@profile.command()
def model(
    draft: Annotated[Path, typer.Argument(help="A problem file with [target], [workload] and nodes.")],
    ranks: Annotated[str, typer.Option(help="Rank ratios of the versions.")] = "0.5,0.25,0.125",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each pilot.")] = 6,
    warmup: Annotated[int, typer.Option(min=1, help="Dense rounds before the versions branch.")] = 3,
    amounts: Annotated[str, typer.Option(help="Shares of the fleet's data to try.")] = "1,0.5,0.25",
    curve_samples: Annotated[int, typer.Option(min=0, help="Curves drawn from their uncertainty.")] = 20,
    averaging: Annotated[str, typer.Option(help="factors or products.")] = "factors",
    like: Annotated[
        Path | None, typer.Option(help="A plan: small teams are made of the nodes it uses most.")
    ] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Folder of the data sets.")] = None,
    output: Annotated[Path, typer.Option("-o", "--output", help="The problem file.")] = Path("problem.toml"),
    pilots: Annotated[
        Path | None, typer.Option(help="Where pilots are kept. Default: beside the problem file.")
    ] = None,
    watts: Annotated[float, typer.Option(help="The server's power, for the energy of switches.")] = 15.0,
    costs: Annotated[
        str,
        typer.Option(
            help="Cost of versions on nodes without own figures: 'measured' (step times on this machine, "
            "relative to dense) or 'flops'."
        ),
    ] = "measured",
    as_json: Annotated[bool, typer.Option("--json", help="JSON on stdout.")] = False,
) -> int:
    """Runs pilots on the nodes' data, fits the curves and writes a complete problem file.

    Interrupted, it goes on where it was when it is called again. A first plan shows which nodes matter: with
    --like PLAN pilots are run on those, and only what is new is trained.
    """
    from takifugu.cli import Exit
    from takifugu.lowrank.averaging import check_how
    from takifugu.plan.plan import read_plan
    from takifugu.train.costs import check_costs
    from takifugu.train.profile import Draft, Profile

    check_how(averaging)
    check_costs(costs)
    _positive("--watts", watts)
    if not output.parent.is_dir():
        raise UsageError(f"{output}: the folder {output.parent} does not exist; choose another -o")
    ready = Profile.prepare(
        Draft.load(draft),
        _numbers("--ranks", ranks),
        rounds,
        warmup,
        _numbers("--amounts", amounts),
        data_dir,
        averaging,
        None if like is None else read_plan(like),
    )
    folder = pilots if pilots is not None else output.parent / f"{output.stem}.pilots"
    try:
        with _bar(ready.pilots.total_rounds) as told:
            found = ready.run(folder, told, curve_samples, costs)
    except KeyboardInterrupt:
        sys.stderr.write(f"pilots so far are kept in {folder}; the same command goes on from there\n")
        return Exit.INTERRUPTED
    found.write(output, watts)
    if as_json:
        typer.echo(json.dumps(_summary(found, output), indent=2, allow_nan=False))
    else:
        _show(found)
    sys.stderr.write(f"wrote {output}\n")
    return Exit.OK


@profile.command()
def node(
    problem: Annotated[Path, typer.Argument(help="A problem file or draft: its workload is what is timed.")],
    name: Annotated[str | None, typer.Option(help="The node's name. Default: this machine's.")] = None,
    ranks: Annotated[
        str, typer.Option(help="Rank ratios, where the file has no versions.")
    ] = "0.5,0.25,0.125",
    link_bytes_per_s: Annotated[float, typer.Option(help="Bytes per second, each way.")] = 1.25e6,
    latency_s: Annotated[float, typer.Option(help="Seconds, one way.")] = 0.02,
    joules_per_byte: Annotated[float, typer.Option(help="Energy of the link.")] = 1.0e-7,
    watts: Annotated[float, typer.Option(help="This machine's power while it trains.")] = 15.0,
    budget_s: Annotated[float, typer.Option(help="Seconds to measure for, all versions together.")] = 20.0,
    data_dir: Annotated[Path | None, typer.Option(help="Folder of the data sets.")] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the entry here.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON on stdout.")] = False,
) -> int:
    """Times training steps of every version on this machine and writes one [[nodes]] entry."""
    import platform

    from takifugu.cli import Exit
    from takifugu.plan.toml_writer import toml
    from takifugu.train.node import Link, measure_node
    from takifugu.train.profile import Draft

    for option, value in (
        ("--link-bytes-per-s", link_bytes_per_s),
        ("--watts", watts),
        ("--budget-s", budget_s),
    ):
        _positive(option, value)
    for option, value in (("--latency-s", latency_s), ("--joules-per-byte", joules_per_byte)):
        if not 0 <= value < float("inf"):
            raise UsageError(f"{option} {value:g} is not 0 or above")
    found = measure_node(
        Draft.load(problem),
        name or platform.node() or "this-machine",
        Link(link_bytes_per_s, latency_s, joules_per_byte),
        watts,
        _numbers("--ranks", ranks),
        budget_s,
        data_dir,
    )
    for version, timing in found.timings.items():
        sys.stderr.write(
            f"{version}: {found.entry['samples_per_s'][version]:,.1f} samples/s, {found.batch_size} in "
            f"{timing.median_s * 1e3:.3g} ms (middle half {timing.low_s * 1e3:.3g} to "
            f"{timing.high_s * 1e3:.3g}, median +-{timing.error:.1%}, timed {timing.count} times)\n"
        )
    threads = f"{found.threads} thread{'s' if found.threads > 1 else ''}"
    timed = ", ".join(f"{v} +-{t.error:.1%} of {t.count}" for v, t in found.timings.items())
    text = (
        f"# Speeds and memory: measured. Energy: estimated, {watts:g} W times seconds. Link: as given.\n"
        f"# Measured with {threads}, batches of {found.batch_size}; error of the median: {timed} timings.\n"
        f"{toml({'nodes': [found.entry]})}"
    )
    if output is not None:
        try:
            output.write_text(text, encoding="utf-8")
        except OSError as error:
            raise UsageError(f"{output}: cannot be written ({error.strerror}); choose another -o") from None
        sys.stderr.write(f"wrote {output}\n")
    if as_json:
        typer.echo(json.dumps(found.to_dict(), indent=2, allow_nan=False))
    elif output is None:
        typer.echo(text, nl=False)
    return Exit.OK


def _summary(found: Finding, output: Path) -> dict[str, Any]:
    from dataclasses import asdict

    return {
        "problem": str(output),
        "start_loss": found.start_loss(),
        "fresh_loss": found.fresh_loss(),
        "label_weight": found.fits.label_weight,
        "costs": None if found.costs is None else found.costs.to_dict(),
        "pilot_rounds": len(found.result.rounds),
        "pilot_passes": found.pilot_passes,
        "full_run_rounds": found.full_run_rounds(),
        "versions": {
            name: {"kind": fit.curve.kind, **fit.curve.parameters(), "goodness": asdict(fit.goodness)}
            for name, fit in found.fits.versions.items()
        },
        "switches": [
            {**asdict(switch), "loss_jump": found.jump(switch), "loss_jump_seen": switch.loss_jump}
            for switch in found.result.switches
        ],
    }


def _show(found: Finding) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("version")
    for title in ("MFLOPs/sample", "payload kB", "curve", "floor", "R2", "error on later rounds", "jump"):
        table.add_column(title, justify="right")
    jumps = {s.target: found.jump(s) for s in reversed(found.result.switches) if s.source == "dense"}
    for rung in found.profile.rungs:
        fit = found.fits.versions[rung.name]
        error = fit.goodness.held_out_error
        table.add_row(
            rung.name,
            f"{rung.train_flops_per_sample / 1e6:,.3g}",
            f"{rung.payload_bytes / 1e3:,.1f}",
            fit.curve.kind,
            f"{fit.curve.floor:.3f}",
            f"{fit.goodness.r2:.3f}",
            "-" if error is None else f"{error:.1%}",
            f"{jumps[rung.name]:.3f}" if rung.name in jumps else "-",
        )
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table)
    full = found.full_run_rounds()
    work = (
        f"pilots: {len(found.result.rounds)} rounds, as much as {found.pilot_passes:.1f} passes over all data"
    )
    if full is None:
        work += "; by its curve the dense model alone never reaches the target"
    elif full:
        work += f", {found.pilot_passes / full:.0%} of a dense run on all nodes ({full} rounds)"
    if found.costs is not None:
        console.print(found.costs.describe(), highlight=False)
    console.print(
        f"start loss {found.start_loss():.4f} (fresh {found.fresh_loss():.4f}, the rest stands for "
        f"hesitation), label weight {found.fits.label_weight:g}; {work}",
        highlight=False,
    )


@contextmanager
def _bar(total: int) -> Iterator[Callable[[PilotRound], None]]:
    """A progress bar on stderr; a line for each round where stderr is no terminal."""
    if not sys.stderr.isatty():
        yield lambda one: _say(f"pilot {one.run} round {one.round}: loss {one.loss_after:.4f}")
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("pilots", total=total)
        yield lambda one: progress.update(
            task, advance=1, description=f"pilot {one.run}: loss {one.loss_after:.3f}"
        )


def _say(message: str) -> None:
    sys.stderr.write(f"{message}\n")


def _numbers(option: str, text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise UsageError(f"{option} {text!r} is not a list of numbers such as 0.5,0.25") from None


def _positive(option: str, value: float) -> None:
    if not 0 < value < float("inf"):
        raise UsageError(f"{option} {value:g} is not above 0")
