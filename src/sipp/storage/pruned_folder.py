"""The folder of a pruned network: its weights and its record, written whole, and read with every check. Needs no torch.

`sipp prune --out DIR` and `pruned.save(DIR)` write it; `sipp report`, `bench`, `eval` and `certify` read it.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from sipp.errors import DataError
from sipp.inputs.identity import entries_hash
from sipp.storage.files import CHANGED, plain, read_file, read_sealed, seal
from sipp.storage.marks import RECORD_FORMAT, RECORD_KIND, RECORD_NAME, WEIGHTS_NAME
from sipp.storage.network_schemas import PrunedRecord
from sipp.storage.outputs import write_folder
from sipp.storage.run_schemas import checked
from sipp.storage.run_schemas import plain as given
from sipp.storage.tensors import raw_tensors, tensors_to_bytes


def write_pruned(folder: Path, tensors: dict[str, Any], record: dict[str, Any], *, force: bool) -> dict[Path, int]:
    """Writes the network and its record into the folder, both or neither, and gives {file: bytes}."""
    report = json.dumps(seal(plain(record)), indent=1, allow_nan=False).encode()
    files = {WEIGHTS_NAME: tensors_to_bytes(tensors), RECORD_NAME: report}
    write_folder(folder, files, force=force)
    return {folder / name: len(data) for name, data in files.items()}


def read_pruned(folder: Path) -> tuple[PrunedRecord, tuple[str, ...]]:
    """The record of the network that `sipp prune` wrote into this folder, and marks; DataError if either was changed.

    The record is checked by its checksum, and against the network: the same weights, and no more of them than it says.
    """
    path = folder / RECORD_NAME
    values = read_sealed(path) if _has_check(path) else {}
    if values.get("kind") != RECORD_KIND or values.get("format") != RECORD_FORMAT:
        raise DataError(
            f"is no record of `sipp prune` with a checksum (format {RECORD_FORMAT}); {CHANGED}, or is older", where=path
        )
    record = checked(PrunedRecord, values, path)
    _check_sums(record, path)
    weights = folder / WEIGHTS_NAME
    if not weights.exists():
        return record, ("Its network is not here, so that its record was not checked against it.",)
    tensors = raw_tensors(read_file(weights), weights)
    found = entries_hash((name, [one.dtype, list(one.shape)], one.data) for name, one in tensors.items())
    if found != record.pruned_hash:
        raise DataError(f"is not the network that {RECORD_NAME} speaks of; {CHANGED}", where=weights)
    for layer in record.layers:
        weight = tensors.get(layer.name)  # of which one that is kept may be zero
        if weight is None or math.prod(weight.shape) != layer.n_weights or weight.n_nonzero() > layer.kept:
            raise DataError(f"layer {layer.name!r:.60} does not fit its weights; {CHANGED}", where=path)
    return record, ()


def _has_check(path: Path) -> bool:
    """Whether the file is an object with a checksum; one that cannot be parsed is for `read_sealed` to refuse."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return True
    return isinstance(found, dict) and "check" in found


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
    certified = {} if record.certificate is None else given(record.certificate)
    hashes = [key for key in ("dense_hash", "pruned_hash") if certified and certified.get(key) != getattr(record, key)]
    if hashes:
        raise DataError(f"the certificate's {hashes[0]} is not the record's; {CHANGED}", where=path)
