"""Files that survive what happens to programs: they appear whole or not at all; logs grow by whole lines."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # Windows has no such locks
    fcntl = None  # type: ignore[assignment]

from takifugu.errors import RunError

Row = dict[str, Any]


def write_text(path: Path, text: str) -> None:
    def write(partial: Path) -> None:
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)

    write_file(path, write)


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    write_text(path, json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def write_file(path: Path, write: Callable[[Path], None]) -> str:
    """`write(partial)` writes beside the file's place; once whole, it is moved there. Returns its hash."""
    partial = path.with_name(f"{path.name}.tmp")
    try:
        write(partial)
        digest = sha256(partial)
        move(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return digest


def move(partial: Path, path: Path) -> None:
    """Replace `path` by a finished file beside it, so that a power failure leaves the one or the other."""
    sync(partial)
    os.replace(partial, path)
    sync(path.parent)


def append(path: Path, rows: Iterable[Row]) -> None:
    text = "".join(json.dumps(row, allow_nan=False, ensure_ascii=False) + "\n" for row in rows)
    if text:
        with path.open("a", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())


def truncate(path: Path, size: int) -> None:
    with path.open("r+b") as file:
        file.truncate(size)
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    if os.name == "nt" and path.is_dir():
        return  # Windows cannot open folders
    # Windows syncs only what is open for writing; other systems open folders only for reading.
    handle = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_json(path: Path) -> Row:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RunError(f"{path}: cannot be read ({error.strerror}); is this a run folder?") from None
    except ValueError as error:
        raise RunError(
            f"{path}: is damaged ({error}); put it back, or start anew in another folder"
        ) from None
    if not isinstance(data, dict):
        raise RunError(f"{path}: is damaged (not an object); put it back, or start anew in another folder")
    return data


def lines(path: Path) -> Iterator[tuple[Row, int]]:
    """Each whole line, and where in the file it ends. A torn last line is what a crash leaves: it is not
    there. Damage before the last line is an error."""
    try:
        opened = path.open("rb")
    except OSError as error:
        raise RunError(
            f"{path}: cannot be read ({error.strerror}); put it back, or start anew in another folder"
        ) from None
    end = 0
    with opened as file:
        size = os.fstat(file.fileno()).st_size
        for number, line in enumerate(file, start=1):
            end += len(line)
            try:
                if not line.endswith(b"\n"):
                    raise ValueError("it breaks off")
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise ValueError("it is not an object")
            except ValueError as error:
                if end == size:
                    return
                raise RunError(
                    f"{path} line {number}: is damaged ({error}); put the file back, "
                    "or start anew in another folder"
                ) from None
            yield row, end


@contextmanager
def locked(folder: Path, by: str) -> Iterator[None]:
    """Only one process at a time carries a run out; the lock, on the file `by`, ends with the process."""
    with (folder / by).open("rb") as file:
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise RunError(
                    f"{folder}: another process is carrying this run out; wait for it, or end it"
                ) from None
        yield
