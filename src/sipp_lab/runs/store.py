"""The files of a run: a folder named by the hash of its configuration, locked while in use, resumable.

ROOT/RECIPE-HASH/
    manifest.json    the configuration, and the data, code and device of its results
    lock             held by the process that works here
    records.jsonl    one line per finished stage, in the order of the plan
    STAGE/           the last two checkpoints step-* during training, final.safetensors when done
"""

from __future__ import annotations

import functools
import json
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any

import sipp
from sipp import files
from sipp.errors import DataError, OptionError
from sipp.files import Values
from sipp.results.checking import refuse_constant
from sipp.results.jsonio import from_json, to_json
from sipp.results.manifest import Manifest, Origin
from sipp.storage import state_files

try:
    import fcntl
except ImportError:  # Windows: nothing prevents two runs in one folder there
    fcntl = None  # type: ignore[assignment]

Tensor = Any  # torch's, which need not be imported to read records
HASH_LENGTH = 12
MANIFEST = "manifest.json"
LOCK = "lock"
RECORDS = "records.jsonl"
FINAL = "final"
STEP = "step"
N_CHECKPOINTS = 2  # the newest, and the previous one in case it is damaged
TAKEN_FROM = "taken_from"  # in the record of a network copied from another run: that run's folder
CLOCK_FIELDS = ("seconds", "part_seconds")  # fields of a record that vary between identical runs


@functools.cache  # the loaded code does not change
def code_version() -> str:
    """The versions of the package and of torch, and a digest of the source of the library and the laboratory."""
    roots = (Path(sipp.__file__).parent, Path(__file__).parents[1])
    sources = (
        f"{path.relative_to(root.parent)}\0".encode() + path.read_bytes()
        for root in roots
        for path in sorted(root.rglob("*.py"))
    )
    digest = files.sha256_of(*sources)
    # without importing torch
    return f"sipp {sipp.__version__}, torch {version('torch')}, source {digest[:HASH_LENGTH]}"


def is_of_this_code(code: str) -> bool:
    """Whether an origin names this version of the package; user code listed after it is ignored."""
    return f"{code}, ".startswith(f"{code_version()}, ")


def config_hash(config: Mapping[str, Any]) -> str:
    """SHA-256 of the configuration, independent of the order of keys."""
    return files.sha256_of(json.dumps(config, sort_keys=True, allow_nan=False).encode())


def run_name(config: Mapping[str, Any]) -> str:
    """The name of a run's folder."""
    return files.check_name(f"{config['name']}-{config_hash(config)[:HASH_LENGTH]}")


def folders_in(root: Path) -> list[Path]:
    """The folders in `root`, by name; those with a manifest are runs."""
    return sorted(path for path in root.iterdir() if path.is_dir()) if root.is_dir() else []


@contextmanager
def open_run(root: Path, config: dict[str, Any], origin: Origin, *, accept_changes: bool = False) -> Iterator[Path]:
    """Creates or opens the folder of this configuration and locks it; OptionError if it is in use.

    Also refuses a folder with results of other data, code or device, unless `accept_changes`: then the manifest lists
    all origins.
    """
    folder = root / run_name(config)
    files.make_folder(folder)
    with _locked(folder):
        files.remove_leftovers(folder)
        _check_manifest(folder, config, origin, accept_changes=accept_changes)
        yield folder


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    path = folder / LOCK
    try:
        path.touch()
    except OSError as error:
        raise DataError(f"the lock could not be opened ({error.strerror})", where=path) from error
    with open(path, "r+", encoding="utf-8", errors="replace") as file:  # the lock is released even if the process dies
        if not _lock(file, shared=False):
            raise OptionError(
                f"{folder} is in use by process {file.read(64).strip() or 'unknown'}",
                fix="wait for it, stop it, or choose another folder with --out",
            )
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield
        file.truncate(0)


def _lock(file: IO[str], *, shared: bool) -> bool:
    """Tries to take the lock; always succeeds on Windows, which has no such locks."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        return True
    except OSError:
        return False


def is_locked(folder: Path) -> bool:
    """Whether a process is using this run folder."""
    try:
        with open(folder / LOCK, encoding="utf-8", errors="replace") as file:
            return not _lock(file, shared=True)
    except FileNotFoundError:
        return False


def read_manifest(folder: Path) -> Manifest:
    """Reads and validates the manifest in a run folder."""
    path = folder / MANIFEST
    return from_json(Manifest, files.read_json(path), path)


def _check_manifest(folder: Path, config: dict[str, Any], origin: Origin, *, accept_changes: bool) -> None:
    """Writes the manifest of a new run; refuses a run that was started with something else."""
    path, current = folder / MANIFEST, to_json(origin)
    if not path.exists():
        files.write_json(path, to_json(Manifest(config, (origin,))))
        return
    known = read_manifest(folder)
    if known.config != config:
        raise OptionError("this folder was made with another configuration", where=path, fix="choose another --out")
    last = to_json(known.origins[-1])
    changed = [f"{key} (was: {last[key]}; now: {current[key]})" for key in current if last[key] != current[key]]
    if changed and not accept_changes:
        raise OptionError(
            f"{folder} was started with different {', '.join(changed)}: its numbers would mix both. Pass "
            "--accept-changes to resume anyway (the manifest will say so), or choose another --out"
        )
    if changed:
        files.write_json(path, to_json(Manifest(config, (*known.origins, origin))))


def add_origins(folder: Path, other: Manifest) -> None:
    """Adds the origins of another run, whose networks are reused here, to the manifest; the newest stays last."""
    known = read_manifest(folder)
    new = tuple(source for source in other.origins if source not in known.origins)
    if new:
        manifest = Manifest(known.config, (*new, *known.origins))
        files.write_json(folder / MANIFEST, to_json(manifest))


# --- checkpoints of a stage -----------------------------------------------------------------------------------------


def step_name(epoch: int, step: int) -> str:
    """The name of a checkpoint; names sort in training order."""
    return f"{STEP}-{epoch:06d}-{step:09d}"


def checkpoints(stage: Path) -> list[str]:
    """The names of a stage's checkpoints, newest first."""
    return sorted((path.stem for path in stage.glob(f"{STEP}-*{state_files.SUFFIX}")), reverse=True)


def save_checkpoint(stage: Path, name: str, tensors: Mapping[str, Tensor], values: Values) -> None:
    """Saves a checkpoint, and removes all but the last two."""
    state_files.save_state(stage, name, tensors, values)
    for old in checkpoints(stage)[N_CHECKPOINTS:]:
        state_files.remove_state(stage, old)


def newest_checkpoint(stage: Path) -> tuple[dict[str, Tensor], Values] | None:
    """The newest intact checkpoint; warns about a damaged one and uses the one before it."""
    for name in checkpoints(stage):
        loaded = load_if_intact(stage, name)
        if loaded is not None:
            return loaded
    return None


def load_if_intact(stage: Path, name: str) -> tuple[dict[str, Tensor], Values] | None:
    """Loads what was saved under this name; None if there is nothing or (with a warning) if it is damaged."""
    if not state_files.has_state(stage, name):
        return None
    try:
        return state_files.load_state(stage, name)
    except DataError as error:
        warnings.warn(f"{error}; going on from what was saved before it", stacklevel=2)
        return None


def finish_stage(stage: Path, tensors: Mapping[str, Tensor], values: Values) -> None:
    """Saves the stage's result and removes its checkpoints."""
    state_files.save_state(stage, FINAL, tensors, values)
    drop_checkpoints(stage)


def drop_checkpoints(stage: Path) -> None:
    """Removes the checkpoints of a stage."""
    for name in checkpoints(stage):
        state_files.remove_state(stage, name)


# --- records --------------------------------------------------------------------------------------------------------


def stage_record(folder: Path, name: str) -> Values | None:
    """The record stored with the network of a stage; None if there is none, DataError if either was changed."""
    if not files.is_name(name):  # of a method with signs in its name: no folder can have it
        return None
    stage = folder / name
    return dict(state_files.load_values(stage, FINAL)["record"]) if state_files.has_state(stage, FINAL) else None


def stage_records(folder: Path, names: Iterable[str]) -> dict[str, Values]:
    """The records of those of these stages that are finished."""
    records: dict[str, Values] = {}
    for name in names:
        with suppress(DataError):  # damaged: training reports it and repeats the stage
            record = stage_record(folder, name)
            records |= {} if record is None else {name: record}
    return records


def write_records(folder: Path, names: Iterable[str], records: Mapping[str, Values]) -> None:
    """Rewrites `records.jsonl`, in the order of the names.

    A run starts by reading all records from the stages, so an interruption can neither lose nor duplicate one.
    """
    in_order = (records[name] for name in names if name in records)
    text = "".join(json.dumps(record, allow_nan=False) + "\n" for record in in_order)
    path = folder / RECORDS
    if not path.is_file() or path.read_bytes() != text.encode():
        files.write_atomic(path, text.encode())


def read_records(folder: Path) -> list[Values]:
    """The records of a run, finished or not."""
    path = folder / RECORDS
    if not path.is_file():
        return []
    records: list[Values] = []
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            records.append(json.loads(line, parse_constant=refuse_constant))
        return records
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, or nested without end
        raise DataError(
            f"is not whole (line {len(records) + 1}: {error})",
            where=path,
            fix="run the recipe again with the same --out, records are rebuilt from the stages",
        ) from error


def without_times(record: Values) -> Values:
    """The record without times: equal for all runs of a configuration, resumed or not."""
    return {key: value for key, value in record.items() if key not in CLOCK_FIELDS}
