"""Runs two networks over a holdout and tells what was looked at: outputs point by point, content hashes of all."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.rnn import PackedSequence

from sipp.batches import batches_of, points_at
from sipp.capture import run_batch, scoring_mode
from sipp.errors import DataError, ModelError, OptionError
from sipp.independence import why_dependent
from sipp.ledger import record_use
from sipp.pointkeys import (
    Known,
    add_known,
    are_known,
    keys_of,
    labels_of,
    plain_keys_of,
    raw_bytes,
    set_hash,
    sketch_of,
)
from sipp.records import Batch

Output = int | str | Callable[[Any], Any] | None

BATCH_POINTS = 256  # points per forward pass where the caller gave no batches
CALLABLE = "callable "  # how a record names an `output=` function, which it cannot hold
WRAPPERS = ("module", "_orig_mod")  # what DDP and torch.compile add to names


@dataclass(frozen=True)
class Survey:
    """Which points a pass over some data gave."""

    points: Counter[tuple[bytes, str]]  # key and label
    keys: tuple[bytes, ...]  # in their order
    plain: tuple[bytes, ...]  # `plain_keys_of`, for the sketch

    @property
    def facts(self) -> dict[str, Any]:
        """What a ledger and a certificate say of the points."""
        return {"n": len(self.keys), "data_hash": set_hash(self.keys)}


def look(
    dense: nn.Module,
    pruned: nn.Module,
    holdout: Any,
    measure: Callable[[Tensor, Tensor, Batch], Tensor],
    output: Output,
    calibration: Any,
    *,
    ledger: str | os.PathLike[str] | None = None,
    claim: str = "",
    drops_padding: bool = True,
) -> tuple[Tensor, dict[str, Any]]:
    """What `measure` says of every point (n x ...), and the fields of a record that tell what was looked at.

    The look is in the ledger before its result can be seen, also if it ends half-way: what was measured is recorded.
    """
    for role, model in (("dense", dense), ("pruned", pruned)):
        check_model(role, model)
    if not (output is None or callable(output) or type(output) in (int, str)):
        raise OptionError(f"output = {output!r} must be an index, a key or a function of the model's output")
    known = None if calibration is None else known_points(holdout_batches(calibration, "calibration"))
    hashes = {"dense_hash": model_hash(dense), "pruned_hash": model_hash(pruned)}
    measured: list[Tensor] = []
    keys: list[bytes] = []
    plain: list[bytes] = []
    shared: list[bool] = []
    dtypes: set[str] = set()

    def facts() -> dict[str, Any]:
        return {"n": len(keys), "data_hash": set_hash(keys), **hashes}

    with scoring_mode(dense, "running"), scoring_mode(pruned, "running"):
        try:
            for batch, f, g in _outputs(dense, pruned, holdout, output, drops_padding):
                dtypes |= {str(t.dtype).removeprefix("torch.") for t in (f, g)}
                measured.append(measure(f, g, batch))
                keys += keys_of(batch)
                plain += [] if ledger is None else plain_keys_of(batch)
                shared += [] if known is None else are_known(known, batch)
        except BaseException:
            if keys:
                record_use(ledger, facts(), f"{claim}, interrupted", sketch_of(plain))
            raise
    refuse_shared(shared)
    evidence = {
        **facts(),
        "n_duplicates": len(keys) - len(set(keys)),
        "dtype": "/".join(sorted(dtypes)),
        "output": CALLABLE + getattr(output, "__qualname__", repr(output)) if callable(output) else output,
        "calibration_checked": calibration is not None,
        **record_use(ledger, facts(), claim, sketch_of(plain)),
    }
    return torch.cat(measured), evidence


def _outputs(
    dense: nn.Module, pruned: nn.Module, holdout: Any, output: Output, drops_padding: bool
) -> Iterator[tuple[Batch, Tensor, Tensor]]:
    """The outputs of both networks, batch by batch, 0 at padding; on the first and the last one a point's output must
    be a function of the point alone."""
    has_positions: bool | None = None if drops_padding else False
    last: tuple[Batch, Tensor, Tensor] | None = None
    for batch in holdout_batches(holdout):
        f, g = run_model(dense, batch, output), run_model(pruned, batch, output)
        if f.shape != g.shape:
            raise ModelError(f"{batch.where}: dense gives {tuple(f.shape)}, pruned {tuple(g.shape)}; they must agree")
        if last is None:
            refuse_dependent("dense", dense, batch, output, f)
            refuse_dependent("pruned", pruned, batch, output, g)
        last = batch, f, g
        if has_positions is None:
            has_positions = follows_positions(dense, batch, output, f)
        yield batch, without_padding(f, batch, has_positions), without_padding(g, batch, has_positions)
    if last is not None and last[0].index > 0:
        refuse_dependent("dense", dense, last[0], output, last[1])
        refuse_dependent("pruned", pruned, last[0], output, last[2])


def refuse_dependent(role: str, model: nn.Module, batch: Batch, output: Output, whole: Tensor) -> None:
    """Raises a ModelError where the output at a point is no function of that point alone."""
    reason = why_dependent(batch, lambda part: run_model(model, part, output), whole)
    if reason:
        raise ModelError(f"{role}, {batch.where}: {reason}; the points would not be independent")


def follows_positions(model: nn.Module, batch: Batch, output: Output, result: Tensor) -> bool | None:
    """Whether dimension 1 of the output is the positions of `real_BT`; None where this batch cannot tell.

    A number of classes may equal the number of positions, so a point is run once more with one position less. What
    cannot be run so is not cut: a claim about the whole output is true as well.
    """
    real_BT = batch.real_BT
    if real_BT is None or bool(real_BT.all()) or real_BT.shape[1] < 2:
        return None
    length = real_BT.shape[1]
    if result.dim() < 2 or result.shape[1] != length:
        return False

    def cut(value: Any) -> Any:
        has_length = isinstance(value, Tensor) and value.ndim > 1 and value.shape[1] == length
        return value[:, : length - 1] if has_length else value

    one = points_at(batch, slice(1))
    kwargs = {name: cut(value) for name, value in one.kwargs.items()}
    shorter = replace(one, args=tuple(cut(value) for value in one.args), kwargs=kwargs)
    try:
        return run_model(model, shorter, output).shape[1] == length - 1
    except (DataError, ModelError):
        return False


def without_padding(result: Tensor, batch: Batch, has_positions: bool | None) -> Tensor:
    """The output with 0 at positions that are padding, which then add nothing to a norm."""
    if not has_positions or batch.real_BT is None or result.shape[1:2] != batch.real_BT.shape[1:]:
        return result
    real = batch.real_BT.to(result.device).reshape(*batch.real_BT.shape, *(1,) * (result.dim() - 2))
    return result.masked_fill(~real, 0.0)


def check_model(role: str, model: nn.Module) -> None:
    """Raises a ModelError for what is no network, and for layers that normalise by the batch."""
    if not isinstance(model, nn.Module):
        raise ModelError(f"the {role} network is a {type(model).__name__}, not an nn.Module")
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and module.running_mean is None:
            raise ModelError(
                f"{role}: {name or type(module).__name__} normalises by the batch, so outputs depend on neighbours and "
                "points are not independent; give it running statistics (track_running_stats=True)"
            )


def run_model(model: nn.Module, batch: Batch, output: Output) -> Tensor:
    """The selected output of the model for the batch: a real n x ... tensor on the CPU."""
    device = next((t.device for t in itertools.chain(model.parameters(), model.buffers())), torch.device("cpu"))
    # Copies: a first layer that works in place must not change what the other network, or the caller, sees.
    args = tuple(_copied(value, device) for value in batch.args)
    kwargs = {name: _copied(value, device) for name, value in batch.kwargs.items()}
    result = run_batch(model, replace(batch, args=args, kwargs=kwargs))
    if callable(output):
        try:
            result = output(result)
        except Exception as error:  # their function: anything may be raised
            raise OptionError(f"output={output!r:.60} fails on the model's output: {error}") from error
    elif output is not None:
        try:
            if isinstance(result, Tensor):  # an index would pick a point, not a part of the output
                raise TypeError("nothing to select from a single tensor")
            result = result[output]
        except (KeyError, IndexError, TypeError) as error:
            raise OptionError(f"output = {output!r} does not exist in the model's {type(result).__name__}") from error
    if not isinstance(result, Tensor):
        raise ModelError(
            f"the model returns a {type(result).__name__}; select one tensor with output= (index, key, function)"
        )
    if not result.is_floating_point() or result.dim() == 0 or result.shape[0] != batch.n_points or result.numel() == 0:
        raise ModelError(
            f"{batch.where}: the output is {result.dtype} {tuple(result.shape)}, not {batch.n_points} rows of real "
            "numbers (points along dimension 0); select or rearrange it with output="
        )
    return result.detach().cpu()


def _copied(value: Any, device: torch.device) -> Any:
    if isinstance(value, PackedSequence):
        movable: Any = value  # PackedSequence.to is typed for dtypes only
        moved = movable.to(device)
        return PackedSequence(moved.data.clone(), moved.batch_sizes, moved.sorted_indices, moved.unsorted_indices)
    return value.to(device, copy=True)


def point_keys(data: Any, role: str) -> list[bytes]:
    """The key of every point, in order."""
    return [key for batch in holdout_batches(data, role) for key in keys_of(batch)]


def known_points(batches: Iterable[Batch]) -> Known:
    """The calibration points, in every form in which a holdout point may be compared with them."""
    known: Known = {}
    for batch in batches:
        add_known(known, batch)
    return known


def survey(data: Any, role: str, known: Known | None = None) -> Survey:
    """Which points the data holds; DataError if one of them is known already."""
    points: Counter[tuple[bytes, str]] = Counter()
    keys: list[bytes] = []
    plain: list[bytes] = []
    shared: list[bool] = []
    for batch in holdout_batches(data, role):
        here = keys_of(batch)
        points.update(zip(here, labels_of(batch)))
        keys += here
        plain += plain_keys_of(batch)
        shared += [] if known is None else are_known(known, batch)
    refuse_shared(shared)
    return Survey(points, tuple(keys), tuple(plain))


def read_again(data: Any, role: str, first: Survey) -> Iterator[tuple[Batch, list[bytes]]]:
    """The batches and the keys of their points; DataError where they are not the points of the first pass."""
    left = first.points.copy()
    for batch in holdout_batches(data, role):
        keys = keys_of(batch)
        left.subtract(zip(keys, labels_of(batch)))
        yield batch, keys
    if any(left.values()):  # too few of a point, or too many
        raise changed(role)


def changed(role: str) -> DataError:
    """The error of data that is not the same in two passes."""
    return DataError(
        f"the {role} data changed between two passes: it is read several times, and every time must give the same "
        "points with the same labels (random augmentation, drop_last with shuffling or an iterator that ends do not); "
        "give fixed data, such as a list of batches or a loader without them; shuffling alone is fine"
    )


def holdout_batches(data: Any, role: str = "holdout") -> Iterator[Batch]:
    """The batches, values as they are: what is not finite is for the claim to count, not to be refused."""
    return batches_of(data, role=role, batch_size=BATCH_POINTS, refuses_non_finite=False)


def refuse_shared(shared: list[bool]) -> None:
    """Raises a DataError where holdout points (in their order: is it one?) are calibration points too."""
    if any(shared):
        raise DataError(
            f"{sum(shared)} of {len(shared)} holdout points are also calibration points, the first at index "
            f"{shared.index(True)}; a certificate needs points the pruning has not seen: take them out of the holdout"
        )


def model_hash(model: nn.Module) -> str:
    """SHA-256 over the state_dict's names, dtypes, shapes and bytes, sorted by name; DDP and compile change nothing."""
    return state_hash(model.state_dict())


def state_hash(state: Mapping[str, Any]) -> str:
    """The hash that a network with this state_dict has."""
    digest = hashlib.sha256()
    named = [(".".join(p for p in name.split(".") if p not in WRAPPERS), v) for name, v in state.items()]
    for name, value in sorted(named, key=lambda pair: pair[0]):
        if value is not None and not isinstance(value, (Tensor, str, int, float, bytes)):
            raise ModelError(f"state_dict entry {name!r} is a {type(value).__name__}, whose content has no stable hash")
        if isinstance(value, Tensor):
            digest.update(json.dumps([name, str(value.dtype), list(value.shape)]).encode())
            digest.update(raw_bytes(value.clone()).numpy().data)
        else:
            digest.update(json.dumps([name, repr(value)]).encode())
    return digest.hexdigest()
