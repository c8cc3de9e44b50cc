"""Data sets as they were published: their files, read and downloaded with a check of every byte."""

from __future__ import annotations

import http.client
import tarfile
import tempfile
import urllib.request
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np

from sipp.errors import DataError
from sipp.files import TEMPORARY, sha256_of
from sipp.progress import Advance

TIMEOUT_S = 30.0
CHUNK = 2**20


@dataclass(frozen=True)
class Published:
    """A data set: its files with their sizes and SHA-256, and an archive on the network that holds them."""

    name: str
    command: str  # `sipp data COMMAND` fetches it
    folder: str  # in which the files lie
    url: str  # of a .tar.gz
    files: Mapping[str, tuple[int, str]]  # {name: (bytes, SHA-256)}

    @property
    def n_bytes(self) -> int:
        """The size of all files."""
        return sum(size for size, _ in self.files.values())

    @property
    def by_hand(self) -> str:
        """What to put where if it cannot be fetched."""
        return f"its {len(self.files)} files ({', '.join(self.files)})"

    def read(self, root: Path | str) -> dict[str, np.ndarray]:
        """The bytes of each file in `root`/folder, or in `root` itself; DataError if any differs."""
        root = Path(root)
        place = root / self.folder if (root / self.folder).is_dir() else root
        found = {}
        for name, (size, digest) in self.files.items():
            try:
                found[name] = data = np.fromfile(place / name, np.uint8)
            except OSError as error:
                raise DataError(
                    f"{self.name} cannot be read: {place / name} ({error})",
                    fix=f"put {self.by_hand} into {place}, or fetch them: sipp data {self.command} {root}",
                ) from error
            if len(data) != size:
                raise DataError(
                    f"{len(data)} bytes instead of {size}: it is cut, or not {self.name}", where=place / name
                )
            if (actual := sha256_of(data.data)) != digest:
                raise DataError(
                    f"it is not the file of {self.name} as published (sha256 {actual[:12]} instead of {digest[:12]})",
                    where=place / name,
                    fix="fetch it again",
                )
        return found

    def fetch(self, root: Path | str, *, progress: Advance | None = None) -> Path:
        """Downloads the files into `root`/folder unless they are there, checks them, and returns the folder.

        The folder appears whole or not at all: a failed download leaves nothing behind.
        """
        target = Path(root) / self.folder
        if target.exists():  # checked first, so that a read-only folder works
            try:
                self.read(root)
            except DataError as error:
                raise DataError(f"{error}", fix=f"move {target} away and fetch again") from error
            return target
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=target.parent, prefix=TEMPORARY) as folder:
                unfinished = Path(folder) / self.folder
                unfinished.mkdir()
                self._download(unfinished, progress)
                self.read(unfinished)
                unfinished.replace(target)
        except (OSError, EOFError, zlib.error, tarfile.TarError, http.client.HTTPException, DataError) as error:
            raise DataError(
                f"{self.name} could not be fetched ({self.url}: {error}). Run it again, or put {self.by_hand} into "
                f"{target}"
            ) from error
        return target

    def _download(self, folder: Path, progress: Advance | None) -> None:
        """Unpacks the files of the archive during the download; other members are ignored."""
        with (
            urllib.request.urlopen(self.url, timeout=TIMEOUT_S) as response,
            tarfile.open(fileobj=response, mode="r|gz") as tar,
        ):
            for member in tar:
                name = PurePosixPath(member.name).name
                content = tar.extractfile(member) if name in self.files and member.isreg() else None
                if content is None:
                    continue
                with open(folder / name, "wb") as file:
                    while file.tell() <= self.files[name][0] and (chunk := content.read(CHUNK)):
                        file.write(chunk)
                        if progress is not None:
                            progress(len(chunk))
