"""The scores of all prunable weights, and all else that a cut to any budget needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from sipp.inputs import Batch, Weight
from sipp.results import BlendTrial, NormStats, Pattern, PruneOptions, Reduce, method_name
from sipp.scoring import Sensitivities


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


MOST_WEIGHTS_OF_SMALL = 4 << 20  # a network with more weights is large: a repair fits all of it only once


def is_like_a_language_model(weights: Sequence[Weight], parameters: Mapping[str, Tensor]) -> bool:
    """Whether a network is large and all its weights are matrices: trying whole networks is too expensive then."""
    n_weights = sum(weight.n_weights for weight in weights)
    return n_weights > MOST_WEIGHTS_OF_SMALL and all(parameters[weight.name].ndim == 2 for weight in weights)
