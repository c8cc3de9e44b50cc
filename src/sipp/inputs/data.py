"""`Data`: any data that a user gives, read in checked batches (`Batch`); everything else reads this.

Some statements need points that had no part in choosing the weights: the last points are held back before scoring
(T18, `Data.hold_back`). That goes by the order of the data, which should be random, as every statement assumes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from sipp.errors import DataError, warn_caller
from sipp.inputs.batches import Batch
from sipp.inputs.hashes import is_padding_mask, point_hashes
from sipp.results import check, numerics

# How many points we put in a batch, if the data is a tensor or a Dataset: many small ones, few large ones.
FEWEST_POINTS, MOST_POINTS = 16, 1024
BATCH_BYTES, GPU_BATCH_BYTES = 2**20, 2**26
# The same for token ids, whose activations are large: tokens in a batch, on a GPU by its memory
BATCH_TOKENS, FEWEST_GPU_TOKENS, GPU_BYTES_A_TOKEN = 2048, 4096, 4 << 20
# Data of unknown length counts as endless if its first batch recurs this often at equal distances, or after this many
# points, unless n_points limits it.
MOST_REPEATS, MOST_UNCOUNTED = 16, 1_000_000
HELD_BACK_SHARE = 0.25  # of the calibration points, for a bound that needs points of its own and was given none (T18)


@dataclass(frozen=True)
class Data:
    """Points that were given, and how they are read."""

    given: Iterable[Any] | Tensor | Dataset[Any]
    role: str = "calibration"  # names the data in errors
    device: torch.device | None = None  # where its batches go; None: they stay where they are
    n_points: int | None = None  # the first that are taken; None: all
    batch_size: int | None = None  # of a tensor or a Dataset; None: by the size of a point
    refuses_non_finite: bool = True
    seen_hashes: set[str] | None = field(default=None, compare=False, repr=False)  # collects those of all points read

    @property
    def can_be_read_again(self) -> bool:
        """Whether a second pass is possible: not with an iterator."""
        return not hasattr(self.given, "__next__")

    @property
    def is_empty(self) -> bool:
        """Whether it is known to hold nothing."""
        return isinstance(self.given, list) and not self.given

    @property
    def is_in_tensors(self) -> bool:
        """Whether the points are in tensors, so that batches of any size can be made."""
        return isinstance(self.given, Tensor | TensorDataset)

    @property
    def n_points_known(self) -> int | None:
        """The number of points, if it is known without reading them."""
        if self.n_points is not None:
            return self.n_points
        if isinstance(self.given, Tensor):
            return len(self.given) if self.given.ndim else None
        return _length(self.given) if _is_map_style(self.given) else None

    def batches(self, batch_size: int | None = None) -> Iterator[Batch]:
        """The points in checked batches.

        A batch is a tensor, (inputs, labels) or a dict of tensors; inputs may be a tuple or a dict of tensors. The
        entry `labels` (or `label`) of a dict batch is its labels; in a pair (dict, labels) the whole dict goes to the
        model. Of `n_points` the last batch is cut if need be.
        """
        if self.n_points is not None:
            check.whole("n_inputs", self.n_points, least=1)
        left, n_seen, role = self.n_points, 0, self.role
        is_endless = _endless() if left is None and not _has_length(self.given) else None
        for index, raw in _read(self._raw_batches(batch_size or self.batch_size), role):
            batch = as_batch(raw, index, role)
            if is_endless is not None and is_endless(batch):
                raise DataError(
                    f"{role} does not seem to end: {n_seen:,} inputs so far, and no length is known",
                    fix="give finite data, such as a list of batches",
                )
            if batch.n_points == 0:
                continue
            if left is not None and batch.n_points > left:
                batch = points_at(batch, slice(left))
            batch = batch if self.device is None else on_device(batch, self.device)
            if self.refuses_non_finite:
                refuse_non_finite(batch)
            if self.seen_hashes is not None:
                self.seen_hashes.update(point_hashes(batch))
            yield batch
            n_seen += batch.n_points
            if left is not None:
                left -= batch.n_points
                if left == 0:
                    return
        if n_seen == 0:
            raise DataError(
                f"{role} holds no inputs; if it is an iterator, it was already used up", fix="give a list or a loader"
            )
        if left:
            warn_caller(f"{self.n_points} inputs were asked for, but {role} has only {n_seen}")

    def first_batch(self, batch_size: int | None = None) -> tuple[Batch, Data]:
        """The first batch, and the data with that batch put back."""
        with torch.random.fork_rng():  # a loader that shuffles draws from the global generator
            batch = fresh(next(self.batches(batch_size)))
        if self.can_be_read_again:
            return batch, self
        return batch, replace(self, given=itertools.chain([as_given(batch)], self.given))  # type: ignore[arg-type]

    def in_memory(self) -> Data:
        """The points, read once and kept as a list of batches."""
        return replace(
            self, given=[as_given(fresh(batch)) for batch in self.batches()], n_points=None, seen_hashes=None
        )

    def hold_back(self) -> tuple[Data, Data]:
        """The points in two lists of batches, kept in memory: those to score, and the last `HELD_BACK_SHARE` of all."""
        read = [fresh(batch) for batch in self.batches()]
        n_left = sum(batch.n_points for batch in read)
        n_left -= math.floor(HELD_BACK_SHARE * n_left)
        scored, held_back = [], []
        for batch in read:
            inside = min(max(n_left, 0), batch.n_points)
            if 0 < inside < batch.n_points:
                scored.append(as_given(points_at(batch, slice(inside))))
                held_back.append(as_given(points_at(batch, slice(inside, None))))
            else:
                (scored if inside else held_back).append(as_given(batch))
            n_left -= batch.n_points
        read_again = replace(self, n_points=None, seen_hashes=None)
        return replace(read_again, given=scored), replace(read_again, given=held_back)

    def hashes(self) -> list[str]:
        """The hash of every point, in order; copies have equal ones."""
        return [found for batch in self.batches() for found in point_hashes(batch)]

    def _raw_batches(self, batch_size: int | None) -> Iterable[Any]:
        """The raw batches."""
        data, device, role = self.given, self.device, self.role
        if isinstance(data, tuple | Mapping):
            raise DataError(
                f"{role} is a single {type(data).__name__}, not an iterable of batches",
                fix="wrap it in a list, [batch]",
            )
        if isinstance(data, Tensor):
            check_dense(data, role)
        if isinstance(data, Tensor) and data.ndim > 0:
            step = points_per_batch(data, device or data.device)
            step = step if batch_size is None else min(batch_size, step) if is_tokens(data) else batch_size
            return data.split(step)
        if _is_map_style(data):
            if batch_size is None and isinstance(data, TensorDataset):  # of others a point may be random, or slow
                batch_size = points_per_batch(data.tensors[0], device or data.tensors[0].device)
            points: Any = data
            _length(points)  # raises if it has none
            # a generator of its own, because a DataLoader would draw its base seed from the global one
            return DataLoader(points, batch_size=batch_size or FEWEST_POINTS, generator=torch.Generator())
        kind = type(data).__name__
        if isinstance(data, str | bytes | Tensor) or kind == "ndarray" or not isinstance(data, Iterable):
            hint = f": {WAYS_OUT['ndarray']}" if kind == "ndarray" else ""
            raise DataError(f"{role} is a {kind}, not a tensor of inputs or an iterable of batches{hint}")
        return data


AnyData = Iterable[Any] | Tensor | Dataset[Any] | Data  # what a user may give, to every function that takes data


def data_of(
    given: AnyData,
    *,
    role: str = "calibration",
    device: torch.device | None = None,
    n_points: int | None = None,
    batch_size: int | None = None,
    refuses_non_finite: bool = True,
) -> Data:
    """What was given, as a `Data`. If it is one already, only `n_points` is applied."""
    if isinstance(given, Data):
        return given if n_points is None else replace(given, n_points=n_points)
    return Data(given, role, device, n_points, batch_size, refuses_non_finite)


def points_per_batch(inputs: Tensor, device: torch.device) -> int:
    """The batch size that fits the byte budget; smaller for token ids, whose activations are large."""
    # torch's half-precision products are slow on a CPU, and on some they crash (illegal instruction)
    is_half = inputs.element_size() < 4 and device.type == "cpu"
    if is_tokens(inputs):
        most = FEWEST_POINTS if device.type == "cpu" else MOST_POINTS
        return max(1, min(most, _tokens_per_batch(device) // inputs.shape[1]))
    if not inputs.is_floating_point() or is_half:
        return FEWEST_POINTS
    point_bytes = max(1, inputs.element_size() * inputs.shape[1:].numel())
    n_bytes = BATCH_BYTES if device.type == "cpu" else GPU_BATCH_BYTES
    return min(max(n_bytes // point_bytes, FEWEST_POINTS), MOST_POINTS)


def _tokens_per_batch(device: torch.device) -> int:
    """Many on a large GPU, which would otherwise wait for Python."""
    if device.type != "cuda":
        return BATCH_TOKENS
    return max(FEWEST_GPU_TOKENS, torch.cuda.get_device_properties(device).total_memory // GPU_BYTES_A_TOKEN)


def is_tokens(inputs: Tensor) -> bool:
    """Whether the points are sequences of whole numbers."""
    return inputs.ndim == 2 and inputs.shape[1] > 0 and not inputs.is_floating_point()


def _is_map_style(data: Any) -> bool:
    """Whether it is a map-style Dataset: one point per index."""
    return isinstance(data, Dataset) and not isinstance(data, IterableDataset)


def _length(data: Any) -> int:
    """The length of a Dataset; a DataError if its __len__ is missing or fails."""
    try:
        return len(data)
    except Exception as error:  # their code: anything may be raised
        raise DataError(
            f"a {type(data).__name__} has no usable length ({error!r})",
            fix="give it a __len__ that counts its inputs",
        ) from error


def _has_length(data: Any) -> bool:
    """Whether the data has a length. A __len__ may raise, as that of a loader of an IterableDataset does."""
    try:
        return len(data) >= 0
    except Exception:  # their code: anything may be raised, and the data itself may be fine
        return False


def _read(source: Iterable[Any], role: str) -> Iterator[tuple[int, Any]]:
    """The raw batches with their numbers. One that cannot be read is never skipped: an error names it."""
    try:
        iterator = iter(source)
    except Exception as error:  # their code: anything may be raised
        raise DataError(f"{role} cannot be iterated over ({error!r})", fix="give a list of batches") from error
    for index in itertools.count():
        try:
            raw = next(iterator)
        except StopIteration:
            return
        except DataError:
            raise
        except Exception as error:
            raise DataError(f"{role} batch {index} could not be read, and no input is skipped: {error!r}") from error
        yield index, raw


def _endless() -> Callable[[Batch], bool]:
    """A function to be called with each batch in turn; it returns True once the data looks endless."""
    first: list[Tensor] = []
    gap = since = n_repeats = n_seen = 0

    def is_endless(batch: Batch) -> bool:
        nonlocal gap, since, n_repeats, n_seen
        inputs = list(tensors_of_inputs(batch).values())
        since += 1
        if not first:
            first.extend(value.clone() for value in inputs)  # a loader may fill one buffer again and again
        elif len(first) == len(inputs) and all(map(numerics.same_tensor, first, inputs)):
            # at equal distances only: finite data may contain copies of its first batch
            n_repeats = n_repeats + 1 if since == gap else 1
            gap, since = since, 0
        n_seen += batch.n_points
        return n_repeats > MOST_REPEATS or n_seen > MOST_UNCOUNTED

    return is_endless


# --- One batch of what was given, checked -----------------------------------------------------------------------------

LABEL_NAMES = ("labels", "label")  # of a dict batch
WAYS_OUT = {
    "ndarray": "give torch.from_numpy(array)",
    "NoneType": "give batches without empty entries",
    "list": "give torch.tensor(list), or torch.stack(list) of tensors",
    "str": "give token numbers",
}


def as_batch(raw: Any, index: int, role: str) -> Batch:
    """The batch with this number, checked; an error names it."""
    where = f"{role} batch {index}"
    args, kwargs, labels = _arguments_and_labels(raw, where)
    named = [*((f"input {i}", value) for i, value in enumerate(args)), *kwargs.items()]
    sizes = [_n_points(value, f"{where}, {name}") for name, value in named]
    if len(set(sizes)) != 1:
        raise DataError(
            f"its tensors hold {sorted(set(sizes))} inputs; dimension 0 must be the same for all", where=where
        )
    tensors = [value for _, value in named if isinstance(value, Tensor)]
    if len(tensors) == len(named) and all(t.ndim == 1 for t in tensors) and any(t.is_floating_point() for t in tensors):
        raise DataError(
            f"{where} is a single vector of {sizes[0]} numbers, one input without a batch dimension",
            fix="stack the inputs, torch.stack(list), or give x[:, None] where each number is an input",
        )
    return Batch(index, where, args, kwargs, labels, sizes[0], _real_positions(kwargs, where))


def _arguments_and_labels(raw: Any, where: str) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """What the model is called with (positional, by name), and the labels; None without labels."""
    inputs, labels, is_pair = raw, None, False
    if isinstance(raw, Sequence) and not isinstance(raw, PackedSequence | str):
        if len(raw) not in (1, 2):
            raise DataError(
                f"{where} has {len(raw)} parts", fix="give (inputs, labels), several inputs as ((a, b), labels)"
            )
        is_pair = len(raw) == 2
        inputs, labels = raw if is_pair else (raw[0], None)
    if isinstance(inputs, Mapping):
        kwargs = dict(inputs)
        odd = next((name for name in kwargs if not isinstance(name, str)), None)
        if odd is not None:
            raise DataError(f"{where} is a dict with the key {odd!r}; its keys are the names of the model's inputs")
        name = next((name for name in LABEL_NAMES if name in kwargs), None)
        if not is_pair and name is not None:
            labels = kwargs.pop(name)
        return (), kwargs, labels
    if isinstance(inputs, Sequence) and not isinstance(inputs, PackedSequence | str):
        return tuple(inputs), {}, labels
    return (inputs,), {}, labels


def _n_points(value: Any, where: str) -> int:
    tensor = value.data if isinstance(value, PackedSequence) else value
    check_dense(tensor, where)
    if tensor.ndim == 0:
        raise DataError(f"{where} holds a single number", fix="give tensors with the inputs along dimension 0")
    return int(value.batch_sizes[0]) if isinstance(value, PackedSequence) else len(tensor)


def check_dense(value: Any, where: str) -> None:
    """Raises a DataError unless this is a dense tensor of real numbers."""
    if not isinstance(value, Tensor):
        kind = type(value).__name__
        way_out = WAYS_OUT.get(kind, "convert it")
        raise DataError(
            f"{where} holds a {kind}; every argument is a dense tensor with the batch in dimension 0: {way_out}"
        )
    if value.layout != torch.strided or value.is_nested:
        raise DataError(f"{where} is a sparse or nested tensor ({value.layout})", fix="give a dense one, x.to_dense()")
    if value.device.type == "meta":
        raise DataError(f"{where} is on the meta device and holds no values", fix="give real inputs")
    if value.is_complex():
        raise DataError(f"{where} holds complex numbers ({value.dtype})", fix="give real ones, torch.view_as_real(x)")
    if value.is_floating_point() and value.element_size() < 2:
        raise DataError(f"{where} holds numbers of 8 bits ({value.dtype})", fix="give wider ones, x.float()")
    if value.is_quantized:
        raise DataError(f"{where} is a quantised tensor ({value.dtype})", fix="give plain numbers, x.dequantize()")


def _real_positions(kwargs: dict[str, Any], where: str) -> Tensor | None:
    """Which positions count (B x T), from an `attention_mask` of 0 and 1 or a bool `*padding_mask` (True: padding).

    None without such a mask, and if masks disagree or there are two sequences: it is not clear which one is meant.
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
            f"all positions of input {int(empty[0])} are padding",
            where=where,
            fix="drop such inputs (an attention_mask is 1 where a position counts, a padding_mask True where it "
            "does not)",
        )
    return found[0]


def refuse_non_finite(batch: Batch) -> None:
    """Raises a DataError if an input is NaN or infinite anywhere."""
    for name, tensor in tensors_of_inputs(batch).items():
        if not tensor.is_floating_point():
            continue
        if "mask" in name:  # an additive attention mask says "never" with -inf
            tensor = tensor.clamp(min=torch.finfo(tensor.dtype).min)
        if tensor.numel() == 0 or all(map(math.isfinite, torch.stack(torch.aminmax(tensor.detach())).tolist())):
            continue  # aminmax passes NaN on; one pass over the values if they are fine
        bad = ~torch.isfinite(tensor)
        is_packed = any(isinstance(value, PackedSequence) for value in (*batch.args, *batch.kwargs.values()))
        where = "" if is_packed else f", first in input {int(bad.nonzero()[0, 0])}"
        raise DataError(
            f"{int(bad.sum())} of {tensor.numel()} values are NaN or infinite{where}",
            where=f"{batch.where}, {name}",
            fix="clean or drop that batch, it would decide every maximum",
        )


def tensors_of_inputs(batch: Batch) -> dict[str, Tensor]:
    """The tensor of every input, by its name in errors; of a packed sequence, its data."""
    named = {f"input {i}": value for i, value in enumerate(batch.args)} | batch.kwargs
    return {name: value.data if isinstance(value, PackedSequence) else value for name, value in named.items()}


def as_given(batch: Batch) -> tuple[Any, Any]:
    """The batch as a caller would give it: (inputs, labels)."""
    return batch.kwargs or batch.args, batch.labels


# --- Batches cut, copied, moved and joined ----------------------------------------------------------------------------


def points_at(batch: Batch, where: slice | Tensor) -> Batch:
    """The batch of these points alone, in this order."""

    def cut(value: Any) -> Any:
        if isinstance(value, PackedSequence):
            padded, lengths = pad_packed_sequence(value, batch_first=True)
            return pack_padded_sequence(padded[where], lengths[where], batch_first=True, enforce_sorted=False)
        if isinstance(value, Tensor) and value.shape[:1] == (batch.n_points,):  # labels may be of any shape
            return value[where]
        if isinstance(value, list | tuple) and len(value) == batch.n_points:
            return [value[i] for i in numerics.integers(0, batch.n_points)[where].tolist()]
        return value

    return replace(_map_values(batch, cut), n_points=len(numerics.integers(0, batch.n_points)[where]))


def first_and_last(n_points: int) -> Tensor:
    """The first and the last point of a batch, which stand for all of it."""
    return numerics.integers(0, n_points)[:: max(1, n_points - 1)]


def form_of(batch: Batch) -> tuple[Any, ...]:
    """The shapes and dtypes of its inputs, except for the number of points."""
    inputs = tensors_of_inputs(batch)
    return (batch.n_points > 1, *((name, t.dtype, t.shape[1:]) for name, t in inputs.items()))


def fresh(batch: Batch) -> Batch:
    """A copy, safe from layers that work in place and loaders that reuse their memory."""

    def copied(value: Any) -> Any:
        if isinstance(value, PackedSequence):
            return value._replace(data=value.data.clone())
        return value.clone() if isinstance(value, Tensor) else value

    return _map_values(batch, copied)


def on_device(batch: Batch, device: torch.device) -> Batch:
    """The batch with its tensors on this device."""

    def move(value: Any) -> Any:
        movable: Any = value  # PackedSequence.to is typed for dtypes only
        return movable.to(device) if isinstance(value, Tensor | PackedSequence) else value

    return _map_values(batch, move)


def with_dtype(batch: Batch, dtype: torch.dtype) -> Batch:
    """The batch with its real numbers in this dtype."""

    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    return _map_values(batch, cast)


def _map_values(batch: Batch, change: Callable[[Any], Any]) -> Batch:
    return replace(
        batch,
        args=tuple(change(value) for value in batch.args),
        kwargs={name: change(value) for name, value in batch.kwargs.items()},
        labels=change(batch.labels),
        real_BT=change(batch.real_BT),
    )


def concatenated(first: Batch, second: Batch) -> Batch | None:
    """One batch of the points of both, without labels; None unless all inputs are tensors of the same form."""
    given, other = _by_name(first), _by_name(second)
    if given.keys() != other.keys():
        return None
    if not all(_is_alike(given[name], first.n_points, other[name], second.n_points) for name in given):
        return None
    both = {name: torch.cat([given[name], other[name]]) for name in given}
    return replace(
        first,
        args=tuple(both[i] for i in range(len(first.args))),
        kwargs={name: both[name] for name in first.kwargs},
        labels=None,
        n_points=first.n_points + second.n_points,
        real_BT=both.get(None),
    )


def _by_name(batch: Batch) -> dict[int | str | None, Any]:
    """The inputs by position or name; under None, the mask of positions that count."""
    real = [] if batch.real_BT is None else [(None, batch.real_BT)]
    return dict([*enumerate(batch.args), *batch.kwargs.items(), *real])


def _is_alike(a: Any, n_a: int, b: Any, n_b: int) -> bool:
    """Whether both are tensors with these numbers of points, and of the same form."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor) or a.ndim == 0 or b.ndim == 0:
        return False
    return (len(a), len(b)) == (n_a, n_b) and a.shape[1:] == b.shape[1:] and a.dtype == b.dtype
