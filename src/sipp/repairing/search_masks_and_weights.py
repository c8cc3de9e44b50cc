"""Finds masks and weights together, from first masks (T21), and polishes the network where asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn

from sipp.progress import fit_cost, progress_bar
from sipp.records.network_hash import tensors_of
from sipp.records.numerics import device_of
from sipp.records.options import ChunkBytes, Fitting, Pattern, Scoring
from sipp.records.pruned import Repaired
from sipp.repairing.data_split import DataSplit, held_out_error
from sipp.repairing.joint import BUDGETS, ERROR_FEEDBACKS, SMALL, Budgets, joint
from sipp.repairing.polishing import LEARNING_RATE, polish
from sipp.scoring.sensitivities import chunk_of


def search_masks_and_weights(
    dense: nn.Module,
    masks: Mapping[str, Tensor],
    split: DataSplit,
    *,
    way: Literal["joint"] | Fitting = "joint",
    floor: float | None = None,
    pattern: Pattern | None = None,
    error_feedback: Sequence[float] = ERROR_FEEDBACKS,
    budgets: Sequence[Budgets] = BUDGETS,
    given: nn.Module | None = None,
    fits_all: bool = True,
    steps: int = 0,
    learning_rate: float = LEARNING_RATE,
    seed: int = 0,
    blocks: str | None = None,
    chunk_bytes: ChunkBytes = "auto",
    progress: bool = False,
) -> Repaired:
    """A copy of the dense network with as many weights as the masks keep: which, and their values, found together.

    `way` is our search, or one of others by its definition. Ours is compared with the `given` network, where that has
    other weights under the masks than the dense one. Unless `fits_all`, validation and test points are not fitted.
    `steps` polish it against the dense outputs; those points are not fitted then either, so that they can stop the
    polish. Where steps lose on them, none is taken.
    """
    given = given if given is not None and has_own_values(dense, given, masks) else None
    n_bytes = chunk_of(Scoring(chunk_bytes=chunk_bytes).chunk_bytes, device_of(dense))
    # a large network is not fitted twice: the tenth of the points that choose and judge would add next to nothing
    fits_all = fits_all and not steps and sum(mask.numel() for mask in masks.values()) <= SMALL
    n_fits = 2 if fits_all else 1
    cost = sum(fit_cost(mask.shape) for mask in masks.values())
    with progress_bar("finding masks and weights", n_fits * cost, shown=progress, in_percent=True) as advance:
        found = joint(
            dense,
            masks,
            split,
            way=way,
            error_feedback=error_feedback,
            budgets=budgets,
            floor=floor,
            pattern=pattern,
            given=given,
            fits_all=fits_all,
            blocks=blocks,
            chunk_bytes=n_bytes,
            advance=advance,
        )
    record = found.record
    if steps and not record.undone:
        polished, chosen = polish(
            dense,
            found.model,
            found.masks,
            split,
            steps=steps,
            learning_rate=learning_rate,
            seed=seed,
            progress=progress,
        )
        after = held_out_error(dense, found.model, split)
        record = replace(record, polish=polished, output_after=after, output_chosen=chosen)
    if given is not None:  # errors of layers before are those of dense weights, which the network did not have
        record = replace(record, layers=tuple(replace(one, error_before=None) for one in record.layers))
    return Repaired(found.model, found.masks, record, split.keys)


def has_own_values(dense: nn.Module, given: nn.Module, masks: Mapping[str, Tensor]) -> bool:
    """Whether a network is another one than the dense under these masks: sampled, fitted or trained."""
    theirs = tensors_of(given)
    return not all(
        torch.equal(theirs[name], torch.where(masks[name], value, 0.0) if name in masks else value)
        for name, value in tensors_of(dense).items()
    )
