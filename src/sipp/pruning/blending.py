"""Sensitivities, magnitudes and lengths of inputs in, the ranking by them that moves the output least out (T20).

score_j = s_j^p |w_j|^(1-p) over the whole network, s the largest or the mean over patches: p = 0 is magnitude, p = 1 is
sipp-det. Besides, |w_j| times the length of its input, compared within rows (Wanda), as language models need it. None
is right everywhere, so every candidate is cut and tried on calibration points kept aside from scoring.
A certificate's holdout is not touched by the choice.

Where nothing is left of the output with any of them, the error tells nothing: magnitude is taken then. The output of a
network that was never trained (its norms take the statistics of the batch) tells nothing of what training will make of
it, only that every layer has to let something through: it is cut by LAMP's shares of one blend.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sipp.inputs.batches import batches_of, fresh
from sipp.inputs.capture import run_batch, scoring_mode
from sipp.inputs.independence import tensors_in
from sipp.inputs.restore import copy_of
from sipp.numerics import BOUND_DTYPE, SCORE_DTYPE, device_of
from sipp.options import NormStats, Reduce
from sipp.records import Weight, from_rows
from sipp.scoring.lamp import shares_of

POWERS = (0.1, 0.25, 0.5, 0.75, 1.0)  # of the sensitivity, besides 0: there the reduction makes no difference
NOISE = 0.05  # relative: errors that are closer are the same
MAGNITUDE_NOISE = 0.1  # the same for magnitude: it has looked at no points, and a few are not enough to leave it
LOST = 0.9  # an error at which next to nothing of the output is left: those above are equal
UNTRAINED = 0.25  # the power at initialisation (results/at-init-10-epochs, at-init-new-seeds)
REDUCTIONS: tuple[Reduce, ...] = ("max", "mean")

# scores of all layers to masks, for one budget: compared over the whole network, or within each row
Cut = Callable[[Sequence[Tensor], bool], list[Tensor]]


@dataclass(frozen=True)
class Candidate:
    """One blend, and how far the network's output moves with its mask."""

    p: float
    reduce: Reduce
    error: float  # ||f^ - f|| / ||f|| over all points kept aside; infinite where an output is not finite
    is_shared: bool = False  # ranked by LAMP's shares of the blend, layer by layer
    by_rows: bool = False  # no blend: magnitude times the length of the input, compared within rows

    @property
    def name(self) -> str:
        if self.by_rows:
            return "magnitude times input length within rows"
        if self.p == 0:
            return "magnitude"
        blend = f"{self.reduce} sensitivity" if self.p == 1 else f"{self.reduce} sensitivity^{self.p:g}"
        return f"{blend} in shares of its layer" if self.is_shared else blend


@dataclass(frozen=True)
class Choice:
    """The blend that was taken, and the whole curve it was chosen from."""

    taken: Candidate
    tried: tuple[Candidate, ...]
    n_points: int
    is_aside: bool = True  # those were not scored; False: too few to keep any aside

    def __str__(self) -> str:
        others = {"magnitude": 0.0, "max sensitivity": 1.0}
        known = {one.name: one.error for one in self.tried if one.name in others and one is not self.taken}
        beside = ", ".join(f"{name} {error:.3g}" for name, error in known.items())
        where = "kept aside, which chose it" if self.is_aside else "that were scored too"
        points = "1 point" if self.n_points == 1 else f"{self.n_points} points"
        text = f"{self.taken.name}, output error {self.taken.error:.3g} on {points} {where}"
        return text + (f" ({beside})" if beside else "")


@dataclass(frozen=True)
class Blend:
    """What the choice is made from, whatever the budget."""

    sensitivities: dict[Reduce, tuple[Tensor, ...]]  # F x K a layer; no "mean" where points cannot be told apart
    points: list[Any]  # batches of calibration points that choose it
    is_aside: bool  # those were not scored
    norm_stats: NormStats
    lengths: tuple[Tensor, ...] | None = None  # F x K a layer: |w| times the length of its input, where that is finite


def blended(blend: Blend, dense: Sequence[Tensor], p: float, reduce: Reduce) -> list[Tensor]:
    """s^p |w|^(1-p) of every weight, F x K a layer; a weight of 0 has the score 0."""
    scores = []
    for weight_FK, sensitivity_FK in zip(dense, blend.sensitivities[reduce]):
        magnitude_FK = weight_FK.to(SCORE_DTYPE).abs()
        if p == 0:
            scores.append(magnitude_FK)
        else:
            scores.append(sensitivity_FK.to(SCORE_DTYPE).pow(p) * magnitude_FK.pow(1 - p))
    return scores


def choose(
    model: nn.Module, weights: Sequence[Weight], dense: Sequence[Tensor], blend: Blend, cut: Cut
) -> tuple[list[Tensor], Choice]:
    """The masks of the candidate that moves the output least on the points kept aside, and how all of them did.

    Of a network that was never trained, the masks of the one blend that is made for it.
    """
    sparse, outputs = copy_of(model), _outputs(model, blend)

    def error_of(masks: Sequence[Tensor]) -> float:
        with torch.no_grad():
            for weight, dense_FK, mask_FK in zip(weights, dense, masks):
                parameter = sparse.get_parameter(weight.name)
                kept_FK = torch.where(mask_FK, dense_FK, 0.0)
                parameter.copy_(from_rows(weight, kept_FK.to(parameter.dtype), parameter))
        return _distance(outputs, _outputs(sparse, blend))

    if blend.norm_stats == "batch":
        masks = cut([shares_of(score_FK) for score_FK in blended(blend, dense, UNTRAINED, "max")], False)
        only = Candidate(UNTRAINED, "max", error_of(masks), is_shared=True)
        return masks, Choice(only, (only,), _count(blend), blend.is_aside)
    tried: list[Candidate] = []
    found: list[list[Tensor]] = []
    for p, reduce in _candidates(blend):
        found.append(cut(blended(blend, dense, p, reduce), False))
        tried.append(Candidate(p, reduce, error_of(found[-1])))
    if blend.lengths is not None:
        found.append(cut(blend.lengths, True))
        tried.append(Candidate(0.0, "mean", error_of(found[-1]), by_rows=True))
    taken = tried.index(best_of(tried))
    return found[taken], Choice(tried[taken], tuple(tried), _count(blend), blend.is_aside)


def best_of(candidates: Sequence[Candidate]) -> Candidate:
    """The candidate of the least error; of those as good as that, the first: the smallest p, the one by rows last.

    A difference of `NOISE` on a few points decides nothing (`MAGNITUDE_NOISE` where p = 0), and neither does one among
    outputs that are all lost.
    """
    least = min(min(one.error, LOST) for one in candidates)

    def is_as_good(one: Candidate) -> bool:
        return min(one.error, LOST) <= (1 + (MAGNITUDE_NOISE if one.p == 0 and not one.by_rows else NOISE)) * least

    return next(one for one in candidates if is_as_good(one))


def _candidates(blend: Blend) -> list[tuple[float, Reduce]]:
    return [(0.0, "max"), *((p, reduce) for p in POWERS for reduce in REDUCTIONS if reduce in blend.sensitivities)]


def _outputs(model: nn.Module, blend: Blend) -> list[Tensor]:
    """All floating-point tensors of the model's output on the points kept aside."""
    found: list[Tensor] = []
    with scoring_mode(model, blend.norm_stats):
        for batch in batches_of(blend.points, device=device_of(model), role="calibration"):
            found += [tensor.detach() for tensor in tensors_in(run_batch(model, fresh(batch)))]
    return found


def _count(blend: Blend) -> int:
    return sum(batch.n_points for batch in batches_of(blend.points, role="calibration"))


def _distance(dense: Sequence[Tensor], sparse: Sequence[Tensor]) -> float:
    """||f^ - f|| / ||f|| over all points together: one point of a small output does not decide."""
    moved = sum(float((g.to(BOUND_DTYPE) - f.to(BOUND_DTYPE)).square().sum()) for f, g in zip(dense, sparse))
    length = sum(float(f.to(BOUND_DTYPE).square().sum()) for f in dense)
    if not math.isfinite(moved) or not math.isfinite(length):
        return math.inf
    return math.sqrt(moved / length) if length > 0 else (0.0 if moved == 0 else math.inf)
