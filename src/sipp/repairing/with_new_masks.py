"""A network and its first masks in, one with masks and weights found together out (T21), polished where asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn

from sipp.progress import fit_cost, progress_bar
from sipp.records.network_hash import tensors_of
from sipp.records.numerics import device_of
from sipp.records.options import ChunkBytes, Fitting, Scoring
from sipp.records.pattern import Pattern
from sipp.records.repair import LayerRepair, Polish, Repair
from sipp.repairing.joint import AIMS, BUDGETS, SMALL, Budgets, Joint, joint
from sipp.repairing.layer_by_layer import LEARNING_RATE, Repaired
from sipp.repairing.parts import Parts, judged_error
from sipp.repairing.polishing import polish
from sipp.scoring.sensitivities import chunk_of


def search_network(
    dense: nn.Module,
    masks: Mapping[str, Tensor],
    parts: Parts,
    *,
    way: Literal["joint"] | Fitting = "joint",
    floor: float | None = None,
    pattern: Pattern | None = None,
    a: Sequence[float] = AIMS,
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
    other weights under the masks than the dense one. Unless `fits_all`, the points that choose and judge are not
    fitted. `steps` polish it against the dense outputs; those points are not fitted then either, so that they can stop
    the polish. Where steps lose on them, none is taken.
    """
    given = given if given is not None and _has_own_values(dense, given, masks) else None
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
            given=given,
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
        after = judged_error(dense, found.model, parts)
    if given is not None:  # errors of layers before are those of dense weights, which the network did not have
        found = replace(found, layers=tuple(replace(one, error_before=None) for one in found.layers))
    return Repaired(found.model, dict(found.masks), _record(found, way, polished, after, chosen), parts.keys)


def _has_own_values(dense: nn.Module, given: nn.Module, masks: Mapping[str, Tensor]) -> bool:
    """Whether a network is another one than the dense under these masks: sampled, fitted or trained."""
    theirs = tensors_of(given)
    return not all(
        torch.equal(theirs[name], torch.where(masks[name], value, 0.0) if name in masks else value)
        for name, value in tensors_of(dense).items()
    )


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
