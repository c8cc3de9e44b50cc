"""`evaluate`: measures a pruned network against the dense one on the same inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from sipp.certificates import Output, PointComparisons, compare_outputs, measure_outputs
from sipp.inputs import labels
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
    why: set[str] = set()
    outputs = measure_outputs(
        dense, network_of(pruned), data, lambda f, g, batch: compare_outputs(f, g, batch, why), output, None,
        progress=check.flag("progress", progress), title="measuring",
    )  # fmt: skip
    comparisons = PointComparisons(*outputs.measured.unbind(1))
    is_labelled, is_finite_n = bool(comparisons.has_label.all()), comparisons.ratio.isfinite()
    n_outside, no_accuracy = int(comparisons.label_outside.sum()), ""
    if n_outside:
        no_accuracy = f"{n_outside:,} labels are outside the output's classes"
    elif not is_labelled:
        no_accuracy = labels.why_not_measured(why, comparisons.has_label)
    return Evaluation(
        n_inputs=len(comparisons.ratio),
        accuracies=_means(comparisons.dense_right, comparisons.pruned_right) if is_labelled else None,
        losses=_means(comparisons.dense_loss, comparisons.pruned_loss) if is_labelled else None,
        same_class=float(comparisons.same_class.mean()) if bool(comparisons.has_classes.all()) else None,
        error_mean=float(comparisons.ratio.mean()),
        error_median=float(comparisons.ratio.median()),
        error_max=float(comparisons.ratio.max()),
        n_not_finite=int((~is_finite_n).sum()),
        why_no_accuracy=no_accuracy,
        data_hash=outputs.evidence.data_hash,
        dense_hash=outputs.evidence.dense_hash,
        pruned_hash=outputs.evidence.pruned_hash,
    )


def _means(dense_n: Tensor, pruned_n: Tensor) -> tuple[float, float]:
    return float(dense_n.mean()), float(pruned_n.mean())
