"""Turns whatever a user calls data into a stream of checked batches."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from sipp.errors import DataError
from sipp.records.batches import Batch
from sipp.records.checking import check_seed, check_whole
from sipp.records.numerics import integers

Data = Iterable[Any] | Tensor | Dataset[Any]
# Where we do the batching ourselves, of a tensor or a Dataset of points: many small points at once, few large ones.
FEWEST_POINTS, MOST_POINTS = 16, 1024
BATCH_BYTES, GPU_BATCH_BYTES = 2**20, 2**26
# Data of unknown length counts as endless if its first batch comes again so often at equal distances, or after so many
# points, unless n_points bounds it.
MOST_REPEATS, MOST_UNCOUNTED = 16, 1_000_000
LABEL_NAMES = ("labels", "label")  # of a dict batch
WAYS_OUT = {
    "ndarray": "give torch.from_numpy(array)",
    "NoneType": "give batches without empty entries",
    "list": "give torch.tensor(list), or torch.stack(list) of tensors",
    "str": "give token numbers",
}


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

    A batch is a tensor, (inputs, labels) or a dict of tensors; inputs may be a tuple or a dict of tensors. The entry
    `labels` (or `label`) of a dict batch is its labels; in a pair (dict, labels) the whole dict goes to the model.
    From a tensor or a Dataset the points are drawn uniformly without replacement with the given seed (T4); from any
    other iterable the first `n_points` are taken, cutting the last batch if need be. `role` names the data in errors;
    `batch_size` is for a tensor or a Dataset, and follows the size of a point if not given.
    """
    if n_points is not None:
        check_whole("n_points", n_points, least=1)
    check_seed(seed)
    left, n_seen = n_points, 0
    is_endless = _endless() if n_points is None and not _has_length(data) else None
    for index, raw in _read(_source(data, n_points, seed, role, batch_size, device), role):
        batch = _as_batch(raw, index, role)
        if is_endless is not None and is_endless(batch):
            raise DataError(
                f"{role} does not seem to end: {n_seen:,} points so far, and no length is known",
                fix=f"give finite data (a list of batches){', or n_points' if role == 'calibration' else ''}",
            )
        if batch.n_points == 0:
            continue
        if left is not None and batch.n_points > left:
            batch = points_at(batch, slice(left))
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
        return _length(data)
    return None


def _length(data: Any) -> int:
    """The length of a Dataset; a DataError where it does not tell."""
    try:
        return len(data)
    except Exception as error:  # their code: anything may be raised
        raise DataError(
            f"a {type(data).__name__} does not tell its length ({error!r})",
            fix="give it a __len__ that counts its points",
        ) from error


def _source(
    data: Data, n_points: int | None, seed: int, role: str, batch_size: int | None, device: torch.device | None
) -> Iterable[Any]:
    if isinstance(data, tuple | Mapping):
        raise DataError(
            f"{role} is a single {type(data).__name__}, not an iterable of batches", fix="wrap it in a list, [batch]"
        )
    if isinstance(data, Tensor):
        check_dense(data, role)
    if isinstance(data, Tensor) and data.ndim > 0:
        chosen = _chosen(len(data), n_points, seed)
        step = batch_size or points_per_batch(data, device or data.device)
        return data.split(step) if chosen is None else (data[part] for part in chosen.split(step))
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        if batch_size is None and isinstance(data, TensorDataset):  # of others a point may be random, or slow to read
            batch_size = points_per_batch(data.tensors[0], device or data.tensors[0].device)
        chosen = _chosen(_length(data), n_points, seed)
        data = data if chosen is None else Subset(data, chosen.tolist())
        # a generator of its own: a DataLoader draws its base seed, and must not draw it from the global one
        return DataLoader(data, batch_size=batch_size or FEWEST_POINTS, generator=torch.Generator())
    kind = type(data).__name__
    if isinstance(data, str | bytes | Tensor) or kind == "ndarray" or not isinstance(data, Iterable):
        hint = f": {WAYS_OUT['ndarray']}" if kind == "ndarray" else ""
        raise DataError(f"{role} is a {kind}, not a tensor of points or an iterable of batches{hint}")
    return data


def _chosen(n_all: int, n_points: int | None, seed: int) -> Tensor | None:
    """The points drawn with the seed; None: all of them, in their order."""
    if n_points is None or n_points >= n_all:
        return None
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randperm(n_all, generator=generator, dtype=torch.int64, device="cpu")[:n_points]


def _read(source: Iterable[Any], role: str) -> Iterator[tuple[int, Any]]:
    """The raw batches with their numbers; one that cannot be read is an error that names it, never skipped."""
    try:
        iterator = iter(source)
    except Exception as error:  # their code: anything may be raised
        raise DataError(
            f"{role} cannot be gone through, its __iter__ fails ({error!r})", fix="give a list of batches"
        ) from error
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


def _endless() -> Callable[[Batch], bool]:
    """A function that is given one batch after another, and says True where they look like going on for ever."""
    first: list[Any] = []
    gap = since = n_repeats = n_seen = 0

    def is_endless(batch: Batch) -> bool:
        nonlocal gap, since, n_repeats, n_seen
        inputs = [v.data if isinstance(v, PackedSequence) else v for v in (*batch.args, *batch.kwargs.values())]
        since += 1
        if not first:
            first.extend(value.clone() for value in inputs)  # a loader may fill one buffer again and again
        elif len(first) == len(inputs) and all(map(_same, first, inputs)):
            # at equal distances only: in finite data the first batch may well have copies
            n_repeats = n_repeats + 1 if since == gap else 1
            gap, since = since, 0
        n_seen += batch.n_points
        return n_repeats > MOST_REPEATS or n_seen > MOST_UNCOUNTED

    return is_endless


def _same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.device == b.device and torch.equal(a, b)


def _has_length(data: Any) -> bool:
    """Whether the data says how long it is; a __len__ may raise, as that of a loader of an IterableDataset does."""
    try:
        return len(data) >= 0
    except Exception:  # their code: anything may be raised, and the data itself may be fine
        return False


def _as_batch(raw: Any, index: int, role: str) -> Batch:
    where = f"{role} batch {index}"
    inputs, labels, is_pair = raw, None, False
    if isinstance(raw, Sequence) and not isinstance(raw, PackedSequence | str):
        if len(raw) not in (1, 2):
            raise DataError(
                f"{where} has {len(raw)} parts", fix="give (inputs, labels), several inputs as ((a, b), labels)"
            )
        is_pair = len(raw) == 2
        inputs, labels = raw if is_pair else (raw[0], None)
    args: tuple[Any, ...] = (inputs,)
    kwargs: dict[str, Any] = {}
    if isinstance(inputs, Mapping):
        args, kwargs = (), dict(inputs)
        odd = next((name for name in kwargs if not isinstance(name, str)), None)
        if odd is not None:
            raise DataError(f"{where} is a dict with the key {odd!r}; its keys are the names of the model's inputs")
        name = next((name for name in LABEL_NAMES if name in kwargs), None)
        if not is_pair and name is not None:
            labels = kwargs.pop(name)
    elif isinstance(inputs, Sequence) and not isinstance(inputs, PackedSequence | str):
        args = tuple(inputs)
    named = [(f"input {i}", value) for i, value in enumerate(args)] + [(str(k), value) for k, value in kwargs.items()]
    sizes = [_n_points(value, f"{where}, {name}") for name, value in named]
    if len(set(sizes)) != 1:
        raise DataError(
            f"its tensors hold {sorted(set(sizes))} points; dimension 0 must be the same for all", where=where
        )
    tensors = [value for _, value in named if isinstance(value, Tensor)]
    if len(tensors) == len(named) and all(t.ndim == 1 for t in tensors) and any(t.is_floating_point() for t in tensors):
        raise DataError(
            f"{where} is a single vector of {sizes[0]} numbers, a point without a batch axis",
            fix="stack the points, torch.stack(list), or give x[:, None] where each number is a point",
        )
    return Batch(
        index=index,
        where=where,
        args=args,
        kwargs=kwargs,
        labels=labels,
        n_points=sizes[0],
        real_BT=_real_positions(kwargs, where),
    )


def _n_points(value: Any, where: str) -> int:
    tensor = value.data if isinstance(value, PackedSequence) else value
    check_dense(tensor, where)
    if tensor.ndim == 0:
        raise DataError(f"{where} holds a single number", fix="give tensors with the points along dimension 0")
    return int(value.batch_sizes[0]) if isinstance(value, PackedSequence) else len(tensor)


def check_dense(value: Any, where: str) -> None:
    """Refuses with a DataError what is no dense tensor of real numbers with values of its own."""
    if not isinstance(value, Tensor):
        kind = type(value).__name__
        way_out = WAYS_OUT.get(kind, "convert it")
        raise DataError(f"{where} holds a {kind}; every input is a dense tensor, points along dimension 0: {way_out}")
    if value.layout != torch.strided or value.is_nested:
        raise DataError(f"{where} is a sparse or nested tensor ({value.layout})", fix="give a dense one, x.to_dense()")
    if value.device.type == "meta":
        raise DataError(f"{where} is on the meta device and holds no values", fix="give real points")
    if value.is_complex():
        raise DataError(f"{where} holds complex numbers ({value.dtype})", fix="give real ones, torch.view_as_real(x)")
    if value.is_floating_point() and value.element_size() < 2:
        raise DataError(f"{where} holds numbers of 8 bits ({value.dtype})", fix="give wider ones, x.float()")
    if value.is_quantized:
        raise DataError(f"{where} is a quantised tensor ({value.dtype})", fix="give plain numbers, x.dequantize()")


def is_padding_mask(name: str) -> bool:
    """Whether an input of this name says which positions are padding."""
    return name == "attention_mask" or name.endswith("padding_mask")


def _real_positions(kwargs: dict[str, Any], where: str) -> Tensor | None:
    """Which positions count (B x T), from an `attention_mask` of 0 and 1 or a bool `*padding_mask` (True: padding).

    None without such a mask, and where masks disagree or there are two sequences: nobody says which one is meant.
    """
    if any(name.startswith(("tgt", "decoder_")) for name in kwargs):
        return None
    found = []
    for name, value in kwargs.items():
        if not is_padding_mask(name) or not isinstance(value, Tensor) or value.ndim != 2:
            continue
        if name != "attention_mask":
            if value.dtype == torch.bool:
                found.append(~value)
        elif bool(((value == 0) | (value == 1)).all()):
            found.append(value.bool())
    if not found or any(other.shape != found[0].shape or not torch.equal(other, found[0]) for other in found[1:]):
        return None
    empty = (~found[0].any(dim=1)).nonzero()
    if len(empty):
        raise DataError(
            f"all positions of point {int(empty[0])} are padding",
            where=where,
            fix="drop such points (an attention_mask is 1 where a position counts, a padding_mask True where it "
            "does not)",
        )
    return found[0]


def points_at(batch: Batch, where: slice | Tensor) -> Batch:
    """The batch of these points alone, in this order."""

    def cut(value: Any) -> Any:
        if isinstance(value, PackedSequence):
            padded, lengths = pad_packed_sequence(value, batch_first=True)
            return pack_padded_sequence(padded[where], lengths[where], batch_first=True, enforce_sorted=False)
        if isinstance(value, Tensor) and value.shape[:1] == (batch.n_points,):  # labels may be of any shape
            return value[where]
        if isinstance(value, list | tuple) and len(value) == batch.n_points:
            return [value[i] for i in integers(0, batch.n_points)[where].tolist()]
        return value

    return replace(
        batch,
        args=tuple(cut(value) for value in batch.args),
        kwargs={name: cut(value) for name, value in batch.kwargs.items()},
        labels=cut(batch.labels),
        n_points=len(integers(0, batch.n_points)[where]),
        real_BT=cut(batch.real_BT),
    )


def fresh(batch: Batch) -> Batch:
    """A copy: a layer that works in place, or a loader that reuses its memory, must not change what is read later."""

    def copied(value: Any) -> Any:
        if isinstance(value, PackedSequence):
            return value._replace(data=value.data.clone())
        return value.clone() if isinstance(value, Tensor) else value

    kwargs = {name: copied(value) for name, value in batch.kwargs.items()}
    args = tuple(copied(value) for value in batch.args)
    return replace(batch, args=args, kwargs=kwargs, labels=copied(batch.labels))


def _on_device(batch: Batch, device: torch.device) -> Batch:
    def move(value: Any) -> Any:
        movable: Any = value  # PackedSequence.to is typed for dtypes only
        return movable.to(device) if isinstance(value, Tensor | PackedSequence) else value

    return replace(
        batch,
        args=tuple(move(value) for value in batch.args),
        kwargs={name: move(value) for name, value in batch.kwargs.items()},
        labels=move(batch.labels),
        real_BT=move(batch.real_BT),
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
            f"{int(bad.sum())} of {tensor.numel()} values are NaN or infinite{where}",
            where=f"{batch.where}, {name}",
            fix="clean or drop that batch, it would decide every maximum",
        )
