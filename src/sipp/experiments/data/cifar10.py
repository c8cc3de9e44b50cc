"""CIFAR-10: downloaded from its official address, and read from either of its official folders as one tensor."""

import http.client
import io
import pickle
import shutil
import tarfile
import urllib.request
import zlib
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import numpy as np
import torch

from sipp.errors import DataError
from sipp.experiments.data.imageset import ImageSet
from sipp.progress import Advance
from sipp.records.checking import check_choice
from sipp.storage.files import make_folder, publish, sha256_of, staged, sync_folder, write_through

URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
TIMEOUT_S = 30.0
CHUNK = 2**20

N_CLASSES = 10
N_PER_FILE = 10_000
TRAIN_FILES = tuple(f"data_batch_{i}" for i in range(1, 6))
FILES = (*TRAIN_FILES, "test_batch")
SHAPE = (3, 32, 32)
N_PIXELS = 3 * 32 * 32
RECORD_BYTES = 1 + N_PIXELS  # one label, then the red, green and blue planes
N_BYTES = len(FILES) * N_PER_FILE * RECORD_BYTES
BIN_FOLDER = "cifar-10-batches-bin"
PY_FOLDER = "cifar-10-batches-py"
SHA256 = "013ba16d14ecc4829da62bf2af648ca30f600491ecb3e7f329c827db0dd17522"  # all records, in the order of FILES

Checksum = Literal["official", "skip"]


def load_cifar10(folder: Path | str, *, n_per_file: int = N_PER_FILE, checksum: Checksum = "official") -> ImageSet:
    """All 60,000 images as uint8, 50,000 training images first, from `folder` or from the batches folder inside it.

    `checksum="official"` refuses anything but the published bytes; "skip" is for other data in the same layout.
    """
    check_choice("checksum", checksum, ("official", "skip"))
    records = np.concatenate(_read_all(Path(folder), n_per_file))  # N x 3073
    if checksum == "official" and (digest := sha256_of(records.data)) != SHA256:
        raise DataError(
            f"this is not CIFAR-10 as published (sha256 {digest[:12]} instead of {SHA256[:12]})",
            where=folder,
            fix="fetch it again, or pass checksum='skip' if other data in this layout is meant",
        )
    labels = torch.from_numpy(records[:, 0].astype(np.int64))
    images = torch.from_numpy(np.ascontiguousarray(records[:, 1:])).view(-1, *SHAPE)
    return ImageSet("cifar10", images, labels, n_per_file * len(TRAIN_FILES), N_CLASSES)


def _read_all(folder: Path, n_per_file: int) -> list[np.ndarray]:
    """The records of the six files in order, from whichever of the two layouts is there."""
    for candidate in (folder / BIN_FOLDER, folder / PY_FOLDER, folder):
        for suffix, read in ((".bin", _read_bin), ("", _read_py)):
            if (candidate / (FILES[0] + suffix)).is_file():
                return [_checked(read, candidate / (name + suffix), n_per_file) for name in FILES]
    raise DataError(
        f"no CIFAR-10 in {folder}",
        fix=f"put the official {BIN_FOLDER}/ (data_batch_1.bin .. test_batch.bin) or {PY_FOLDER}/ "
        f"(data_batch_1 .. test_batch) there, or fetch it with: sipp data cifar10 {folder}",
    )


def _checked(read: Callable[[Path, int], np.ndarray], path: Path, n_records: int) -> np.ndarray:
    if not path.is_file():
        raise DataError(f"{path} is missing: the set is incomplete; all of {', '.join(FILES)} are needed")
    records = read(path, n_records)
    wrong = np.flatnonzero(records[:, 0] >= N_CLASSES)
    if wrong.size:
        label = records[wrong[0], 0]
        raise DataError(f"record {wrong[0]} has label {label}, but classes are 0 .. {N_CLASSES - 1}", where=path)
    return records


def _read_bin(path: Path, n_records: int) -> np.ndarray:
    """Records n x 3073 of one binary file, whose size must be exact."""
    expected, n_bytes = n_records * RECORD_BYTES, path.stat().st_size
    if n_bytes != expected:
        raise DataError(
            f"{n_bytes} bytes instead of {expected} ({n_records} records); it is cut or not CIFAR-10", where=path
        )
    return np.fromfile(path, np.uint8).reshape(n_records, RECORD_BYTES)


# --- the Python version, which torchvision downloads: pickles ---------------------------------------------------------


def _read_py(path: Path, n_records: int) -> np.ndarray:
    """The same records from one pickled file, read without running anything in it."""
    try:
        batch = _BatchUnpickler(io.BytesIO(path.read_bytes()), encoding="latin1").load()
        labels = np.frombuffer(bytes(batch["labels"]), np.uint8)  # anything but whole numbers of 0 .. 255 raises
        return np.concatenate([labels.reshape(n_records, 1), batch["data"].pixels.reshape(n_records, N_PIXELS)], axis=1)
    except Exception as error:  # a malformed pickle can raise nearly anything
        raise DataError(
            f"this is not a batch of {n_records} images and labels ({type(error).__name__}: {str(error)[:200]}); "
            "nothing in it was run",
            where=path,
            fix="take the file from the official archive again",
        ) from error


class _Dtype:
    """Stands for `numpy.dtype`, which can only be uint8 here."""

    def __init__(self, name: str, align: object = False, copy: object = False) -> None:
        if name not in ("u1", "|u1", "uint8"):
            raise pickle.UnpicklingError(f"an array of element type {name!r}")

    def __setstate__(self, state: object) -> None:
        """Takes no notice: byte order and field names mean nothing for uint8."""


class _Array:
    """Stands for a numpy array under construction: its bytes."""

    def __setstate__(self, state: Any) -> None:
        _, shape, _, is_fortran, raw = state
        data = raw.encode("latin1") if isinstance(raw, str) else raw  # text: bytes as Python 2 wrote them
        self.pixels = np.frombuffer(data, np.uint8).reshape(shape, order="F" if is_fortran else "C")


# What the names in a batch lead to. Numpy itself, whose arrays can be made to point anywhere, is not among it.
STAND_INS: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): lambda *args: _Array(),
    ("numpy._core.multiarray", "_reconstruct"): lambda *args: _Array(),
    ("numpy", "ndarray"): None,
    ("numpy", "dtype"): _Dtype,
    ("_codecs", "encode"): lambda text, encoding: text,  # latin1, for bytes in old protocols
}


class _BatchUnpickler(pickle.Unpickler):
    """Reads numbers, text, lists and uint8 arrays, and refuses all else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in STAND_INS:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return STAND_INS[module, name]


# --- download ---------------------------------------------------------------------------------------------------------


def fetch_cifar10(folder: Path | str, *, progress: Advance | None = None, url: str = URL) -> Path:
    """`folder/cifar-10-batches-bin`, downloaded if it is not there, complete and checked.

    A download that fails leaves nothing behind; the folder gets its name in one step, once its bytes are the published
    ones. DataError says what to put where otherwise.
    """
    folder = Path(folder)
    target = folder / BIN_FOLDER
    if target.exists():  # asked first, so that a folder one may only read is enough
        try:
            load_cifar10(target, n_per_file=N_PER_FILE)
        except DataError as error:
            raise DataError(f"{error}", fix=f"move {target} away and fetch again") from error
        return target
    try:
        files = _download(url, progress)
        if (digest := sha256_of(*files.values())) != SHA256:
            raise DataError(f"sha256 {digest[:12]} instead of {SHA256[:12]}", where=url)
    except (OSError, EOFError, zlib.error, tarfile.TarError, http.client.HTTPException, DataError) as error:
        raise DataError(
            f"CIFAR-10 could not be fetched ({url}: {error}). Run it again, or put data_batch_1.bin .. "
            f"data_batch_5.bin and test_batch.bin of the official binary version into {target}"
        ) from error
    unfinished = staged(target)
    try:
        make_folder(folder)
        unfinished.mkdir()
        for name, records in files.items():
            write_through(unfinished / f"{name}.bin", records)
        sync_folder(unfinished)
        publish(unfinished, target)
    except OSError as error:
        raise DataError(f"cannot fetch CIFAR-10 into {folder}: {error}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return target


def _download(url: str, progress: Advance | None) -> dict[str, bytes]:
    """The six files of the archive at `url`, unpacked while they come in; no other member of it is looked at."""
    n_bytes = N_PER_FILE * RECORD_BYTES
    files: dict[str, bytearray] = {}
    with (
        urllib.request.urlopen(url, timeout=TIMEOUT_S) as response,
        tarfile.open(fileobj=response, mode="r|gz") as tar,
    ):
        for member in tar:
            name = PurePosixPath(member.name).name.removesuffix(".bin")
            file = tar.extractfile(member) if name in FILES and member.isreg() else None
            if file is None:
                continue
            files[name] = bytearray()
            while len(files[name]) <= n_bytes and (chunk := file.read(CHUNK)):
                files[name] += chunk
                if progress is not None:
                    progress(len(chunk))
    if missing := [name for name in FILES if name not in files]:
        raise DataError(f"the archive does not hold {', '.join(missing)}")
    return {name: bytes(files[name]) for name in FILES}
