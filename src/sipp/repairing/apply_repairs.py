"""Gives the kept weights of a cut new values: first by the method's own fit, then by the repair."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor, nn

from sipp.pruning.spared_rows import restore_spared, spared_by_name
from sipp.records.options import RepairMethod
from sipp.records.pruned import Repaired
from sipp.records.ranking import Ranking
from sipp.repairing.data_split import DataSplit
from sipp.repairing.repair_network import own_weights, repair_network
from sipp.repairing.repair_options import RepairOptions


def apply_repairs(
    ranking: Ranking,
    masks: Mapping[str, Tensor],
    split: DataSplit,
    repairs: Sequence[RepairMethod],
    options: RepairOptions,
    *,
    start: nn.Module | None = None,
) -> Repaired:
    """Runs the repairs one after the other (see `repairs_of`) and returns the result of the last one.

    It keeps as many weights as `masks` do. `start` is the pruned network; None means the dense weights under the
    masks. Method, floor and pattern of `options` are set here. Only the last repair may fit the test points too.
    """
    dense, model, masks = ranking.model, start, dict(masks)
    for i, method in enumerate(repairs):
        is_last = i == len(repairs) - 1
        chosen = replace(
            options,
            method=method,
            floor=ranking.floor,
            pattern=ranking.pattern,
            fits_all=options.fits_all and is_last,
        )
        spared = spared_by_name(ranking, masks)
        own = None if model is None else own_weights(dense, model, masks)
        fitted = {name: mask & ~spared[name] if name in spared else mask for name, mask in masks.items()}
        repaired = repair_network(dense, fitted, split, chosen, own)
        model, masks = repaired.model, restore_spared(repaired.model, dense, repaired.masks, spared)
    return replace(repaired, masks=masks)
