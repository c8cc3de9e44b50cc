"""Reads and writes the folder of a pruned network: its weights and its record. Needs no torch.

`sipp prune --out DIR` and `sipp.save_folder` write it; `sipp report`, `bench`, `eval` and `certify` read it.

Only one file can be replaced atomically, not two. So the record is stored in the header of the weights, and report.json
is a copy of it for people. A reader uses the record in the header, which always belongs to the weights, and reports a
copy that differs: a save was interrupted, or somebody replaced a file.
"""

from __future__ import annotations

import io
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from sipp.errors import DataError, warn_caller
from sipp.results.jsonio import to_json
from sipp.results.network_hash import with_buffers
from sipp.results.stored import Report, read_report
from sipp.storage.files import CHANGED, Values, make_folder, read_file, read_sealed, seal, write_atomic
from sipp.storage.outputs import RECORD_KEY, RECORD_NAME, WEIGHTS_NAME, check_folder
from sipp.storage.tensors import metadata_in, raw_hash, raw_tensors, tensors_to_bytes

NO_NETWORK = "The network is missing, so its record could not be checked against it."
OTHER_COPY = (
    f"{RECORD_NAME} is missing, damaged or not about this network; the record stored in {WEIGHTS_NAME} is shown."
)


MOST_SEEN = 2_000_000  # inputs that chose a network: a header takes 100 MB, 40 bytes for each of them


def write_pruned(folder: Path, tensors: dict[str, Any], record: dict[str, Any], *, force: bool) -> dict[Path, int]:
    """Writes the network and its record into the folder, both or neither; returns {file: bytes}."""
    if len(record.get("seen", ())) > MOST_SEEN:
        warn_caller(
            "too many inputs chose this network to be listed in its record, so `sipp certify` can compare a holdout "
            "with them only if they are given to it (--calibration)"
        )
        record = {**record, "seen": [], "seen_all": False}
    report = json.dumps(seal(to_json(record)), indent=1, allow_nan=False).encode()
    weights = tensors_to_bytes(tensors, {"format": "pt", RECORD_KEY: report.decode()})
    check_folder(folder, force=force)
    is_new = not folder.exists()
    try:
        make_folder(folder)
        write_atomic(folder / WEIGHTS_NAME, weights)
        while (stored := _record_of(folder)) != _bytes_of(folder / RECORD_NAME) and stored is not None:
            write_atomic(folder / RECORD_NAME, stored)  # that of another process, if it wrote last
    except OSError as error:
        raise DataError(
            f"{folder} could not be written ({error.strerror or error})",
            fix="free space or allow writing, or give another place",
        ) from error
    finally:
        if is_new:
            with suppress(OSError):
                folder.rmdir()  # only succeeds if it is empty
    return {folder / WEIGHTS_NAME: len(weights), folder / RECORD_NAME: len(report)}


def _record_of(folder: Path) -> bytes | None:
    """The record in the header of the network in this folder; None if there is none."""
    try:
        with open(folder / WEIGHTS_NAME, "rb") as file:
            return _record_in(metadata_in(file))
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None


def _record_in(metadata: dict[str, Any]) -> bytes | None:
    record = metadata.get(RECORD_KEY)
    return record.encode(errors="surrogatepass") if isinstance(record, str) else None


def is_pruned_folder(folder: Path) -> bool:
    """Whether the folder holds the record of a pruned network, valid or not."""
    return (folder / RECORD_NAME).exists() or _record_of(folder) is not None


def read_pruned(folder: Path) -> tuple[Report, tuple[str, ...]]:
    """The report in a folder that `sipp prune` wrote, and notes for the reader; DataError if it was changed.

    It is checked by its checksum, and by the hash of the network beside it.
    """
    copy, path = folder / RECORD_NAME, folder / WEIGHTS_NAME
    data = _bytes_of(path)
    if data is None:
        return read_report(read_sealed(copy, _bytes_of(copy)), copy), (NO_NETWORK,)
    own = _record_in(metadata_in(io.BytesIO(data)))
    if own is None:
        raise DataError(f"holds no record, so it is not the network that {RECORD_NAME} speaks of", where=path)
    values = read_sealed(path, own)
    report = read_report(values, path)
    if with_buffers(raw_hash(raw_tensors(data, path)), report.identity.buffers_hash) != report.identity.pruned_hash:
        raise DataError(f"its weights are not those that its record speaks of; {CHANGED}", where=path)
    return report, () if _copied(copy) == values else (OTHER_COPY,)


def _copied(copy: Path) -> Values | None:
    """The copy of the record; None if it is missing or damaged."""
    try:
        return None if (report := _bytes_of(copy)) is None else read_sealed(copy, report)
    except DataError:
        return None


def _bytes_of(path: Path) -> bytes | None:
    """The content of a file; None if there is none."""
    return read_file(path) if path.exists() else None
