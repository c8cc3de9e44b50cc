"""Runs two networks on a holdout, measures every point, and records by hash which points were used."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from sipp.certificates.ledger import ACCURACY, record_use
from sipp.certificates.measures import MeasureFunction
from sipp.certificates.running import Output, check_model, follows_positions, run_model, without_padding
from sipp.errors import DataError, ModelError, OptionError
from sipp.inputs.capture import scoring_mode
from sipp.inputs.data import Data, data_of
from sipp.inputs.outputs import allowed_difference, why_dependent
from sipp.inputs.point_keys import draw_keys_of, keys_of, labels_of, ledger_keys_of, set_hash, sketch_of
from sipp.progress import progress_bar
from sipp.results.batches import Batch
from sipp.results.hashing import SeenPoints
from sipp.results.network_hash import model_hash
from sipp.results.pruned_to import NetworkLike, network_of, points_seen

BATCH_POINTS = 256  # points per forward pass where the caller gave no batches
CALLABLE = "callable "  # prefix for the name of an `output=` function, which a record cannot store


@dataclass
class Survey:
    """Which points a pass over some data has met so far; `known` are points that it must not contain."""

    known: frozenset[bytes] | SeenPoints = frozenset()
    points: Counter[tuple[bytes, str]] = field(default_factory=Counter)  # key and label
    keys: list[bytes] = field(default_factory=list)  # one per point, in order, like the lists below
    plain: list[bytes] = field(default_factory=list)  # `ledger_keys_of`, for the sketch
    draws: list[bytes] = field(default_factory=list)  # `draw_keys_of`: which points are copies of others
    draw_of: dict[bytes, bytes] = field(default_factory=dict)  # the draw of each key
    shared: list[bool] = field(default_factory=list)  # whether the point is in `known`

    def add(self, batch: Batch) -> None:
        """Adds the points of a batch."""
        keys, draws = keys_of(batch), draw_keys_of(batch)
        self.points.update(zip(keys, labels_of(batch)))
        self.keys += keys
        self.plain += ledger_keys_of(batch)
        self.draws += draws
        self.draw_of.update(zip(keys, draws))
        self.shared += [key in self.known for key in draws]

    @property
    def n(self) -> int:
        """The number of distinct points."""
        return len(set(self.draws))

    @property
    def words(self) -> str:
        """`n` in words, for a message."""
        return f"{self.n} different inputs" if self.n < len(self.keys) else f"{self.n}"

    @property
    def facts(self) -> dict[str, Any]:
        """The fields about the points in a ledger and a certificate."""
        return {"n": self.n, "data_hash": set_hash(self.keys)}

    @property
    def labels_hash(self) -> int:
        """A hash of points and labels, valid in this process only."""
        return hash(frozenset(self.points.items()))


@dataclass(frozen=True)
class Evidence:
    """What a certificate rests on, in the fields that it takes over as they are."""

    n: int  # distinct points
    data_hash: str
    dense_hash: str
    pruned_hash: str
    n_duplicates: int  # further copies of points
    dtype: str
    output: int | str | None
    calibration_checked: bool
    ledger_kept: bool
    prior_uses: int


@dataclass(frozen=True)
class MeasuredOutputs:
    """What was measured at every point, and the facts about these points and networks."""

    measured: Tensor  # n x ..., one row per point
    draws: list[bytes]  # one key per point; copies of a point have equal keys
    evidence: Evidence


def measure_outputs(
    dense: nn.Module,
    pruned: NetworkLike,
    holdout: Any,
    measure: MeasureFunction,
    output: Output,
    calibration: Any,
    *,
    ledger: str | os.PathLike[str] | None = None,
    claim: str = "",
    terms: tuple[Any, ...] = (),
    drops_padding: bool = True,
    finest: float | None = None,
    progress: bool = False,
    title: str = "certifying",
) -> MeasuredOutputs:
    """Applies `measure` to the outputs of both networks at every point, and collects the evidence for a certificate.

    The use is in the ledger before its result can be seen, even if it is interrupted: every point on which a network
    was run is recorded. `finest` is the error to be claimed; a dependence on the batch must be smaller. If `pruned` is
    a record, the points that chose it count as calibration points, and as checked if the record knows all of them.
    Without a `claim` nothing is recorded; `terms` distinguish claims of one kind. `title` names the progress bar.
    """
    network = network_of(pruned)
    for role, model in (("dense", dense), ("pruned", network)):
        check_model(role, model)
    if not (output is None or callable(output) or type(output) in (int, str)):
        raise OptionError(
            f"output={output!r:.60} must be an index, a key or a function of the model's output", option="output"
        )
    known, is_checked = _calibration_points(pruned, calibration)
    hashes = {"dense_hash": model_hash(dense), "pruned_hash": model_hash(network)}
    seen = Survey(known)

    def record_interruption() -> None:
        record_use(ledger, {**seen.facts, **hashes}, f"{claim}, interrupted", sketch_of(seen.plain))

    measured: list[Tensor] = []
    dtypes: set[str] = set()
    bar = progress_bar(title, holdout_data(holdout).n_points_known, shown=progress)
    with scoring_mode(dense, "running"), scoring_mode(network, "running"), bar as advance:
        try:
            for batch, f, g in _outputs(dense, network, holdout, seen, output, drops_padding, finest):
                dtypes |= {str(t.dtype).removeprefix("torch.") for t in (f, g)}
                measured.append(measure(f, g, batch))
                advance(batch.n_points)
        except BaseException as error:
            # If we refuse the first batch ourselves, before any function of the caller ran, nobody has seen an output
            is_ours = isinstance(error, DataError | ModelError | OptionError)
            is_unseen = not measured and not callable(output) and is_ours
            if seen.keys and not is_unseen:
                record_interruption()
            raise
    if any(seen.shared) and callable(output):  # refused, but the caller's function has already seen every output
        record_interruption()
    refuse_shared(seen.shared)
    facts = {**seen.facts, **hashes}
    if claim == ACCURACY:
        terms = (*terms, seen.labels_hash)
    evidence = Evidence(
        **facts,
        n_duplicates=len(seen.keys) - seen.n,
        dtype="/".join(sorted(dtypes)),
        output=CALLABLE + getattr(output, "__qualname__", repr(output)) if callable(output) else output,
        calibration_checked=is_checked,
        **record_use(ledger, facts, claim, sketch_of(seen.plain), terms),
    )
    return MeasuredOutputs(torch.cat(measured), seen.draws, evidence)


def _calibration_points(pruned: NetworkLike, calibration: Any) -> tuple[frozenset[bytes] | SeenPoints, bool]:
    """The points that chose the pruned network, as far as they are known, and whether these are all."""
    if isinstance(calibration, SeenPoints):  # of a record on the disk
        return calibration, calibration.is_all
    keys, is_all = points_seen(pruned)
    if calibration is not None:
        return keys | holdout_data(calibration, "calibration").keys(), True
    return keys, bool(keys) and is_all


def _outputs(
    dense: nn.Module,
    pruned: nn.Module,
    holdout: Any,
    seen: Survey,
    output: Output,
    drops_padding: bool,
    finest: float | None,
) -> Iterator[tuple[Batch, Tensor, Tensor]]:
    """The outputs of both networks, batch by batch, with 0 at padding; `seen` knows a batch before it is run.

    A point's output must not depend on the rest of the batch. This is checked on the first batch, the first with
    several points, the largest and the last.
    """
    has_positions: bool | None = None if drops_padding else False
    last: tuple[Batch, Tensor, Tensor] | None = None
    largest: tuple[Batch, Tensor, Tensor] | None = None
    checked: set[int] = set()

    def check_once(batch: Batch, f: Tensor, g: Tensor) -> None:
        if batch.index not in checked:
            checked.add(batch.index)
            refuse_dependent("dense", dense, batch, output, f, finest)
            refuse_dependent("pruned", pruned, batch, output, g, finest)

    for batch in holdout_data(holdout).batches():
        seen.add(batch)
        f, g = run_model(dense, batch, output), run_model(pruned, batch, output)
        if f.shape != g.shape:
            raise ModelError(
                f"dense gives {tuple(f.shape)}, pruned {tuple(g.shape)}; they must agree", where=batch.where
            )
        if largest is None or largest[0].n_points == 1 < batch.n_points:
            check_once(batch, f, g)
        last = batch, f, g
        if largest is None or batch.n_points > largest[0].n_points:
            largest = last
        if has_positions is None:
            has_positions = follows_positions(dense, batch, output, f)
        yield batch, without_padding(f, batch, has_positions), without_padding(g, batch, has_positions)
    for chosen in (largest, last):
        if chosen is not None:
            check_once(*chosen)


def refuse_dependent(
    role: str, model: nn.Module, batch: Batch, output: Output, whole: Tensor, finest: float | None = None
) -> None:
    """Raises a ModelError if the output at a point depends on the other points of its batch."""
    allowed = allowed_difference(model, batch, finest)
    reason = why_dependent(batch, lambda part: run_model(model, part, output), allowed, whole)
    if reason:
        is_fine = finest is not None and finest < allowed_difference(model, batch)
        more = f" (it must not change by more than epsilon = {finest:g})" if is_fine else ""
        raise ModelError(f"{reason}; the inputs would not be independent{more}", where=f"{role}, {batch.where}")


def point_keys(data: Any, role: str) -> list[bytes]:
    """The key of every point, in order."""
    return [key for batch in holdout_data(data, role).batches() for key in keys_of(batch)]


def survey(data: Any, role: str, known: frozenset[bytes] = frozenset()) -> Survey:
    """Reads all points of the data; DataError if one of them is in `known`."""
    seen = Survey(known)
    for batch in holdout_data(data, role).batches():
        seen.add(batch)
    refuse_shared(seen.shared)
    return seen


def read_again(data: Any, role: str, first: Survey) -> Iterator[tuple[Batch, list[bytes]]]:
    """The batches and the keys of their points; DataError if they are not those of the first pass."""
    left = first.points.copy()
    for batch in holdout_data(data, role).batches():
        keys = keys_of(batch)
        left.subtract(zip(keys, labels_of(batch)))
        yield batch, keys
    if any(left.values()):  # too few of a point, or too many
        raise changed_data_error(role)


def changed_data_error(role: str) -> DataError:
    """The error for data whose points differ between two passes."""
    return DataError(
        f"the {role} data changed between two passes: it is read several times, and every time must give "
        "the same inputs with the same labels (random augmentation, drop_last with shuffling or an iterator "
        "that ends do not)",
        fix="give fixed data, such as a list of batches or a loader without them; shuffling alone is fine",
    )


def holdout_data(data: Any, role: str = "holdout") -> Data:
    """The data, including non-finite values, which a claim counts as violations."""
    return data_of(data, role=role, batch_size=BATCH_POINTS, refuses_non_finite=False)


def refuse_shared(shared: list[bool]) -> None:
    """Raises a DataError if any holdout point is also a calibration point (`shared`, one flag per point)."""
    if any(shared):
        raise DataError(
            f"{sum(shared)} of {len(shared)} holdout inputs are also calibration inputs, the first at "
            f"index {shared.index(True)}; a certificate needs inputs that the pruning has not seen",
            fix="take them out of the holdout",
        )
