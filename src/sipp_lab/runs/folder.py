"""The folder of a run: named by the hash of its configuration, locked while in use, and read by the page.

OUT/RECIPE-HASH/
    manifest.json    the configuration, and the data, code and device of its results
    lock             held by the process that works here
    records.jsonl    one line per finished network, in the order of the plan
    STAGE/           checkpoint.pt during training; final.safetensors, with the record, when done
"""

from __future__ import annotations

import fcntl
import functools
import io
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

import sipp
from sipp.errors import DataError, OptionError, SippError
from sipp.files import TEMPORARY, make_folder, read_file, sha256_of, write_atomic
from sipp.results import Sheet, Table, from_json, to_json, words
from sipp_lab.runs.records import Manifest, NetworkRecord, Origin, Stage

HASH_LENGTH = 12
MANIFEST = "manifest.json"
LOCK = "lock"
RECORDS = "records.jsonl"
FINAL = "final.safetensors"
CHECKPOINT = "checkpoint.pt"
DIGEST_BYTES = 64  # at the start of a checkpoint
REMOVE = "remove it; the same command makes it again, and what was pruned from it"
KEY = "values"  # of the JSON text in the metadata of a state

Values = dict[str, Any]


@functools.cache  # the loaded code does not change
def code_version() -> str:
    """The versions of the package and of torch, and a digest of the source of the library and the laboratory."""
    roots = (Path(sipp.__file__).parent, Path(__file__).parents[1])
    sources = (
        f"{path.relative_to(root.parent)}\0".encode() + path.read_bytes()
        for root in roots
        for path in sorted(root.rglob("*.py"))
    )
    digest = sha256_of(*sources)
    return f"sipp {sipp.__version__}, torch {version('torch')}, source {digest[:HASH_LENGTH]}"


def run_name(config: Mapping[str, Any]) -> str:
    """The name of a run's folder: of its recipe, and a hash of the configuration, whatever the order of keys."""
    digest = sha256_of(json.dumps(config, sort_keys=True, allow_nan=False).encode())
    return f"{config['name']}-{digest[:HASH_LENGTH]}"


# --- working in it ----------------------------------------------------------------------------------------------------


@contextmanager
def open_run(root: Path, config: Values, origin: Origin, *, accept_changes: bool = False) -> Iterator[Path]:
    """Creates or opens the folder of this configuration and locks it; OptionError if it is in use.

    Also refuses a folder with results of other data, code or device, unless `accept_changes`: then the manifest lists
    all origins.
    """
    folder = root / run_name(config)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / LOCK).touch()
    except OSError as error:
        raise DataError(
            f"cannot be written ({error.strerror or error})", where=folder, fix="give another --out"
        ) from error
    with open(folder / LOCK, "r+", encoding="utf-8") as file:  # the lock is released even if the process dies
        if not _lock(file, shared=False):
            raise OptionError(
                f"{folder} is in use by process {file.read(64).strip() or 'unknown'}",
                fix="wait for it, stop it, or choose another folder with --out",
            )
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        for left in folder.rglob(f"{TEMPORARY}*"):  # by killed writers
            left.unlink(missing_ok=True)
        for final in folder.glob(f"*/{FINAL}"):
            (final.parent / CHECKPOINT).unlink(missing_ok=True)
        _write_manifest(folder, config, origin, accept_changes=accept_changes)
        yield folder
        file.truncate(0)


def _lock(file: IO[str], *, shared: bool) -> bool:
    """Tries to take the lock."""
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        return True
    except OSError:
        return False


def is_locked(folder: Path) -> bool:
    """Whether a process is using this run folder."""
    try:
        with open(folder / LOCK, encoding="utf-8") as file:
            return not _lock(file, shared=True)
    except FileNotFoundError:
        return False


def _write_manifest(folder: Path, config: Values, origin: Origin, *, accept_changes: bool) -> None:
    """Writes the manifest of a new run; refuses one that has results of something else."""
    origins: tuple[Origin, ...] = ()
    if (folder / MANIFEST).exists() and any(folder.glob("*/*")):
        origins = read_manifest(folder).origins
        last, current = to_json(origins[-1]), to_json(origin)
        changed = [f"{key} (was: {last[key]}; now: {current[key]})" for key in current if last[key] != current[key]]
        if not changed:
            return
        if not accept_changes:
            raise OptionError(
                f"{folder} was started with different {', '.join(changed)}: its numbers would mix both",
                fix="give --accept-changes to resume anyway (this is recorded), or choose another --out",
            )
    values = to_json(Manifest(config, (*origins, origin)))
    write_atomic(folder / MANIFEST, json.dumps(values, sort_keys=True, allow_nan=False, indent=1).encode())


# --- what is in it ----------------------------------------------------------------------------------------------------


def save_state(path: Path, tensors: Mapping[str, Tensor], values: Values) -> None:
    """Saves tensors, and values that JSON can hold, as one safetensors file."""
    own = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    make_folder(path.parent)
    write_atomic(path, save(own, {KEY: json.dumps(values, allow_nan=False)}))


def load_state(path: Path) -> tuple[dict[str, Tensor], Values]:
    """The tensors (on the CPU) and values of `save_state`."""
    with _opened(path) as file:
        return {name: file.get_tensor(name) for name in file.keys()}, json.loads(file.metadata()[KEY])  # noqa: SIM118


def load_values(path: Path) -> Values:
    """The values of `save_state`, without its tensors."""
    with _opened(path) as file:
        return dict(json.loads(file.metadata()[KEY]))


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"is damaged, or was not written by sipp ({error})", where=path, fix=REMOVE) from error


def save_checkpoint(path: Path, values: Values) -> None:
    """Saves tensors and plain values, however nested, behind their SHA-256."""
    content = io.BytesIO()
    torch.save(values, content)
    make_folder(path.parent)
    write_atomic(path, sha256_of(content.getbuffer()).encode() + content.getvalue())


def load_checkpoint(path: Path) -> Values:
    """The tensors (on the CPU) and values of `save_checkpoint`."""
    data = read_file(path)
    digest, content = data[:DIGEST_BYTES], data[DIGEST_BYTES:]
    if sha256_of(content).encode() != digest:
        raise DataError("is damaged, or was not written by sipp", where=path, fix=REMOVE)
    return dict(torch.load(io.BytesIO(content), map_location="cpu", weights_only=True))


def is_done(folder: Path, stage_name: str) -> bool:
    """Whether the network of a stage is trained and recorded."""
    return (folder / stage_name / FINAL).is_file()


def records_of(folder: Path, stages: Sequence[Stage]) -> list[Values]:
    """The records of those stages that are done."""
    return [load_values(folder / one.name / FINAL)["record"] for one in stages if is_done(folder, one.name)]


def write_records(folder: Path, stages: Sequence[Stage]) -> None:
    """Rewrites `records.jsonl` from the networks that are done, if it changes."""
    text = "".join(json.dumps(record, allow_nan=False) + "\n" for record in records_of(folder, stages)).encode()
    path = folder / RECORDS
    if not path.is_file() or path.read_bytes() != text:
        write_atomic(path, text)


def read_records(folder: Path) -> list[Values]:
    """The records of a run, finished or not."""
    path, fix = folder / RECORDS, "run the recipe again with the same --out: records are rebuilt from the networks"
    lines = read_file(path).splitlines() if path.is_file() else []
    return [_json_of(line, path, fix) for line in lines]


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a run."""
    path = folder / MANIFEST
    manifest: Manifest = from_json(Manifest, _json_of(read_file(path), path), path)
    return manifest


def _json_of(text: bytes, path: Path, fix: str = "") -> Any:
    """The JSON values in a part of a file."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise DataError(f"is not valid JSON ({error})", where=path, fix=fix) from error


# --- reading ----------------------------------------------------------------------------------------------------------

HOW_TO_REPAIR = "put back an intact copy of that file, or move its folder away and create it again"


@dataclass(frozen=True)
class Run:
    """A run folder, finished or not: its configuration, where it was computed, and the records of its networks."""

    name: str
    config: Mapping[str, Any]
    origins: tuple[Origin, ...]
    records: tuple[NetworkRecord, ...]
    n_stages: int

    @property
    def finished(self) -> bool:
        return len(self.records) >= self.n_stages

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader should know."""
        is_ours = f"{self.origins[-1].code}, ".startswith(f"{code_version()}, ")  # the user's own code follows
        return () if is_ours else ("These results were produced by a different version of the code.",)


def read_run(folder: Path) -> Run:
    """Reads a run folder, finished or not."""
    manifest, lines = read_manifest(folder), enumerate(read_records(folder), start=1)
    records = tuple(from_json(NetworkRecord, record, f"{folder / RECORDS} line {number}") for number, record in lines)
    config, prune = manifest.config, manifest.config["prune"]
    n_levels = prune["levels"] if prune.get("keeps") is None else len(prune["keeps"])
    n_stages = config["repetitions"] * (1 + len(prune["methods"]) * n_levels)
    return Run(folder.resolve().name, config, manifest.origins, records, n_stages)


@dataclass(frozen=True)
class RunStatus:
    """The progress of a run; what is wrong with its folder if it cannot be read."""

    folder: Path
    pipeline: str = ""
    n_done: int = 0
    n_stages: int = 0
    state: Literal["running", "finished", "stopped", "broken"] = "broken"
    n_origins: int = 1  # more than 1: resumed with different data, code or device
    what: str = ""
    fix: str = ""


def list_runs(out: Path) -> list[RunStatus]:
    """Every run in `out`, by name, including those that cannot be read."""
    return [_status(folder) for folder in sorted(path.parent for path in out.glob(f"*/{MANIFEST}"))]


def _status(folder: Path) -> RunStatus:
    try:
        run = read_run(folder)
    except SippError as error:
        return RunStatus(folder, what=error.fault, fix=error.fix or HOW_TO_REPAIR)
    state: Any = "running" if is_locked(folder) else "finished" if run.finished else "stopped"
    return RunStatus(folder, str(run.config["pipeline"]), len(run.records), run.n_stages, state, len(run.origins))


def runs_sheet(runs: Sequence[RunStatus]) -> Sheet:
    """How far each run has got; broken ones with what to do."""
    rows = []
    for run in runs:
        note = "" if run.n_origins == 1 else f", {run.n_origins} origins (resumed with changes)"
        counts = "" if run.state == "broken" else f"{run.n_done} of {run.n_stages}"
        rows.append((run.folder.name, run.pipeline, counts, run.state + note))
    broken = " ".join(f"broken: {run.what}; {run.fix}." for run in runs if run.state == "broken")
    table = Table(("run", "pipeline", "networks", "state"), tuple(rows), texts=("pipeline", "state"))
    return Sheet(words.counted(len(runs), "run"), tables=(table,) if rows else (), note=broken)
