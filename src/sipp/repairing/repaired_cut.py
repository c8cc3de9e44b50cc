"""A cut with new values, fitted to the dense network: by the method itself, by a refit, or by a joint search (T21)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sipp.pruning.cutting import Cut, cut_as_given, put_back, spared_by_name
from sipp.records.options import ChunkBytes, Fitting, Repairing
from sipp.records.pruned import Repaired
from sipp.records.ranking import Ranking
from sipp.records.repair import Repair
from sipp.repairing.data_split import DataSplit
from sipp.repairing.refit_network import refit_network
from sipp.repairing.search_masks_and_weights import has_own_values, search_masks_and_weights


def repaired_cut(
    ranking: Ranking,
    found: Cut,
    split: DataSplit,
    way: Repairing | Fitting,
    *,
    blocks: str | None = None,
    chunk_bytes: ChunkBytes = "auto",
    like: Repair | None = None,
    fits_all: bool = True,
    progress: bool = False,
) -> tuple[Cut, Repaired]:
    """The same number of weights with values fitted to the dense network, and what the repair did.

    By "refit" under the same masks; otherwise mask and values are found together (T21), with the choices of an earlier
    repair where one is given in `like`; or as others find them. Without `fits_all` some points are not fitted, and
    can judge what comes after.
    """
    dense, seed = ranking.model, found.seed
    run: dict[str, Any] = {"seed": seed, "blocks": blocks, "chunk_bytes": chunk_bytes, "progress": progress}
    if way == "refit":
        fixed = refit_network(dense, found.model, found.masks, split, **run)
    else:
        known: dict[str, Any] = {"way": "joint" if isinstance(way, bool) else way}
        known |= {} if like is None else {"error_feedback": (like.error_feedback,), "budgets": (like.budgets,)}
        known |= {"floor": ranking.floor, "pattern": ranking.pattern, "fits_all": fits_all}
        spared = spared_by_name(ranking, found.masks)
        masks = {name: mask & ~spared[name] if name in spared else mask for name, mask in found.masks.items()}
        is_plain = found.model is dense or not has_own_values(dense, found.model, found.masks)
        before = None if is_plain else found.model
        fixed = search_masks_and_weights(dense, masks, split, given=before, **known, **run)
        fixed = replace(fixed, masks=put_back(fixed.model, dense, fixed.masks, spared))
    given = cut_as_given(ranking, fixed.model, fixed.masks, seed=seed)
    return replace(given, budget=found.budget, choice=found.choice), fixed
