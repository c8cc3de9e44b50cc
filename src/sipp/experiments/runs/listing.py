"""Run folders in, how far each run is out, as `sipp runs` lists them. Needs no torch, and reads no network."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sipp.errors import SippError
from sipp.experiments.runs import store
from sipp.experiments.runs.plan import Stage, stages_of
from sipp.records.schemas import Manifest, PlanConfig, checked
from sipp.storage import files

RunState = Literal["running", "finished", "stopped"]


@dataclass(frozen=True)
class Listed:
    """One run folder, as `sipp runs` shows it."""

    folder: Path
    recipe: str
    pipeline: str
    n_done: int
    n_stages: int
    state: RunState
    n_origins: int  # above 1: it was resumed with other data, code or device


@dataclass(frozen=True)
class Unread:
    """A run folder that cannot be read: the others are listed all the same."""

    folder: Path
    what: str
    fix: str  # empty: what went wrong says nothing of it


def list_runs(out: Path) -> list[Listed | Unread]:
    """Every run below `out`, by name; one that cannot be read does not hide the others."""
    found: list[Listed | Unread] = []
    for folder in sorted(one for one in out.iterdir() if one.is_dir()) if out.is_dir() else ():
        try:
            if (folder / store.MANIFEST).exists():
                found.append(how_far(folder))
        except SippError as error:
            found.append(Unread(folder, error.fault, error.fix))
        except OSError as error:
            found.append(Unread(folder, f"{error.filename or folder}: {error.strerror or error}", "allow reading it"))
    return found


def how_far(folder: Path) -> Listed:
    """How far the run in this folder is."""
    manifest, stages = planned(folder)
    n_done = len(store.read_records(folder))
    state: RunState = "running" if store.is_locked(folder) else "finished" if n_done == len(stages) else "stopped"
    config = manifest.config
    return Listed(folder, config["name"], config["pipeline"], n_done, len(stages), state, len(manifest.origins))


def planned(folder: Path) -> tuple[Manifest, list[Stage]]:
    """The manifest of a run, and its plan."""
    manifest = store.read_manifest(folder)
    config = checked(PlanConfig, manifest.config, files.inside(folder, store.MANIFEST))
    seeds = range(config.seed, config.seed + config.repetitions)
    return manifest, stages_of(seeds, config.prune.methods, config.prune.n_levels)
