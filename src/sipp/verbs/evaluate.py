"""`evaluate`: measures a pruned network against the dense one on the same inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from sipp.certificates import Output, compare_networks
from sipp.results import Evaluation, NetworkLike, check, network_of


@torch.inference_mode(False)
def evaluate(
    dense: nn.Module, pruned: NetworkLike, data: Any, *, output: Output = None, progress: bool = True
) -> Evaluation:
    """Measures the accuracy and the loss of both networks on the same inputs, and how far their outputs differ.

    `data` is that of `certify`; without labels there is no accuracy. This is a measurement on these inputs, not a claim
    about others: `certify_accuracy` makes one. For a language model, see `perplexity`.

    Example:
        >>> import sipp, torch
        >>> _ = torch.manual_seed(0)
        >>> net = torch.nn.Linear(8, 4)
        >>> pruned = sipp.prune(net, None, keep=0.9, method="magnitude")
        >>> inputs = torch.rand(100, 8)
        >>> measured = sipp.evaluate(net, pruned, [(inputs, net(inputs).argmax(1))])
        >>> measured.accuracies[0], measured.error < 0.2
        (1.0, True)
    """
    found = compare_networks(dense, network_of(pruned), data, output, progress=check.flag("progress", progress))
    ratio_n = found.points.ratio
    return Evaluation(
        n_inputs=len(ratio_n),
        accuracies=found.accuracies,
        losses=found.losses,
        same_class=found.same_class,
        error_mean=float(ratio_n.mean()),
        error_median=float(ratio_n.median()),
        error_max=float(ratio_n.max()),
        n_not_finite=int((~ratio_n.isfinite()).sum()),
        why_no_accuracy=found.why_no_accuracy,
        data_hash=found.evidence.data_hash,
        dense_hash=found.evidence.dense_hash,
        pruned_hash=found.evidence.pruned_hash,
    )
