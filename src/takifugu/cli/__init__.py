"""The command line. `main` maps exceptions to exit codes; one file per command does the work.

Nothing in here imports torch until a command needs it: `takifugu --help` stays quick.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
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
    from takifugu.errors import TakifuguError

    # Typer brings its own copy of click since 0.26; this is the base class of whichever it uses.
    click_exception: type[Any] = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")

    try:
        # standalone_mode=False: click neither exits nor prints, so that codes are decided here.
        code = app(args=list(arguments) if arguments is not None else None, standalone_mode=False)
        return int(code or Exit.OK)
    except typer.Abort:
        return _say("interrupted", Exit.INTERRUPTED)
    except KeyboardInterrupt:
        return _say("interrupted", Exit.INTERRUPTED)
    except typer.Exit as stop:
        return int(stop.exit_code)
    except click_exception as error:
        error.show()
        return Exit.USAGE
    except TakifuguError as error:
        if os.environ.get("TAKIFUGU_TRACEBACK"):
            raise
        return _say(f"error: {error}", Exit.USAGE)
    except BrokenPipeError:
        # The reader (head, a pager) left. Python would complain again while flushing at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Exit.FAILED


def _say(message: str, code: Exit) -> int:
    sys.stderr.write(f"takifugu: {message}\n")
    return code


def entry() -> None:
    sys.exit(main())
