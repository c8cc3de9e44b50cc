"""Reads results from folders: runs of `sipp run`, and pruned networks of `sipp prune`.

`sipp.experiments.runs.reading` reads runs, `sipp.storage.pruned_folder` pruned networks. Errors name the file and
line; missing values are never guessed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sipp.errors import DataError
from sipp.experiments.arms import SEPARATOR
from sipp.experiments.runs.reading import Run, UnreadableFolder, read_run
from sipp.experiments.runs.store import MANIFEST
from sipp.records.schemas import (
    BENCH_FORMAT,
    EVAL_KIND,
    BenchRecord,
    CertificateRecord,
    EvalRecord,
    PrunedRecord,
    checked,
)
from sipp.storage import pruned_folder
from sipp.storage.files import read_file, read_sealed
from sipp.storage.outputs import BENCH_NAME, RECORD_NAME

MOST_CERTIFICATE = 1 << 20  # bytes
DEPTH = 2  # of nested folders: results/STUDY/RUN
Beside = CertificateRecord | EvalRecord  # files about a network in its folder


@dataclass(frozen=True)
class PrunedModel:
    """A folder that `sipp prune` wrote."""

    name: str
    record: PrunedRecord
    marks: tuple[str, ...]  # warnings: what could not be checked
    bench: BenchRecord | None = None  # size and speed, from `sipp bench`
    certificates: Mapping[str, CertificateRecord] = field(default_factory=dict)  # from `sipp certify --out`
    evaluations: Mapping[str, EvalRecord] = field(default_factory=dict)  # from `sipp eval --out`

    @property
    def arm(self) -> str:
        """Its label in comparisons: the method, and whether it was repaired."""
        return f"{self.record.method}{SEPARATOR}repaired" if self.record.repair else self.record.method

    @property
    def output_change(self) -> float | None:
        """How far the output moved on a few calibration points; None if unknown."""
        return None if self.record.moved is None else self.record.moved.error

    @property
    def all_certificates(self) -> list[CertificateRecord]:
        """The certificate from `sipp prune`, then those from `sipp certify`."""
        first = [] if self.record.certificate is None else [self.record.certificate]
        return [*first, *self.certificates.values()]


Result = Run | PrunedModel


def read_results(paths: Sequence[Path]) -> list[Result]:
    """Reads these folders: runs, pruned networks, or folders of them. DataError if one is broken."""
    results, broken = read_whole_results(paths)
    if broken:
        raise DataError(broken[0].what)
    return results


def read_whole_results(paths: Sequence[Path]) -> tuple[list[Result], list[UnreadableFolder]]:
    """Reads these folders and also returns the broken ones inside them; a folder in `paths` itself must be intact."""
    results: dict[Path, Result] = {}
    broken: dict[Path, UnreadableFolder] = {}
    for path in paths:
        folders = _result_folders(path)
        if not folders:
            raise DataError(
                f"no results in this folder: neither a run ({MANIFEST}) nor a pruned network ({RECORD_NAME})",
                where=path,
                fix="give a folder written by sipp prune --out FOLDER, sipp.save_folder or sipp run",
            )
        for folder in folders:
            resolved = folder.resolve()
            if resolved in results:
                continue
            try:
                results[resolved] = (read_run if (folder / MANIFEST).exists() else read_pruned_result)(folder)
            except (DataError, OSError) as error:
                if folder == path:  # named by the caller
                    raise
                broken[resolved] = UnreadableFolder(folder, str(error))
    return list(results.values()), list(broken.values())


def _is_result(folder: Path) -> bool:
    """Whether this is a result, intact or not; an unreadable folder counts, and fails later."""
    try:
        return (folder / MANIFEST).exists() or pruned_folder.is_pruned_folder(folder)
    except OSError:
        return True


def _result_folders(path: Path, depth: int = DEPTH) -> list[Path]:
    """The folder itself if it is a result, else the results in it or in its subfolders."""
    if _is_result(path):
        return [path]
    try:
        folders = sorted(inner for inner in path.iterdir() if inner.is_dir() and not inner.is_symlink())
        direct = [inner for inner in folders if _is_result(inner)]
        if direct or depth == 0:
            return direct
        return [folder for inner in folders for folder in _result_folders(inner, depth - 1)]
    except FileNotFoundError as error:
        raise DataError(
            "there is no such folder", where=path, fix="check the name, and the folder you are in"
        ) from error
    except OSError as error:
        raise DataError(f"cannot be read as a folder ({error.strerror or error})", where=path) from error


def read_pruned_result(folder: Path) -> PrunedModel:
    """Reads the pruned network in a folder of `sipp prune`."""
    record, marks = pruned_folder.read_pruned(folder)
    path = folder / BENCH_NAME
    values = read_sealed(path) if path.exists() else None
    if isinstance(values, dict) and values.get("format") != BENCH_FORMAT:
        values = None
        marks += (f"{BENCH_NAME} is of another version and not shown: run sipp bench again.",)
    bench = None if values is None else checked(BenchRecord, values, path)
    if bench is not None and bench.pruned_hash != record.pruned_hash:
        bench = None
        marks += (f"{BENCH_NAME} is about another network and is not shown; run sipp bench again.",)
    beside, more = _read_companions(folder, record)
    certificates = {name: entry for name, entry in beside.items() if isinstance(entry, CertificateRecord)}
    evaluations = {name: entry for name, entry in beside.items() if isinstance(entry, EvalRecord)}
    return PrunedModel(folder.resolve().name, record, (*marks, *more), bench, certificates, evaluations)


def _read_companions(folder: Path, record: PrunedRecord) -> tuple[dict[str, Beside], tuple[str, ...]]:
    """The certificates and evaluations in a folder, and warnings about those for other networks or broken."""
    records: dict[str, Beside] = {}
    marks = []
    for path in sorted(folder.glob("*.json")):
        if path.name in (RECORD_NAME, BENCH_NAME):
            continue
        what = "certificate"
        try:
            values = json.loads(read_file(path)) if path.stat().st_size <= MOST_CERTIFICATE else None
            if not isinstance(values, dict) or "pruned_hash" not in values:
                continue  # some other file
            if values.get("kind") == EVAL_KIND:
                what = "evaluation"
                records[path.name] = checked(EvalRecord, read_sealed(path), path)
            else:
                records[path.name] = checked(CertificateRecord, values, path)
        except (OSError, ValueError, RecursionError, DataError):
            marks.append(f"{path.name} cannot be read as {'a' if what == 'certificate' else 'an'} {what}.")
            continue
        is_other_dense = record.dense_hash is not None and values.get("dense_hash") != record.dense_hash
        if values["pruned_hash"] != record.pruned_hash or is_other_dense:
            del records[path.name]
            marks.append(
                f"{path.name} is {'a' if what == 'certificate' else 'an'} {what} for other networks and is not shown."
            )
        elif what == "certificate":
            marks.append(f"{path.name} is shown unchecked; sipp certify --verify checks it.")
    return records, tuple(marks)
