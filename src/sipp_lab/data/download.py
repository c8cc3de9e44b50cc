"""Downloads the files of a data set out of a .tar.gz, into a folder that appears whole or not at all."""

import http.client
import tarfile
import tempfile
import urllib.request
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath

from sipp.errors import DataError
from sipp.files import TEMPORARY
from sipp.progress import Advance

TIMEOUT_S = 30.0
CHUNK = 2**20


def fetch_files(
    url: str,
    sizes: Mapping[str, int],
    target: Path,
    *,
    check: Callable[[Mapping[str, bytes]], None],
    what: str,
    by_hand: str,
    progress: Advance | None = None,
) -> None:
    """Puts the files in `sizes` ({name: bytes}) from the archive at `url` into the new folder `target`.

    `check` raises DataError if they are not the published ones. A failed download leaves nothing behind; its error
    names the data set (`what`) and says which files to put into the folder instead (`by_hand`).
    """
    try:
        files = _download(url, sizes, progress)
        check(files)
    except (OSError, EOFError, zlib.error, tarfile.TarError, http.client.HTTPException, DataError) as error:
        raise DataError(
            f"{what} could not be fetched ({url}: {error}). Run it again, or put {by_hand} into {target}"
        ) from error
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=TEMPORARY) as folder:
            unfinished = Path(folder) / target.name
            unfinished.mkdir()
            for name, data in files.items():
                (unfinished / name).write_bytes(data)
            unfinished.replace(target)
    except OSError as error:
        raise DataError(f"could not be written ({error.strerror or error})", where=target) from error


def _download(url: str, sizes: Mapping[str, int], progress: Advance | None) -> dict[str, bytes]:
    """The files of the archive, unpacked during the download; other members are ignored."""
    files: dict[str, bytearray] = {}
    with (
        urllib.request.urlopen(url, timeout=TIMEOUT_S) as response,
        tarfile.open(fileobj=response, mode="r|gz") as tar,
    ):
        for member in tar:
            name = PurePosixPath(member.name).name
            file = tar.extractfile(member) if name in sizes and member.isreg() else None
            if file is None:
                continue
            files[name] = bytearray()
            while len(files[name]) <= sizes[name] and (chunk := file.read(CHUNK)):
                files[name] += chunk
                if progress is not None:
                    progress(len(chunk))
    if missing := [name for name in sizes if name not in files]:
        raise DataError(f"the archive does not hold {', '.join(missing)}")
    return {name: bytes(files[name]) for name in sizes}
