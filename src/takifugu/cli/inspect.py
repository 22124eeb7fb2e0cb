"""`takifugu inspect`: what a model's layers look like, and what a rank rule would make of them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from takifugu.errors import UsageError

if TYPE_CHECKING:
    from takifugu.lowrank.report import FactorReport
    from takifugu.lowrank.spectra import MatrixSpectrum

_BARS = "▁▂▃▄▅▆▇█"


def inspect(
    target: Annotated[str, typer.Argument(help="A zoo network, or package.module:callable.")],
    rank: Annotated[
        str, typer.Option(help="0.25, 64, stable, evbmf, energy:0.9, params:0.3, macs:0.5, bytes:4000000.")
    ] = "0.25",
    where: Annotated[
        list[str] | None,
        typer.Option(
            help="Layer-name pattern, repeatable. Default: the paper's choice for zoo networks, else all "
            "layers but the first, the last and embeddings."
        ),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All layers, embeddings included.")] = False,
    scheme: Annotated[
        str | None,
        typer.Option(help="Conv scheme: kxk-1x1, 1x1-kxk, tucker2, separable, fastest."),
    ] = None,
    force: Annotated[bool, typer.Option(help="Factorize also what would cost more.")] = False,
    weights: Annotated[Path | None, typer.Option(help="A file of takifugu.save to load first.")] = None,
    shape: Annotated[str | None, typer.Option(help="Input shape for MACs, e.g. 1,3,32,32.")] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of the random weights.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="JSON on stdout.")] = False,
) -> None:
    """Spectrum, ranks, parameters, MACs and bytes per layer, for a rank rule."""
    import torch

    from takifugu.cli.target import resolve
    from takifugu.lowrank.checkpoint import load
    from takifugu.lowrank.default_layers import everything as all_layers
    from takifugu.lowrank.spectra import spectra
    from takifugu.lowrank.surgery import densify_, factorize_, structure_of

    torch.manual_seed(seed)
    found = resolve(target, _shape(shape))
    model = found.model
    if weights is not None:
        load(weights, model)
        if not structure_of(model).is_dense:
            densify_(model)
    chosen: Any = where if where else all_layers if everything else found.where
    talk = sys.stderr if not as_json and sys.stderr.isatty() else None
    curves = spectra(model, chosen, lambda name: _progress(talk, f"decomposing {name}"))
    _progress(talk, "factorizing")
    report = factorize_(model, rank, chosen, scheme=scheme, force=force, example_input=found.example)
    _progress(talk, "")
    if as_json:
        data = {"target": target, "rank_rule": rank, "seed": seed, **report.to_dict()}
        data["spectra"] = {n: {m: s.to_dict() for m, s in layer.items()} for n, layer in curves.items()}
        typer.echo(json.dumps(data, indent=2))
    else:
        _show(target, rank, weights, report, curves)


def _show(
    target: str,
    rank: str,
    weights: Path | None,
    report: FactorReport,
    curves: dict[str, dict[str, MatrixSpectrum]],
) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 180)
    source = f"weights of {weights}" if weights else "random weights: spectra are those of the initialization"
    console.print(f"{target}, rank {rank} ({source})", highlight=False)
    table = Table(box=None, pad_edge=False)
    for title in ("layer", "matrix"):
        table.add_column(title, no_wrap=True)
    table.add_column("singular values", no_wrap=True)
    for title in ("full", "stable", "90%", "99%", "rank"):
        table.add_column(title, justify="right")
    for layer in report.layers:
        for matrix, curve in curves.get(layer.name, {}).items():
            chosen = "-" if layer.rank is None else str(layer.rank.get(matrix, "-"))
            counts = [curve.full_rank, f"{curve.stable_rank:.1f}", curve.rank_90, curve.rank_99]
            table.add_row(layer.name, matrix, _sparkline(curve.curve), *map(str, counts), chosen)
    console.print(table)
    console.print()
    console.print(report, highlight=False)


def _sparkline(values: tuple[float, ...]) -> str:
    return "".join(_BARS[min(len(_BARS) - 1, int(value * len(_BARS)))] for value in values)


def _shape(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        shape = tuple(int(part) for part in text.split(","))
    except ValueError:
        shape = ()
    if not shape or min(shape) < 1:
        raise UsageError(f"--shape {text!r} is not a list of positive integers such as 1,3,32,32")
    return shape


def _progress(stream: Any, message: str) -> None:
    """One line that rewrites itself, on a terminal only."""
    if stream is not None:
        stream.write(f"\r\033[K{message}")
        stream.flush()
