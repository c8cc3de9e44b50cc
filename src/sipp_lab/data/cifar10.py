"""Downloads and reads CIFAR-10 (the official binary version)."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from sipp.errors import DataError
from sipp.files import sha256_of
from sipp.progress import Advance
from sipp_lab.data.download import fetch_files
from sipp_lab.data.imageset import ImageSet

URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"

N_CLASSES = 10
N_PER_FILE = 10_000
TRAIN_FILES = tuple(f"data_batch_{i}" for i in range(1, 6))
FILES = (*TRAIN_FILES, "test_batch")
SHAPE = (3, 32, 32)
RECORD_BYTES = 1 + 3 * 32 * 32  # one label, then the red, green and blue planes
N_BYTES = len(FILES) * N_PER_FILE * RECORD_BYTES
BIN_FOLDER = "cifar-10-batches-bin"
SHA256 = "013ba16d14ecc4829da62bf2af648ca30f600491ecb3e7f329c827db0dd17522"  # all records, in the order of FILES


def load_cifar10(folder: Path | str) -> ImageSet:
    """All 60,000 images as uint8, training images first, from `folder` or from the batches folder inside it.

    DataError if the bytes are not the published ones.
    """
    root, n_bytes = Path(folder), N_PER_FILE * RECORD_BYTES
    place = next(
        (candidate for candidate in (root / BIN_FOLDER, root) if (candidate / f"{FILES[0]}.bin").is_file()), None
    )
    if place is None:
        raise DataError(
            f"no CIFAR-10 in {folder}",
            fix=f"put the official {BIN_FOLDER}/ (data_batch_1.bin .. test_batch.bin) there, or fetch it with: "
            f"sipp data cifar10 {folder}",
        )
    for path in (place / f"{name}.bin" for name in FILES):
        n_found = path.stat().st_size if path.is_file() else 0
        if n_found != n_bytes:
            raise DataError(f"{n_found} bytes instead of {n_bytes}; it is missing, cut or not CIFAR-10", where=path)
    records = np.concatenate([np.fromfile(place / f"{name}.bin", np.uint8) for name in FILES])
    if (digest := sha256_of(records.data)) != SHA256:
        raise DataError(
            f"this is not CIFAR-10 as published (sha256 {digest[:12]} instead of {SHA256[:12]})",
            where=folder,
            fix="fetch it again",
        )
    records = records.reshape(-1, RECORD_BYTES)
    labels = torch.from_numpy(records[:, 0].astype(np.int64))
    images = torch.from_numpy(np.ascontiguousarray(records[:, 1:])).view(-1, *SHAPE)
    return ImageSet("cifar10", images, labels, N_PER_FILE * len(TRAIN_FILES), N_CLASSES)


# --- download ---------------------------------------------------------------------------------------------------------


def fetch_cifar10(folder: Path | str, *, progress: Advance | None = None, url: str = URL) -> Path:
    """Downloads CIFAR-10 unless it is there, checks it, and returns `folder/cifar-10-batches-bin`.

    The folder appears atomically, once its bytes are verified; a failed download leaves nothing behind. The error says
    which files to put where instead.
    """
    folder = Path(folder)
    target = folder / BIN_FOLDER
    if target.exists():  # checked first, so that a read-only folder works
        try:
            load_cifar10(target)
        except DataError as error:
            raise DataError(f"{error}", fix=f"move {target} away and fetch again") from error
        return target
    names = [f"{name}.bin" for name in FILES]
    by_hand = "data_batch_1.bin .. data_batch_5.bin and test_batch.bin of the official binary version"
    sizes = dict.fromkeys(names, N_PER_FILE * RECORD_BYTES)
    fetch_files(url, sizes, target, check=_check_download, what="CIFAR-10", by_hand=by_hand, progress=progress)
    return target


def _check_download(files: Mapping[str, bytes]) -> None:
    if (digest := sha256_of(*files.values())) != SHA256:
        raise DataError(f"sha256 {digest[:12]} instead of {SHA256[:12]}")
