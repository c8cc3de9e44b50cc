"""The dense network, a pruned one and unlabelled points in; the pruned network with better kept weights out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from sipp.checking import check_flag, check_number, check_seed, check_whole
from sipp.errors import ModelError, OptionError
from sipp.inputs.batches import Data, batches_of
from sipp.inputs.capture import Forms
from sipp.inputs.layers import unwrap
from sipp.inputs.network_hash import tensors_hash, tensors_of
from sipp.inputs.restore import copy_of
from sipp.numerics import device_of
from sipp.options import ChunkBytes, Scoring
from sipp.progress import Advance, progress_bar
from sipp.pruning.result import Moved, Pruned, not_zero, unstated
from sipp.repairing.gathering import Gatherer, sites_of, stretches, take_census
from sipp.repairing.intercepts import find_places
from sipp.repairing.parts import Parts, divided, judged_error
from sipp.repairing.polishing import output_error, polish
from sipp.repairing.record import LayerRepair, Polish, Repair
from sipp.repairing.refitting import refit
from sipp.scoring.sensitivities import chunk_of

LEARNING_RATE = 1e-3
MOST_STEPS = 10_000_000
UNSTATED = (
    "repair gave the kept weights new values; sipp.assess(model, repaired.model, data) states what holds for them (T17)"
)


@torch.inference_mode(False)
def repair(
    model: nn.Module,
    pruned: Pruned,
    data: Data,
    *,
    steps: int = 0,
    learning_rate: float = LEARNING_RATE,
    n_points: int | None = None,
    seed: int = 0,
    chunk_bytes: ChunkBytes = "auto",
    progress: bool = True,
) -> Pruned:
    """The pruned network with its kept weights refitted to the dense `model`, without labels; masks stay as they are.

    Layer by layer in the order of execution, each row's kept weights and its intercept get the least-squares fit of the
    dense layer's outputs, on the inputs that the repaired network itself meets. Then `steps` of Adam bring the outputs
    of the whole network nearer to the dense ones. One point in twenty of `data` chooses: a layer that is not better
    there is left alone, and the polish stops where it no longer gains. One in twenty does nothing but judge the result,
    if there are 80 points or more: with fewer the record has no estimate. `repair` of the record says what was done.
    All points are used unless `n_points` says how many; all of them are held in memory. Neither model is changed.

    Example:
        >>> import sipp, torch
        >>> _ = torch.manual_seed(0)
        >>> net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
        >>> points = torch.rand(200, 8)
        >>> fixed = sipp.repair(net, sipp.prune(net, points, keep=0.5, method="wt"), points)
        >>> fixed.repair.output_after < fixed.repair.output_before
        True
    """
    steps = check_whole("steps", steps, least=0, most=MOST_STEPS)
    check_number("learning_rate", learning_rate, above=0)
    check_seed(seed)
    check_flag("progress", progress)
    _check_record(pruned)
    dense, given = unwrap(model), unwrap(pruned.model)
    _check_twins(dense, given, pruned.masks)
    parts = divided(batches_of(data, device=device_of(dense), n_points=n_points, seed=seed))
    repaired, n_bytes = copy_of(given), chunk_of(Scoring(chunk_bytes=chunk_bytes).chunk_bytes, device_of(dense))
    at_first, before = output_error(dense, given, parts.aside), judged_error(dense, given, parts)
    with progress_bar("repairing", len(pruned.masks) + steps, shown=progress) as advance:
        layers = _refit_all(dense, repaired, pruned.masks, parts, n_bytes, advance)
        at_last, refitted = output_error(dense, repaired, parts.aside), judged_error(dense, repaired, parts)
        polished = None
        if steps > 0:
            polished, at_last = polish(
                dense,
                repaired,
                pruned.masks,
                parts.fitted,
                parts.aside,
                steps=steps,
                learning_rate=learning_rate,
                seed=seed,
                advance=advance,
            )
    done = _record(
        parts, layers, polished, (at_first, at_last), (before, refitted, judged_error(dense, repaired, parts))
    )
    return _restated(pruned, copy_of(given) if done.undone else repaired, done, pruned.seen | parts.keys)


def _refit_all(
    dense: nn.Module,
    repaired: nn.Module,
    masks: Mapping[str, Tensor],
    parts: Parts,
    chunk_bytes: int,
    advance: Advance,
) -> tuple[LayerRepair, ...]:
    """Refits all weights of `repaired` in place, in the order of execution."""
    sites, forms = sites_of(dense, masks), Forms()
    weights = {weight.name: weight for site in sites for weight in site.weights.values()}
    census = take_census(dense, sites, parts.batches, forms)
    gatherer = Gatherer(
        dense, repaired, sites, sites_of(repaired, masks), parts.batches, parts.is_aside, census, forms, chunk_bytes
    )
    places = find_places(dense, sites, parts.batches[0])
    done = []
    for stretch, fits in stretches(census):
        all_names = [name for group in stretch for name in group]
        known = [gatherer.targets(all_names, i) for i in range(len(parts.batches))] if fits else None
        for group in stretch:
            sums = gatherer.gather(group, known)
            for name in group:
                done.append(refit(repaired, weights[name], masks[name], sums[name], places[name]))
                advance(1)
    met = {layer.name for layer in done}
    unmet = [LayerRepair(name, None, None, None, "none", "it meets no patches") for name in weights if name not in met]
    return (*done, *unmet)


def _check_record(pruned: object) -> None:
    """Raises unless it is the record of a pruning."""
    if not isinstance(pruned, Pruned):
        raise OptionError(
            f"pruned is a {type(pruned).__name__}, not the record of a pruning",
            fix="give what sipp.prune or sipp.assess gives",
        )


def _check_twins(dense: nn.Module, given: nn.Module, masks: Mapping[str, Tensor]) -> None:
    """Raises unless both models hold the same tensors by name and shape, and the masks are those of the zeros."""
    ours, theirs = tensors_of(dense), tensors_of(given)
    odd = ours.keys() ^ theirs.keys() or {name for name in ours if ours[name].shape != theirs[name].shape}
    if odd:
        raise ModelError(
            f"{min(odd)} is not the same tensor in the dense and the pruned model", fix="give the model that was pruned"
        )
    if device_of(dense) != device_of(given):
        raise ModelError(
            f"the dense model lies on {device_of(dense)}, the pruned one on {device_of(given)}", fix="move one of them"
        )
    parameters = dict(given.named_parameters(remove_duplicate=False))
    for name, mask in masks.items():
        parameter = parameters.get(name)
        if parameter is None or parameter.shape != mask.shape:
            raise ModelError(
                f"the mask of {name} fits no parameter of the pruned model", fix="give the record as it was"
            )
    if name := not_zero(given, masks):
        raise ModelError(f"{name} is not zero everywhere off its mask", fix="give the record as it was, or prune again")


def _record(
    parts: Parts,
    layers: tuple[LayerRepair, ...],
    polished: Polish | None,
    chosen: tuple[float | None, float | None],
    judged: tuple[float | None, float | None, float | None],
) -> Repair:
    """The record of a repair, undone if it is worse, by the output's errors: on the points that choose, before and at
    the end; on those that judge, before, after the refit and at the end."""
    at_first, at_last = chosen
    before, refitted, after = judged
    is_worse = at_first is not None and at_last is not None and not at_last <= at_first
    return Repair(
        layers=layers,
        n_points=sum(batch.n_points for batch in parts.fitted),
        n_aside=sum(batch.n_points for batch in parts.aside),
        n_judged=sum(batch.n_points for batch in parts.judging),
        output_before=before,
        output_refit=refitted,
        output_after=before if is_worse else after,
        output_chosen=at_first if is_worse else at_last,
        polish=polished,
        undone="the output was not nearer to the dense one on the points kept aside" if is_worse else "",
    )


def _restated(pruned: Pruned, model: nn.Module, done: Repair, seen: frozenset[bytes]) -> Pruned:
    """The record of the repaired network: what was promised spoke of the old values, so nothing of it is left."""
    moved = None if done.output_chosen is None else Moved(done.output_chosen, done.n_aside, aside=False)
    if done.output_after is not None:
        moved = Moved(done.output_after, done.n_judged, aside=True)
    about = replace(unstated(pruned, UNSTATED), model=model, stated=tensors_hash(model))
    return replace(about, repair=done, moved=moved, seen=seen)
