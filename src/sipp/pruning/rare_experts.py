"""Finds experts that saw too few tokens to be judged: they are not pruned."""

from __future__ import annotations

import torch
from torch import Tensor

from sipp.errors import warn_caller
from sipp.inputs.patches import n_patches_of, rows_of
from sipp.inputs.scoring_task import ScoringTask, each_use
from sipp.records.batches import Batch, WeightUse
from sipp.records.ranking import Weight

FEWEST_TOKENS = 32  # an expert that saw fewer is not pruned


def rows_of_rare_experts(task: ScoringTask) -> tuple[Tensor, ...]:
    """For each weight, which rows belong to an expert that saw too few tokens (bool, F); () if there are none.

    Warns with the names of the experts. Costs a pass over the data, for models with experts only.
    """
    routed = {weight.name for layer in task.layers if layer.is_routed for weight in layer.weights.values()}
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
