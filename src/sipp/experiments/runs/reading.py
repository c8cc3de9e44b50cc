"""Result folders as those read them who show them: runs of `sipp run`, networks of `sipp prune`.

What `sipp run` would refuse to go on with, or make anew, is refused here by the same checks. What cannot be checked
(a network's file is not here, a folder has another name) is told in a mark.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sipp.certificates.identity import entries_hash
from sipp.errors import DataError
from sipp.experiments.runs import store
from sipp.experiments.runs.listing import planned
from sipp.experiments.runs.plan import Stage
from sipp.storage import files
from sipp.storage.files import Values
from sipp.storage.marks import RECORD_FORMAT, RECORD_KIND, RECORD_NAME, WEIGHTS_NAME
from sipp.storage.network_schemas import NetworkRecord, PrunedRecord
from sipp.storage.run_schemas import Manifest, OriginRecord, checked, plain
from sipp.storage.tensors import raw_tensors

CHANGED = "it was changed after it was written"


@dataclass(frozen=True)
class RunFiles:
    """A run's configuration, its origins and the records of its networks; `marks` say what was not as it should be."""

    config: Values
    origins: tuple[OriginRecord, ...]
    n_stages: int
    records: tuple[tuple[str, NetworkRecord], ...]  # where a record was read, and the record
    marks: tuple[str, ...]


def read_run(folder: Path) -> RunFiles:
    """The run in this folder, finished or not; DataError where `sipp run` would not take a file for its own.

    A record stands in `records.jsonl`, and with a checksum beside its network. Both are the same, or one was changed.
    """
    manifest, stages = planned(folder)
    path = folder / store.RECORDS
    records, not_checked, seen = [], 0, set[str]()
    for number, record in enumerate(store.read_records(folder), start=1):
        where = f"{path} line {number}"
        stage = _stage_of(record, stages, where)
        if stage in seen:
            raise DataError(f"{stage} stands there twice; {CHANGED}", where=where)
        seen.add(stage)
        own = store.stage_record(folder, stage)
        if own is None:
            not_checked += 1
        elif own != record:
            raise DataError(f"not the record that lies beside its network in {folder / stage}; {CHANGED}", where=where)
        records.append((where, checked(NetworkRecord, record, where)))
    marks = _run_marks(folder, manifest, not_checked, len(records))
    return RunFiles(manifest.config, manifest.origins, len(stages), tuple(records), marks)


def _stage_of(record: Any, stages: list[Stage], where: str) -> str:
    """The name of the stage that a record speaks of."""
    keys = ("seed", "method", "level")
    found = tuple(record.get(key) for key in keys) if isinstance(record, dict) else ()
    stage = next((one for one in stages if (one.seed, one.method, one.level) == found), None)
    if stage is None:
        raise DataError(f"its {', '.join(keys)} are those of no network of this run; {CHANGED}", where=where)
    return stage.name


def _run_marks(folder: Path, manifest: Manifest, not_checked: int, n_records: int) -> tuple[str, ...]:
    """What a reader must be told: a name that is not the configuration's, records without networks, other code."""
    marks = []
    name = f"{manifest.config['name']}-{store.config_hash(manifest.config)[: store.HASH_LENGTH]}"
    if folder.resolve().name != name:
        marks.append(
            f"This folder is not called {name}: it was renamed, or its configuration was changed after it was written."
        )
    if not_checked:
        marks.append(
            f"The networks of {not_checked} of {n_records} records are not here, so that these records were not "
            "checked against them."
        )
    if manifest.origins[-1].code != store.code_version():
        marks.append("Its numbers come from other code than the one that shows them.")
    return tuple(marks)


def read_pruned(folder: Path) -> tuple[PrunedRecord, tuple[str, ...]]:
    """The record of the network that `sipp prune` wrote into this folder, and marks; DataError if either was changed.

    The record is checked by its checksum, and against the network: the same weights, and no more of them than it says.
    """
    path = folder / RECORD_NAME
    values = files.read_sealed(path) if _has_check(path) else {}
    if values.get("kind") != RECORD_KIND or values.get("format") != RECORD_FORMAT:
        raise DataError(
            f"is no record of `sipp prune` with a checksum (format {RECORD_FORMAT}); {CHANGED}, or is older", where=path
        )
    record = checked(PrunedRecord, values, path)
    _check_sums(record, path)
    weights = folder / WEIGHTS_NAME
    if not weights.exists():
        return record, ("Its network is not here, so that its record was not checked against it.",)
    tensors = raw_tensors(files.read_file(weights), weights)
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
    certified = {} if record.certificate is None else plain(record.certificate)
    hashes = [key for key in ("dense_hash", "pruned_hash") if certified and certified.get(key) != getattr(record, key)]
    if hashes:
        raise DataError(f"the certificate's {hashes[0]} is not the record's; {CHANGED}", where=path)
