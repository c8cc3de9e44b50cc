"""The sensitivities of a network, and what is known of the inputs that they were computed on."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sipp.inputs import ModelMap, Weight
from sipp.results import NormStats, Reduce, SeenInputs


@dataclass(frozen=True)
class LayerSensitivities:
    """Sensitivities and norms of one weight, from one pass over the calibration points (T1-T3, T11, T12)."""

    weight: Weight
    sensitivity_FK: Tensor
    order: int  # position of the layer's first use in the forward pass: the l of T12
    n_outputs: int  # eta_l: output scalars for one input
    sign_complexity: float | None  # Delta_l; None if patches cannot be assigned to points
    output_ratio: float | None  # max over S of ||Z_l(x)|| / ||f(x)||, the data part of kappa_l
    quadrants_B: Tensor | None  # of each point: the sum of the four ||Z_l^{st}(x)||, over ||f(x)|| (T18); None: unknown
    mean_FK: Tensor | None = None  # the mean over patches instead of the maximum, if both were asked for (T20)


@dataclass(frozen=True)
class Sensitivities:
    """The sensitivities of a network, and the data they were computed on."""

    layers: tuple[LayerSensitivities, ...]  # in the order of the model's parameters
    n_points: int
    largest_batch: int
    reduce: Reduce
    norm_stats: NormStats
    batch_dependent: bool  # patches depend on the batch (batch statistics): T4-T12 are about batches
    draws: frozenset[str]  # hashes of the distinct draws: points, or batches if batch_dependent
    seen: SeenInputs  # the points that were scored, and others that chose something: a blend, repaired values
    map: ModelMap  # of the model on such inputs
    dependence: str  # why outputs depend on other points, so that nothing is guaranteed; empty: they do not

    @property
    def n_distinct(self) -> int:
        """n of T4 and T18: the number of distinct draws (points or batches) under the maxima."""
        return len(self.draws)

    def n_new(self, holdout: Sensitivities) -> int:
        """How many draws of a holdout did not influence the pruning, and therefore can test it."""
        return len(holdout.draws - self.draws - self.seen.hashes)

    @property
    def n_outputs(self) -> int:
        """eta of T4: output scalars of all layers for one draw."""
        return sum(layer.n_outputs for layer in self.layers) * (self.largest_batch if self.batch_dependent else 1)

    @property
    def max_fan_in(self) -> int:
        """rho of T4: the largest fan-in."""
        return max(layer.weight.fan_in for layer in self.layers)
