"""Turns whatever a user calls data into a stream of checked batches on the model's device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from sipp.errors import DataError, OptionError
from sipp.records import Batch

Data = Iterable[Any] | Tensor | Dataset[Any]
DEFAULT_BATCH_SIZE = 16  # only where we do the batching ourselves: a tensor or a Dataset of points
EXPECTED = "a tensor, (inputs, labels), or a dict of tensors"


def batches_of(data: Data, *, device: torch.device, n_points: int | None = None, seed: int = 0) -> Iterator[Batch]:
    """The batches of `data`, at most `n_points` points in all, each checked for non-finite values.

    From a tensor or a Dataset the points are drawn uniformly without replacement with the given seed (T4); from any
    other iterable the first `n_points` are taken, cutting the last batch if need be.
    """
    if n_points is not None and (not isinstance(n_points, int) or n_points < 1):
        raise OptionError(f"n_points={n_points!r} must be a whole number of at least 1")
    left = n_points
    index = -1
    for index, raw in enumerate(_source(data, n_points, seed)):
        batch = _as_batch(raw, index)
        if left is not None and batch.n_points > left:
            batch = _first(batch, left)
        batch = _on_device(batch, device)
        _refuse_non_finite(batch)
        yield batch
        if left is not None:
            left -= batch.n_points
            if left == 0:
                return
    if index < 0:
        raise DataError("the data holds no batch: at least one batch with one point is needed")


def count_points(data: Data) -> int | None:
    """The number of points, where that is known without reading them."""
    if isinstance(data, Tensor):
        return len(data)
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        return len(data)  # type: ignore[arg-type]
    return None


def _source(data: Data, n_points: int | None, seed: int) -> Iterable[Any]:
    if isinstance(data, Mapping) or (isinstance(data, tuple) and data and isinstance(data[0], Tensor | Mapping)):
        raise DataError(
            f"data is a single {type(data).__name__}, which reads like one batch: pass an iterable of batches, "
            "for one batch a list with one entry, [batch]"
        )
    if isinstance(data, Tensor):
        if data.ndim < 2:
            raise DataError(f"data is a tensor of shape {tuple(data.shape)}: expected points along the first dimension")
        data = _Points(data)
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        n_all = len(data)  # type: ignore[arg-type]
        if n_points is not None and n_points < n_all:
            chosen = torch.randperm(n_all, generator=torch.Generator().manual_seed(seed))[:n_points]
            data = Subset(data, chosen.tolist())
        # a generator of its own: a DataLoader draws its base seed, and must not draw it from the global one
        return DataLoader(data, batch_size=DEFAULT_BATCH_SIZE, generator=torch.Generator())
    if isinstance(data, str) or not isinstance(data, Iterable):
        raise DataError(
            f"data is a {type(data).__name__}: expected an iterable of batches, a tensor of points or a Dataset"
        )
    return data


class _Points(TensorDataset):
    """A tensor of points as a Dataset of plain points (TensorDataset alone would give 1-tuples)."""

    def __getitem__(self, index: Any) -> Any:
        return self.tensors[0][index]


def _as_batch(raw: Any, index: int) -> Batch:
    labels = None
    if isinstance(raw, PackedSequence) or not isinstance(raw, Sequence):
        inputs = raw
    elif len(raw) == 2:
        inputs, labels = raw
    elif len(raw) == 1:
        inputs = raw[0]
    else:
        raise DataError(f"batch {index} is a {type(raw).__name__} of {len(raw)} entries: expected {EXPECTED}")
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    if isinstance(inputs, Mapping):
        kwargs = dict(inputs)
    elif isinstance(inputs, Sequence) and not isinstance(inputs, PackedSequence | str):
        args = tuple(inputs)
    else:
        args = (inputs,)
    sizes = {name: _n_points(value) for name, value in _named(args, kwargs) if _n_points(value) is not None}
    if not sizes:
        raise DataError(f"batch {index} is a {type(raw).__name__} without tensors: expected {EXPECTED}")
    if len(set(sizes.values())) > 1:
        raise DataError(f"batch {index}: the inputs disagree on the number of points (first dimension): {sizes}")
    n_points = next(iter(sizes.values()))
    if not n_points:
        raise DataError(f"batch {index} holds no point")
    return Batch(index=index, args=args, kwargs=kwargs, labels=labels, n_points=n_points)


def _n_points(value: Any) -> int | None:
    if isinstance(value, PackedSequence):
        return int(value.batch_sizes[0])
    return len(value) if isinstance(value, Tensor) and value.ndim > 0 else None


def _named(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(f"input {i}", value) for i, value in enumerate(args)] + list(kwargs.items())


def _first(batch: Batch, n: int) -> Batch:
    def cut(value: Any) -> Any:
        if isinstance(value, PackedSequence):
            raise DataError(
                f"n_points would cut batch {batch.index}, a PackedSequence: give n_points at a batch boundary"
            )
        return value[:n] if isinstance(value, Tensor) and value.ndim > 0 else value

    return Batch(
        index=batch.index,
        args=tuple(cut(value) for value in batch.args),
        kwargs={name: cut(value) for name, value in batch.kwargs.items()},
        labels=cut(batch.labels),
        n_points=n,
    )


def _on_device(batch: Batch, device: torch.device) -> Batch:
    def move(value: Any) -> Any:
        movable: Any = value  # PackedSequence.to is typed for dtypes only
        return movable.to(device) if isinstance(value, Tensor | PackedSequence) else value

    return Batch(
        index=batch.index,
        args=tuple(move(value) for value in batch.args),
        kwargs={name: move(value) for name, value in batch.kwargs.items()},
        labels=move(batch.labels),
        n_points=batch.n_points,
    )


def _refuse_non_finite(batch: Batch) -> None:
    for name, value in _named(batch.args, batch.kwargs):
        tensor = value.data if isinstance(value, PackedSequence) else value
        if not (isinstance(tensor, Tensor) and tensor.is_floating_point()):
            continue
        if "mask" in name:  # an additive attention mask says "never" with -inf
            tensor = tensor.clamp(min=torch.finfo(tensor.dtype).min)
        n_bad = int((~torch.isfinite(tensor)).sum())
        if n_bad:
            raise DataError(
                f"batch {batch.index}, {name}: {n_bad} of {tensor.numel()} values are NaN or infinite; "
                "clean or drop that batch, it would decide every maximum"
            )
