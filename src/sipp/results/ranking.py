"""Prunable weights, their scores, and the ranking that a budget is applied to.

Axis letters, used as suffixes of tensor names everywhere:
    B points of a batch     P patches        F rows of a weight (parameter groups)    K fan-in of a row
    G groups of a grouped convolution (1 elsewhere)      R rows of one group, F = G * R
    S, T signs of weights and of activations             Q quadrants of signs, and Z itself
    N, C, M: anything that is counted in one file (rows of all groups, knots of a curve, weights of a pattern); 1: kept
So `weight_FK` has one row per parameter group, `patches_GKP` holds P patches of fan-in K for each of G groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor, nn

from sipp.results.batches import Batch
from sipp.results.blend import BlendTrial
from sipp.results.options import NormStats, Pattern, PruneOptions, Reduce, method_name


@dataclass(frozen=True)
class Weight:
    """One prunable parameter, seen as F rows of fan-in K."""

    name: str  # canonical parameter name, without wrapper prefixes
    aliases: tuple[str, ...]  # other names of the same tensor (tied weights)
    layer_type: str  # class name of the layer that holds it
    n_rows: int
    fan_in: int
    rows_last: bool  # stored transposed, K x F instead of F x K

    @property
    def n_weights(self) -> int:
        return self.n_rows * self.fan_in


MOST_WEIGHTS_OF_SMALL = 4 << 20  # a network with more weights is large: a repair fits all of it only once


def is_like_a_language_model(weights: Sequence[Weight], parameters: Mapping[str, Tensor]) -> bool:
    """Whether a network is large and all its weights are matrices: trying whole networks is too expensive then."""
    n_weights = sum(weight.n_weights for weight in weights)
    return n_weights > MOST_WEIGHTS_OF_SMALL and all(parameters[weight.name].ndim == 2 for weight in weights)


def to_rows(weight: Weight, tensor: Tensor) -> Tensor:
    """The parameter-shaped tensor as an F x K matrix (a view wherever the layout allows one)."""
    return tensor.t() if weight.rows_last else tensor.reshape(weight.n_rows, weight.fan_in)


def from_rows(weight: Weight, matrix_FK: Tensor, like: Tensor) -> Tensor:
    """The F x K matrix in the shape of the parameter `like`."""
    return matrix_FK.t().contiguous() if weight.rows_last else matrix_FK.reshape(like.shape)


DrawUnit = Literal["inputs", "batches"]  # the independent draws: batches if a point's patches depend on its batch


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
    n_batches: int
    largest_batch: int
    reduce: Reduce
    norm_stats: NormStats
    batch_dependent: bool  # patches depend on the batch (batch statistics): T4-T12 are about batches
    keys: frozenset[str]  # of the distinct draws: points, or batches if batch_dependent
    no_chain: str  # why the network is no chain of fully-connected layers, as T12 needs; empty: it is one
    dependence: str  # why outputs depend on other points, so that nothing is guaranteed; empty: they do not
    selection_keys: frozenset[str] = frozenset()  # other points that chose something: a blend, repaired values
    point_keys: frozenset[str] = frozenset()  # of all points that were scored, also in batches that count as one draw

    @property
    def n_distinct(self) -> int:
        """n of T4 and T18: the number of distinct draws (points or batches) under the maxima."""
        return len(self.keys)

    @property
    def all_seen_keys(self) -> frozenset[str]:
        """Keys of all points that influenced the pruning and therefore cannot test it."""
        return self.keys | self.selection_keys

    @property
    def n_outputs(self) -> int:
        """eta of T4: output scalars of all layers for one draw."""
        return sum(layer.n_outputs for layer in self.layers) * (self.largest_batch if self.batch_dependent else 1)

    @property
    def max_fan_in(self) -> int:
        """rho of T4: the largest fan-in."""
        return max(layer.weight.fan_in for layer in self.layers)


@dataclass(frozen=True)
class BlendInputs:
    """What a blend is chosen from; does not depend on the budget."""

    # F x K per layer; without "mean" if patches cannot be assigned to points; empty if the blend only starts a search
    sensitivities: dict[Reduce, tuple[Tensor, ...]]
    points: Any  # the calibration points that choose it, a Data
    is_held_back: bool  # they were held back from scoring
    norm_stats: NormStats
    # F x K per layer: |w| times the norm of its input; None if not finite
    wanda_scores: tuple[Tensor, ...] | None = None
    taken: BlendTrial | None = None  # chosen at another budget: no other candidate is tried


@dataclass(frozen=True)
class Ranking:
    """The scores of all prunable weights, and all else that a cut to any budget needs."""

    model: nn.Module  # the dense network, untouched
    weights: tuple[Weight, ...]
    scores: tuple[Tensor, ...]  # F x K on the CPU, one per weight: the largest are kept
    sensitivities: Sensitivities | None  # None if no sensitivities were computed: then nothing is guaranteed
    options: PruneOptions  # method "given": weights that the caller chose
    why_no_sensitivities: str = ""  # why there are no sensitivities; empty if there are
    sample: Batch | None = None  # a few points to run networks on; None without sensitivities
    is_thinned: bool = False  # a score of 0 marks a weight that was pruned earlier and stays pruned
    floor: float | None = None  # under rows and layers; None: they may lose all weights
    pattern: Pattern | None = None  # n of every m weights of a row, instead of a budget over all
    spared: tuple[Tensor, ...] = ()  # bool (F) per weight: rows that are not pruned and not in the budget; (): none
    blend: BlendInputs | None = None  # what a blend is chosen from; None for other methods
    chosen_by_points: bool = True  # whether points chose the weights; False: they serve statements only
    method_keys: frozenset[str] = frozenset()  # keys of other points that the method read

    @property
    def seen(self) -> frozenset[str]:
        """Keys of the points that chose the weights, as far as they are known."""
        if self.options.method == "given" or not self.chosen_by_points:
            return frozenset()
        found = self.sensitivities
        return self.method_keys | (frozenset() if found is None else found.point_keys | found.selection_keys)

    @property
    def seen_all(self) -> bool:
        """Whether no other points chose them: unknown, so False, if the caller brought the weights."""
        return self.options.method != "given" and (bool(self.seen) or not self.chosen_by_points)

    def without_scores(self) -> Ranking:
        """The ranking after its last cut, which can be repaired and stated, but not cut again.

        Its scores are twice as large as the network.
        """
        return replace(self, scores=(), blend=None)

    @property
    def method_name(self) -> str:
        return method_name(self.options.method)

    @property
    def n_weights(self) -> int:
        return sum(weight.n_weights for weight in self.weights)
