"""The command line. `main` maps exceptions to exit codes; one file per command does the work.

Nothing in here imports torch until a command needs it: `takifugu --help` stays quick.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from enum import IntEnum
from typing import Any


class Exit(IntEnum):
    OK = 0
    FAILED = 1
    """It failed, or the answer is no."""
    USAGE = 2
    """Wrong usage or a bad file."""
    INFEASIBLE = 3
    """Proven infeasible."""
    INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    import typer

    from takifugu.cli.app import app
    from takifugu.errors import InternalError, TakifuguError

    warnings.formatwarning = _formatted
    # Newer releases of typer carry a click of their own, older ones use the installed one.
    click_error: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")
    try:
        # standalone_mode=False: nothing below exits or prints, so that codes are decided here.
        code = int(app(args=None if arguments is None else list(arguments), standalone_mode=False) or 0)
    except typer.Exit as stop:
        code = int(stop.exit_code)
    except (typer.Abort, KeyboardInterrupt):
        code = Exit.INTERRUPTED
    except click_error as error:
        error.show()
        code = Exit.USAGE
    except TakifuguError as error:
        if os.environ.get("TAKIFUGU_TRACEBACK"):
            raise
        code = _say(f"error: {error}", Exit.USAGE)
    except InternalError as error:
        if os.environ.get("TAKIFUGU_TRACEBACK"):
            raise
        code = _say(f"internal error: {error}", Exit.FAILED)
    except BrokenPipeError:
        _drop_stdout()  # the reader (head, a pager) left
        code = Exit.FAILED
    except OSError as error:
        # Files have messages of their own; what is left is, for one, a full disk under stdout.
        if os.environ.get("TAKIFUGU_TRACEBACK"):
            raise
        _drop_stdout()
        code = _say(f"error: {error}", Exit.FAILED)
    if code == Exit.INTERRUPTED:
        _say("interrupted", Exit.INTERRUPTED)
    return code


def _formatted(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Return a warning of ours without the line of source it comes from, which says nothing to a user."""
    from takifugu.errors import TakifuguWarning

    if issubclass(category, TakifuguWarning):
        return f"takifugu: warning: {message}\n"
    return _usual_format(message, category, filename, lineno, line)


_usual_format = warnings.formatwarning


def _drop_stdout() -> None:
    """Python would complain again while flushing at exit."""
    with suppress(OSError, ValueError):  # a stdout without a file, as in tests
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _say(message: str, code: Exit) -> int:
    sys.stderr.write(f"takifugu: {message}\n")
    return code


def entry() -> None:
    if sys.stderr is None:  # closed by whoever started this: nobody listens, and the work goes on
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    sys.exit(main())
