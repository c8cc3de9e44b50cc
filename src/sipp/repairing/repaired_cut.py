"""A cut with new values, fitted to the dense network: by the method itself, then by the repair that was asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sipp.pruning.cutting import Cut, cut_as_given, put_back, spared_by_name
from sipp.records.numerics import device_of
from sipp.records.options import ChunkBytes, Fitting, Repairing
from sipp.records.pruned import Repaired
from sipp.records.ranking import Ranking
from sipp.records.repair import Repair
from sipp.repairing.data_split import DataSplit
from sipp.repairing.repair_network import own_weights, repair_network
from sipp.repairing.repair_options import BUDGETS, RepairMethod, RepairOptions
from sipp.scoring.sensitivities import chunk_of


def repaired_cut(
    ranking: Ranking,
    cut: Cut,
    split: DataSplit,
    repairs: Sequence[Repairing | Fitting],
    *,
    blocks: str | None = None,
    chunk_bytes: ChunkBytes = "auto",
    like: Repair | None = None,
    fits_all: bool = True,
    progress: bool = False,
) -> tuple[Cut, Repaired]:
    """The same number of weights with values fitted to the dense network, and what the last repair did.

    The repairs follow each other (see `ways_of`), and all but the last leave the points that judge unfitted; without
    `fits_all`, so does the last. The choices of an earlier repair are taken where one is given in `like`.
    """
    dense = ranking.model
    chosen = RepairOptions(
        floor=ranking.floor,
        pattern=ranking.pattern,
        blocks=blocks,
        seed=cut.seed,
        chunk_bytes=chunk_of(chunk_bytes, device_of(dense)),
        progress=progress,
    )
    if like is not None and like.error_feedback is not None:
        chosen = replace(
            chosen,
            error_feedbacks=(like.error_feedback,),
            budgets=tuple(kind for kind in BUDGETS if kind == like.budgets),
        )
    for i, repair in enumerate(repairs):
        method: RepairMethod = "joint" if isinstance(repair, bool) else repair
        options = replace(chosen, method=method, fits_all=fits_all and i == len(repairs) - 1)
        spared, pruned = spared_by_name(ranking, cut.masks), own_weights(dense, cut.model, cut.masks)
        masks = {name: mask & ~spared[name] if name in spared else mask for name, mask in cut.masks.items()}
        repaired = repair_network(dense, masks, split, options, pruned)
        masks = put_back(repaired.model, dense, repaired.masks, spared)
        fixed = Repaired(repaired.model, masks, repaired.record, split.keys)
        cut = replace(cut_as_given(ranking, repaired.model, masks, seed=cut.seed), budget=cut.budget, choice=cut.choice)
    return cut, fixed
