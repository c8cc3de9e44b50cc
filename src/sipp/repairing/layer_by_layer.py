"""The dense network, a pruned one and unlabelled points in; the pruned network with better kept weights out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from sipp.errors import ModelError
from sipp.inputs.blocks import find_blocks
from sipp.inputs.capture import Forms
from sipp.inputs.distance import output_error
from sipp.inputs.restore import copy_of
from sipp.progress import Advance, fit_cost, progress_bar
from sipp.records.network_hash import tensors_of
from sipp.records.numerics import BOUND_DTYPE, device_of
from sipp.records.options import ChunkBytes, Scoring
from sipp.records.pruned import OutputChange, not_zero
from sipp.records.repair import LayerRepair, Polish, Repair
from sipp.repairing.gathering import stretches
from sipp.repairing.intercepts import find_places
from sipp.repairing.parts import Parts, judged_error
from sipp.repairing.polishing import polish
from sipp.repairing.refitting import refit
from sipp.repairing.stages import census_of, pair_of
from sipp.scoring.sensitivities import chunk_of

LEARNING_RATE = 2e-3


@dataclass(frozen=True)
class Repaired:
    """A repaired copy of a network, what was done, and the points it was done with."""

    model: nn.Module
    masks: dict[str, Tensor]
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
    parts: Parts,
    *,
    steps: int = 0,
    learning_rate: float = LEARNING_RATE,
    seed: int = 0,
    blocks: str | None = None,
    chunk_bytes: ChunkBytes = "auto",
    progress: bool = False,
) -> Repaired:
    """A copy of the `given` network whose kept weights are fitted to the dense one, layer by layer, then by `steps`."""
    check_same_tensors(dense, given, masks)
    repaired, n_bytes = copy_of(given), chunk_of(Scoring(chunk_bytes=chunk_bytes).chunk_bytes, device_of(dense))
    at_first, before = output_error(dense, given, parts.aside), judged_error(dense, given, parts)
    cost = sum(fit_cost(mask.shape) for mask in masks.values())
    with progress_bar("repairing", cost, shown=progress, in_percent=True) as advance:
        layers = _refit_all(dense, repaired, masks, parts, blocks, n_bytes, advance)
    at_last, refitted = output_error(dense, repaired, parts.aside), judged_error(dense, repaired, parts)
    polished = None
    if steps > 0:
        with progress_bar("polishing", steps, shown=progress) as advance:
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
    judged = (before, refitted, judged_error(dense, repaired, parts))
    done = _record(parts, layers, polished, (at_first, at_last), judged)
    return Repaired(copy_of(given) if done.undone else repaired, dict(masks), done, parts.keys)


def _refit_all(
    dense: nn.Module,
    repaired: nn.Module,
    masks: Mapping[str, Tensor],
    parts: Parts,
    blocks: str | None,
    chunk_bytes: int,
    advance: Advance,
) -> tuple[LayerRepair, ...]:
    """Refits all weights of `repaired` in place, in the order of execution."""
    pair = pair_of(
        dense,
        repaired,
        masks,
        parts,
        census_of(dense, masks, parts, Forms()),
        blocks=find_blocks(dense, parts.batches[0], blocks),
        chunk_bytes=chunk_bytes,
        dtype=BOUND_DTYPE,
    )
    weights = {weight.name: weight for layer in pair.dense_layers for weight in layer.weights.values()}
    places = find_places(dense, pair.dense_layers, parts.batches[0])
    done = []
    for stage in pair.stages():
        gatherer = stage.gatherer
        for stretch, fits in stretches(gatherer.census, device_of(dense)):
            all_names = [name for group in stretch for name in group]
            known = [gatherer.targets(all_names, i)[0] for i in range(len(parts.batches))] if fits else None
            for group in stretch:
                sums = gatherer.gather(group, known)
                for name in group:
                    done.append(refit(repaired, weights[name], masks[name], sums[name], places[name]))
                    advance(fit_cost(masks[name].shape))
    met = {layer.name for layer in done}
    unmet = [LayerRepair(name, None, None, None, "none", "no inputs reach it") for name in weights if name not in met]
    return (*done, *unmet)


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
        undone="the output was no closer to the dense one on held-back inputs" if is_worse else "",
    )
