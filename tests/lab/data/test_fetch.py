"""Fetching CIFAR-10 and MNIST from a server on this machine: whole and checked, or not at all."""

import gzip
import hashlib
import io
import os
import tarfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from lab.data.test_cifar10 import N, fake_records
from lab.data.test_mnist import write

from sipp.errors import DataError
from sipp_lab.data import cifar10 as module, mnist
from sipp_lab.data.cifar10 import BIN_FOLDER, fetch_cifar10

NOWHERE = "http://127.0.0.1:9/nothing-listens-here"


def tar(members: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return out.getvalue()


def official_tar(change: dict[str, bytes] | None = None) -> bytes:
    files = {f"{BIN_FOLDER}/{name}.bin": value.tobytes() for name, value in reversed(fake_records().items())}
    return tar({f"{BIN_FOLDER}/readme.html": b"hello", **files, **(change or {})})


class Server:
    """A web server that gives `content`, may hang up after `cut` bytes of it, and counts what was asked."""

    def __init__(self) -> None:
        self.content = official_tar()
        self.cut: int | None = None
        self.n_asked = 0
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.n_asked += 1
                self.send_response(200)
                self.send_header("Content-Length", str(len(outer.content)))
                self.end_headers()
                self.wfile.write(outer.content[: outer.cut])

            def log_message(self, *args: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}/cifar.tar.gz"
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    whole = b"".join(value.tobytes() for value in fake_records().values())
    monkeypatch.setattr(module, "SHA256", hashlib.sha256(whole).hexdigest())
    monkeypatch.setattr(module, "N_PER_FILE", N)
    server = Server()
    yield server
    server.http.shutdown()
    server.http.server_close()


def assert_whole(folder: Path) -> None:
    for name, value in fake_records().items():
        assert (folder / BIN_FOLDER / f"{name}.bin").read_bytes() == value.tobytes()
    assert os.listdir(folder) == [BIN_FOLDER]  # and nothing of the work is left
    assert len(os.listdir(folder / BIN_FOLDER)) == 6


def test_official_archive(tmp_path: Path, server: Server) -> None:
    calls: list[int] = []
    found = fetch_cifar10(tmp_path / "d", url=server.url, progress=calls.append)
    assert found == tmp_path / "d" / BIN_FOLDER
    assert_whole(tmp_path / "d")
    assert sum(calls) == 6 * N * 3073 and len(calls) >= 6
    fetch_cifar10(tmp_path / "d", url=server.url)
    assert server.n_asked == 1  # what is there is checked, and not fetched again




def tampered(kind: str) -> bytes:
    value = fake_records()["data_batch_2"].copy()
    name = f"{BIN_FOLDER}/data_batch_2.bin"
    value[1, 5] ^= 1
    if kind == "bit":
        return official_tar({name: value.tobytes()})
    if kind == "short":
        return official_tar({name: value.tobytes()[:-1]})
    if kind == "long":
        return official_tar({name: fake_records()["data_batch_2"].tobytes() + b"x"})
    if kind == "missing":
        return tar({name: value.tobytes()})
    if kind == "cut":
        return official_tar()[:-5000]
    return b"<html>please log in</html>"


@pytest.mark.parametrize("kind", ["bit", "short", "long", "missing", "cut", "page", "hung up"])
def test_a_tampered_archive_is_refused_and_leaves_nothing(tmp_path: Path, server: Server, kind: str) -> None:
    good = server.content
    if kind == "hung up":
        server.cut = len(good) // 2
    else:
        server.content = tampered(kind)
    with pytest.raises(DataError, match="could not be fetched"):
        fetch_cifar10(tmp_path, url=server.url)
    assert os.listdir(tmp_path) == []  # not half a data set
    server.content, server.cut = good, None
    fetch_cifar10(tmp_path, url=server.url)
    assert_whole(tmp_path)




def test_a_folder_that_is_there_but_wrong_is_left_alone(tmp_path: Path, server: Server) -> None:
    folder = tmp_path / BIN_FOLDER
    folder.mkdir()
    (folder / "data_batch_1.bin").write_bytes(b"mine")
    with pytest.raises(DataError, match=r"move .* away"):
        fetch_cifar10(tmp_path, url=server.url)
    assert (folder / "data_batch_1.bin").read_bytes() == b"mine" and server.n_asked == 0








def test_mnist_comes_whole_and_is_read_or_not_at_all(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mnist, "PARTS", {"train": 12, "t10k": 5})
    images, labels = write(tmp_path)
    files = {}
    for path in (tmp_path / "mnist").iterdir():
        data = path.read_bytes()
        files[path.name.removesuffix(".gz")] = gzip.decompress(data) if path.suffix == ".gz" else data
    monkeypatch.setattr(mnist, "SHA256", {name: hashlib.sha256(data).hexdigest() for name, data in files.items()})
    good = tar({f"package/data/{name}": data for name, data in files.items()} | {"package/index.js": b"run()"})
    label_file = "train-labels-idx1-ubyte"
    other = tar({f"package/data/{name}": data for name, data in {**files, label_file: bytes(20)}.items()})
    for bad in (other, good[:-200], tar({"package/data/nothing": b""})):
        server.content = bad
        with pytest.raises(DataError, match=r"MNIST could not be fetched .*put the four files of MNIST"):
            mnist.fetch_mnist(tmp_path / "d", url=server.url)
        assert not (tmp_path / "d").exists()
    server.content = good
    calls: list[int] = []
    assert mnist.fetch_mnist(tmp_path / "d", url=server.url, progress=calls.append) == tmp_path / "d" / "mnist"
    assert sum(calls) == sum(map(len, files.values())) == mnist.n_bytes()
    assert sorted(os.listdir(tmp_path / "d" / "mnist")) == sorted(files)
    read = mnist.load_mnist(tmp_path / "d")
    assert read.labels.tolist() == labels.tolist() and len(read.images) == len(images)
    n_asked = server.n_asked
    mnist.fetch_mnist(tmp_path / "d", url=server.url)
    assert server.n_asked == n_asked  # what is there is read, and not fetched again
    (tmp_path / "d" / "mnist" / label_file).write_bytes(b"mine")
    with pytest.raises(DataError, match=r"move .* away"):
        mnist.fetch_mnist(tmp_path / "d", url=server.url)
    assert (tmp_path / "d" / "mnist" / label_file).read_bytes() == b"mine"


