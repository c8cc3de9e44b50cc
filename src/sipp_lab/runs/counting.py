"""Counts the multiply-adds of a pruned network, which depend on which layers lost weights, not only on how many."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from sipp_lab.training.loop import in_eval_mode


def multiply_adds(model: nn.Module, one_input: Tensor) -> int | None:
    """The multiply-adds of one input with the non-zero weights; None if those of a layer cannot be told.

    Every weight of a layer is used equally often, so a layer that keeps a share of its weights does that share of its
    products. Biases, norms and activations do not count, as usual.
    """
    with warnings.catch_warnings(), in_eval_mode(model), torch.no_grad():
        warnings.simplefilter("ignore")  # torch's own, about a switch for Intel's GPUs
        # Without oneDNN, torch runs a recurrent layer as the matrix products that its counter knows.
        with torch.backends.mkldnn.flags(enabled=False), FlopCounterMode(display=False) as counter:
            model(one_input)
    counts, root, total = counter.get_flop_counts(), type(model).__name__, 0
    for name, module in model.named_modules():
        weights = [weight for weight in module.parameters(recurse=False) if weight.dim() > 1]
        if not weights:
            continue
        flops = sum(counts.get(f"{root}.{name}" if name else root, {}).values())
        uses, left = divmod(flops // 2, sum(weight.numel() for weight in weights))
        if not flops or left:  # none that torch counts, or other products than those with these weights
            return None
        total += uses * sum(int(torch.count_nonzero(weight)) for weight in weights)
    return total
