"""The folder of a pruned network: its weights and its record, which belong together, read with every check. No torch.

`sipp prune --out DIR` and `sipp.save_folder` write it; `sipp report`, `bench`, `eval` and `certify` read it.

Two files cannot be replaced in one step, one can. So the header of the network holds its record too: with that file
the folder is the new one, and report.json is a copy. While it may be another's, a temporary file says so (it is there
before the network is replaced, and goes once the copy is right): whoever finds one takes the record in the header. So a
reader, or who comes after a writer that was killed, finds the old folder or the new one; and of two writers at once
the one whose network stays has the last word on the record.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
from pathlib import Path
from typing import Any

from sipp.errors import DataError
from sipp.records.hashing import entries_hash, with_buffers
from sipp.records.json_values import json_value
from sipp.records.schemas import PRUNED_FORMAT, PRUNED_KIND, PrunedRecord, checked, given_values
from sipp.storage.files import (
    CHANGED,
    make_folder,
    read_file,
    read_sealed,
    seal,
    staged,
    staged_for,
    sync_folder,
    write_atomic,
    write_through,
)
from sipp.storage.outputs import RECORD_KEY, RECORD_NAME, WEIGHTS_NAME, check_folder
from sipp.storage.tensors import metadata_in, raw_tensors, tensors_to_bytes

NO_NETWORK = "The network is missing, so its record could not be checked against it."
CUT_SHORT = (
    f"{RECORD_NAME} is out of date because a save was interrupted; the record in {WEIGHTS_NAME} is shown instead."
)


def write_pruned(folder: Path, tensors: dict[str, Any], record: dict[str, Any], *, force: bool) -> dict[Path, int]:
    """Writes the network and its record into the folder, both or neither, and gives {file: bytes}."""
    report = json.dumps(seal(json_value(record)), indent=1, allow_nan=False).encode()
    weights = tensors_to_bytes(tensors, {"format": "pt", RECORD_KEY: report.decode()})
    check_folder(folder, force=force)
    is_new = not folder.exists()
    try:
        make_folder(folder)
        _replace(folder, weights, report)
    except OSError as error:
        raise DataError(
            f"{folder} could not be written ({error.strerror or error})",
            fix="free space or allow writing, or give another place",
        ) from error
    finally:
        if is_new:
            with contextlib.suppress(OSError):
                folder.rmdir()  # where nothing came to lie in it
    return {folder / WEIGHTS_NAME: len(weights), folder / RECORD_NAME: len(report)}


def _replace(folder: Path, weights: bytes, report: bytes) -> None:
    """Puts both files into the folder."""
    under_way = staged(folder / RECORD_NAME)
    try:
        write_through(under_way, report)
        sync_folder(folder)
        write_atomic(folder / WEIGHTS_NAME, weights)
        while (now := _record_of(folder)) is not None:  # another's, where another writer was faster
            write_atomic(folder / RECORD_NAME, now)
            if _record_of(folder) == now:
                break
    except BaseException:
        if (now := _record_of(folder)) is None or now == _bytes_of(folder / RECORD_NAME):
            under_way.unlink(missing_ok=True)  # nothing was replaced, or all
        raise
    under_way.unlink()


def _record_of(folder: Path) -> bytes | None:
    """The record in the header of the network in this folder; None where there is none."""
    try:
        with open(folder / WEIGHTS_NAME, "rb") as file:
            return _record_in(metadata_in(file))
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None


def _record_in(metadata: dict[str, Any]) -> bytes | None:
    record = metadata.get(RECORD_KEY)
    return record.encode(errors="surrogatepass") if isinstance(record, str) else None


def is_pruned_folder(folder: Path) -> bool:
    """Whether a record of a pruned network lies here, whole or not."""
    return (folder / RECORD_NAME).exists() or _record_of(folder) is not None


def read_pruned(folder: Path) -> tuple[PrunedRecord, tuple[str, ...]]:
    """The record of the network that `sipp prune` wrote into this folder, and marks; DataError if either was changed.

    The record is checked by its checksum, and against the network: the same weights, and no more of them than it says.
    """
    while True:
        report = _bytes_of(folder / RECORD_NAME)
        try:
            return _read(folder, report)
        except DataError:
            if _bytes_of(folder / RECORD_NAME) == report:
                raise  # else it was replaced while it was read


def _bytes_of(path: Path) -> bytes | None:
    """The content of a file; None where there is none."""
    return read_file(path) if path.exists() else None


def _read(folder: Path, report: bytes | None) -> tuple[PrunedRecord, tuple[str, ...]]:
    path, weights = folder / RECORD_NAME, folder / WEIGHTS_NAME
    data = _bytes_of(weights)
    if data is None:
        return _record(path, report), (NO_NETWORK,)
    own = _record_in(metadata_in(io.BytesIO(data)))
    marks: tuple[str, ...] = ()
    if own is not None and any(staged_for(file) == RECORD_NAME for file in folder.iterdir()):
        marks = () if own == report else (CUT_SHORT,)
        path, report = weights, own
    record = _record(path, report)
    tensors = raw_tensors(data, weights)
    stored = entries_hash((name, [one.dtype, list(one.shape)], one.data) for name, one in tensors.items())
    if with_buffers(stored, record.buffers_hash) != record.pruned_hash:
        raise DataError(f"is not the network that {path.name} speaks of; {CHANGED}", where=weights)
    for layer in record.layers:
        weight = tensors.get(layer.name)  # of which one that is kept may be zero
        if weight is None or math.prod(weight.shape) != layer.n_weights or weight.n_nonzero() > layer.kept:
            raise DataError(f"layer {layer.name!r:.60} does not fit its weights; {CHANGED}", where=path)
    return record, marks


def _record(path: Path, data: bytes | None) -> PrunedRecord:
    """The record in the file or in its bytes, if it has its checksum and its numbers fit each other."""
    values = read_sealed(path, data)
    if values.get("kind") != PRUNED_KIND or values.get("format") != PRUNED_FORMAT:
        raise DataError(
            f"is not a record of `sipp prune` in format {PRUNED_FORMAT}; {CHANGED}, or is older", where=path
        )
    record = checked(PrunedRecord, values, path)
    _check_sums(record, path)
    return record


def _check_sums(record: PrunedRecord, path: Path) -> None:
    """Refuses a record whose totals are not those of its layers, or whose certificate speaks of other networks."""
    layers = record.layers
    totals = {key: sum(getattr(layer, key) for layer in layers) for key in ("kept", "n_weights", "dead_rows")}
    totals["keep"] = totals["kept"] / max(1, totals["n_weights"])
    wrong = [key for key, total in totals.items() if getattr(record, key) != total]
    shapes = all(layer.n_rows * layer.fan_in == layer.n_weights >= layer.kept for layer in layers)
    shares = all(layer.keep == layer.kept / max(1, layer.n_weights) for layer in layers)
    if wrong or not shapes or not shares:
        raise DataError(f"{', '.join(wrong) or 'a layer'} does not fit the counts of its layers; {CHANGED}", where=path)
    certified = {} if record.certificate is None else given_values(record.certificate)
    hashes = [key for key in ("dense_hash", "pruned_hash") if certified and certified.get(key) != getattr(record, key)]
    if hashes:
        raise DataError(f"the certificate's {hashes[0]} is not the record's; {CHANGED}", where=path)
