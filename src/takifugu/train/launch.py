"""Several processes on this machine, started and watched by torch's elastic launcher.

The processes run the same command; `takifugu train` in them finds itself launched. If one dies, all are
started again and go on from the last checkpoint. A failure that a new start cannot mend (a loss that is no
number, a full disk) is left in a file instead, and the processes end without complaint, so that the launcher
does not try again.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from takifugu.errors import RunError

RESTARTS = 3
_OUTCOME = "TAKIFUGU_TRAIN_OUTCOME"
_SAVING_S = 300
"""How long the processes may take to save when they are told to stop."""


def launch(arguments: Sequence[str], workers: int, continuation: str) -> int:
    """Run `takifugu ARGUMENTS` in so many processes and return the exit code.

    `continuation` is the command that continues the run, for the message if a process fails for good.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from takifugu.cli import Exit

    logging.getLogger("torch.distributed.elastic").setLevel(logging.ERROR)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers)))
    with tempfile.TemporaryDirectory(prefix="takifugu-") as aside:
        outcome = Path(aside) / "outcome.json"
        os.environ[_OUTCOME] = str(outcome)
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=workers,
            run_id="takifugu-train",
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=RESTARTS,
            shutdown_timeout=_SAVING_S,
            logs_specs=DefaultLogsSpecs(log_dir=aside),  # or it leaves a folder behind for every run
        )
        try:
            elastic_launch(config, sys.executable)("-m", "takifugu", *arguments)
        except SignalException:
            return Exit.INTERRUPTED
        except ChildFailedError as error:
            code = _left_behind(outcome)
            if code is not None:
                return code
            rank, failure = error.get_first_failure()
            raise RunError(
                f"process {rank} failed with code {failure.exitcode} after {RESTARTS} restarts; see the "
                f"output above; continue from the last checkpoint with: {continuation}"
            ) from None
        finally:
            del os.environ[_OUTCOME]
        code = _left_behind(outcome)
        return Exit.OK if code is None else code


def launched() -> int | None:
    """How many processes `launch` has started, seen from one of them; None if it did not start this one."""
    return int(os.environ["WORLD_SIZE"]) if _OUTCOME in os.environ and "WORLD_SIZE" in os.environ else None


def over() -> bool:
    """Whether a process of this run has told how it ended. Those that lost it and are started again go."""
    path = os.environ.get(_OUTCOME)
    return path is not None and Path(path).exists()


def leave_behind(code: int) -> int:
    """A process tells the launcher how it ended; returns what it should exit with."""
    path = os.environ.get(_OUTCOME)
    if path is None or code == 0:
        return code  # torchrun is the user's own: it wants the real code
    Path(path).write_text(json.dumps({"code": code}), encoding="utf-8")
    return 0


def _left_behind(path: Path) -> int | None:
    return int(json.loads(path.read_text(encoding="utf-8"))["code"]) if path.exists() else None
