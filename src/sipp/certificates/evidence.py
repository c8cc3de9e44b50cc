"""Runs two networks on a holdout in one pass and measures every input, for a certificate.

n counts different points, and a violation counts with every copy (T14), because the data cannot tell why there are
copies. If the sample was copied, 20 points drawn 2,000 times are 20 points; if frequent inputs came up repeatedly, a
failing input that makes up 90 % of all must not be one violation among many rarities. The true sample is M of the N
given points, with k_M violations. It has every different point, so M >= n, and k_M <= k, the violations with all
copies. BinCDF falls in its number of points and grows in its count, so the true sample would have certified, too.
Near copies are not recognised.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from sipp.certificates.compared_output import Output, check_model, follows_positions, run_model, without_padding
from sipp.certificates.measures import MeasureFunction
from sipp.errors import DataError, ModelError, OptionError
from sipp.inputs import Batch, Data, data_of, hash_of_points, outputs, scoring_mode
from sipp.progress import progress_bar
from sipp.results import NetworkLike, SeenInputs, hashing, inputs_seen, network_of

BATCH_POINTS = 256  # points per forward pass where the caller gave no batches
DenseOutputs = dict[tuple[str, ...], Tensor]  # of earlier calls, by the hashes of a batch's points
CALLABLE = "callable "  # prefix for the name of an `output=` function, which a record cannot store


@dataclass(frozen=True)
class Evidence:
    """The counts and hashes that a certificate is based on."""

    n: int  # distinct points
    n_duplicates: int  # further copies of points
    data_hash: str  # of all points
    dense_hash: str
    pruned_hash: str
    dtype: str
    output: int | str | None
    calibration_checked: bool


@dataclass(frozen=True)
class MeasuredOutputs:
    """The measurements of every input, and the facts about these inputs and networks."""

    fields: dict[str, Tensor]  # by name, n numbers each
    hashes: list[str]  # one per point; copies of a point have equal ones
    evidence: Evidence


def measure_outputs(
    dense: nn.Module,
    pruned: NetworkLike,
    holdout: Any,
    measure: MeasureFunction,
    output: Output,
    calibration: Any,
    *,
    drops_padding: bool = True,
    finest: float | None = None,
    dense_outputs: DenseOutputs | None = None,
    progress: bool = False,
    title: str = "certifying",
) -> MeasuredOutputs:
    """Applies `measure` to the outputs of both networks at every point, and collects the evidence for a certificate.

    `finest` is the error to be claimed; a dependence on the batch must be smaller. If `pruned` is a record, the points
    that chose it count as calibration points, and as checked if the record knows all of them. `dense_outputs` holds
    those of earlier calls, by the hashes of a batch's points; new ones are added while they fit. `title` names the
    progress bar.
    """
    network = network_of(pruned)
    for role, model in (("dense", dense), ("pruned", network)):
        check_model(role, model)
    if not (output is None or callable(output) or type(output) in (int, str)):
        raise OptionError(
            f"output={output!r:.60} must be an index, a key or a function of the model's output", option="output"
        )
    known = _known_inputs(pruned, calibration)
    data = holdout_data(holdout)
    measured: list[dict[str, Tensor]] = []
    hashes: list[str] = []
    dtypes: set[str] = set()
    bar = progress_bar(title, data.n_points_known, shown=progress)
    with scoring_mode(dense, "running"), scoring_mode(network, "running"), bar as advance:
        for batch, of_batch, f, g in _outputs(dense, network, data, output, drops_padding, finest, dense_outputs):
            dtypes |= {str(t.dtype).removeprefix("torch.") for t in (f, g)}
            hashes += of_batch
            measured.append(measure(f, g, batch))
            advance(batch.n_points)
    refuse_shared(hashes, known.hashes)
    n = len(set(hashes))
    evidence = Evidence(
        n=n,
        n_duplicates=len(hashes) - n,
        data_hash=hash_of_points(hashes),
        dense_hash=hashing.of_model(dense),
        pruned_hash=hashing.of_model(network),
        dtype="/".join(sorted(dtypes)),
        output=CALLABLE + getattr(output, "__qualname__", repr(output)) if callable(output) else output,
        calibration_checked=known.is_all,
    )
    fields = {name: torch.cat([of_batch[name] for of_batch in measured]) for name in measured[0]}
    return MeasuredOutputs(fields, hashes, evidence)


def _known_inputs(pruned: NetworkLike, calibration: Any) -> SeenInputs:
    """The inputs that chose the pruned network, as far as they are known, and whether these are all.

    `calibration` are the caller's own, or those of a record on the disk.
    """
    seen = inputs_seen(pruned)
    if calibration is None:
        return seen
    if not isinstance(calibration, SeenInputs):
        calibration = SeenInputs(frozenset(holdout_data(calibration, "calibration").hashes()), is_all=True)
    return replace(seen | calibration, is_all=calibration.is_all)


def _outputs(
    dense: nn.Module,
    pruned: nn.Module,
    data: Data,
    output: Output,
    drops_padding: bool,
    finest: float | None,
    known: DenseOutputs | None,
) -> Iterator[tuple[Batch, list[str], Tensor, Tensor]]:
    """The hashes of points and the outputs of both networks, batch by batch, with 0 at padding.

    A point's output must not depend on the rest of the batch. This is checked on the first batch, and on the first with
    several points.
    """
    has_positions: bool | None = None if drops_padding else False
    n_checked = 0
    for batch in data.batches():
        hashes = batch.hashes()
        memory = known if batch.real_BT is None else None  # with padding, which hashes leave out, it may differ
        f = None if memory is None else memory.get(tuple(hashes))
        if f is None:
            f = run_model(dense, batch, output)
            if memory is not None and sum(one.nbytes for one in memory.values()) + f.nbytes <= outputs.OUTPUT_BYTES:
                memory[tuple(hashes)] = f
        g = run_model(pruned, batch, output)
        if f.shape != g.shape:
            raise ModelError(
                f"outputs have different shapes: dense {tuple(f.shape)}, pruned {tuple(g.shape)}", where=batch.where
            )
        if n_checked == 0 or n_checked == 1 < batch.n_points:
            n_checked = batch.n_points
            _refuse_dependent("dense", dense, batch, output, f, finest)
            _refuse_dependent("pruned", pruned, batch, output, g, finest)
        if has_positions is None:
            has_positions = follows_positions(dense, batch, output, f)
        yield batch, hashes, without_padding(f, batch, has_positions), without_padding(g, batch, has_positions)


def _refuse_dependent(
    role: str, model: nn.Module, batch: Batch, output: Output, whole: Tensor, finest: float | None = None
) -> None:
    """Raises a ModelError if the output at a point depends on the other points of its batch."""
    allowed = outputs.allowed_difference(model, batch, finest)
    reason = outputs.why_dependent(batch, lambda part: run_model(model, part, output), allowed, whole)
    if reason:
        is_fine = finest is not None and finest < outputs.allowed_difference(model, batch)
        more = f" (it must not change by more than epsilon = {finest:g})" if is_fine else ""
        raise ModelError(f"{reason}; the inputs would not be independent{more}", where=f"{role}, {batch.where}")


def holdout_data(data: Any, role: str = "holdout") -> Data:
    """The data, including non-finite values, which a claim counts as violations."""
    return data_of(data, role=role, batch_size=BATCH_POINTS, refuses_non_finite=False)


def refuse_shared(holdout: list[str], known: Collection[str]) -> None:
    """Raises a DataError if any of these holdout points, given by their hashes, is also a calibration point."""
    shared = [found in known for found in holdout]
    if any(shared):
        raise DataError(
            f"{sum(shared)} of {len(shared)} holdout inputs are also calibration inputs, the first at "
            f"index {shared.index(True)}; a certificate needs inputs that the pruning has not seen",
            fix="remove them from the holdout",
        )
