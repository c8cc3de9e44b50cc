"""Pipelines: the order in which networks are pruned and trained. Each is one file, named as in recipes.

To add a pipeline, add a file that defines `PIPELINE`. The rest of a run (folders, checkpoints, records, several
processes, Ray) is in `sipp_lab.runs.train_networks`. The files import torch only inside functions, because the
report reads their descriptions without it.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

from sipp.results.checking import check_choice
from sipp_lab.runs.plan import Stage

# Types from runs/context.py and training/loop.py, which import torch
RunContext = Any
Network = Any
Prepared = Any
MaskChanges = Any

SHARED = "shared"  # the one file in this folder that is not a pipeline


@dataclass(frozen=True)
class Pipeline:
    """A pipeline: which network a stage starts from, how it is pruned, and when masks change during training."""

    description: str
    compared_with: str  # what bounds and certificates compare a pruned network with
    metric: Literal["top1", "delta_top1"]  # of the plot shown first: accuracy, or its change
    parent: Callable[[Stage], Stage | None]  # the stage whose network is pruned; None: the initial one
    # Prunes the parent's network; called by all processes.
    prepare: Callable[[RunContext, Stage, Network | None], Prepared]
    # The mask changes during a stage's training of n steps; None: the masks of `prepare` stay.
    mask_changes: Callable[[RunContext, Stage, int], MaskChanges] | None = None
    note_on_time: str = ""  # shown with the plot of times

    @property
    def has_parent(self) -> bool:
        """Whether pruned networks start from a trained dense one."""
        return self.parent is not no_parent


def pipeline_names() -> list[str]:
    """The pipelines a recipe may name: the files in this folder, with - for _."""
    files = (module.name for module in pkgutil.iter_modules(__path__))
    return sorted(name.replace("_", "-") for name in files if name != SHARED)


def pipeline_of(name: str) -> Pipeline:
    """The pipeline with this name."""
    check_choice("pipeline", name, pipeline_names())
    pipeline: Pipeline = import_module(f"{__name__}.{name.replace('-', '_')}").PIPELINE
    return pipeline


def parent_of(name: str, stage: Stage) -> Stage | None:
    """The stage whose trained network this one is pruned from, in the named pipeline; None if there is none."""
    return None if stage.method is None else pipeline_of(name).parent(stage)


def no_parent(stage: Stage) -> None:
    """For pipelines in which all networks start from the initial one."""
    return
