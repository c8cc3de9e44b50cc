"""Experts that saw too few tokens to be judged: a task in, the rows that are to stay as they are out."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from sipp.inputs.layers import PrunableLayer
from sipp.inputs.scoring_task import ScoringTask, each_use
from sipp.records.batches import Batch, WeightUse
from sipp.records.ranking import Weight

FEWEST_TOKENS = 32  # below that, what an expert does is not known
IN_NAME = "experts"  # part of the name of a module that only some tokens reach


def rows_of_few_tokens(task: ScoringTask) -> tuple[Tensor, ...]:
    """Of each weight, which rows belong to an expert that saw too few tokens (bool, F); () where there are none.

    A warning names the experts. One more pass over the data, for models with experts only.
    """
    routed = {weight.name for layer in task.layers if _is_routed(layer) for weight in layer.weights.values()}
    if not routed or task.data is None or not task.data.can_be_read_again:
        return ()
    counts = {weight.name: torch.zeros(weight.n_rows, dtype=torch.int64, device="cpu") for weight in task.weights}

    def on_use(weight: Weight, use: WeightUse, batch: Batch) -> None:
        if weight.name in routed:
            n_patches = use.windows.shape[: 2 + use.n_position_dims].numel() // use.windows.shape[1]
            stop = weight.n_rows if use.n_rows is None else use.row_start + use.n_rows
            counts[weight.name][use.row_start : stop] += n_patches

    each_use(task, on_use)
    spared = [(counts[one.name] < FEWEST_TOKENS) & (one.name in routed) for one in task.weights]
    names = [_words(task, one, counts[one.name]) for one, rows_F in zip(task.weights, spared) if bool(rows_F.any())]
    if not names:
        return ()
    some = "; ".join(names[:8]) + ("; ..." if len(names) > 8 else "")
    warnings.warn(
        f"experts that saw fewer than {FEWEST_TOKENS} tokens are left as they are: {some}; give more data", stacklevel=3
    )
    return tuple(spared)


def _is_routed(layer: PrunableLayer) -> bool:
    return IN_NAME in layer.module_name.split(".") or layer.known_as == IN_NAME


def _words(task: ScoringTask, weight: Weight, counts_F: Tensor) -> str:
    """The weight, and where it holds several experts which of them."""
    shape = task.model.get_parameter(weight.name).shape
    if len(shape) != 3:
        return weight.name
    few = (counts_F.reshape(shape[0], -1)[:, 0] < FEWEST_TOKENS).nonzero().flatten().tolist()
    return f"{weight.name} (expert {', '.join(map(str, few))})"
