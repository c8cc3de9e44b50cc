"""Folders of `sipp run` as those read them who show them; those of `sipp prune` are in `sipp.storage.pruned_folder`.

What `sipp run` would refuse to go on with, or make anew, is refused here by the same checks. What cannot be checked
(a network's file is not here, a folder has another name) is told in a mark.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sipp.errors import DataError
from sipp.experiments.runs import store
from sipp.experiments.runs.listing import planned
from sipp.experiments.runs.plan import Stage
from sipp.records.schemas import Manifest, NetworkRecord, OriginRecord, checked
from sipp.storage.files import CHANGED, Values


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
