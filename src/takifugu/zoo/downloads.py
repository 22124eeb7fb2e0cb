"""Fetches data sets from their own sites.

Archives are checked against the checksums that are published for them, and what comes out of them once more
by its own SHA-256. A file appears under its name whole and checked, or not at all.
"""

from __future__ import annotations

import gzip
import hashlib
import logging
import os
import sys
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

from takifugu.errors import DataError
from takifugu.zoo.sites import SITES, Member, Parcel, Site

TIMEOUT_S = 30.0
CHUNK_BYTES = 1 << 18
_DAMAGES = (
    *(KeyError, EOFError, RuntimeError),  # no such member, cut off, encrypted
    *(zlib.error, gzip.BadGzipFile, tarfile.TarError, zipfile.BadZipFile),
)


def fetch(name: str, data_folder: Path, site: Site | None = None) -> None:
    """Gets what the data set lacks in the folder; files that are there already stay as they are."""
    site = SITES[name] if site is None else site
    folder = data_folder / site.folder
    try:
        for parcel in site.parcels:
            missing = [member for member in parcel.members if not _there(folder / member.name)]
            if missing:
                _fetch_parcel(name, parcel, missing, folder)
    except OSError as error:
        raise DataError(
            f"{name}: cannot be kept in {folder} ({error.strerror or error}); "
            "name a folder that holds it with --data-dir or TAKIFUGU_DATA"
        ) from None


def _there(path: Path) -> bool:
    return path.is_file() or path.with_name(f"{path.name}.gz").is_file()


def _fetch_parcel(name: str, parcel: Parcel, missing: list[Member], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    # Beside the files' last place, so that a rename, which is all or nothing, brings them there.
    with tempfile.TemporaryDirectory(dir=folder, prefix=".download-") as temporary:
        packed = _download(name, parcel, Path(temporary), folder)
        unpacked = [_unpack(packed, member, parcel) for member in missing]
        for member, path in zip(missing, unpacked, strict=True):
            os.replace(path, folder / member.name)


def _download(name: str, parcel: Parcel, temporary: Path, folder: Path) -> Path:
    try:
        import pooch
        import requests
    except ImportError:
        raise DataError(
            f"{name}: is not in {folder}, and fetching it needs pooch; pip install 'takifugu[train]', "
            f"or {_by_hand(parcel, folder)}"
        ) from None
    try:
        with _progress(name) as progress, _quiet(pooch.get_logger()):
            downloader = pooch.HTTPDownloader(
                progressbar=progress,
                chunk_size=CHUNK_BYTES,
                timeout=TIMEOUT_S,
                # Some sites turn the default name of Python's clients away. Compressed files must come as
                # they are, or they would not be what the checksum was made of.
                headers={"User-Agent": "takifugu", "Accept-Encoding": "identity"},
            )
            path = pooch.retrieve(
                parcel.url,
                known_hash=parcel.checksum or None,
                fname=f"packed{Path(parcel.url).suffix}",
                path=temporary,
                downloader=downloader,
            )
    except requests.exceptions.RequestException as error:
        raise DataError(
            f"{name}: {parcel.url} could not be fetched ({_short(error)}); try again, or "
            f"{_by_hand(parcel, folder)}"
        ) from None
    except ValueError:
        raise DataError(
            f"{name}: what {parcel.url} sent is not the published file (its checksum is not "
            f"{parcel.checksum}) and was thrown away; try again, or {_by_hand(parcel, folder)}"
        ) from None
    return Path(path)


def _by_hand(parcel: Parcel, folder: Path) -> str:
    renamed = [
        f"{member.inside} as {member.name}" if Path(member.inside).name != member.name else member.inside
        for member in parcel.members
        if member.inside
    ]
    what = f"unpack {', '.join(renamed)}" if renamed else f"put {parcel.members[0].name} (plain or .gz)"
    return f"get {parcel.url} by other means and {what} into {folder}"


def _short(error: Exception) -> str:
    """The innermost reason: what requests wraps around it is long and says little."""
    response = getattr(error, "response", None)
    if response is not None:
        return f"HTTP {response.status_code} {response.reason}".strip()
    reason: Any = error.args[0] if error.args else error
    reason = getattr(reason, "reason", reason)
    return str(reason).rsplit(">: ", 1)[-1].rsplit(": ", 1)[-1] if str(reason) else type(error).__name__


# ---- unpacking --------------------------------------------------------------------------------------------


def _unpack(packed: Path, member: Member, parcel: Parcel) -> Path:
    """One wanted file. Its name comes from our table, so nothing in an archive can lead elsewhere."""
    path = packed.with_name(f"unpacked-{member.name}")
    digest = hashlib.sha256()
    try:
        with _opened(packed, member, parcel.url) as source, path.open("wb") as target:
            while chunk := source.read(1 << 20):
                digest.update(chunk)
                target.write(chunk)
    except _DAMAGES as error:
        raise DataError(
            f"{parcel.url}: has no readable {member.inside or member.name} ({error}); try again later"
        ) from None
    if member.sha256 and digest.hexdigest() != member.sha256:
        raise DataError(
            f"{parcel.url}: its {member.inside or member.name} has the SHA-256 {digest.hexdigest()}, "
            f"expected {member.sha256}; nothing of it was kept"
        )
    return path


@contextmanager
def _opened(packed: Path, member: Member, url: str) -> Iterator[IO[bytes]]:
    if url.endswith((".tar.gz", ".tgz")):
        with tarfile.open(packed) as tar:
            entry = tar.getmember(member.inside)
            content = tar.extractfile(entry) if entry.isreg() else None
            if content is None:
                raise KeyError(f"{member.inside} is not a plain file")
            with content:
                yield content
    elif url.endswith(".zip"):
        with zipfile.ZipFile(packed) as archive, archive.open(member.inside) as file:
            yield file
    else:
        with packed.open("rb") as raw, gzip.GzipFile(fileobj=raw) as unpacked:
            yield cast(IO[bytes], unpacked)


# ---- what the user sees -----------------------------------------------------------------------------------


class _Bar:
    """The part of tqdm's interface that pooch uses, drawn by rich."""

    def __init__(self, update: Callable[..., None]) -> None:
        self._update = update
        self.total = 0

    def update(self, amount: int) -> None:
        self._update(advance=amount, total=self.total or None)

    def reset(self) -> None:
        self._update(completed=0)

    def close(self) -> None:
        """rich's own end is the end of its block."""


@contextmanager
def _progress(name: str) -> Iterator[_Bar | bool]:
    if not sys.stderr.isatty():
        yield False
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(f"fetching {name}", total=None)
        yield _Bar(lambda **change: progress.update(task, **change))


@contextmanager
def _quiet(logger: logging.Logger) -> Iterator[None]:
    """pooch announces every file on stderr; our own bar or error says it."""
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
