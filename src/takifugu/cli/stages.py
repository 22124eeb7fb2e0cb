"""Progress of a long command in stages, on stderr: bars on a terminal, now and then a line elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

_LINE_EVERY_S = 2.0
_SIGN_OF_LIFE_S = 5.0


class Stage(Protocol):
    def at(self, done: float, detail: str = "") -> None:
        """So much of the stage's total is done, and this is what it is at."""


@contextmanager
def stages() -> Iterator[_Bars | _Lines]:
    """`with stages() as show: with show.stage("profile", "pilots", 20) as stage: stage.at(3, "loss 0.7")`."""
    show: _Bars | _Lines = _Bars() if sys.stderr.isatty() else _Lines()
    with show.shown():
        yield show


class _Bars:
    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        # The spinner turns by itself, so that nothing looks dead that is not.
        self._progress = Progress(
            SpinnerColumn(finished_text=" "),
            TextColumn("{task.description:<8}"),
            BarColumn(24),
            TimeElapsedColumn(),
            TextColumn("{task.fields[detail]}", style="dim", markup=False),
            console=Console(stderr=True),
        )

    @contextmanager
    def shown(self) -> Iterator[None]:
        with self._progress:
            yield

    @contextmanager
    def stage(self, title: str, about: str, total: float | None = None) -> Iterator[Stage]:
        task = self._progress.add_task(title, total=total, detail=about)
        progress = self._progress

        class Bar:
            def at(self, done: float, detail: str = "") -> None:
                progress.update(task, completed=done, detail=detail)

        yield Bar()
        progress.update(task, total=total or 1.0, completed=total or 1.0, detail=about)


class _Lines:
    def __init__(self) -> None:
        self._said_at = time.monotonic()
        self._now: str | None = None
        """What is being done, while a stage is on."""
        self._over = threading.Event()
        self._lock = threading.Lock()

    @contextmanager
    def shown(self) -> Iterator[None]:
        watch = threading.Thread(target=self._watch, daemon=True)
        watch.start()
        try:
            yield
        finally:
            self._over.set()
            watch.join()

    @contextmanager
    def stage(self, title: str, about: str, total: float | None = None) -> Iterator[Stage]:
        lines = self
        self._now = f"{title}: {about}"
        self._say(self._now)

        class Told:
            def at(self, done: float, detail: str = "") -> None:
                share = f" {done / total:.0%}" if total else ""
                lines._now = f"{title}{share}: {detail or about}"
                if time.monotonic() - lines._said_at >= _LINE_EVERY_S:
                    lines._say(lines._now)

        try:
            yield Told()
        finally:
            self._now = None

    def _watch(self) -> None:
        """Says that a stage is still on when it has had nothing to tell for a while."""
        while not self._over.wait(1.0):
            now, quiet = self._now, time.monotonic() - self._said_at
            if now is not None and quiet >= _SIGN_OF_LIFE_S:
                self._say(f"{now} ...")

    def _say(self, text: str) -> None:
        with self._lock:
            self._said_at = time.monotonic()
            sys.stderr.write(f"{text}\n")
            sys.stderr.flush()
