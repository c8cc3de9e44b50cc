"""`certify`, `certify_accuracy`: bound the error of a pruned network, from measurements on new inputs (T14, T16).

A certificate needs no assumption on the networks, only that the holdout points are independent draws from the source of
future inputs and were used neither for training nor for calibration. A hash of every point checks part of this; the
record says what was not checked. Copies of a point are no evidence, so only distinct points count. A point is one index
along dimension 0 of every input tensor. Its output must not depend on the other points of the batch, which is checked
on the first batch, and on the first with several points.

Data (holdout, calibration): one tensor of points, a torch Dataset, or an iterable of batches; a batch is a tensor,
(inputs, labels), or a dict of tensors passed as keywords, and inputs may itself be a tuple or a dict of tensors. The
positions that an `attention_mask` or a `*padding_mask` of a dict batch calls padding are neither content nor output.
"""

from __future__ import annotations

from typing import Any, get_args

import torch
from torch import nn

from sipp.certificates import AccuracyClaim, Output, OutputClaim
from sipp.results import SHARE, AccuracyCertificate, Certificate, Measure, NetworkLike, PruneOptions, check


@torch.inference_mode(False)
def certify(
    dense: nn.Module,
    pruned: NetworkLike,
    holdout: Any,
    *,
    share: float = SHARE,
    confidence: float = PruneOptions.confidence,
    epsilon: float | None = None,
    measure: Measure = "output",
    output: Output = None,
    calibration: Any = None,
    progress: bool = True,
) -> Certificate:
    """Certifies the error on new inputs: P(||f^(x) - f(x)|| <= epsilon ||f(x)||) >= 1 - share, with this confidence.

    `share` is the share of inputs that may be further off. Without `epsilon`, it finds the smallest one that can be
    proved; with it, it says whether the claim holds, and which share can be proved (`proved_share`). `pruned` is a
    network, or what `prune` or `prune_to` returned. The holdout must contain none of the inputs that such a record was
    made with, and none of `calibration`. `output` picks from tuple or dict outputs: an index, a key, or a function of
    the output. For a language model an input is a sequence, and `measure` may be another distance: "kl", the KL
    divergence KL(f || f^) of the next token in nats, averaged over positions, or "next-token", the share of positions
    where a different next token is predicted.

    Example:
        >>> import sipp, torch
        >>> _ = torch.manual_seed(0)
        >>> net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
        >>> pruned = sipp.prune(net, None, keep=0.9, method="magnitude")
        >>> certificate = sipp.certify(net, pruned, torch.rand(500, 8), share=0.05, confidence=0.95)
        >>> certificate.verdict, certificate.n, certificate.epsilon < 0.5
        ('certified', 500, True)
    """
    check.share("confidence", confidence)
    check.share("share", share)
    check.choice("measure", measure, get_args(Measure))
    if epsilon is not None:  # None asks for the smallest
        epsilon = check.number("epsilon", epsilon, least=0)
    claim = OutputClaim(epsilon, share, confidence, measure)
    return claim.test(dense, pruned, holdout, output, calibration, progress=check.flag("progress", progress))


@torch.inference_mode(False)
def certify_accuracy(
    dense: nn.Module,
    pruned: NetworkLike,
    holdout: Any,
    *,
    confidence: float = PruneOptions.confidence,
    output: Output = None,
    calibration: Any = None,
    progress: bool = True,
) -> AccuracyCertificate:
    """Certifies the accuracy drop: accuracy(dense) - accuracy(pruned) <= drop_upper, with the given confidence.

    Labels are used if the batches have them (the record's `mode` says so); outputs are n x classes. For a language
    model (n x tokens x vocabulary) an input is a sequence, and the claim is about the share of its positions where the
    predicted next token changed.

    Example:
        >>> import sipp, torch
        >>> _ = torch.manual_seed(0)
        >>> net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
        >>> pruned = sipp.prune(net, None, keep=0.9, method="magnitude")
        >>> holdout = [(torch.rand(500, 8), torch.randint(0, 4, (500,)))]
        >>> certificate = sipp.certify_accuracy(net, pruned, holdout, confidence=0.95)
        >>> certificate.mode, 0 < certificate.drop_upper < 0.2
        ('labels', True)
    """
    check.share("confidence", confidence)
    claim = AccuracyClaim(None, confidence)
    return claim.test(dense, pruned, holdout, output, calibration, progress=check.flag("progress", progress))
