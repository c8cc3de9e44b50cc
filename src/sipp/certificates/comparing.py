"""Compares two networks on the same inputs, as a measurement and not as a claim: errors, classes, accuracies."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sipp.certificates.compared_output import Output
from sipp.certificates.evidence import Evidence, measure_outputs
from sipp.certificates.measures import classes_of, point_ratios
from sipp.inputs import Batch, labels
from sipp.results import numerics


@dataclass(frozen=True)
class PointComparisons:
    """Measurements of each point (float64, n each), and flags."""

    ratio: Tensor  # `point_ratios`
    squared_error: Tensor  # ||f^ - f||^2
    squared_size: Tensor  # ||f||^2
    has_classes: Tensor
    same_class: Tensor
    has_label: Tensor  # one that names a class
    dense_right: Tensor
    pruned_right: Tensor
    dense_loss: Tensor  # cross-entropy
    pruned_loss: Tensor


def _compare_outputs(f: Tensor, g: Tensor, batch: Batch, why: set[str]) -> dict[str, Tensor]:
    """The fields of `PointComparisons`, of dense and pruned outputs; `why` collects why labels give no accuracy."""
    n = len(f)
    f_nk, g_nk = f.to(numerics.BOUND_DTYPE).reshape(n, -1), g.to(numerics.BOUND_DTYPE).reshape(n, -1)
    has_classes = f.dim() == 2 and f.shape[1] > 1
    truth = labels.truth_of(batch.labels, n, f.shape[1]) if has_classes else labels.Truth(None)
    if not has_classes and batch.labels is not None:
        truth = labels.Truth(None, f"the output is {' x '.join(['n', *map(str, f.shape[1:])])}, not n x classes")
    why.update([truth.why] if truth.why else [])
    no_n = torch.zeros(n, dtype=torch.bool, device=f.device)
    points = dict.fromkeys(("same_class", "has_label", "dense_right", "pruned_right"), no_n)
    points |= dict.fromkeys(("dense_loss", "pruned_loss"), no_n.to(numerics.BOUND_DTYPE))
    points |= {"ratio": point_ratios(f, g), "has_classes": no_n | has_classes}
    points |= {"squared_error": (g_nk - f_nk).square().sum(1), "squared_size": f_nk.square().sum(1)}
    if has_classes:  # a non-finite output has none
        *outputs, differ = classes_of(f, g)
        points["same_class"] = ~differ
    if truth.classes_n is not None:
        truth_n = truth.classes_n.to(f.device)
        if bool(((truth_n < 0) | (truth_n >= f.shape[1])).any()):
            why.add("labels are outside the output's classes")
        else:
            right = [is_finite & (classes_n == truth_n) for classes_n, is_finite in outputs]
            loss = [F.cross_entropy(out_nk, truth_n, reduction="none") for out_nk in (f_nk, g_nk)]
            points |= {"has_label": ~no_n, "dense_right": right[0], "pruned_right": right[1]}
            points |= {"dense_loss": loss[0], "pruned_loss": loss[1]}
    return points


@dataclass(frozen=True)
class NetworkComparison:
    """How the outputs of a network compare with the dense one's on the same inputs."""

    points: PointComparisons
    evidence: Evidence
    why_no_accuracy: str  # empty: there is one, or there are no labels

    @property
    def same_class(self) -> float | None:
        """The share of points with the same class; None without classes."""
        return float(self.points.same_class.double().mean()) if bool(self.points.has_classes.all()) else None

    @property
    def accuracies(self) -> tuple[float, float] | None:
        """Of the dense and the other network; None without labels."""
        return self._means(self.points.dense_right, self.points.pruned_right)

    @property
    def losses(self) -> tuple[float, float] | None:
        """The mean cross-entropy of both; None without labels."""
        return self._means(self.points.dense_loss, self.points.pruned_loss)

    def _means(self, dense_n: Tensor, pruned_n: Tensor) -> tuple[float, float] | None:
        is_labelled = bool(self.points.has_label.all())
        return (float(dense_n.double().mean()), float(pruned_n.double().mean())) if is_labelled else None


def compare_networks(
    dense: nn.Module, other: nn.Module, data: Any, output: Output, *, known: Any = None, progress: bool = False
) -> NetworkComparison:
    """Runs both networks on the data, none of which may be `known`, and compares them point by point."""
    why: set[str] = set()
    outputs = measure_outputs(
        dense, other, data, partial(_compare_outputs, why=why), output, known, progress=progress, title="measuring"
    )
    points = PointComparisons(**outputs.fields)
    n_labelled, n = int(points.has_label.sum()), len(points.has_label)
    partly = "" if n_labelled in (0, n) else f"only {n_labelled:,} of {n:,} inputs have labels"
    return NetworkComparison(points, outputs.evidence, min(why, default=partly))
