"""A network and its first masks in, one with masks and weights found together out (T21), polished where asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from torch import Tensor, nn

from sipp.progress import fit_cost, progress_bar
from sipp.records.numerics import device_of
from sipp.records.options import ChunkBytes, Fitting, Pattern, Scoring
from sipp.records.repair import LayerRepair, Polish, Repair
from sipp.repairing.data_split import DataSplit, test_error
from sipp.repairing.joint import BUDGETS, ERROR_FEEDBACKS, SMALL, Budgets, Joint, joint
from sipp.repairing.polishing import polish
from sipp.repairing.refit_network import LEARNING_RATE, Repaired
from sipp.scoring.sensitivities import chunk_of


def search_masks_and_weights(
    dense: nn.Module,
    masks: Mapping[str, Tensor],
    parts: DataSplit,
    *,
    way: Literal["joint"] | Fitting = "joint",
    floor: float | None = None,
    pattern: Pattern | None = None,
    a: Sequence[float] = ERROR_FEEDBACKS,
    budgets: Sequence[Budgets] = BUDGETS,
    fits_all: bool = True,
    steps: int = 0,
    learning_rate: float = LEARNING_RATE,
    seed: int = 0,
    blocks: str | None = None,
    chunk_bytes: ChunkBytes = "auto",
    progress: bool = False,
) -> Repaired:
    """A copy of the dense network with as many weights as the masks keep: which, and their values, found together.

    `way` is our search, or one of others by its definition.
    Unless `fits_all`, the points that choose and judge are not fitted. `steps` polish it against the dense outputs;
    those points are not fitted then either, so that they can stop the polish. Where steps lose on them, none is taken.
    """
    n_bytes = chunk_of(Scoring(chunk_bytes=chunk_bytes).chunk_bytes, device_of(dense))
    # a large network is not fitted twice: the tenth of the points that choose and judge would add next to nothing
    fits_all = fits_all and not steps and sum(mask.numel() for mask in masks.values()) <= SMALL
    n_fits = 2 if fits_all else 1
    cost = sum(fit_cost(mask.shape) for mask in masks.values())
    with progress_bar("finding masks and weights", n_fits * cost, shown=progress, in_percent=True) as advance:
        found = joint(
            dense,
            masks,
            parts,
            way=way,
            a=a,
            budgets=budgets,
            floor=floor,
            pattern=pattern,
            fits_all=fits_all,
            blocks=blocks,
            chunk_bytes=n_bytes,
            advance=advance,
        )
    polished, after, chosen = None, found.output_after, found.output_chosen
    if steps and not found.undone:
        with progress_bar("polishing", steps, shown=progress) as advance:
            polished, chosen = polish(
                dense,
                found.model,
                found.masks,
                parts.fitted,
                parts.aside,
                steps=steps,
                learning_rate=learning_rate,
                seed=seed,
                advance=advance,
            )
        after = test_error(dense, found.model, parts)
    return Repaired(found.model, dict(found.masks), _record(found, way, polished, after, chosen), parts.keys)


def _record(
    found: Joint, way: Literal["joint"] | Fitting, polished: Polish | None, after: float | None, chosen: float | None
) -> Repair:
    layers = tuple(
        LayerRepair(one.name, one.error_before, one.error, one.ridge, one.intercept, one.why, n_moved=one.moved)
        for one in found.layers
    )
    return Repair(
        layers=layers,
        n_points=found.n_points,
        n_aside=found.n_aside,
        n_judged=found.n_judged,
        output_before=found.output_before,
        output_refit=found.output_after,
        output_after=after,
        output_chosen=chosen,
        polish=polished,
        undone=found.undone,
        way=way,
        a=found.a,
        budgets=found.budgets,
        n_judged_fit=found.n_judged_fit,
    )
