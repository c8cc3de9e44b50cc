"""Reads run folders: the progress of a run, and its records. Imports no torch.

A file that `sipp run` would not resume from is refused here by the same checks. What cannot be checked (a network's
file is missing, a folder was renamed) becomes a note. `sipp.storage.pruned_folder` reads folders of `sipp prune`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sipp.errors import DataError, SippError
from sipp.files import CHANGED
from sipp.results.jsonio import from_json
from sipp.results.manifest import Manifest, Origin, Planned
from sipp.results.run_records import NetworkRecord
from sipp_lab.pipelines import Pipeline, pipeline_names, pipeline_of
from sipp_lab.runs import store
from sipp_lab.runs.plan import Stage, stages_of

RunState = Literal["running", "finished", "stopped"]


@dataclass(frozen=True)
class RunStatus:
    """The progress of a run, as `sipp runs` shows it."""

    folder: Path
    recipe: str
    pipeline: str
    n_done: int
    n_stages: int
    state: RunState
    n_origins: int  # more than 1: resumed with different data, code or device


@dataclass(frozen=True)
class UnreadableFolder:
    """A result folder that cannot be read, and why."""

    folder: Path
    what: str
    fix: str = ""  # empty if the error suggests none


def list_runs(out: Path) -> list[RunStatus | UnreadableFolder]:
    """Every run in `out`, by name, including those that cannot be read."""
    runs: list[RunStatus | UnreadableFolder] = []
    for folder in store.folders_in(out):
        try:
            if not (folder / store.MANIFEST).exists():
                continue
            manifest, stages = _plan(folder)
            n_done, config = len(store.read_records(folder)), manifest.config
            ended: RunState = "finished" if n_done == len(stages) else "stopped"
            state: RunState = "running" if store.is_locked(folder) else ended
            n_origins = len(manifest.origins)
            runs.append(RunStatus(folder, config["name"], config["pipeline"], n_done, len(stages), state, n_origins))
        except SippError as error:
            runs.append(UnreadableFolder(folder, error.fault, error.fix))
        except OSError as error:
            what = f"{error.filename or folder}: {error.strerror or error}"
            runs.append(UnreadableFolder(folder, what, "allow reading it"))
    return runs


def _plan(folder: Path) -> tuple[Manifest, list[Stage]]:
    """The manifest and the stages of a run."""
    manifest = store.read_manifest(folder)
    config = from_json(Planned, manifest.config, folder / store.MANIFEST)
    seeds = range(config.seed, config.seed + config.repetitions)
    return manifest, stages_of(seeds, config.prune.methods, config.prune.n_levels)


@dataclass(frozen=True)
class Run:
    """A run folder, finished or not: its configuration, where it was computed, and the records of its networks."""

    name: str
    config: Mapping[str, Any]
    origins: tuple[Origin, ...]
    records: tuple[NetworkRecord, ...]
    n_stages: int
    notes: tuple[str, ...]  # warnings for the reader: what could not be checked, or is not as `sipp run` left it

    @property
    def finished(self) -> bool:
        return len(self.records) >= self.n_stages

    @property
    def pipeline(self) -> Pipeline | None:
        """The pipeline that made it; None if this version has no pipeline of that name."""
        name = str(self.config["pipeline"])
        return pipeline_of(name) if name in pipeline_names() else None


def read_run(folder: Path) -> Run:
    """Reads a run folder, finished or not; raises DataError for a file that `sipp run` would refuse to resume from.

    Each record is stored twice, in `records.jsonl` and (with a checksum) beside its network. If the two differ, one of
    them was edited.
    """
    manifest, stages = _plan(folder)
    names = {(stage.seed, stage.method, stage.level): stage.name for stage in stages}
    records, n_unchecked, seen = [], 0, set[str]()
    for number, record in enumerate(store.read_records(folder), start=1):
        where = f"{folder / store.RECORDS} line {number}"
        stage = names.get(_key_of(record))
        if stage is None:
            raise DataError(f"no network of this run has its seed, method and level; {CHANGED}", where=where)
        if stage in seen:
            raise DataError(f"{stage} is in the file twice; {CHANGED}", where=where)
        seen.add(stage)
        own = store.stage_record(folder, stage)
        if own is None:
            n_unchecked += 1
        elif own != record:
            raise DataError(
                f"differs from the record stored with its network in {folder / stage}; {CHANGED}", where=where
            )
        records.append(from_json(NetworkRecord, record, where))
    notes = _notes(folder, manifest, n_unchecked, len(records))
    name = folder.resolve().name
    return Run(name, manifest.config, manifest.origins, tuple(records), len(stages), notes)


def _key_of(record: Any) -> Any:
    """The seed, method and level of a record that is not validated yet."""
    values = tuple(record.get(key) for key in ("seed", "method", "level")) if isinstance(record, dict) else ()
    return values if all(isinstance(value, str | int | None) for value in values) else None


def _notes(folder: Path, manifest: Manifest, n_unchecked: int, n_records: int) -> tuple[str, ...]:
    """Warnings for the reader: a renamed folder, records without their networks, results of other code."""
    notes = []
    name = f"{manifest.config['name']}-{store.config_hash(manifest.config)[: store.HASH_LENGTH]}"
    if folder.resolve().name != name:
        notes.append(
            f"This folder is not called {name}: it was renamed, or its configuration was changed after it was written."
        )
    if n_unchecked:
        notes.append(
            f"The networks of {n_unchecked} of {n_records} records are missing, so these records could not be "
            "checked against them."
        )
    if not store.is_of_this_code(manifest.origins[-1].code):
        notes.append("These results were produced by a different version of the code.")
    return tuple(notes)
