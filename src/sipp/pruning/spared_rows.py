"""Spared rows: experts that saw too few tokens to be judged are not pruned, and do not count towards the budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from sipp.errors import warn_caller
from sipp.inputs import Batch, Weight, WeightUse, from_rows, n_patches_of, rows_of
from sipp.pruning.ranked import Ranking
from sipp.pruning.sparse_rows import WHOLE, SparseRows, with_restored
from sipp.scoring import ScoringTask, each_use

FEWEST_TOKENS = 32  # an expert that saw fewer is not pruned


def rows_of_rare_experts(task: ScoringTask) -> tuple[Tensor, ...]:
    """For each weight, which rows belong to an expert that saw too few tokens (bool, F); () if there are none.

    Warns with the names of the experts. Costs a pass over the data, for models with experts only.
    """
    routed = {weight.name for layer in task.layers if layer.is_expert for weight in layer.weights.values()}
    if not routed or task.data is None or not task.data.can_be_read_again:
        return ()
    counts = {weight.name: torch.zeros(weight.n_rows, dtype=torch.int64, device="cpu") for weight in task.weights}

    def on_use(weight: Weight, use: WeightUse, batch: Batch) -> None:
        if weight.name in routed:
            counts[weight.name][rows_of(use, weight)] += n_patches_of(use)

    each_use(task, on_use)
    spared = [(counts[weight.name] < FEWEST_TOKENS) & (weight.name in routed) for weight in task.weights]
    few = (weight for weight, rows_F in zip(task.weights, spared) if bool(rows_F.any()))
    names = [_expert_names(task, weight, counts[weight.name]) for weight in few]
    if not names:
        return ()
    some = "; ".join(names[:8]) + ("; ..." if len(names) > 8 else "")
    warn_caller(f"experts that saw fewer than {FEWEST_TOKENS} tokens are left as they are: {some}; give more data")
    return tuple(spared)


def _expert_names(task: ScoringTask, weight: Weight, counts_F: Tensor) -> str:
    """The name of the weight, with the numbers of the experts if it holds several."""
    shape = task.model.get_parameter(weight.name).shape
    if len(shape) != 3:
        return weight.name
    few = (counts_F.reshape(shape[0], -1)[:, 0] < FEWEST_TOKENS).nonzero().flatten().tolist()
    return f"{weight.name} (expert {', '.join(map(str, few))})"


def with_spared(spared: Sequence[Tensor], dense: Sequence[Tensor], rows: Sequence[SparseRows]) -> list[SparseRows]:
    """The rows of all layers with spared ones as they were in the dense network."""
    whole = []
    for cut_rows, spared_F, dense_FK in zip(rows, spared, dense):
        restored = with_restored(cut_rows, spared_F[:, None].expand_as(dense_FK), dense_FK)
        whole.append(
            replace(
                restored,
                eps_F=restored.eps_F.masked_fill(spared_F, 0.0),
                strategy_FS=restored.strategy_FS.masked_fill(spared_F[:, None], WHOLE),
                n_draws_FS=restored.n_draws_FS.masked_fill(spared_F[:, None], 0.0),
            )
        )
    return whole


def spared_by_name(ranking: Ranking, masks: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """{parameter name: bool tensor, True = spared}, only for parameters with spared weights."""
    spared = {}
    for weight, spared_F in zip(ranking.weights, ranking.spared):
        if bool(spared_F.any()):
            mask = masks[weight.name]
            spared_FK = spared_F[:, None].expand(weight.n_rows, weight.fan_in)
            spared[weight.name] = from_rows(weight, spared_FK, mask).to(mask.device)
    return spared


def restore_spared(
    model: nn.Module, dense: nn.Module, masks: Mapping[str, Tensor], spared: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Restores the dense values of spared weights in the model; returns the masks with these weights added."""
    with torch.no_grad():
        for name, spared_mask in spared.items():
            parameter = model.get_parameter(name)
            parameter.copy_(torch.where(spared_mask, dense.get_parameter(name), parameter))
    return {name: mask | spared[name] if name in spared else mask for name, mask in masks.items()}
