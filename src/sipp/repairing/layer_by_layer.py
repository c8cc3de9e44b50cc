"""The dense network, a pruned one and unlabelled points in; the pruned network with better kept weights out."""

from __future__ import annotations

import glob
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from sipp.errors import DataError, ModelError
from sipp.inputs.batches import concatenated, fresh, points_at
from sipp.inputs.capture import Forms
from sipp.inputs.data import AnyData, data_of
from sipp.inputs.distance import output_error
from sipp.inputs.layers import PrunableLayer, find_prunable_layers
from sipp.inputs.point_keys import draw_keys_of
from sipp.inputs.restore import copy_of
from sipp.progress import Advance, progress_bar
from sipp.records.batches import Batch
from sipp.records.network_hash import tensors_of
from sipp.records.numerics import device_of, integers
from sipp.records.options import ChunkBytes, Scoring
from sipp.records.pruned import OutputChange, not_zero
from sipp.records.repair import LayerRepair, Polish, Repair
from sipp.repairing.gathering import Gatherer, stretches, take_census
from sipp.repairing.intercepts import find_places
from sipp.repairing.polishing import polish
from sipp.repairing.refitting import refit
from sipp.scoring.sensitivities import chunk_of

# One point in so many is kept aside. Half of these choose the ridges, leave layers alone and stop the polish; the rest
# choose nothing, and tell how good the result is. Where those would be too few, all of them choose and none tells.
ASIDE_OF = 10
FEWEST_JUDGES = 4  # different points, none of them a copy of one that was fitted or that chose
FEWEST_POINTS = 10
LEARNING_RATE = 1e-3


@dataclass(frozen=True)
class Repaired:
    """A repaired copy of a network, what was done, and the points it was done with."""

    model: nn.Module
    record: Repair
    keys: frozenset[bytes]

    @property
    def moved(self) -> OutputChange | None:
        """How far its output is from the dense one: on points that only judge, or else on those that chose."""
        done = self.record
        if done.output_after is not None:
            return OutputChange(done.output_after, done.n_judged, aside=True)
        return None if done.output_chosen is None else OutputChange(done.output_chosen, done.n_aside, aside=False)


def repair_network(
    dense: nn.Module,
    given: nn.Module,
    masks: Mapping[str, Tensor],
    data: AnyData,
    *,
    steps: int = 0,
    learning_rate: float = LEARNING_RATE,
    n_points: int | None = None,
    seed: int = 0,
    chunk_bytes: ChunkBytes = "auto",
    progress: bool = False,
) -> Repaired:
    """A copy of the `given` network whose kept weights are fitted to the dense one, layer by layer, then by `steps`."""
    check_same_tensors(dense, given, masks)
    parts = _divided(data_of(data, device=device_of(dense), n_points=n_points, seed=seed).batches())
    repaired, n_bytes = copy_of(given), chunk_of(Scoring(chunk_bytes=chunk_bytes).chunk_bytes, device_of(dense))
    at_first, before = output_error(dense, given, parts.aside), _judged(dense, given, parts)
    with progress_bar("repairing", len(masks) + steps, shown=progress) as advance:
        layers = _refit_all(dense, repaired, masks, parts, n_bytes, advance)
        at_last, refitted = output_error(dense, repaired, parts.aside), _judged(dense, repaired, parts)
        polished = None
        if steps > 0:
            polished, at_last = polish(
                dense,
                repaired,
                masks,
                parts.fitted,
                parts.aside,
                steps=steps,
                learning_rate=learning_rate,
                seed=seed,
                advance=advance,
            )
    done = _record(parts, layers, polished, (at_first, at_last), (before, refitted, _judged(dense, repaired, parts)))
    return Repaired(copy_of(given) if done.undone else repaired, done, parts.keys)


@dataclass(frozen=True)
class Parts:
    """The calibration points, batch by batch, which of them are kept aside to choose, and those that only judge."""

    batches: tuple[Batch, ...]
    is_aside: tuple[bool, ...]
    judging: tuple[Batch, ...]
    keys: frozenset[bytes]  # of all points

    @property
    def fitted(self) -> list[Batch]:
        return [batch for batch, is_one in zip(self.batches, self.is_aside) if not is_one]

    @property
    def aside(self) -> list[Batch]:
        return [batch for batch, is_one in zip(self.batches, self.is_aside) if is_one]


def _refit_all(
    dense: nn.Module,
    repaired: nn.Module,
    masks: Mapping[str, Tensor],
    parts: Parts,
    chunk_bytes: int,
    advance: Advance,
) -> tuple[LayerRepair, ...]:
    """Refits all weights of `repaired` in place, in the order of execution."""
    layers, forms = _masked_layers(dense, masks), Forms()
    weights = {weight.name: weight for layer in layers for weight in layer.weights.values()}
    census = take_census(dense, layers, parts.batches, forms)
    gatherer = Gatherer(
        dense,
        repaired,
        layers,
        _masked_layers(repaired, masks),
        parts.batches,
        parts.is_aside,
        census,
        forms,
        chunk_bytes,
    )
    places = find_places(dense, layers, parts.batches[0])
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


def _masked_layers(model: nn.Module, masks: Mapping[str, Tensor]) -> tuple[PrunableLayer, ...]:
    """The modules that hold masked weights, with those weights alone."""
    found = find_prunable_layers(model, include=[glob.escape(name) for name in masks])
    chosen = (replace(layer, weights={l: w for l, w in layer.weights.items() if w.name in masks}) for layer in found)
    return tuple(layer for layer in chosen if layer.weights)


def check_same_tensors(dense: nn.Module, given: nn.Module, masks: Mapping[str, Tensor]) -> None:
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


def _divided(batches: Iterable[Batch]) -> Parts:
    """Each batch cut in two: points to fit, and points kept aside, which make batches of their own."""
    parts: dict[bool, list[Batch]] = {False: [], True: []}
    n_seen, most, different, fitted_keys = 0, 0, set[bytes](), set[bytes]()
    for batch in batches:
        keys = draw_keys_of(batch)
        different |= set(keys)
        most = max(most, batch.n_points)
        where = integers(n_seen, n_seen + batch.n_points) % ASIDE_OF == ASIDE_OF - 1
        n_seen += batch.n_points
        fitted_keys |= {key for key, is_aside in zip(keys, where.tolist()) if not is_aside}
        for flag, found in parts.items():
            at = (where == flag).nonzero().flatten()
            if len(at):
                found.append(fresh(points_at(batch, at)))
    if len(different) < FEWEST_POINTS:  # copies kept aside would praise what was fitted to them
        copies = "" if len(different) == n_seen else " different"
        raise DataError(
            f"calibration holds {len(different)}{copies} points", fix=f"give a repair at least {FEWEST_POINTS}"
        )
    choosing, judging = _halved(parts[True], fitted_keys)
    fitted, aside = parts[False], _together(choosing, most)
    is_aside = (False,) * len(fitted) + (True,) * len(aside)
    return Parts((*fitted, *aside), is_aside, tuple(_together(judging, most)), frozenset(different))


def _halved(aside: list[Batch], fitted_keys: set[bytes]) -> tuple[list[Batch], list[Batch]]:
    """Every second point chooses and the others judge, but for copies; all choose where too few would judge."""
    choosing, rest, n_seen = list[Batch](), list[Batch](), 0
    for batch in aside:
        is_second = integers(n_seen, n_seen + batch.n_points) % 2 == 1
        n_seen += batch.n_points
        for found, where in ((choosing, ~is_second), (rest, is_second)):
            if bool(where.any()):
                found.append(points_at(batch, where.nonzero().flatten()))
    used = fitted_keys | {key for batch in choosing for key in draw_keys_of(batch)}
    judging, judging_keys = list[Batch](), list[bytes]()
    for batch in rest:
        keys = draw_keys_of(batch)
        new = [i for i, key in enumerate(keys) if key not in used]
        judging_keys += [keys[i] for i in new]
        if new:
            judging.append(points_at(batch, torch.tensor(new, dtype=torch.int64, device="cpu")))
    return (choosing, judging) if len(set(judging_keys)) >= FEWEST_JUDGES else (aside, [])


def _together(batches: Sequence[Batch], most: int) -> list[Batch]:
    """The points in as few batches as can be made of neighbours that are alike, none larger than `most`."""
    found: list[Batch] = []
    for batch in batches:
        fits = found and found[-1].n_points + batch.n_points <= most
        both = concatenated(found[-1], batch) if fits else None
        if both is None:
            found.append(batch)
        else:
            found[-1] = both
    return found


def _judged(dense: nn.Module, other: nn.Module, parts: Parts) -> float | None:
    """The output's error on the points that chose nothing; None where there are none."""
    return output_error(dense, other, parts.judging) if parts.judging else None


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
