"""Turns whatever a user calls data into a stream of checked batches."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from sipp.errors import DataError, OptionError
from sipp.records import Batch

Data = Iterable[Any] | Tensor | Dataset[Any]
# Where we do the batching ourselves, of a tensor or a Dataset of points: many small points at once, few large ones.
FEWEST_POINTS, MOST_POINTS = 16, 1024
BATCH_BYTES, GPU_BATCH_BYTES = 2**20, 2**26


def batches_of(
    data: Data,
    *,
    device: torch.device | None = None,
    n_points: int | None = None,
    seed: int = 0,
    role: str = "calibration",
    batch_size: int | None = None,
    refuses_non_finite: bool = True,
) -> Iterator[Batch]:
    """The batches of `data`, at most `n_points` points in all, moved to `device` if one is given.

    A batch is a tensor, (inputs, labels) or a dict of tensors; inputs may be a tuple or a dict of tensors. From a
    tensor or a Dataset the points are drawn uniformly without replacement with the given seed (T4); from any other
    iterable the first `n_points` are taken, cutting the last batch if need be. `role` names the data in errors;
    `batch_size` is for a tensor or a Dataset, and follows the size of a point if not given.
    """
    if n_points is not None and (not isinstance(n_points, int) or n_points < 1):
        raise OptionError(f"n_points={n_points!r} must be a whole number of at least 1")
    left, n_seen = n_points, 0
    for index, raw in _read(_source(data, n_points, seed, role, batch_size, device), role):
        batch = _as_batch(raw, index, role)
        if batch.n_points == 0:
            continue
        if left is not None and batch.n_points > left:
            batch = _first(batch, left)
        batch = batch if device is None else _on_device(batch, device)
        if refuses_non_finite:
            _refuse_non_finite(batch)
        yield batch
        n_seen += batch.n_points
        if left is not None:
            left -= batch.n_points
            if left == 0:
                return
    if n_seen == 0:
        raise DataError(f"{role} holds no points; a used-up iterator looks like this too, give a list or a loader")
    if left:
        warnings.warn(f"asked for {n_points} points, {role} has only {n_seen}", stacklevel=2)


def points_per_batch(inputs: Tensor, device: torch.device) -> int:
    """As many as fit so many bytes; few of whole numbers: a token is small, what a network makes of it is not."""
    # Half-precision products of torch are slow on a CPU, and end the process on some (an illegal instruction)
    is_half = inputs.element_size() < 4 and device.type == "cpu"
    if not inputs.is_floating_point() or is_half:
        return FEWEST_POINTS
    point_bytes = max(1, inputs.element_size() * inputs.shape[1:].numel())
    n_bytes = BATCH_BYTES if device.type == "cpu" else GPU_BATCH_BYTES
    return min(max(n_bytes // point_bytes, FEWEST_POINTS), MOST_POINTS)


def count_points(data: Data) -> int | None:
    """The number of points, where that is known without reading them."""
    if isinstance(data, Tensor):
        return len(data) if data.ndim else None
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        return len(data)  # type: ignore[arg-type]
    return None


def _source(
    data: Data, n_points: int | None, seed: int, role: str, batch_size: int | None, device: torch.device | None
) -> Iterable[Any]:
    if isinstance(data, tuple | Mapping):
        raise DataError(
            f"{role} is a single {type(data).__name__}, not an iterable of batches: wrap it in a list, [batch]"
        )
    if isinstance(data, Tensor) and data.ndim > 0:
        chosen = _chosen(len(data), n_points, seed)
        step = batch_size or points_per_batch(data, device or data.device)
        return data.split(step) if chosen is None else (data[part] for part in chosen.split(step))
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        if batch_size is None and isinstance(data, TensorDataset):  # of others a point may be random, or slow to read
            batch_size = points_per_batch(data.tensors[0], device or data.tensors[0].device)
        chosen = _chosen(len(data), n_points, seed)  # type: ignore[arg-type]
        data = data if chosen is None else Subset(data, chosen.tolist())
        # a generator of its own: a DataLoader draws its base seed, and must not draw it from the global one
        return DataLoader(data, batch_size=batch_size or FEWEST_POINTS, generator=torch.Generator())
    if isinstance(data, str | Tensor) or not isinstance(data, Iterable):
        raise DataError(f"{role} is a {type(data).__name__}, not a tensor of points or an iterable of batches")
    return data


def _chosen(n_all: int, n_points: int | None, seed: int) -> Tensor | None:
    """The points drawn with the seed; None: all of them, in their order."""
    if n_points is None or n_points >= n_all:
        return None
    return torch.randperm(n_all, generator=torch.Generator().manual_seed(seed))[:n_points]


def _read(source: Iterable[Any], role: str) -> Iterator[tuple[int, Any]]:
    """The raw batches with their numbers; one that cannot be read is an error that names it, never skipped."""
    iterator = iter(source)
    for index in itertools.count():
        try:
            raw = next(iterator)
        except StopIteration:
            return
        except DataError:
            raise
        except Exception as error:
            raise DataError(f"{role} batch {index} could not be read, and no point is skipped: {error!r}") from error
        yield index, raw


def _as_batch(raw: Any, index: int, role: str) -> Batch:
    where = f"{role} batch {index}"
    inputs, labels = raw, None
    if isinstance(raw, Sequence) and not isinstance(raw, PackedSequence | str):
        if len(raw) not in (1, 2):
            raise DataError(f"{where} has {len(raw)} parts; give (inputs, labels), several inputs as ((a, b), labels)")
        inputs, labels = raw if len(raw) == 2 else (raw[0], None)
    args: tuple[Any, ...] = (inputs,)
    kwargs: dict[str, Any] = {}
    if isinstance(inputs, Mapping):
        args, kwargs = (), dict(inputs)
    elif isinstance(inputs, Sequence) and not isinstance(inputs, PackedSequence | str):
        args = tuple(inputs)
    sizes = [_n_points(value, where) for value in (*args, *kwargs.values())]
    if len(set(sizes)) != 1:
        raise DataError(f"{where}: its tensors hold {sorted(set(sizes))} points; dimension 0 must be the same for all")
    return Batch(index=index, where=where, args=args, kwargs=kwargs, labels=labels, n_points=sizes[0])


def _n_points(value: Any, where: str) -> int:
    if isinstance(value, PackedSequence):
        return int(value.batch_sizes[0])
    if not isinstance(value, Tensor) or value.ndim == 0 or value.layout != torch.strided:
        raise DataError(
            f"{where} holds a {type(value).__name__}; every input is a dense tensor, points along dimension 0"
        )
    return len(value)


def _first(batch: Batch, n: int) -> Batch:
    def cut(value: Any) -> Any:
        if isinstance(value, PackedSequence):
            raise DataError(f"n_points would cut {batch.where}, a PackedSequence: give n_points at a batch boundary")
        return value[:n] if isinstance(value, Tensor) and value.ndim > 0 else value

    return replace(
        batch,
        args=tuple(cut(value) for value in batch.args),
        kwargs={name: cut(value) for name, value in batch.kwargs.items()},
        labels=cut(batch.labels),
        n_points=n,
    )


def _on_device(batch: Batch, device: torch.device) -> Batch:
    def move(value: Any) -> Any:
        movable: Any = value  # PackedSequence.to is typed for dtypes only
        return movable.to(device) if isinstance(value, Tensor | PackedSequence) else value

    return replace(
        batch,
        args=tuple(move(value) for value in batch.args),
        kwargs={name: move(value) for name, value in batch.kwargs.items()},
        labels=move(batch.labels),
    )


def _refuse_non_finite(batch: Batch) -> None:
    named = [(f"input {i}", value) for i, value in enumerate(batch.args)] + list(batch.kwargs.items())
    for name, value in named:
        tensor = value.data if isinstance(value, PackedSequence) else value
        if not tensor.is_floating_point():
            continue
        if "mask" in name:  # an additive attention mask says "never" with -inf
            tensor = tensor.clamp(min=torch.finfo(tensor.dtype).min)
        if tensor.numel() == 0 or bool(torch.isfinite(torch.stack(torch.aminmax(tensor))).all()):
            continue  # NaN counts as both extremes; one reading, where nothing is wrong
        bad = ~torch.isfinite(tensor)
        where = "" if isinstance(value, PackedSequence) else f", first in point {int(bad.nonzero()[0, 0])}"
        raise DataError(
            f"{batch.where}, {name}: {int(bad.sum())} of {tensor.numel()} values are NaN or infinite{where}; "
            "clean or drop that batch, it would decide every maximum"
        )
