"""`takifugu report`: one page from the folder of a run, or from a plan."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer


def report(
    source: Annotated[Path, typer.Argument(metavar="RUN|PLAN", help="The folder of a run, or a plan file.")],
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="The page. Default: RUN/report.html, or PLAN.html."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="The result as JSON on stdout; a page only with -o.")
    ] = False,
) -> None:
    """One HTML page that works offline: what was reached, by whom, when, and at what cost."""
    from takifugu.errors import UsageError
    from takifugu.report.page import page
    from takifugu.report.read import read
    from takifugu.report.summary import summary

    found = read(source)
    if output is None and not as_json:
        output = source / "report.html" if source.is_dir() else source.with_suffix(".html")
    if output is not None:
        text = page(found)
        try:
            output.write_text(text, encoding="utf-8")
        except OSError as error:
            raise UsageError(f"{output}: cannot be written ({error.strerror}); choose another -o") from None
        sys.stderr.write(f"wrote {output} ({len(text.encode()) / 1e6:.1f} MB)\n")
    if as_json:
        typer.echo(json.dumps(summary(found), indent=1, ensure_ascii=False, allow_nan=False))
    else:
        typer.echo(str(output))
