"""Downloads from a server on the loopback interface, with archives the tests make: good, damaged and hostile."""

from __future__ import annotations

import builtins
import gzip
import hashlib
import http.server
import io
import os
import socket
import sys
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from takifugu.errors import DataError
from takifugu.zoo import datasets, downloads, sites
from takifugu.zoo.sites import Member, Parcel, Site

pooch = pytest.importorskip("pooch")


class Server:
    """Serves `files` by path; `cut` are sent by half, although announced whole."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.cut: set[str] = set()
        self.asked: list[str] = []
        self.agents: list[str] = []
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.asked.append(self.path)
                outer.agents.append(self.headers["User-Agent"])
                content = outer.files.get(self.path)
                if content is None:
                    self.send_error(404, "Nothing here")
                    return
                self.send_response(200)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content[: len(content) // 2] if self.path in outer.cut else content)

            def log_message(self, *_: object) -> None:
                pass

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.base = f"http://127.0.0.1:{self.http.server_port}"

    def give(self, path: str, content: bytes) -> str:
        """Serves the content; returns its published checksum."""
        self.files[path] = content
        return f"md5:{hashlib.md5(content, usedforsecurity=False).hexdigest()}"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    server = Server()
    thread = threading.Thread(target=server.http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.http.shutdown()
    thread.join()
    server.http.server_close()


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def tar(entries: dict[str, bytes], links: dict[str, str] | None = None) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, content in entries.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
        for name, target in (links or {}).items():
            info = tarfile.TarInfo(name)
            info.type, info.linkname = tarfile.SYMTYPE, target
            archive.addfile(info)
    return buffer.getvalue()


def zipped(entries: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def one(server: Server, path: str, checksum: str, *members: Member) -> Site:
    return Site("set", (Parcel(f"{server.base}{path}", checksum, members),))


def left_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_every_kind_of_archive_gives_the_wanted_files_only(server: Server, tmp_path: Path) -> None:
    files = {"set/a": b"first" * 1000, "set/b": b"second", "set/unwanted": b"no"}
    site = Site(
        "set",
        (
            Parcel(
                f"{server.base}/x.tar.gz",
                server.give("/x.tar.gz", tar(files)),
                (Member("a", "set/a", sha256(files["set/a"])), Member("renamed", "set/b")),
            ),
            Parcel(f"{server.base}/x.zip", server.give("/x.zip", zipped(files)), (Member("c.txt", "set/b"),)),
            Parcel(f"{server.base}/d.gz", server.give("/d.gz", gzip.compress(b"plain")), (Member("d"),)),
        ),
    )
    downloads.fetch("things", tmp_path, site)
    assert left_in(tmp_path) == {"set/a", "set/renamed", "set/c.txt", "set/d"}
    assert (tmp_path / "set/a").read_bytes() == files["set/a"]
    assert (tmp_path / "set/c.txt").read_bytes() == (tmp_path / "set/renamed").read_bytes() == b"second"
    assert (tmp_path / "set/d").read_bytes() == b"plain"
    assert set(server.agents) == {"takifugu"}  # some sites turn python-requests away


def test_only_what_is_missing_is_fetched(server: Server, tmp_path: Path) -> None:
    packed = zipped({"a": b"new a", "b": b"new b"})
    site = one(server, "/x.zip", server.give("/x.zip", packed), Member("a", "a"), Member("b", "b"))
    (tmp_path / "set").mkdir()
    (tmp_path / "set/a").write_bytes(b"mine")
    downloads.fetch("things", tmp_path, site)
    assert (tmp_path / "set/a").read_bytes() == b"mine"
    assert (tmp_path / "set/b").read_bytes() == b"new b"
    downloads.fetch("things", tmp_path, site)
    assert server.asked == ["/x.zip"]
    os.replace(tmp_path / "set/b", tmp_path / "set/b.gz")  # loaders read both
    downloads.fetch("things", tmp_path, site)
    assert server.asked == ["/x.zip"]


def test_a_wrong_checksum_keeps_nothing(server: Server, tmp_path: Path) -> None:
    server.give("/x.zip", zipped({"a": b"evil"}))
    site = one(server, "/x.zip", "md5:" + "0" * 32, Member("a", "a"))
    with pytest.raises(DataError, match=r"things: what http.*/x\.zip sent is not the published file"):
        downloads.fetch("things", tmp_path, site)
    assert left_in(tmp_path) == set()


def test_wrong_content_of_a_right_archive_keeps_nothing_of_it(server: Server, tmp_path: Path) -> None:
    checksum = server.give("/x.zip", zipped({"good": b"good", "bad": b"bad"}))
    members = (Member("good", "good", sha256(b"good")), Member("bad", "bad", sha256(b"else")))
    with pytest.raises(DataError, match="its bad has the SHA-256 .* expected .* nothing of it was kept"):
        downloads.fetch("things", tmp_path, one(server, "/x.zip", checksum, *members))
    assert left_in(tmp_path) == set()


@pytest.mark.parametrize("published", [True, False])
def test_a_download_that_is_cut_off_leaves_nothing(server: Server, tmp_path: Path, published: bool) -> None:
    checksum = server.give("/d.gz", gzip.compress(os.urandom(100_000)))
    server.cut.add("/d.gz")
    site = one(server, "/d.gz", checksum if published else "", Member("d"))
    with pytest.raises(DataError, match=r"d\.gz"):
        downloads.fetch("things", tmp_path, site)
    assert left_in(tmp_path) == set()
    server.cut.clear()
    downloads.fetch("things", tmp_path, site)
    assert left_in(tmp_path) == {"set/d"}


def test_an_archive_that_is_damaged_inside(server: Server, tmp_path: Path) -> None:
    for path, content in {
        "/x.tar.gz": b"no archive",
        "/x.zip": b"no archive",
        "/d.gz": b"no archive",
        "/e.gz": gzip.compress(os.urandom(5000))[:-2000],
    }.items():
        site = one(server, path, server.give(path, content), Member("a", "" if path[2] == "." else "a"))
        with pytest.raises(DataError, match="has no readable"):
            downloads.fetch("things", tmp_path, site)
    assert left_in(tmp_path) == set()


def test_an_archive_cannot_write_elsewhere(server: Server, tmp_path: Path) -> None:
    cache = tmp_path / "deep/cache"
    hostile = tar(
        {"../../escaped": b"x", "/tmp/takifugu-escaped": b"x", "a": b"fine"}, {"link": "/etc/passwd"}
    )
    checksum = server.give("/x.tar.gz", hostile)
    downloads.fetch("things", cache, one(server, "/x.tar.gz", checksum, Member("a", "a")))
    assert left_in(tmp_path) == {"deep/cache/set/a"}
    assert not Path("/tmp/takifugu-escaped").exists()
    site = one(server, "/x.tar.gz", checksum, Member("b", "link"))
    with pytest.raises(DataError, match="link is not a plain file"):
        downloads.fetch("things", cache, site)
    checksum = server.give("/x.zip", zipped({"../../escaped": b"x", "a": b"fine"}))
    downloads.fetch("more", cache / "more", one(server, "/x.zip", checksum, Member("a", "a")))
    assert left_in(tmp_path) == {"deep/cache/set/a", "deep/cache/more/set/a"}


def test_offline_says_what_to_put_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with socket.socket() as closed:  # bound, but nobody listens
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}/x.zip"
        site = Site("set", (Parcel(url, "", (Member("train.txt", "x/wiki.train"), Member("b", "x/b"))),))
        with pytest.raises(DataError) as caught:
            downloads.fetch("things", tmp_path, site)
    said = str(caught.value)
    assert f"things: {url} could not be fetched (" in said
    assert (
        f"get {url} by other means and unpack x/wiki.train as train.txt, x/b into {tmp_path / 'set'}" in said
    )
    assert "object at 0x" not in said
    assert left_in(tmp_path) == set()


def test_a_file_that_is_gone(server: Server, tmp_path: Path) -> None:
    site = one(server, "/gone.gz", "", Member("gone"))
    with pytest.raises(DataError, match=r"\(HTTP 404 Nothing here\).*put gone \(plain or \.gz\) into"):
        downloads.fetch("things", tmp_path, site)


def test_a_folder_that_cannot_be_written(server: Server, tmp_path: Path) -> None:
    (tmp_path / "set").write_text("a file where the folder should be")
    with pytest.raises(DataError, match=r"things: cannot be kept in .*set .*--data-dir"):
        downloads.fetch("things", tmp_path, one(server, "/x.gz", "", Member("x")))


def test_without_pooch(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: object, **more: object) -> object:
        if name == "pooch":
            raise ImportError(name)
        return real(name, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(DataError, match=r"pip install 'takifugu\[train\]'"):
        downloads.fetch("things", tmp_path, one(server, "/x.gz", "", Member("x")))
    assert server.asked == []


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_for_terminals_only(
    server: Server, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    before = pooch.get_logger().level
    for handler in pooch.get_logger().handlers:  # it writes to the stderr there was when it was imported
        monkeypatch.setattr(handler, "emit", lambda record: said.append(record.getMessage()))
    site = one(server, "/d.gz", server.give("/d.gz", gzip.compress(os.urandom(1 << 20))), Member("d"))
    downloads.fetch("things", tmp_path / "silent", site)
    assert capfd.readouterr() == ("", "")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    downloads.fetch("things", tmp_path / "shown", site)
    assert "fetching things" in terminal.getvalue()
    assert "1.0/1.0 MB" in terminal.getvalue()
    assert said == []
    assert pooch.get_logger().level == before


def _idx(array: np.ndarray) -> bytes:
    head = bytes([0, 0, 8, array.ndim]) + b"".join(int(n).to_bytes(4, "big") for n in array.shape)
    return head + array.astype(np.uint8).tobytes()


def test_loading_fetches_into_the_cache_folder_and_nowhere_else(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = {
        name: _idx(np.zeros((2, 28, 28)) if "images" in name else np.array([1, 7]))
        for name in sites.SITES["mnist"].files
    }
    parcels = tuple(
        Parcel(f"{server.base}/{name}.gz", server.give(f"/{name}.gz", gzip.compress(raw)), (Member(name),))
        for name, raw in content.items()
    )
    monkeypatch.setitem(sites.SITES, "mnist", Site("mnist", parcels))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("TAKIFUGU_DATA", str(tmp_path / "chosen"))
    for folder in (None, tmp_path / "named"):
        with pytest.raises(DataError, match="train-images-idx3-ubyte is missing: put"):
            datasets.load("mnist", folder)
    assert server.asked == []
    assert left_in(tmp_path) == set()
    monkeypatch.delenv("TAKIFUGU_DATA")
    assert datasets.load("mnist").labels.tolist() == [1, 7]
    assert left_in(tmp_path) == {f"cache/takifugu/mnist/{name}" for name in content}
    assert datasets.load("mnist", part="test").labels.tolist() == [1, 7]
    assert len(server.asked) == 4


def test_the_table_of_sites_is_sound() -> None:
    for site in sites.SITES.values():
        assert len(set(site.files)) == len(site.files)
        for parcel in site.parcels:
            kind, _, digest = parcel.checksum.partition(":")
            assert (kind, len(digest)) in {("md5", 32), ("sha256", 64)}
            assert int(digest, 16) >= 0
            for member in parcel.members:
                assert len(member.sha256) in (0, 64)
                assert bool(member.inside) == parcel.url.endswith((".zip", ".tar.gz"))


@pytest.mark.parametrize("name", list(sites.SITES))
def test_files_on_this_machine_are_the_published_ones(name: str) -> None:
    """The table's SHA-256s against real files, where there are any."""
    site = sites.SITES[name]
    folder = datasets.data_folder() / site.folder
    pinned = [m for parcel in site.parcels for m in parcel.members if m.sha256]
    for member in pinned:
        path = next((p for p in (folder / member.name, folder / f"{member.name}.gz") if p.is_file()), None)
        if path is None:
            pytest.skip(f"no {member.name} in {folder}")
        content = path.read_bytes()
        assert sha256(gzip.decompress(content) if path.suffix == ".gz" else content) == member.sha256
    if not pinned:
        pytest.skip(f"nothing is pinned for {name}")
