"""What one pass over the calibration points says of each weight, and the legend of axis letters.

Axis letters, used as suffixes of tensor names everywhere:
    B points of a batch     P patches        F rows of a weight (parameter groups)    K fan-in of a row
    G groups of a grouped convolution (1 elsewhere)      R rows of one group, F = G * R
So `weight_FK` has one row per parameter group, `patches_GKP` holds P patches of fan-in K for each of G groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from sipp.records.options import NormStats, Reduce
from sipp.records.weights import Weight

DrawUnit = Literal["inputs", "batches"]  # what a statement counts: batches where a point's patches depend on its batch


@dataclass(frozen=True)
class LayerScores:
    """What one pass over the calibration points says about one weight (T1-T3, T11, T12)."""

    weight: Weight
    sensitivity_FK: Tensor
    order: int  # rank of the layer's first use in the forward pass: the l of T12
    n_outputs: int  # eta_l: output scalars for one input
    sign_complexity: float | None  # Delta_l; None where points could not be told apart
    output_ratio: float | None  # max over S of ||Z_l(x)|| / ||f(x)||, the data part of kappa_l
    quadrants_B: Tensor | None  # of each point: the four norms ||Z_l^{st}(x)|| added up, by ||f(x)|| (T18); or unknown
    sensitivity_s1_FK: Tensor | None = None  # s_j on the points of S1 alone; None where no point of S2 was met (T19)
    sensitivity_s2_FK: Tensor | None = None  # and on those of S2 alone
    mean_FK: Tensor | None = None  # the mean over patches instead of the largest, where both were asked for (T20)


@dataclass(frozen=True)
class Scores:
    """The sensitivities of a whole network and the circumstances they were computed in."""

    layers: tuple[LayerScores, ...]  # in the order of the model's parameters
    n_points: int
    n_batches: int
    largest_batch: int
    reduce: Reduce
    norm_stats: NormStats
    batch_dependent: bool  # a point's patches depend on its batch (batch statistics): T4-T12 speak of batches
    keys: frozenset[bytes]  # what the draws are, so that equal ones count once: points, or (batch_dependent) batches
    dependence: str  # why an output was seen to be no function of its point alone: nothing is promised; empty: fine
    selection_keys: frozenset[bytes] = frozenset()  # other points that chose something: a blend, repaired values
    n_apart: int | None = None  # points in S2 that are not in S1, equal ones once (T19); None where S was not split

    @property
    def n_distinct(self) -> int:
        """n of T4 and T18: the different draws that the maxima were taken over, points or whole batches."""
        return len(self.keys)

    @property
    def all_seen_keys(self) -> frozenset[bytes]:
        """All that chose the pruning: no point of these can judge it."""
        return self.keys | self.selection_keys

    @property
    def n_outputs(self) -> int:
        """eta of T4: output scalars of all layers for one draw."""
        return sum(layer.n_outputs for layer in self.layers) * (self.largest_batch if self.batch_dependent else 1)

    @property
    def max_fan_in(self) -> int:
        """rho of T4: the largest fan-in."""
        return max(layer.weight.fan_in for layer in self.layers)
