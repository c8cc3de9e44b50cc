"""Folders in, frozen records out: runs of `sipp run`, and pruned models of `sipp prune`.

Files are read by `sipp.experiments.runs.reading`, which refuses what `sipp run` refuses. What is wrong with a file is
said with its path and line, and nothing is guessed in its place.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sipp.certificates.record import from_values
from sipp.errors import DataError
from sipp.experiments.runs import reading
from sipp.experiments.runs.store import FINAL, MANIFEST, RECORDS
from sipp.storage.marks import RECORD_NAME, WEIGHTS_NAME

Values = Mapping[str, Any]


@dataclass(frozen=True)
class Accuracy:
    """Shares of n test points, in [0, 1]."""

    n: int
    top1: float
    top5: float


@dataclass(frozen=True)
class Scores:
    """How many of a layer's scores, and of those it keeps, lie in each bin; `zero` counts scores that are 0."""

    zero: int
    counts: tuple[int, ...]
    kept: tuple[int, ...]


@dataclass(frozen=True)
class Layer:
    """One prunable weight after pruning."""

    name: str
    n_weights: int
    kept: int
    dead_rows: int
    eps: float | None  # None: no bound, or an infinite one
    scores: Scores | None


@dataclass(frozen=True)
class Bound:
    """The theory's statement about the network, before retraining."""

    epsilon: float | None
    delta: float | None
    met: bool
    reason: str
    words: str = ""  # the statement as a sentence, with the share of inputs it speaks of (T18)


@dataclass(frozen=True)
class Certificate:
    """The holdout's statement about the network, before retraining; `values` holds every field of its file."""

    verdict: str
    epsilon: float | None  # None: no finite one was proved
    sentence: str
    values: Values


@dataclass(frozen=True)
class Record:
    """One network of a run; level 0 is the dense one, which has no method."""

    seed: int
    method: str | None
    level: int
    keep: float
    n_weights: int | None
    after: Accuracy
    before: Accuracy | None
    dead_rows: int
    layers: tuple[Layer, ...]
    bound: Bound | None
    guarantee: str | None
    certificate: Certificate | None
    seconds: float
    parts: Mapping[str, float]  # seconds by part of the stage; empty in older runs


@dataclass(frozen=True)
class Bins:
    """Where the bins of the scores lie: log10 of the first edge, their width and number."""

    low: float
    width: float
    n: int


@dataclass(frozen=True)
class Run:
    """A run folder, finished or not."""

    name: str
    config: Values
    origins: tuple[Values, ...]
    records: tuple[Record, ...]
    n_stages: int
    bins: Bins | None
    marks: tuple[str, ...]  # what could not be checked, or is not as `sipp run` left it

    @property
    def finished(self) -> bool:
        return len(self.records) >= self.n_stages


@dataclass(frozen=True)
class PrunedModel:
    """A folder that `sipp prune` wrote."""

    name: str
    method: str
    keep: float
    layers: tuple[Layer, ...]
    bound: Bound | None
    guarantee: str | None
    certificate: Certificate | None
    measured: str | None  # the statement with the measured constant (T19), or why there is none
    has_measured: bool
    values: Values  # everything else that is plain: versions, seeds, hashes
    marks: tuple[str, ...]  # what could not be checked


@dataclass(frozen=True)
class Broken:
    """A folder among others that cannot be read, and why."""

    folder: Path
    reason: str


Source = Run | PrunedModel


def read_sources(paths: Sequence[Path]) -> list[Source]:
    """What lies in these folders, each of which is a run, a pruned model, or a folder of such; all of it is whole."""
    found, broken = read_whole_sources(paths)
    if broken:
        raise DataError(broken[0].reason)
    return found


def read_whole_sources(paths: Sequence[Path]) -> tuple[list[Source], list[Broken]]:
    """What lies in these folders, and what among it is broken; a folder that was itself named must be whole."""
    found: dict[Path, Source] = {}
    broken: dict[Path, Broken] = {}
    for path in paths:
        named = _is_source(path)
        folders = [path] if named else sorted(inner for inner in _folders(path) if _is_source(inner))
        if not folders:
            raise DataError(
                f"{path}: neither a run (with {MANIFEST}) nor a pruned model (with {RECORD_NAME}), nor a folder of such"
            )
        for folder in folders:
            resolved = folder.resolve()
            if resolved in found:
                continue
            try:
                found[resolved] = read_run(folder) if (folder / MANIFEST).exists() else read_pruned(folder)
            except (DataError, OSError) as error:
                if named:
                    raise
                broken[resolved] = Broken(folder, str(error))
    return list(found.values()), list(broken.values())


def files_read(paths: Sequence[Path]) -> list[Path]:
    """Every file that is read for these folders: records, and the networks they are checked against."""
    found = []
    for path in paths:
        for folder in [path] if _is_source(path) else (inner for inner in _folders(path) if _is_source(inner)):
            names = (MANIFEST, RECORDS, RECORD_NAME, WEIGHTS_NAME)
            found += [folder / name for name in names] + sorted(folder.glob(f"*/{FINAL}.*"))
    return found


def _is_source(folder: Path) -> bool:
    """Whether a result lies here, whole or not; of a folder into which nobody may look, reading says so in its turn."""
    try:
        return (folder / MANIFEST).exists() or (folder / RECORD_NAME).exists()
    except OSError:
        return True


def _folders(path: Path) -> list[Path]:
    try:
        return [inner for inner in path.iterdir() if inner.is_dir()]
    except OSError as error:
        raise DataError(f"{path}: cannot be read as a folder ({error.strerror or error})") from error


def read_run(folder: Path) -> Run:
    """The run in this folder, with the records of the networks that are done."""
    found = reading.read_run(folder)
    records, bins = [], None
    for place, raw in found.records:
        records.append(_record(raw, place))
        bins = bins or (_bins(raw["score_bins"], place) if raw.get("score_bins") else None)
        for layer in records[-1].layers:
            if layer.scores is not None and (bins is None or len(layer.scores.counts) != bins.n):
                raise DataError(f"{place}: the scores of {layer.name!r} do not have the bins that 'score_bins' says")
    name = folder.resolve().name
    return Run(name, found.config, found.origins, tuple(records), found.n_stages, bins, found.marks)


def read_pruned(folder: Path) -> PrunedModel:
    """The pruned model in this folder, as its report describes it."""
    where = str(folder / RECORD_NAME)
    values, marks = reading.read_pruned(folder)
    shown = {"layers", "bound", "certificate", "kind", "measured"}
    return PrunedModel(
        name=folder.resolve().name,
        method=_field(values, "method", where, str),
        keep=_number(values, "keep", where),
        layers=tuple(_layer(one, where) for one in _field(values, "layers", where, list)),
        bound=_bound(values.get("bound"), where),
        guarantee=_optional_text(values, "guarantee", where),
        certificate=_certificate(values.get("certificate"), where),
        measured=_measured(values.get("measured"), where),
        has_measured=isinstance(values.get("measured"), dict) and values["measured"].get("c_constant") is not None,
        values={key: value for key, value in values.items() if key not in shown},
        marks=marks,
    )


# --- the parts of a record ------------------------------------------------------------------------------------------


def _record(raw: Values, where: str) -> Record:
    method = raw.get("method")
    if method is not None and not isinstance(method, str):
        raise DataError(f"{where}: 'method' must be text or null, not {method!r:.40}")
    parts = raw.get("part_seconds") or {}
    if not isinstance(parts, dict):
        raise DataError(f"{where}: 'part_seconds' must be an object")
    return Record(
        seed=_count(raw, "seed", where),
        method=method,
        level=_count(raw, "level", where),
        keep=1.0 if method is None else _number(raw, "keep", where),
        n_weights=_count(raw, "n_weights", where) if "n_weights" in raw else None,
        after=_accuracy(_field(raw, "after", where, dict), where),
        before=_accuracy(_field(raw, "before", where, dict), where) if raw.get("before") is not None else None,
        dead_rows=_count(raw, "dead_rows", where) if "dead_rows" in raw else 0,
        layers=tuple(_layer(one, where) for one in raw.get("layers") or ()),
        bound=_bound(raw.get("bound"), where),
        guarantee=_optional_text(raw, "guarantee", where),
        certificate=_certificate(raw.get("certificate"), where),
        seconds=_number(raw, "seconds", where),
        parts={name: _number(parts, name, where) for name in parts},
    )


def _accuracy(raw: Values, where: str) -> Accuracy:
    return Accuracy(_count(raw, "n", where), _number(raw, "top1", where), _number(raw, "top5", where))


def _layer(raw: Any, where: str) -> Layer:
    if not isinstance(raw, dict):
        raise DataError(f"{where}: a layer must be an object, not {raw!r:.40}")
    name = _field(raw, "name", where, str)
    inner = f"{where}, layer {name!r}"
    if "n_weights" in raw:
        n_weights = _count(raw, "n_weights", inner)
    else:
        n_weights = _count(raw, "n_rows", inner) * _count(raw, "fan_in", inner)
    dead = raw.get("dead_rows", 0)
    n_dead = len(dead) if isinstance(dead, list) else _count({"dead_rows": dead}, "dead_rows", inner)
    scores = raw.get("scores")
    return Layer(
        name=name,
        n_weights=n_weights,
        kept=_count(raw, "kept", inner),
        dead_rows=n_dead,
        eps=_optional_number(raw, "eps", inner),
        scores=_scores(scores, inner) if scores is not None else None,
    )


def _scores(raw: Any, where: str) -> Scores:
    if not isinstance(raw, dict):
        raise DataError(f"{where}: 'scores' must be an object")
    counts, kept = (_field(raw, key, where, list) for key in ("counts", "kept"))
    if len(counts) != len(kept) or not all(_is_count(value) for value in (*counts, *kept)):
        raise DataError(f"{where}: 'counts' and 'kept' of the scores must be equally long lists of counts")
    return Scores(_count(raw, "zero", where), tuple(counts), tuple(kept))


def _bins(raw: Any, where: str) -> Bins:
    if not isinstance(raw, dict):
        raise DataError(f"{where}: 'score_bins' must be an object")
    return Bins(_number(raw, "low", where), _number(raw, "width", where), _count(raw, "n", where))


def _bound(raw: Any, where: str) -> Bound | None:
    if raw is None:
        return None
    if not isinstance(raw, dict):
        raise DataError(f"{where}: 'bound' must be an object")
    epsilon = _optional_number(raw, "epsilon", where)
    # A bound is met only where the record says so in so many words, and gives the number.
    met = raw.get("met") is True and epsilon is not None
    reason, words = (_optional_text(raw, name, where) or "" for name in ("reason", "words"))
    return Bound(epsilon, _optional_number(raw, "delta", where), met, reason, words)


def _measured(raw: Any, where: str) -> str | None:
    if raw is None:
        return None
    if not isinstance(raw, dict):
        raise DataError(f"{where}: 'measured' must be an object")
    return _optional_text(raw, "words", where)


def _certificate(raw: Any, where: str) -> Certificate | None:
    if raw is None:
        return None
    if not isinstance(raw, dict):
        raise DataError(f"{where}: 'certificate' must be an object")
    verdict = _optional_text(raw, "verdict", where) or _optional_text(raw, "mode", where) or "no verdict"
    if set(raw) == {"verdict"} and not verdict.startswith("certified"):  # a run that could not certify says why
        return Certificate(verdict, None, verdict, raw)
    try:
        sentence = from_values(raw).sentence  # from its counts: what the file says of them is not shown
    except DataError as error:
        raise DataError(f"{where}: 'certificate': {error}") from error
    epsilon = None if raw.get("epsilon") == "inf" else _optional_number(raw, "epsilon", where)
    return Certificate(verdict, epsilon, sentence, {**raw, "sentence": sentence})


# --- values ---------------------------------------------------------------------------------------------------------


def _field(values: Values, key: str, where: str, kind: type) -> Any:
    if key not in values or not isinstance(values[key], kind):
        raise DataError(f"{where}: {key!r} must be a {kind.__name__}, found {values.get(key)!r:.60}")
    return values[key]


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _count(values: Values, key: str, where: str) -> int:
    value = values.get(key)
    if not _is_count(value):
        raise DataError(f"{where}: {key!r} must be a count, found {value!r:.60}")
    return int(values[key])


def _number(values: Values, key: str, where: str) -> float:
    value = values.get(key)
    if type(value) not in (int, float) or not math.isfinite(value):  # type: ignore[arg-type]
        raise DataError(f"{where}: {key!r} must be a finite number, found {value!r:.60}")
    return float(values[key])


def _optional_number(values: Values, key: str, where: str) -> float | None:
    return None if values.get(key) in (None, "inf") else _number(values, key, where)


def _optional_text(values: Values, key: str, where: str) -> str | None:
    return None if values.get(key) is None else str(_field(values, key, where, str))
