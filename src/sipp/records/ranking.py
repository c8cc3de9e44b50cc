"""Everything that pruning knows before it is given a budget."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from sipp.records.batches import Batch
from sipp.records.choice import BlendTrial
from sipp.records.options import Constants, Draws, Method, NormStats, Reduce, method_name
from sipp.records.pattern import Pattern
from sipp.records.scores import Scores
from sipp.records.weights import Weight


@dataclass(frozen=True)
class BlendInputs:
    """What the choice is made from, whatever the budget."""

    sensitivities: dict[Reduce, tuple[Tensor, ...]]  # F x K a layer; no "mean" where points cannot be told apart, none
    # at all where a search of its own follows
    points: Any  # the calibration points that choose it, a Data
    is_aside: bool  # those were not scored
    norm_stats: NormStats
    lengths: tuple[Tensor, ...] | None = None  # F x K a layer: |w| times the length of its input, where that is finite
    taken: BlendTrial | None = None  # chosen at another budget: no other is tried


@dataclass(frozen=True)
class Ranking:
    """Everything pruning knows before it is given a budget: cut it at any number of weights."""

    model: nn.Module  # the dense network, untouched
    weights: tuple[Weight, ...]
    ranks: tuple[Tensor, ...]  # F x K scores on the CPU, one per weight
    scores: Scores | None  # None where nothing was scored: then nothing is promised
    method: Method  # "given": weights that the caller chose
    draws: Draws
    delta: float
    confidence: float
    constants: Constants
    unscored: str = ""  # why nothing was scored; empty if it was
    example: Any = None  # a few of the points, as the model takes them; None where nothing was scored
    sample: Batch | None = None  # some more, on which the output of a cut is measured; None where nothing was scored
    is_thinned: bool = False  # a rank of 0 is a weight that an earlier step pruned, and is not taken back
    floor: float | None = None  # under rows and layers; None: they may die
    pattern: Pattern | None = None  # n of every m weights of a row, instead of a budget over all
    spared: tuple[Tensor, ...] = ()  # F a weight: rows that stay as they are, beside the budget; (): none do
    blend: BlendInputs | None = None  # what a blend is chosen from; None for other methods
    noted: frozenset[bytes] = frozenset()  # keys of points that a method read beside those that were scored

    @property
    def method_name(self) -> str:
        return method_name(self.method)

    @property
    def n_weights(self) -> int:
        return sum(weight.n_weights for weight in self.weights)
