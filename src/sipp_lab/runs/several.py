"""Runs recipes one after another as a command does: in the processes that were started, or on Ray, with a bar each."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from sipp.progress import progress_bar, write_line
from sipp_lab.parallel.on_ray import LOCAL, RayOptions
from sipp_lab.parallel.processes import join_processes, leave_processes
from sipp_lab.recipes import Recipe
from sipp_lab.runs.one_run import FinishedRun, Progress, run
from sipp_lab.runs.options import RunOptions
from sipp_lab.runs.stages import plan
from sipp_lab.training.setup import device_named

UNITS = 1000  # of progress in a network
RESUME = "what is done is kept: run the same command again to resume"


def run_each(recipes: Sequence[Recipe], how: RunOptions) -> list[FinishedRun] | None:
    """Runs the recipes in order. None in a process that only helps."""
    ray = RayOptions(how.ray_address or LOCAL, how.at_once, tuple(how.code or ())) if how.engine == "ray" else None
    processes = join_processes(cpu=device_named(how.device).type == "cpu")
    if processes.world_size > 1 and processes.is_leader:
        write_line(f"{processes.world_size} processes take part: each trains on its share of every batch")
    elif processes.world_size == 1 and any(name.startswith("ACCELERATE_") for name in os.environ):
        write_line("1 process takes part; several on a CPU: torchrun --nproc-per-node 2 -m sipp run ...")
    done = []
    try:
        for recipe in recipes:
            n_units = UNITS * len(plan(recipe))
            with progress_bar(recipe.name, n_units, shown=processes.is_leader, in_percent=True) as advance:
                done.append(
                    run(
                        recipe, out=how.out, data_root=how.data, device=how.device, on_progress=_moving(advance),
                        accept_changes=how.accept_changes, processes=processes, ray=ray,
                    )
                )  # fmt: skip
    except (KeyboardInterrupt, SystemExit):
        write_line(RESUME)
        raise
    finally:
        leave_processes(processes)
    return done if processes.is_leader else None


def _moving(advance: Callable[[int], None]) -> Callable[[Progress], None]:
    """Advances the bar to where a run is, which says so after each network and now and then in between."""
    at = 0

    def show(progress: Progress) -> None:
        nonlocal at
        share = 0.0 if progress.is_end or not progress.n_epochs else progress.epochs / progress.n_epochs
        now = max(at, int(UNITS * (progress.n_done + share)))
        advance(now - at)
        at = now

    return show
