"""Counts the multiply-adds of a pruned network, which depend on which layers lost weights, not only on how many."""

from __future__ import annotations

import warnings
from itertools import groupby

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from sipp.inputs.capture import scoring_mode
from sipp.inputs.layers.registry import find_prunable_layers


def multiply_adds(model: nn.Module, one_input: Tensor) -> int | None:
    """The multiply-adds of one input with the non-zero prunable weights; None if torch cannot count those of a layer.

    Every weight of a layer is used equally often, so a layer that keeps a share of its weights does that share of its
    products. Biases, norms and activations do not count, as usual.
    """
    with warnings.catch_warnings(), scoring_mode(model, "running"), torch.no_grad():
        warnings.simplefilter("ignore")  # torch's own, about a switch for Intel's GPUs
        # Without oneDNN, torch runs a recurrent layer as the matrix products that its counter knows.
        with torch.backends.mkldnn.flags(enabled=False), FlopCounterMode(display=False) as counter:
            model(one_input)
    counts, root, total = counter.get_flop_counts(), type(model).__name__, 0
    names = [weight.name for layer in find_prunable_layers(model) for weight in layer.weights.values()]
    for module, group in groupby(names, key=lambda name: name.rpartition(".")[0]):
        weights = [model.get_parameter(name) for name in group]
        flops = sum(counts.get(f"{root}.{module}" if module else root, {}).values())
        if not flops:
            return None
        uses, left = divmod(flops // 2, sum(weight.numel() for weight in weights))
        if left:  # other products than those with these weights
            return None
        total += uses * sum(int(torch.count_nonzero(weight)) for weight in weights)
    return total
