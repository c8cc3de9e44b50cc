"""`Data`: any data that a user gives, checked once; everything else reads this.

Some statements need points that had no part in choosing the weights. T18: the last points are held back before
scoring, `Data.hold_back`. T19: the last points of S are S2, the others S1, `split_last`. Both go by the order of the
data, which should be random, as every statement assumes.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from sipp.errors import DataError, warn_caller
from sipp.inputs.batches import (
    WAYS_OUT,
    as_batch,
    as_given,
    check_dense,
    fresh,
    on_device,
    points_at,
    refuse_non_finite,
    tensors_of_inputs,
)
from sipp.inputs.point_keys import draw_keys_of
from sipp.records.batches import Batch
from sipp.records.checking import check_seed, check_whole
from sipp.records.numerics import same_tensor

# How many points we put in a batch, if the data is a tensor or a Dataset: many small ones, few large ones.
FEWEST_POINTS, MOST_POINTS = 16, 1024
BATCH_BYTES, GPU_BATCH_BYTES = 2**20, 2**26
# The same for token ids, whose activations are large: tokens in a batch, on a GPU by its memory
BATCH_TOKENS, FEWEST_GPU_TOKENS, GPU_BYTES_A_TOKEN = 2048, 4096, 4 << 20
# Data of unknown length counts as endless if its first batch recurs this often at equal distances, or after this many
# points, unless n_points limits it.
MOST_REPEATS, MOST_UNCOUNTED = 16, 1_000_000
HELD_BACK_SHARE = 0.25  # of the calibration points, for a bound that needs points of its own and was given none (T18)
MOST_S2_POINTS = 64  # in S2 of T19: 59 cover 95 % of inputs at confidence 95 %
MOST_S2_SHARE = 1 / 4  # of all points


@dataclass(frozen=True)
class Data:
    """Points that were given, and how they are read."""

    given: Iterable[Any] | Tensor | Dataset[Any]
    role: str = "calibration"  # names the data in errors
    device: torch.device | None = None  # where its batches go; None: they stay where they are
    n_points: int | None = None  # how many to take; None: all
    seed: int = 0  # for drawing them from a tensor or a Dataset
    batch_size: int | None = None  # of a tensor or a Dataset; None: by the size of a point
    refuses_non_finite: bool = True
    noted: set[bytes] | None = field(default=None, compare=False, repr=False)  # collects the key of every point read

    @property
    def can_be_read_again(self) -> bool:
        """Whether a second pass is possible: not with an iterator."""
        return not hasattr(self.given, "__next__")

    @property
    def is_empty(self) -> bool:
        """Whether it is known to hold nothing."""
        return isinstance(self.given, list) and not self.given

    @property
    def is_repeated(self) -> bool:
        """Whether every pass gives the same points, whatever `n_points` is; a loader may shuffle."""
        return isinstance(self.given, Tensor | TensorDataset | list)

    @property
    def has_cheap_points(self) -> bool:
        """Whether the points are in tensors, so that batches of any size can be made."""
        return isinstance(self.given, Tensor | TensorDataset)

    @property
    def n_known(self) -> int | None:
        """The number of points, if it is known without reading them."""
        if self.n_points is not None:
            return self.n_points
        if isinstance(self.given, Tensor):
            return len(self.given) if self.given.ndim else None
        return _length(self.given) if _has_points(self.given) else None

    def with_points(self, n_points: int | None) -> Data:
        """The same data, limited to this many points; None: all."""
        return replace(self, n_points=n_points)

    def batches(self, batch_size: int | None = None) -> Iterator[Batch]:
        """The points in checked batches.

        A batch is a tensor, (inputs, labels) or a dict of tensors; inputs may be a tuple or a dict of tensors. The
        entry `labels` (or `label`) of a dict batch is its labels; in a pair (dict, labels) the whole dict goes to the
        model. From a tensor or a Dataset `n_points` are drawn uniformly without replacement with the seed (T4); from
        any other iterable the first are taken, cutting the last batch if need be.
        """
        if self.n_points is not None:
            check_whole("n_points", self.n_points, least=1)
        check_seed(self.seed)
        left, n_seen, role = self.n_points, 0, self.role
        is_endless = _endless() if left is None and not _has_length(self.given) else None
        for index, raw in _read(self._source(batch_size or self.batch_size), role):
            batch = as_batch(raw, index, role)
            if is_endless is not None and is_endless(batch):
                raise DataError(
                    f"{role} does not seem to end: {n_seen:,} inputs so far, and no length is known",
                    fix=f"give finite data (a list of batches){', or n_points' if role == 'calibration' else ''}",
                )
            if batch.n_points == 0:
                continue
            if left is not None and batch.n_points > left:
                batch = points_at(batch, slice(left))
            batch = batch if self.device is None else on_device(batch, self.device)
            if self.refuses_non_finite:
                refuse_non_finite(batch)
            if self.noted is not None:
                self.noted.update(draw_keys_of(batch))
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
        return replace(self, given=[as_given(fresh(batch)) for batch in self.batches()], n_points=None, noted=None)

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
        read_again = replace(self, n_points=None, noted=None)
        return replace(read_again, given=scored), replace(read_again, given=held_back)

    def keys(self) -> frozenset[bytes]:
        """The keys of all points, equal ones once (T18)."""
        return frozenset(key for batch in self.batches() for key in draw_keys_of(batch))

    def _source(self, batch_size: int | None) -> Iterable[Any]:
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
            chosen = self._chosen(len(data))
            step = points_per_batch(data, device or data.device)
            step = step if batch_size is None else min(batch_size, step) if is_tokens(data) else batch_size
            return data.split(step) if chosen is None else (data[part] for part in chosen.split(step))
        if _has_points(data):
            if batch_size is None and isinstance(data, TensorDataset):  # of others a point may be random, or slow
                batch_size = points_per_batch(data.tensors[0], device or data.tensors[0].device)
            chosen = self._chosen(_length(data))
            points: Any = data if chosen is None else Subset(data, chosen.tolist())  # type: ignore[arg-type]
            # a generator of its own, because a DataLoader would draw its base seed from the global one
            return DataLoader(points, batch_size=batch_size or FEWEST_POINTS, generator=torch.Generator())
        kind = type(data).__name__
        if isinstance(data, str | bytes | Tensor) or kind == "ndarray" or not isinstance(data, Iterable):
            hint = f": {WAYS_OUT['ndarray']}" if kind == "ndarray" else ""
            raise DataError(f"{role} is a {kind}, not a tensor of inputs or an iterable of batches{hint}")
        return data

    def _chosen(self, n_all: int) -> Tensor | None:
        """The points drawn with the seed; None: all of them, in their order."""
        if self.n_points is None or self.n_points >= n_all:
            return None
        generator = torch.Generator("cpu").manual_seed(self.seed)
        return torch.randperm(n_all, generator=generator, dtype=torch.int64, device="cpu")[: self.n_points]


AnyData = Iterable[Any] | Tensor | Dataset[Any] | Data  # what a user may give, to every function that takes data


def data_of(
    given: AnyData,
    *,
    role: str = "calibration",
    device: torch.device | None = None,
    n_points: int | None = None,
    seed: int = 0,
    batch_size: int | None = None,
    refuses_non_finite: bool = True,
) -> Data:
    """What was given, as a `Data`. If it is one already, only `n_points` is applied."""
    if isinstance(given, Data):
        return given if n_points is None else given.with_points(n_points)
    return Data(given, role, device, n_points, seed, batch_size, refuses_non_finite)


def split_last(batches: Iterable[Batch]) -> Iterator[tuple[Batch, int]]:
    """Each batch with the number of its points that are in S1: all but the last points of the data (T19).

    Which points come last is known only at the end of the data, so a few batches are held back.
    """
    held: deque[Batch] = deque()
    n_held = n_seen = 0
    for batch in batches:
        held.append(fresh(batch))
        n_held, n_seen = n_held + batch.n_points, n_seen + batch.n_points
        while n_held - held[0].n_points >= MOST_S2_POINTS:
            n_held -= held[0].n_points
            yield held[0], held.popleft().n_points
    n_first = n_held - min(MOST_S2_POINTS, math.floor(MOST_S2_SHARE * n_seen))
    for batch in held:
        yield batch, min(max(n_first, 0), batch.n_points)
        n_first -= batch.n_points


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


def _has_points(data: Any) -> bool:
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
        elif len(first) == len(inputs) and all(map(same_tensor, first, inputs)):
            # at equal distances only: finite data may contain copies of its first batch
            n_repeats = n_repeats + 1 if since == gap else 1
            gap, since = since, 0
        n_seen += batch.n_points
        return n_repeats > MOST_REPEATS or n_seen > MOST_UNCOUNTED

    return is_endless
