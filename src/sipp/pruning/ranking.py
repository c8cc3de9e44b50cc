"""Scores every prunable weight by a method, and keeps what later statements need.

A ranking does not depend on the budget: one ranking can be cut to any number of weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sipp.errors import OptionError
from sipp.inputs import Batch, Data, fresh, points_at, to_rows, warn_of_frozen
from sipp.progress import progress_bar
from sipp.pruning.blending import blend_inputs
from sipp.pruning.ranked import BlendInputs, Ranking, is_like_a_language_model
from sipp.results import PruneOptions, check, pattern_of
from sipp.scoring import (
    MethodInfo,
    ScoringTask,
    Sensitivities,
    checked_method,
    measure_sensitivities,
    method_of,
    own_scores,
    score_of,
)

N_SAMPLE = 32  # points on which the output of a cut is measured


@dataclass(frozen=True)
class _Plan:
    """What a ranking reads, decided before any pass."""

    task: ScoringTask  # with the points to score
    method_task: ScoringTask  # with the points that the method reads, noted in `method_keys`
    held_back: Data | None  # points held back to choose a blend
    needs_first_mask_only: bool  # a search follows, for which Wanda's mask is enough
    why_no_sensitivities: str  # empty if they are computed
    method_keys: set[str]  # filled while the method reads


def rank(task: ScoringTask, options: PruneOptions, *, progress: bool = False, statements: bool = False) -> Ranking:
    """Scores every prunable weight by one method.

    `statements` also computes what only statements need: sensitivities in addition to the scores of a baseline (T17).
    """
    check.flag("progress", progress)
    info = checked_method(options)
    warn_of_frozen(task.model, task.weights)
    if task.data is None and info.needs_data and isinstance(options.method, str):  # a function raises its own error
        raise OptionError(
            f"method={info.name!r} needs data: an iterable of batches, a tensor of inputs or a Dataset", option="method"
        )
    plan = _plan(task, options, info, statements=statements)
    method_scores = None
    if not info.uses_sensitivities:
        with progress_bar(f"scoring by {info.name}", None, shown=progress and info.needs_data):
            method_scores = own_scores(plan.method_task, info) if info.is_own else score_of(info)(plan.method_task)
    sensitivities, sample = None, None
    if not plan.why_no_sensitivities:
        sensitivities, sample = _measure(plan, options, info, progress=progress)
        repaired_on = task.data if options.repair or info.fitting else None
        sensitivities = _with_selection_points(sensitivities, frozenset(plan.method_keys), plan.held_back, repaired_on)
    blend = None
    if info.is_blend and (sensitivities is not None or plan.needs_first_mask_only):
        blend = blend_inputs(plan.task, None if plan.needs_first_mask_only else sensitivities, plan.held_back)
    return Ranking(
        model=task.model,
        weights=task.weights,
        scores=_scores_to_cut(plan.task, sensitivities, method_scores, blend),
        sensitivities=sensitivities,
        options=options,
        why_no_sensitivities=plan.why_no_sensitivities,
        sample=sample,
        floor=floor_of(options),
        pattern=None if options.pattern is None else pattern_of(options.pattern),
        blend=blend,
        chosen_by_points=info.needs_data,
        method_keys=frozenset(plan.method_keys),
    )


def _plan(task: ScoringTask, options: PruneOptions, info: MethodInfo, *, statements: bool) -> _Plan:
    """Which points the method reads, which are scored and held back, and whether there will be sensitivities.

    The hashes of the points that the method reads are noted too: of a loader that shuffles, they may be others than
    those that are scored.
    """
    first_mask_only = needs_first_mask_only(task, info, options)
    statements = options.statements if first_mask_only else statements
    why_not = _why_no_sensitivities(info, task.data, statements, first_mask_only)
    keys: set[str] = set()
    if info.is_blend:
        scored, held_back = hold_back_points(task.collecting(keys) if first_mask_only else task)
        return _Plan(scored, scored, held_back, first_mask_only, why_not, keys)
    return _Plan(task, task.collecting(keys), None, first_mask_only, why_not, keys)


def _measure(plan: _Plan, options: PruneOptions, info: MethodInfo, *, progress: bool) -> tuple[Sensitivities, Batch]:
    """The sensitivities of a model, and the first points that were scored."""
    sample = list[Batch]()
    with progress_bar("scoring", plan.task.points.n_points_known, shown=progress) as advance:

        def on_batch(batch: Batch) -> None:
            advance(batch.n_points)
            if not sample:
                sample.append(fresh(points_at(batch, slice(N_SAMPLE))))

        found = measure_sensitivities(
            plan.task,
            reduce=options.reduce or info.reduce,
            on_batch=on_batch,
            with_means=info.is_blend and not plan.needs_first_mask_only,
        )
    return found, sample[0]


def _scores_to_cut(
    task: ScoringTask,
    sensitivities: Sensitivities | None,
    method_scores: Mapping[str, Tensor] | None,
    blend: BlendInputs | None,
) -> tuple[Tensor, ...]:
    """The scores to cut by, F x K per weight.

    The method's own; else the sensitivities; else Wanda's, if a search only needs a first mask; else magnitudes.
    """
    if method_scores is not None:
        return tuple(to_rows(weight, method_scores[weight.name]).cpu() for weight in task.weights)
    if sensitivities is not None:
        return tuple(layer.sensitivity_FK.cpu() for layer in sensitivities.layers)
    if blend is not None and blend.wanda_scores is not None:
        return blend.wanda_scores
    return tuple(to_rows(w, task.parameters()[w.name].detach()).abs().cpu() for w in task.weights)


def floor_of(options: PruneOptions) -> float | None:
    """The floor under rows and layers: the option, or the method's default; None if there is none."""
    floor = method_of(options.method).floor if options.floor is None else float(options.floor)
    return floor or None


def _with_selection_points(
    sensitivities: Sensitivities, method_keys: frozenset[str], *parts: Data | None
) -> Sensitivities:
    """The sensitivities with these points added to `selection_keys`."""
    used = [data for data in parts if data is not None and not data.is_empty]
    keys = sensitivities.selection_keys.union(method_keys, *(data.hashes() for data in used))
    return replace(sensitivities, selection_keys=keys)


def needs_first_mask_only(task: ScoringTask, info: MethodInfo, options: PruneOptions) -> bool:
    """Whether a blend only gives the first mask of a search (T21) in a large network of linear layers.

    Then Wanda's mask is taken without trying others, because it is the best start for language models.
    """
    is_start = info.is_blend and options.repair in (True, "joint") and task.norm_stats != "batch"
    return is_start and task.data is not None and is_like_a_language_model(task.weights, task.parameters())


def _why_no_sensitivities(info: MethodInfo, data: Data | None, statements: bool, first_mask_only: bool) -> str:
    """Why no sensitivities are computed; empty if they are."""
    if info.uses_sensitivities and not first_mask_only:
        return ""
    if data is None:
        return f"{info.name} was given no data; with data there would be bounds"
    if not statements:
        return f"{info.name} needs no sensitivities, and none were scored; sipp.assess gives bounds for its masks"
    if info.needs_data and not data.can_be_read_again:
        return f"{info.name} has used up the iterator; with a list, a loader or a tensor there would be bounds"
    return ""


def hold_back_points(task: ScoringTask) -> tuple[ScoringTask, Data]:
    """The task with the points to score, and points held back for a sound bound (T18), a blend (T20) or `compare`."""
    scored, held_back = task.points.hold_back()
    return task.with_points(scored), held_back


def only_alive(ranking: Ranking, alive: Mapping[str, Tensor]) -> Ranking:
    """The ranking with score 0 for pruned weights and, unless the method samples, a positive score for all others.

    Otherwise a budget above the number of positive scores would take pruned weights back, and `random` would rank them
    like any other.
    """
    if not alive:
        return ranking
    scores = []
    for weight, scores_FK in zip(ranking.weights, ranking.scores):
        alive_FK = to_rows(weight, alive[weight.name]).to(scores_FK.device)
        # The smallest normal number: it decides ties only, and can only add to a bound (T5), never lower it.
        least = torch.finfo(scores_FK.dtype).tiny if not method_of(ranking.options.method).is_sampled else 0.0
        scores.append(torch.where(alive_FK, scores_FK.clamp(min=least), 0.0))
    return replace(ranking, scores=tuple(scores), is_thinned=True)


def masks_within(masks: Mapping[str, Tensor], alive: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The masks without weights that are already pruned; without `alive`, the masks as they are.

    `only_alive` ranks pruned weights last, but a weight that is alive and exactly 0 ties with them.
    """
    return {name: mask & alive[name] if alive else mask for name, mask in masks.items()}
