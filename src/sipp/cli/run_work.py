"""Runs the recipes of `sipp run` and `sipp study`: in this process, in several, or on Ray."""

from __future__ import annotations

import os
from collections.abc import Sequence

from rich.console import Console

from sipp.cli.options import RunOptions
from sipp.cli.run_display import show_progress
from sipp_lab.parallel.on_ray import LOCAL, RayOptions
from sipp_lab.parallel.processes import ALONE, join_processes, leave_processes
from sipp_lab.recipes import Recipe
from sipp_lab.runs.run_recipe import FinishedRun
from sipp_lab.runs.run_recipe import run as run_recipe

PROCESSES = "WORLD_SIZE"  # set by accelerate launch and torchrun


def run_recipes(recipes: Sequence[Recipe], how: RunOptions) -> list[FinishedRun] | None:
    """Runs the recipes in order: later ones reuse networks of earlier ones. None in a process that only helps."""
    processes = join_processes(cpu=how.device == "cpu") if int(os.environ.get(PROCESSES, "1")) > 1 else ALONE
    ray = RayOptions(how.ray_address or LOCAL, how.at_once) if how.ray_address or how.at_once else None
    try:
        with show_progress(Console(quiet=not processes.is_leader)) as on_progress:
            done = [
                run_recipe(
                    recipe,
                    out=how.out,
                    data_root=how.data,
                    device=how.device,
                    n_workers=how.workers,
                    accept_changes=how.accept_changes,
                    on_progress=on_progress,
                    processes=processes,
                    engine=how.engine,
                    ray=ray,
                    code_files=tuple(how.code or ()),
                )
                for recipe in recipes
            ]
    finally:
        leave_processes(processes)
    return done if processes.is_leader else None
