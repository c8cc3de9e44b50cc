"""Measures each holdout point: how far its output moved, and whether its class changed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sipp.certificates.tokens import check_token_logits, mean_at, real_positions, token_changes
from sipp.errors import DataError, ModelError
from sipp.inputs import Batch, labels
from sipp.results import Measure, numerics

MeasureFunction = Callable[[Tensor, Tensor, Batch], Tensor]  # of dense and pruned outputs: n x ..., one row a point

MOST_POSITIONS = 1_000_000  # of a sequence: float64 can distinguish two shares of so many


def point_ratios(dense_out: Tensor, pruned_out: Tensor) -> Tensor:
    """||f^ - f|| / ||f|| per point (n x ... -> n, float64), such that ratio > epsilon is the violation Z of T14.

    0 where f^ = f, also for f = 0; +inf for f = 0 != f^ and for anything not finite. Rounded up to the next float64
    where ratio * ||f|| < ||f^ - f||, so that the reported epsilon always satisfies the inequality it stands for.
    """
    n = dense_out.shape[0]
    f, g = dense_out.double().reshape(n, -1), pruned_out.double().reshape(n, -1)
    error, size = _norms(g - f), _norms(f)
    ratio = torch.where(error == 0, torch.zeros_like(error), error / size)
    ratio = torch.where(ratio * size < error, torch.nextafter(ratio, torch.full_like(ratio, math.inf)), ratio)
    # An overflowing norm would make the quotient 0: it counts as not finite, like the outputs themselves.
    finite = f.isfinite().all(dim=1) & g.isfinite().all(dim=1) & error.isfinite() & size.isfinite()
    return torch.where(finite, ratio, torch.full_like(ratio, math.inf))


class PointComparisons(NamedTuple):
    """Measurements of each point (float64, n each); flags are 0 or 1."""

    ratio: Tensor  # `point_ratios`
    squared_error: Tensor  # ||f^ - f||^2
    squared_size: Tensor  # ||f||^2
    has_classes: Tensor
    same_class: Tensor
    has_label: Tensor  # one that names a class
    label_outside: Tensor  # one that names none of the output's classes: then no point has a label
    dense_right: Tensor
    pruned_right: Tensor
    dense_loss: Tensor  # cross-entropy
    pruned_loss: Tensor


def compare_outputs(f: Tensor, g: Tensor, batch: Batch, why: set[str]) -> Tensor:
    """The `PointComparisons` of dense and pruned outputs, n x 11; `why` collects why labels give no accuracy."""
    n = len(f)
    f_nk, g_nk = f.to(numerics.BOUND_DTYPE).reshape(n, -1), g.to(numerics.BOUND_DTYPE).reshape(n, -1)
    has_classes = f.dim() == 2 and f.shape[1] > 1
    truth = labels.truth_of(batch.labels, n, f.shape[1]) if has_classes else labels.Truth(None)
    if not has_classes and batch.labels is not None:
        truth = labels.Truth(None, f"the output is {' x '.join(['n', *map(str, f.shape[1:])])}, not n x classes")
    why.update([truth.why] if truth.why else [])
    zeros_n = torch.zeros(n, dtype=numerics.BOUND_DTYPE, device=f.device)
    squares = ((g_nk - f_nk).square().sum(1), f_nk.square().sum(1))
    points = PointComparisons(point_ratios(f, g), *squares, zeros_n + has_classes, *[zeros_n] * 7)
    if has_classes:  # a non-finite output has none
        *outputs, differ = _classes(f, g)
        points = points._replace(same_class=~differ)
    if truth.classes_n is not None:
        truth_n = truth.classes_n.to(f.device)
        points = points._replace(label_outside=(truth_n < 0) | (truth_n >= f.shape[1]))
        if bool(points.label_outside.any()):
            why.add("labels are outside the output's classes")
        else:
            right = [is_finite & (classes_n == truth_n) for classes_n, is_finite in outputs]
            loss = [F.cross_entropy(out_nk, truth_n, reduction="none") for out_nk in (f_nk, g_nk)]
            points = points._replace(
                has_label=zeros_n + 1.0,
                dense_right=right[0],
                pruned_right=right[1],
                dense_loss=loss[0],
                pruned_loss=loss[1],
            )
    return torch.stack([value.to(numerics.BOUND_DTYPE) for value in points], dim=1)


def measure_of(name: Measure) -> MeasureFunction:
    """The function that measures what a certificate limits, one number per point."""
    if name == "output":
        return lambda f, g, _: point_ratios(f, g)
    return partial(_mean_change, which=0 if name == "kl" else 1)


def _mean_change(f: Tensor, g: Tensor, batch: Batch, which: int) -> Tensor:
    """Per sequence (T22), for the next token: the mean KL(f || f^) in nats (which=0), or how often it changes (1)."""
    check_token_logits(f, batch)
    return mean_at(token_changes(f.double(), g.double())[which], real_positions(batch, f.shape[:2], f.device))


def _classes(f: Tensor, g: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], Tensor]:
    """The class of each dense and pruned output and whether the output is finite, and whether they differ."""
    dense, pruned = ((out.argmax(dim=-1), out.isfinite().all(dim=-1)) for out in (f, g))
    return dense, pruned, (dense[0] != pruned[0]) | ~dense[1] | ~pruned[1]


class Outcomes(NamedTuple):
    """What pruning did to the answer at each point (T16; float64, n each): 0 or 1, or a share of positions."""

    lost: Tensor  # dense right and pruned wrong
    gained: Tensor  # the reverse
    differ: Tensor  # their classes differ
    has_label: Tensor
    is_sequence: Tensor  # its outcomes are shares of positions
    dense_right: Tensor

    @property
    def are_sequences(self) -> bool:
        """Whether the points are sequences, for which T22 holds."""
        return bool(self.is_sequence.any())


def outcomes_of(f: Tensor, g: Tensor, batch: Batch) -> Tensor:
    """The `Outcomes` of dense and pruned outputs, n x 6; for sequences (n x tokens x vocabulary), shares of positions.

    With non-finite outputs the pruned network counts as wrong and the dense one as right, which can only raise the
    limit.
    """
    if f.dim() == 3 and f.shape[2] > 1:
        changed = mean_at(_classes(f, g)[2], real_positions(batch, f.shape[:2], f.device))
        return _stacked(None, None, changed, None, is_sequence=True)
    if f.dim() != 2 or f.shape[1] < 2:
        raise ModelError(
            f"outputs are {tuple(f.shape)}, accuracy needs n x classes",
            where=batch.where,
            fix="select with output=",
            option="output",
        )
    (f_class, f_fine), (g_class, g_fine), differ = _classes(f, g)
    if batch.labels is None:
        return _stacked(None, None, differ, None, is_sequence=False)
    classes = labels.truth_of(batch.labels, len(f), f.shape[1])
    if classes.classes_n is None:
        raise DataError(classes.why, where=batch.where, fix="give class numbers or one-hot rows, or leave labels out")
    truth = classes.classes_n.to(f.device)
    if ((truth < 0) | (truth >= f.shape[1])).any():
        raise DataError(
            f"a label lies outside 0 .. {f.shape[1] - 1}", where=batch.where, fix="drop such inputs or map them first"
        )
    f_right, g_right = (f_class == truth) | ~f_fine, (g_class == truth) & g_fine
    return _stacked(f_right & ~g_right, ~f_right & g_right, differ, f_right, is_sequence=False)


def _stacked(
    lost: Tensor | None, gained: Tensor | None, differ: Tensor, dense_right: Tensor | None, *, is_sequence: bool
) -> Tensor:
    """The columns of `Outcomes`; without labels nothing is right, lost or gained."""
    zeros_n = torch.zeros(len(differ), dtype=torch.float64, device=differ.device)
    outcomes = Outcomes(
        zeros_n if lost is None else lost,
        zeros_n if gained is None else gained,
        differ,
        zeros_n + (dense_right is not None),
        zeros_n + is_sequence,
        zeros_n if dense_right is None else dense_right,
    )
    return torch.stack([column_n.double() for column_n in outcomes], dim=1)


def outcome_counts(outcomes: Outcomes, hashes: Sequence[str]) -> tuple[int, int, int, int]:
    """The sums over all points (lost, gained, differ, labelled): lost and differ rounded up, gained rounded down.

    Of several copies only the smallest gain counts, once.
    """
    sums = (_exact_sum(column.tolist()) for column in (outcomes.lost, outcomes.differ, outcomes.has_label))
    lost, differ, labelled = map(math.ceil, sums)
    gains: dict[str, float] = {}
    for key, gained in zip(hashes, outcomes.gained.tolist(), strict=True):
        gains[key] = min(gained, gains.get(key, gained))
    return lost, math.floor(_exact_sum(gains.values())), differ, labelled


def _exact_sum(shares: Iterable[float]) -> Fraction:
    """The exact sum of shares of positions: a whole sum that was rounded up could make lost + gained exceed differ."""
    counts = Counter(shares)
    return sum((n * Fraction(share).limit_denominator(MOST_POSITIONS) for share, n in counts.items()), Fraction(0))


def _norms(rows: Tensor) -> Tensor:
    """L2 norm of each row, scaled by its largest entry so that squares neither overflow nor vanish."""
    largest = rows.abs().amax(dim=1)
    scale = torch.where(largest > 0, largest, torch.ones_like(largest))
    return scale * torch.linalg.vector_norm(rows / scale[:, None], dim=1)
