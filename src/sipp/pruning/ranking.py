"""Ranks the weights of a network by a method (T1-T4).

data  ->  a Ranking: scores, sensitivities for what is stated later, what a blend is chosen from (T20)

A ranking does not depend on the budget: one ranking can be cut to any number of weights (cutting.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from sipp.errors import OptionError, warn_caller
from sipp.inputs import Batch, Data, Weight
from sipp.progress import progress_bar
from sipp.pruning.budgets import AllocationProblem, allocation_problem, sampling_constant
from sipp.results import (
    BlendTrial,
    NormStats,
    Pattern,
    PruneOptions,
    Reduce,
    SeenInputs,
    check,
    numerics,
)
from sipp.scoring import (
    MethodInfo,
    ScoringTask,
    Sensitivities,
    checked_method,
    measure_sensitivities,
    scores_of,
)

N_SAMPLE = 32  # points on which the output of a cut is measured


# Of blends
POWERS = (0.1, 0.25, 0.5, 0.75, 1.0)  # p, besides 0, where the reduction makes no difference
UNTRAINED = 0.25  # the power at initialisation (results/at-init-10-epochs, at-init-new-seeds)
REDUCTIONS: tuple[Reduce, ...] = ("max", "mean")


@dataclass(frozen=True)
class BlendInputs:
    """What a blend is chosen from; does not depend on the budget."""

    # F x K per layer; without "mean" if patches cannot be assigned to points; empty if the blend only starts a search
    sensitivities: dict[Reduce, tuple[Tensor, ...]]
    points: Data  # the calibration points that choose it
    is_held_back: bool  # they were held back from scoring
    norm_stats: NormStats
    # F x K per layer: |w| times the norm of its input; None if not finite
    wanda_scores: tuple[Tensor, ...] | None = None
    taken: BlendTrial | None = None  # chosen at another budget: no other candidate is tried

    def candidates(self) -> list[BlendTrial]:
        """What is tried, magnitude first and Wanda's score last; none has an error yet."""
        if self.norm_stats == "batch":  # the network was never trained
            return [BlendTrial(UNTRAINED, "max", math.inf, is_shared=True)]
        if self.taken is not None:
            return [self.taken]
        wanda_last = [] if self.wanda_scores is None else [BlendTrial(0.0, "mean", math.inf, by_rows=True)]
        if wanda_last and not self.sensitivities:
            return wanda_last
        pairs = ((p, reduce) for p in POWERS for reduce in REDUCTIONS if reduce in self.sensitivities)
        blends = [BlendTrial(p, reduce, math.inf) for p, reduce in pairs]
        return [BlendTrial(0.0, "max", math.inf), *blends, *wanda_last]


@dataclass(frozen=True)
class Ranking:
    """The scores of all prunable weights, and all else that a cut to any budget needs."""

    model: nn.Module  # the dense network, untouched
    weights: tuple[Weight, ...]
    scores: tuple[Tensor, ...]  # F x K on the CPU, one per weight: the largest are kept
    sensitivities: Sensitivities | None  # None if no sensitivities were computed: then nothing is guaranteed
    options: PruneOptions
    method_name: str  # in records; GIVEN: the caller chose the weights
    seen: SeenInputs  # the points that chose the weights; others only serve statements
    why_no_sensitivities: str = ""  # why there are no sensitivities; empty if there are
    sample: Batch | None = None  # a few points to run networks on; None without sensitivities
    alive: tuple[Tensor, ...] = ()  # bool F x K: what an earlier pruning left, and nothing else stays; (): all
    floor: float | None = None  # under rows and layers; None: they may lose all weights
    pattern: Pattern | None = None  # n of every m weights of a row, instead of a budget over all
    blend: BlendInputs | None = None  # what a blend is chosen from; None for other methods

    def without_scores(self) -> Ranking:
        """The ranking after its last cut, which can be repaired and stated, but not cut again.

        Its scores are twice as large as the network.
        """
        return replace(self, scores=(), blend=None)

    @property
    def n_weights(self) -> int:
        return sum(weight.n_weights for weight in self.weights)

    @cached_property
    def dense(self) -> list[Tensor]:
        """F x K per weight, on the CPU: the weights before pruning."""
        return [weight.rows(self.model.get_parameter(weight.name).detach()).cpu() for weight in self.weights]

    def sensitivity(self, i: int) -> Tensor | None:
        """F x K of weight i, on the CPU; None if there are none."""
        return None if self.sensitivities is None else self.sensitivities.layers[i].sensitivity_FK.cpu()

    @property
    def sampling_constant(self) -> float:
        """S~ of T6 for a sum of sensitivities of 1."""
        assert self.sensitivities is not None
        options, n_outputs = self.options, self.sensitivities.n_outputs
        return sampling_constant(n_outputs=n_outputs, delta=options.delta, c_constant=options.c_constant)

    @cached_property
    def problem(self) -> AllocationProblem:
        """OptAlloc for the rows of a method that samples, without its budget (T10)."""
        return allocation_problem(self.dense, self.scores, self.sampling_constant, self.options.allocation)


def rank(
    task: ScoringTask,
    options: PruneOptions,
    *,
    alive: Mapping[str, Tensor] | None = None,
    needs_bounds: bool = False,
    progress: bool = False,
    warns: bool = True,
) -> Ranking:
    """Scores every prunable weight by one method.

    `alive` are the masks of an earlier pruning: what they prune stays pruned. `needs_bounds` also computes what only
    bounds need: sensitivities in addition to the scores of a baseline (T17). With `warns`, there is a warning if some
    of the weights are frozen.
    """
    check.flag("progress", progress)
    info, whole = checked_method(options), task
    if task.data is None and info.needs_data and isinstance(options.method, str):  # a function raises its own error
        raise OptionError(
            f"method={info.name!r} needs data: an iterable of batches, a tensor of inputs or a Dataset", option="method"
        )
    from_wanda, why_not = starts_from_wanda(task, info, repair=options.repair), ""
    if from_wanda or not info.uses_sensitivities:
        why_not = _why_no_sensitivities(task, info, needs_bounds=options.statements if from_wanda else needs_bounds)
    read = set[str]()  # hashes: of a loader that shuffles, a method may read others than are scored
    if warns:
        _warn_of_frozen(task.model, task.weights)
    found = held_back = sensitivities = sample = blend = None
    if info.is_blend:
        task, held_back = task.hold_back()
        read.update(hash_ for part in (task.points, held_back) if not part.is_empty for hash_ in part.hashes())
    if not info.uses_sensitivities:
        with progress_bar(f"scoring by {info.name}", None, shown=progress and info.needs_data):
            found = scores_of(replace(task, read=read), info)
    if not why_not:
        with_means = info.is_blend and not from_wanda  # T20
        sensitivities, sample = _measure(task, options.reduce or info.reduce, with_means=with_means, shown=progress)
        repaired = whole.points.hashes() if options.repair or info.fitting else []
        chose = SeenInputs(frozenset(read).union(repaired), is_all=True)
        sensitivities = replace(sensitivities, seen=sensitivities.seen | chose)
    if info.is_blend:
        from sipp.pruning.blending import blend_inputs  # loaded for blends only

        blend = blend_inputs(task, None if from_wanda else sensitivities, held_back)
    scores = _scores(task, found, sensitivities, blend)
    kept = [weight.rows(alive[weight.name]).cpu() for weight in task.weights] if alive else []
    if kept:
        scores = [_alive_first(*layer, is_sampled=info.is_sampled) for layer in zip(scores, kept)]
    return Ranking(
        model=task.model,
        weights=task.weights,
        scores=tuple(scores),
        sensitivities=sensitivities,
        options=options,
        method_name=info.name,
        seen=_chosen_by(info, read, sensitivities, is_within=bool(kept)),
        why_no_sensitivities=why_not,
        sample=sample,
        alive=tuple(kept),
        floor=(info.floor if options.floor is None else float(options.floor)) or None,
        pattern=None if options.pattern is None else Pattern.of(options.pattern),
        blend=blend,
    )


def starts_from_wanda(task: ScoringTask, info: MethodInfo, *, repair: bool) -> bool:
    """Whether Wanda's mask starts the repair of a large linear network, and a blend tries no other."""
    is_search = info.is_blend and repair and task.norm_stats != "batch" and task.data is not None
    return is_search and is_large_linear_network(task.weights, task.parameters())


def _why_no_sensitivities(task: ScoringTask, info: MethodInfo, *, needs_bounds: bool) -> str:
    """Why a method that ranks without sensitivities scores none for statements; empty if it does."""
    if task.data is None:
        return f"{info.name} was given no data; with data there would be bounds"
    if not needs_bounds:
        return f"{info.name} needs no sensitivities, and none were scored; sipp.assess gives bounds for its masks"
    if info.needs_data and not task.data.can_be_read_again:
        return f"{info.name} has used up the iterator; with a list, a loader or a tensor there would be bounds"
    return ""


def is_large_linear_network(weights: Sequence[Weight], parameters: Mapping[str, Tensor]) -> bool:
    """Whether a network is large and all its weights are matrices: trying whole networks is too expensive then."""
    is_large = sum(weight.n_weights for weight in weights) > numerics.MOST_WEIGHTS_OF_SMALL
    return is_large and all(parameters[weight.name].ndim == 2 for weight in weights)


def _scores(
    task: ScoringTask,
    found: Mapping[str, Tensor] | None,
    sensitivities: Sensitivities | None,
    blend: BlendInputs | None,
) -> Sequence[Tensor]:
    """The scores of every weight, F x K on the CPU; a blend is cut by others, and only needs some."""
    if found is not None:
        return [weight.rows(found[weight.name]).cpu() for weight in task.weights]
    if sensitivities is not None:
        return [layer.sensitivity_FK.cpu() for layer in sensitivities.layers]
    if blend is not None and blend.wanda_scores is not None:
        return blend.wanda_scores
    parameters = task.parameters()
    return [weight.rows(parameters[weight.name].detach()).abs().cpu() for weight in task.weights]


def _measure(task: ScoringTask, reduce: Reduce, *, with_means: bool, shown: bool) -> tuple[Sensitivities, Batch]:
    """The sensitivities of a model, and the first points that were scored."""
    sample = list[Batch]()
    with progress_bar("scoring", task.points.n_points_known, shown=shown) as advance:

        def on_batch(batch: Batch) -> None:
            advance(batch.n_points)
            if not sample:
                sample.append(batch.at(slice(N_SAMPLE)).copied())

        return measure_sensitivities(task, reduce=reduce, on_batch=on_batch, with_means=with_means), sample[0]


def _alive_first(scores_FK: Tensor, alive_FK: Tensor, *, is_sampled: bool) -> Tensor:
    """The scores with 0 for pruned weights and, unless the method samples, a positive score for all others.

    Otherwise a budget above the number of positive scores would take pruned weights back, and `random` would rank them
    like any other.
    """
    # The smallest normal number: it decides ties only, and can only add to a bound (T5), never lower it.
    least = 0.0 if is_sampled else torch.finfo(scores_FK.dtype).tiny
    return torch.where(alive_FK, scores_FK.clamp(min=least), 0.0)


def _chosen_by(info: MethodInfo, read: set[str], sensitivities: Sensitivities | None, *, is_within: bool) -> SeenInputs:
    """The points that chose the weights.

    Others may have: those that chose the masks to stay within, or those that a user's function knows by itself.
    """
    if not info.needs_data:  # its points serve statements only
        return SeenInputs(frozenset(read), is_all=not is_within)
    hashes = read.union(() if sensitivities is None else sensitivities.seen.hashes)
    return SeenInputs(frozenset(hashes), is_all=bool(hashes) and not is_within)


def _warn_of_frozen(model: nn.Module, weights: Sequence[Weight]) -> None:
    """Warns of weights with requires_grad=False beside others that train: they would be pruned all the same."""
    frozen = [weight.name for weight in weights if not model.get_parameter(weight.name).requires_grad]
    if frozen and len(frozen) < len(weights):
        some = ", ".join(frozen[:8]) + (", ..." if len(frozen) > 8 else "")
        warn_caller(
            f"{len(frozen)} of {len(weights)} prunable weights are frozen (requires_grad=False) and are pruned like "
            f"the others: {some}; leave them as they are with exclude={frozen[0]!r}"
        )
