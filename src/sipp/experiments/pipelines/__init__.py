"""Pipelines: in which order networks are pruned and trained. One file each; the name of the file is that in a recipe.

A new pipeline is one new file in this folder with a `PIPELINE` in it. Everything else of a run (folders, checkpoints,
records, several processes, Ray) is the same for all, and in `sipp.experiments.runs.train_networks`. The files import
torch only where they prune: the page reads their words without it.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

from sipp.experiments.runs.plan import Stage
from sipp.records.checking import check_choice

# Records that hold tensors, of runs/context.py and training/loop.py: by their names only, without torch
RunContext = Any
Network = Any
Prepared = Any
MaskChanges = Any

SHARED = "shared"  # the one file in this folder that is no pipeline


@dataclass(frozen=True)
class Pipeline:
    """What a pipeline decides: from which network a stage starts, how it is pruned, when masks change in training."""

    description: str
    compared_with: str  # what bounds and certificates compare a pruned network with
    metric: Literal["top1", "delta_top1"]  # of the plot that is shown first: the accuracy, or its change by pruning
    parent: Callable[[Stage], Stage | None]  # whose trained network a pruned stage starts from; None: the initial one
    # The network that a pruned stage trains, from its parent's; called by all processes.
    prepare: Callable[[RunContext, Stage, Network | None], Prepared]
    # Which masks change during a stage's training of so many steps; None: those of `prepare` stay.
    mask_changes: Callable[[RunContext, Stage, int], MaskChanges] | None = None
    note_on_time: str = ""  # what a reader of the plot of times should know

    @property
    def has_parent(self) -> bool:
        """Whether pruned networks start from a trained dense one."""
        return self.parent is not no_parent


def pipeline_names() -> list[str]:
    """The names a recipe may give: those of the files in this folder, with - for _."""
    files = (module.name for module in pkgutil.iter_modules(__path__))
    return sorted(name.replace("_", "-") for name in files if name != SHARED)


def pipeline_of(name: str) -> Pipeline:
    """The pipeline of this name."""
    check_choice("pipeline", name, pipeline_names())
    pipeline: Pipeline = import_module(f"{__name__}.{name.replace('-', '_')}").PIPELINE
    return pipeline


def parent_of(name: str, stage: Stage) -> Stage | None:
    """The stage whose trained network this one is pruned from in the pipeline of this name; None: it needs no other."""
    return None if stage.method is None else pipeline_of(name).parent(stage)


def no_parent(stage: Stage) -> None:
    """The parent in a pipeline whose networks all start from the initial one."""
    return
