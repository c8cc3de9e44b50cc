"""Mask and weights found together, layer by layer in the order of execution (T21). No labels, no training.

Each layer gets the inputs x of the network pruned so far. Its target is  W x + a (dense output - W x), where a is the
error feedback: a = 0 repeats the dense layer W on its new inputs, a = 1 makes up for all that earlier layers have lost.
At the end of a residual block the loss of the residual connection is made up for as well. Validation points choose the
error feedback, the budgets of the layers, the ridges and, for each layer, between the first mask and the one that the
search finds; then all points fit the network once more.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from torch import Tensor, nn

from sipp.allocation.largest_scores import even_layers, largest, largest_above_floor
from sipp.errors import OptionError
from sipp.inputs.batches import fresh, points_at
from sipp.inputs.blocks import Blocks, find_blocks
from sipp.inputs.capture import Forms
from sipp.inputs.distance import output_error
from sipp.inputs.restore import copy_of
from sipp.native.memory import give_back_freed
from sipp.progress import Advance, fit_cost
from sipp.records.batches import Batch
from sipp.records.numerics import SCORE_DTYPE, device_of
from sipp.records.options import Pattern
from sipp.records.ranking import LARGE, Weight, from_rows, is_like_a_language_model, to_rows
from sipp.records.repair import LayerRepair, Repair
from sipp.repairing.data_split import DataSplit, DenseOutputs, held_out_error, in_large_batches, merged_batches
from sipp.repairing.gathering import layer_usage, masked_layers, stretches
from sipp.repairing.intercepts import Place, find_places
from sipp.repairing.layer_fit import PEERS, JointLayer, LayerTask, Way, fit_layer, left_as_given
from sipp.repairing.layer_search import Bases
from sipp.repairing.layer_targets import LayerTargets, find_residual_layers, refuse_residual
from sipp.repairing.stages import NetworkStage, dense_and_pruned, usage_of

ERROR_FEEDBACKS = (1.0, 0.25, 0.0)  # candidates for a, tried in this order as long as the error falls
# Of large networks only first layers are tried, which praises a = 1: what it costs shows in deep ones of linear layers
# alone (SmolLM2 at half of its weights: perplexity 20.9 with 1, 20.5 with this). Nor are magnitudes compared there.
LARGE_ERROR_FEEDBACKS = (0.25,)
RIDGES = (1e-3, 1e-4)  # of the mean diagonal, towards the dense weights
LARGE_RIDGES = RIDGES[:1]  # for those: of SmolLM2's 210 weights it was chosen for 209
TRIED_OF, FEWEST_TRIED = 4, 256  # a and budgets are tried with one in so many points, and not fewer than this
PATCHES_PER_FEATURE = 256  # more than a refit looks at: a search fits masks too
SAME_BUDGET = 0.01  # relative: layers that keep nearly as many are not tried twice
NOISE = 0.05  # relative: errors of trials that are closer are the same, and the first is taken
SMALL = LARGE  # weights up to which all layers are tried; of larger networks the first ones
FIRST_OF = 8  # with one in so many of the weights

# Of layers: the first masks', by global magnitude, the same share of all, half way between the first masks' and that
Budgets = Literal["given", "magnitude", "even", "between"]
BUDGETS: tuple[Budgets, ...] = ("given", "between", "magnitude", "even")
Masks = Mapping[str, Tensor]


@dataclass(frozen=True)
class Trial:
    """One choice, fitted to fewer points."""

    error_feedback: float
    budgets: Budgets
    n_layers: int  # that were fitted: the first ones
    error: float | None  # of the output on the points kept aside; None where it holds no real numbers


@dataclass(frozen=True)
class JointSearch:
    """A copy of the network with the masks and weights that were found, and what was done.

    Where all points were fitted in the end (`record.n_points` is more than `record.n_judged_fit`) none are left to
    judge it: the errors are those of a network fitted in the same way to the `n_judged_fit` others alone.
    """

    model: nn.Module
    masks: dict[str, Tensor]
    layers: tuple[JointLayer, ...]  # in the order of execution
    record: Repair
    trials: tuple[Trial, ...]  # empty where nothing was to be chosen


@dataclass(frozen=True)
class _Task:
    """What all fits of a network share."""

    dense: nn.Module
    weights: Mapping[str, Weight]
    layer: LayerTask
    residuals: Collection[str] | None
    blocks: Blocks | None
    chunk_bytes: int
    forms: Forms = field(default_factory=Forms)  # of batches that were checked


def joint(
    model: nn.Module,
    masks: Masks,
    split: DataSplit,
    *,
    way: Way = "joint",
    error_feedback: float | Sequence[float] = ERROR_FEEDBACKS,
    ridges: Sequence[float] = RIDGES,
    budgets: Sequence[Budgets] = BUDGETS,
    floor: float | None = None,
    pattern: Pattern | None = None,
    residuals: Collection[str] | None = None,
    given: nn.Module | None = None,
    fits_all: bool = True,
    blocks: str | None = None,
    chunk_bytes: int,
    advance: Advance = lambda n: None,
) -> JointSearch:
    """The dense network pruned to as many weights as the given masks keep, or to the pattern that they obey.

    `budgets` are the candidates for the numbers of weights of layers: ("given",) keeps those of the given masks. With a
    `floor` no row dies that has a weight in the first masks, and budgets by magnitude leave each layer at least that
    share of an even cut. `residuals` are the weights at the ends of residual blocks; None: they are found. Weights that
    are 0 in the dense network and not in the given mask stay 0. `way` is "joint", "given" (masks stay, weights are
    refitted to the same targets), or a peer. `given` has weights of its own under the masks: what is found is compared
    with it, and given up where it is worse; None: with the dense weights under them. Unless `fits_all`, the result is
    the network that was judged. `advance` is called with the cost of each weight, and once more with `fits_all`.
    """
    candidates = (0.0,) if way in PEERS else _candidates(error_feedback)
    budgets = budgets if way == "joint" and pattern is None else ("given",)
    weights = {weight.name: weight for one in masked_layers(model, masks) for weight in one.weights.values()}
    if is_like_a_language_model(list(weights.values()), masks):
        candidates = LARGE_ERROR_FEEDBACKS if tuple(candidates) == ERROR_FEEDBACKS else candidates
        ridges = LARGE_RIDGES if tuple(ridges) == RIDGES else ridges
        budgets = tuple(one for one in budgets if one != "magnitude") or budgets
    layer = LayerTask(way, candidates[0], tuple(ridges), pattern, floor is not None, _allow_tf32(model, weights, masks))
    split = in_large_batches(split)
    give_back_freed()
    found = find_blocks(model, split.batches[0], blocks)
    task = _Task(model, weights, layer, () if way in PEERS else residuals, found, chunk_bytes)
    task, chosen, trials = _chosen(task, masks, split, candidates, budgets, floor)
    start = _starts(task, masks, (chosen,), floor)[chosen]
    at_first, before = _errors(task, _before(task, masks, given)[0], split)  # gone before there is another copy
    judged = _fitted(task, start, split, {}, advance)
    give_back_freed()
    at_last, after = _errors(task, judged.model, split)
    is_worse = way not in PEERS and at_first is not None and at_last is not None and not at_last <= at_first
    made = _undone(task, masks, judged, given) if is_worse else judged
    n_fitted = sum(batch.n_points for batch in split.fit)
    if fits_all and not is_worse:
        made = _fitted(task, start, _whole(split), {one.name: one for one in judged.layers}, advance)
    n_aside, n_judged = (sum(batch.n_points for batch in some) for some in (split.validation, split.test))
    layers = (
        LayerRepair(one.name, one.error_before, one.error, one.ridge, one.intercept, one.why, n_moved=one.moved)
        for one in made.layers
    )
    record = Repair(
        layers=tuple(layers),
        n_points=n_fitted if made is judged or is_worse else n_fitted + n_aside + n_judged,
        n_aside=n_aside,
        n_judged=n_judged,
        output_before=before,
        output_refit=before if is_worse else after,
        output_after=before if is_worse else after,
        output_chosen=at_first if is_worse else at_last,
        polish=None,
        undone="the output was no closer to the dense one on held-back inputs" if is_worse else "",
        way="refit" if way == "given" else way,
        error_feedback=task.layer.error_feedback,
        budgets=chosen,
        n_judged_fit=n_fitted,
    )
    return JointSearch(made.model, made.masks, made.layers, record, trials)


def _allow_tf32(model: nn.Module, weights: Mapping[str, Weight], masks: Masks) -> bool:
    """Whether a GPU may round the factors of products: in networks that are large, where most time goes into them.

    Both networks are rounded alike, and sums over thousands of patches even it out: least squares see no more of it
    than a ridge a thousand times smaller than theirs.
    """
    return device_of(model).type == "cuda" and is_like_a_language_model(list(weights.values()), masks)


def _candidates(error_feedback: float | Sequence[float]) -> tuple[float, ...]:
    found = (float(error_feedback),) if isinstance(error_feedback, int | float) else tuple(error_feedback)
    if not found or not all(0 <= one <= 1 for one in found):
        raise OptionError(
            f"error_feedback={error_feedback!r} is not in [0, 1]",
            fix="give one number, or several to choose from",
            option="error_feedback",
        )
    return found


def _with_feedback(task: _Task, error_feedback: float) -> _Task:
    return replace(task, layer=replace(task.layer, error_feedback=error_feedback))


def _chosen(
    task: _Task,
    masks: Masks,
    split: DataSplit,
    candidates: Sequence[float],
    budgets: Sequence[Budgets],
    floor: float | None,
) -> tuple[_Task, Budgets, tuple[Trial, ...]]:
    """The task with the error feedback that was chosen, the budgets that were, and the trials."""
    if len(candidates) == 1 and (len(budgets) == 1 or len(_starts(task, masks, budgets, floor)) == 1):
        return task, budgets[0], ()
    first = _first(task, masks, split)
    trials = _tried(task, first, _few(split), candidates, budgets, floor)
    best = _best(trials)
    return _with_feedback(task, best.error_feedback), best.budgets, tuple(trials)


def _best(trials: Sequence[Trial]) -> Trial:
    """The first whose error is as small as the least, but for noise."""
    least = min(map(_or_infinite, trials))
    return next(one for one in trials if _or_infinite(one) <= (1 + NOISE) * least)


def _or_infinite(trial: Trial) -> float:
    return math.inf if trial.error is None else trial.error


@dataclass(frozen=True)
class _Fitted:
    """A network that was fitted, its masks, and what became of its layers."""

    model: nn.Module
    masks: dict[str, Tensor]
    layers: tuple[JointLayer, ...]


def _errors(task: _Task, model: nn.Module, split: DataSplit) -> tuple[float | None, float | None]:
    """How far its output is from the dense one, on the points that choose and on those that only judge."""
    return output_error(task.dense, model, split.validation), held_out_error(task.dense, model, split)


def _before(task: _Task, masks: Masks, given: nn.Module | None) -> tuple[nn.Module, dict[str, JointLayer]]:
    """The network before: the given one, or the dense one under the given masks, and the records of its weights."""
    model = copy_of(task.dense if given is None else given)
    return model, {name: left_as_given(model, task.weights[name], masks[name], "undone") for name in masks}


def _undone(task: _Task, masks: Masks, fitted: _Fitted, given: nn.Module | None) -> _Fitted:
    """That network in place of one that was fitted, with the errors of its layers; of a given one they are unknown."""
    model, left = _before(task, masks, given)
    layers = [left[one.name] for one in fitted.layers]
    if given is None:
        layers = [replace(_with_errors(left[one.name], one), error=one.error_before) for one in fitted.layers]
    return _Fitted(model, dict(masks), tuple(layers))


def _first(task: _Task, masks: Masks, split: DataSplit) -> dict[str, Tensor]:
    """The masks of the layers that trials fit: all of a small network, the first to be executed of others."""
    n_wanted = max(SMALL, sum(mask.numel() for mask in masks.values()) // FIRST_OF)
    if sum(mask.numel() for mask in masks.values()) <= n_wanted:
        return dict(masks)
    usage = layer_usage(task.dense, masked_layers(task.dense, masks), split.batches[:1], task.forms)
    found, n_weights = dict[str, Tensor](), 0
    for group in usage.order:
        found |= {name: masks[name] for name in group}
        n_weights += sum(masks[name].numel() for name in group)
        if n_weights >= n_wanted:
            break
    return found


def _few(split: DataSplit) -> DataSplit:
    """Some of the points that are fitted, a quarter of them at least, and all points kept aside, for several fits."""
    n_points = sum(batch.n_points for batch in split.fit)
    step = n_points // max(FEWEST_TRIED, n_points // TRIED_OF)
    if step < 2:
        return replace(split, dense_outputs=DenseOutputs())
    most = max(batch.n_points for batch in split.fit)
    fitted = merged_batches([fresh(points_at(batch, slice(None, None, step))) for batch in split.fit], most)
    is_validation = (False,) * len(fitted) + (True,) * len(split.validation)
    return replace(
        split, batches=(*fitted, *split.validation), is_validation=is_validation, dense_outputs=DenseOutputs()
    )


def _whole(split: DataSplit) -> DataSplit:
    """All points to be fitted."""
    batches = (*split.batches, *split.test)
    return replace(split, batches=batches, is_validation=(False,) * len(batches), test=(), dense_outputs=None)


def _tried(
    task: _Task,
    masks: Masks,
    split: DataSplit,
    candidates: Sequence[float],
    budgets: Sequence[Budgets],
    floor: float | None,
) -> list[Trial]:
    """How far the output moves with each feedback on the first budgets, while that falls; then with other budgets."""
    starts = _starts(task, masks, budgets, floor)
    trials = list[Trial]()

    def add(feedback: float, name: Budgets) -> bool:
        """Whether it is the best so far."""
        one = _with_feedback(task, feedback)
        if task.residuals is not None:
            one = replace(one, residuals=[name for name in task.residuals if name in masks])
        made = _fitted(one, starts[name], split, {}, lambda n: None)
        error = output_error(task.dense, made.model, split.validation)
        trials.append(Trial(feedback, name, len(masks), error))
        return _or_infinite(trials[-1]) < min(map(_or_infinite, trials[:-1]), default=math.inf)

    first, *others = sorted(starts, key=lambda name: name != "between")  # where errors are the same, it is taken
    for feedback in candidates:
        if not add(feedback, first):
            break
    best = _best(trials)
    for name in others:
        add(best.error_feedback, name)
    return trials


def _starts(
    task: _Task, masks: Masks, wanted: Sequence[Budgets], floor: float | None
) -> dict[Budgets, dict[str, Tensor]]:
    """First masks by budgets of layers; those whose layers keep nearly as many as another's are left out.

    All keep as many weights in total. Budgets that are not given are filled by magnitude.
    """
    weights = [weight for name, weight in task.weights.items() if name in masks]
    budget = sum(int(mask.sum()) for mask in masks.values())
    found: dict[Budgets, dict[str, Tensor]] = {}
    counts = list[list[int]]()
    for name in wanted:
        shares = even_layers([(w.n_rows, w.fan_in) for w in weights], budget, least=0 if floor is None else 1)
        if name == "between":
            shares = _between([int(masks[w.name].sum()) for w in weights], shares, weights)
        if name in ("even", "between") and any(_nearly(shares, one) for one in counts):
            continue
        if name == "given":
            start = dict(masks)
        else:
            rows = [to_rows(w, task.dense.get_parameter(w.name).detach()) for w in weights]
            dense = [one_FK.cpu().abs().to(SCORE_DTYPE) for one_FK in rows]
            start = _named(weights, _largest_of(dense, budget if name == "magnitude" else shares, floor), masks)
        kept_each = [int(start[weight.name].sum()) for weight in weights]
        if not any(_nearly(kept_each, one) for one in counts):
            counts.append(kept_each)
            found[name] = start
    return found


def _between(counts: Sequence[int], shares: Sequence[int], weights: Sequence[Weight]) -> list[int]:
    """The geometric means of both, scaled to the same sum; no layer gets more than it has."""
    means = [math.sqrt(one * other) for one, other in zip(counts, shares)]
    sizes = [w.n_rows * w.fan_in for w in weights]
    found, left = [0] * len(means), sum(counts)
    order = sorted(range(len(means)), key=lambda i: -means[i] / sizes[i])
    rest = sum(means)
    for i in order:
        found[i] = min(sizes[i], round(left * means[i] / rest)) if rest > 0 else 0
        left, rest = left - found[i], rest - means[i]
    return found


def _nearly(counts: Sequence[int], others: Sequence[int]) -> bool:
    return all(abs(one - other) <= SAME_BUDGET * other for one, other in zip(counts, others))


def _largest_of(dense: list[Tensor], budget: int | list[int], floor: float | None) -> list[Tensor]:
    """Masks of the largest weights, of a budget for all layers or of each layer's own."""
    if isinstance(budget, int):
        return largest(dense, budget) if floor is None else largest_above_floor(dense, dense, budget, share=floor)
    pairs = list(zip(dense, budget))
    if floor is None:
        return [largest([one_FK], kept)[0] for one_FK, kept in pairs]
    return [largest_above_floor([one_FK], [one_FK], kept, share=0.0)[0] for one_FK, kept in pairs]


def _named(weights: Sequence[Weight], cut: Sequence[Tensor], like: Masks) -> dict[str, Tensor]:
    pairs = zip(weights, cut)
    return {w.name: from_rows(w, mask_FK, like[w.name]).to(like[w.name].device) for w, mask_FK in pairs}


def search_block(
    dense: nn.Module,
    masks: Masks,
    split: DataSplit,
    inputs: Sequence[Batch],
    *,
    error_feedback: float = LARGE_ERROR_FEEDBACKS[0],
    ridges: Sequence[float] = LARGE_RIDGES,
    pattern: Pattern | None = None,
    follows: bool = True,
    chunk_bytes: int,
) -> tuple[nn.Module, dict[str, Tensor], tuple[JointLayer, ...]]:
    """One block of a network, mask and weights found together: its pruned copy, the masks, what became of the weights.

    `split` holds its batches as the dense network gives them, `inputs` as the one that is pruned so far does.
    """
    weights = {weight.name: weight for one in masked_layers(dense, masks) for weight in one.weights.values()}
    allow_tf32 = device_of(dense).type == "cuda"  # a block of a network that is large
    layer = LayerTask("joint", error_feedback, tuple(ridges), pattern, keeps_rows=False, allow_tf32=allow_tf32)
    task = _Task(dense, weights, layer, None, None, chunk_bytes)
    made = _fitted(task, masks, split, {}, lambda n: None, inputs=inputs, follows=follows)
    return made.model, made.masks, made.layers


def _fitted(
    task: _Task,
    start: Masks,
    split: DataSplit,
    decided: Mapping[str, JointLayer],
    advance: Advance,
    *,
    inputs: Sequence[Batch] | None = None,
    follows: bool = False,
) -> _Fitted:
    """The network from first masks, its layers in the order of execution; all points fit what was decided before.

    `inputs` are those of the pruned network, where they are others; with `follows` earlier layers have changed them.
    """
    dense = task.dense
    usage = usage_of(dense, start, split, task.forms, PATCHES_PER_FEATURE)
    give_back_freed()
    pruned = copy_of(dense)
    pair = dense_and_pruned(
        dense,
        pruned,
        start,
        split,
        usage,
        blocks=task.blocks,
        chunk_bytes=task.chunk_bytes,
        dtype=SCORE_DTYPE,
        allow_tf32=task.layer.allow_tf32,
        pruned_batches=inputs,
    )
    places = find_places(dense, pair.dense_layers, split.batches[0])
    _check_residuals(task.residuals, pair.usage.order)
    masks, layers = dict(start), list[JointLayer]()
    for stage in pair.stages():
        is_behind = follows or stage.follows
        for mask, layer in _fitted_stage(
            task, stage, pruned, start, places, decided, split.dense_outputs, follows=is_behind
        ):
            masks[layer.name] = mask
            layers.append(layer)
            advance(fit_cost(mask.shape))
    reached = {layer.name for layer in layers}
    for name in (name for name in start if name not in reached):
        advance(fit_cost(start[name].shape))
        layers.append(left_as_given(pruned, task.weights[name], start[name], "no inputs reach it"))
    return _Fitted(pruned, masks, tuple(layers))


def _fitted_stage(
    task: _Task,
    stage: NetworkStage,
    pruned: nn.Module,
    start: Masks,
    places: Mapping[str, Place],
    decided: Mapping[str, JointLayer],
    known: DenseOutputs | None,
    *,
    follows: bool,
) -> Iterator[tuple[Tensor, JointLayer]]:
    """The masks of a stage's weights, one after the other, and what became of them. Its targets end with it."""
    gatherer, bases = stage.gatherer, Bases()
    residuals = None if task.residuals is None else [name for name in task.residuals if name in stage.names]
    corrected = find_residual_layers(gatherer, residuals, follows=follows)
    is_large = sum(mask.numel() for mask in start.values()) > SMALL  # a small one would take its memory again and again
    for stretch, fits in stretches(gatherer.usage, device_of(task.dense)):
        targets = LayerTargets(gatherer, corrected, [name for group in stretch for name in group], fits, known)
        for group in stretch:
            if is_large:
                give_back_freed()
            sums = gatherer.gather(group, targets.taken(group).of_batch)
            for name in group:
                weight, before = task.weights[name], decided.get(name)
                mask, layer = fit_layer(
                    task.layer, pruned, weight, start[name], sums.pop(name), places[name], before, bases
                )
                yield mask, _with_errors(replace(layer, corrects=name in corrected), before)
        del targets  # before those of the next stretch are made


def _check_residuals(residuals: Collection[str] | None, order: Sequence[Sequence[str]]) -> None:
    for name in residuals or ():
        if not any(name in group for group in order):
            refuse_residual(name)


def _with_errors(layer: JointLayer, judged: JointLayer | None) -> JointLayer:
    """The layer with the errors that were found on points kept aside, where those are fitted now."""
    if judged is None:
        return layer
    return replace(
        layer,
        error_before=judged.error_before,
        error_given=judged.error_given,
        error_joint=judged.error_joint,
        error=judged.error,
    )
