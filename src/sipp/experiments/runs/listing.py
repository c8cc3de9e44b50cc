"""Run folders in, how far each run is out, as `sipp runs` lists them. Needs no torch, and reads no network."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sipp.experiments.runs import store
from sipp.experiments.runs.plan import Stage, stages_of
from sipp.storage import files
from sipp.storage.run_schemas import Manifest, PlanConfig, checked

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


def list_runs(out: Path) -> list[Listed]:
    """Every run below `out`, by name."""
    return [how_far(manifest.parent) for manifest in sorted(out.glob(f"*/{store.MANIFEST}"))]


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
    return manifest, stages_of(seeds, config.prune.methods, config.prune.levels)
