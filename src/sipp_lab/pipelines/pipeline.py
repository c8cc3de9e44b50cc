"""What a pipeline is: which network a stage starts from, how it is pruned, and when masks change during training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from sipp_lab.runs.context import Network, Prepared, RunContext
from sipp_lab.runs.records import Stage
from sipp_lab.training.loop import MaskChanges


@dataclass(frozen=True)
class Pipeline:
    """A pipeline; `sipp_lab.runs` does the rest (folders, checkpoints, records, several processes, Ray)."""

    description: str
    compared_with: str  # what bounds and certificates compare a pruned network with
    metric: Literal["top1", "delta_top1"]  # of the plot shown first: accuracy, or its change
    # The network that training starts from, out of the parent's (of the initial one if there is no parent).
    prepare: Callable[[RunContext, Stage, Network], Prepared]
    # The stage whose trained network is the parent; None: pruned networks start from the initial one.
    parent: Callable[[Stage], Stage] | None = None
    # The mask changes during a stage's training of n steps; None: the masks of `prepare` stay.
    mask_changes: Callable[[RunContext, Stage, int], MaskChanges] | None = None

    @property
    def has_parent(self) -> bool:
        """Whether pruned networks start from a trained dense one."""
        return self.parent is not None

    def parent_of(self, stage: Stage) -> Stage | None:
        """The stage whose trained network this one is pruned from; None if there is none."""
        return None if self.parent is None or stage.method is None else self.parent(stage)
