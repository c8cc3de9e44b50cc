"""Reads results from folders: runs of `sipp run`, and pruned networks of `sipp prune`.

`sipp.experiments.runs.reading` reads runs, `sipp.storage.pruned_folder` pruned networks. Errors name the file and
line; missing values are never guessed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sipp.errors import DataError
from sipp.experiments.arms import SEPARATOR
from sipp.experiments.runs.reading import Run, UnreadableFolder, read_run
from sipp.experiments.runs.store import MANIFEST
from sipp.results.bench import BENCH_KIND, BenchRecord
from sipp.results.certificate import claims_on_one_holdout
from sipp.results.evaluation import EVAL_KIND, EvalRecord
from sipp.results.schemas import CertificateRecord, PrunedRecord, checked
from sipp.storage import pruned_folder
from sipp.storage.files import read_file, read_json
from sipp.storage.outputs import RECORD_NAME

MOST_BYTES = 1 << 24  # of a file beside a network
DEPTH = 2  # of nested folders: results/STUDY/RUN
Measurement = CertificateRecord | EvalRecord | BenchRecord  # of a network; a file in its folder
SEALED: dict[str, tuple[str, type[Measurement]]] = {  # by their kind; a file without one of these is a certificate
    EVAL_KIND: ("an evaluation", EvalRecord),
    BENCH_KIND: ("a benchmark", BenchRecord),
}


@dataclass(frozen=True)
class PrunedModel:
    """A folder that `sipp prune` wrote."""

    name: str
    record: PrunedRecord
    notes: tuple[str, ...]  # warnings: what could not be checked
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
    def evaluation(self) -> EvalRecord | None:
        """The evaluation with an accuracy (if any) on the most points."""
        known = self.evaluations.values()
        return max(known, key=lambda measured: (measured.accuracies is not None, measured.n_points), default=None)

    @property
    def accuracies(self) -> tuple[float, float] | None:
        """The accuracy before and after pruning, by that evaluation."""
        return None if self.evaluation is None else self.evaluation.accuracies

    @property
    def certified_error(self) -> float | None:
        """The certified error of the output; the largest of several, since the best of several is not a claim."""
        limits = [certificate.output_limit for certificate in self.all_certificates]
        return max((limit for limit in limits if limit is not None), default=None)

    @property
    def certified_drop(self) -> CertificateRecord | None:
        """The certificate on accuracy; the weakest of several."""
        known = [certificate for certificate in self.all_certificates if certificate.drop_upper is not None]
        return max(known, key=lambda certificate: certificate.drop_upper or 0.0, default=None)

    @property
    def all_certificates(self) -> list[CertificateRecord]:
        """The certificate from `sipp prune`, then those from `sipp certify`."""
        first = [] if self.record.certificate is None else [self.record.certificate]
        return [*first, *self.certificates.values()]


def shared_holdout(models: Iterable[PrunedModel]) -> str:
    """A sentence if several certificates of these networks rest on the same holdout, else empty."""
    claims = [certificate.certificate for model in models for certificate in model.all_certificates]
    return claims_on_one_holdout(claim for claim in claims if claim is not None)


Result = Run | PrunedModel


def read_results(paths: Sequence[Path]) -> list[Result]:
    """Reads these folders: runs, pruned networks, or folders of them. DataError if one is broken."""
    results, broken = read_intact_results(paths)
    if broken:
        raise DataError(broken[0].what)
    return results


def read_intact_results(paths: Sequence[Path]) -> tuple[list[Result], list[UnreadableFolder]]:
    """The results in these folders, and the folders inside them that are broken; those in `paths` must be intact."""
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
    """Reads the pruned network in a folder of `sipp prune`, and what was measured and certified about it."""
    record, notes = pruned_folder.read_pruned(folder)
    certificates: dict[str, CertificateRecord] = {}
    evaluations: dict[str, EvalRecord] = {}
    bench = None
    for path in sorted(folder.glob("*.json")):
        measured, note = (None, "") if path.name == RECORD_NAME else _read_measurement(path, record)
        notes += (note,) if note else ()
        if isinstance(measured, CertificateRecord):
            certificates[path.name] = measured
        elif isinstance(measured, EvalRecord):
            evaluations[path.name] = measured
        elif measured is not None:
            bench = measured
    return PrunedModel(folder.resolve().name, record, notes, bench, certificates, evaluations)


def _read_measurement(path: Path, record: PrunedRecord) -> tuple[Measurement | None, str]:
    """The certificate, evaluation or benchmark in a file, if it is intact and about this network; and a note."""
    what: str
    schema: type[Measurement]
    what, schema = "a certificate", CertificateRecord
    try:
        values = json.loads(read_file(path)) if path.stat().st_size <= MOST_BYTES else None
        if not isinstance(values, dict) or "pruned_hash" not in values:
            return None, ""  # some other file
        what, schema = SEALED.get(str(values.get("kind")), (what, schema))
        measured = checked(schema, values if schema is CertificateRecord else read_json(path), path)
    except (OSError, ValueError, RecursionError):
        return None, f"{path.name} cannot be read as {what}."
    dense_hash = values.get("dense_hash", record.dense_hash)
    if values["pruned_hash"] != record.pruned_hash or record.dense_hash not in (None, dense_hash):
        return None, f"{path.name} is {what} for other networks and is not shown."
    return measured, ""
