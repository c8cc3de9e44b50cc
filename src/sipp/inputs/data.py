"""`Data`: any data that a user gives, read in checked batches (`Batch`), and one SHA-256 for each input.

Some statements need points that had no part in choosing the weights: `split_off` holds some back. It does so at random
places, because data is often sorted by class, or repeats with one point of each class in turn.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from sipp.errors import DataError, warn_caller
from sipp.results import HELD_BACK_ONE_IN, check, hashing, numerics

MOST_UNCOUNTED = 1_000_000  # points: data of unknown length counts as endless after so many
DIGITS = 32  # hexadecimal, half of a SHA-256: two of a billion points share them with a probability below 1e-20


# --- A batch ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Batch:
    """One batch ready for the model: `model(*args, **kwargs)`."""

    index: int
    where: str  # its name in errors: "holdout batch 3"
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    labels: Any
    n_points: int
    real_BT: Tensor | None = None  # which positions of each point count; False is padding. None: all of them

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensor of every input, by its name in errors."""
        named = {f"input {i}": value for i, value in enumerate(self.args)} | self.kwargs
        return {name: value for name, value in named.items() if isinstance(value, Tensor)}

    @property
    def as_given(self) -> tuple[Any, Any]:
        """The batch as a caller would give it: (inputs, labels)."""
        return self.kwargs or self.args, self.labels

    def at(self, where: slice | Tensor) -> Batch:
        """The batch of these points alone, in this order."""
        numbers = numerics.integers(0, self.n_points)[where]

        def cut(value: Any) -> Any:
            if isinstance(value, Tensor) and value.shape[:1] == (self.n_points,):  # labels may be of any shape
                return value[where]
            if isinstance(value, list | tuple) and len(value) == self.n_points:
                return [value[i] for i in numbers.tolist()]
            return value

        return replace(self._changed(cut), n_points=len(numbers))

    def copied(self, device: torch.device | None = None, dtype: torch.dtype | None = None) -> Batch:
        """A copy, safe from layers that work in place: on a device, its real numbers in a dtype (None: as they are)."""

        def copy(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return value.to(device, dtype if value.is_floating_point() else None, copy=True)

        return self._changed(copy)

    def on(self, device: torch.device) -> Batch:
        """The batch with its tensors on this device."""
        return self._changed(lambda value: value.to(device) if isinstance(value, Tensor) else value)

    def joined(self, other: Batch) -> Batch | None:
        """One batch of the points of both; None unless their inputs and labels have the same form."""
        names, n_args = list(self.kwargs), len(self.args)
        if self.kwargs.keys() != other.kwargs.keys() or n_args != len(other.args):
            return None
        mine, theirs = (
            (*one.args, *(one.kwargs[name] for name in names), one.labels, one.real_BT) for one in (self, other)
        )
        if [_form(one, self.n_points) for one in mine] != [_form(one, other.n_points) for one in theirs]:
            return None
        *inputs, labels, real_BT = map(_both, mine, theirs)
        args, kwargs = tuple(inputs[:n_args]), dict(zip(names, inputs[n_args:]))
        n_points = self.n_points + other.n_points
        return replace(self, args=args, kwargs=kwargs, labels=labels, n_points=n_points, real_BT=real_BT)

    def hashes(self) -> list[str]:
        """One SHA-256 a point, of the bytes of all its inputs as they are given.

        It finds the points of one set in another, and the copies within a set. Padding is not content: positions where
        `real_BT` is False are left out, and so is the mask itself.
        """
        names = [name for name in sorted(self.kwargs) if self.real_BT is None or not _is_padding_mask(name)]
        parts = [self._rows(value) for value in (*self.args, *(self.kwargs[name] for name in names))]
        return [hashlib.sha256(b"".join(point)).hexdigest()[:DIGITS] for point in zip(*parts, strict=True)]

    def _changed(self, change: Callable[[Any], Any]) -> Batch:
        return replace(
            self,
            args=tuple(map(change, self.args)),
            kwargs={name: change(value) for name, value in self.kwargs.items()},
            labels=change(self.labels),
            real_BT=change(self.real_BT),
        )

    def _rows(self, value: Tensor) -> list[bytes]:
        """The bytes of each point, without padding."""
        real_BT = self.real_BT
        if real_BT is not None and value.ndim > 1 and value.shape[1] == real_BT.shape[1]:
            return [_bytes(point[real]) for point, real in zip(value, real_BT.to(value.device))]
        whole = _bytes(value)
        n_bytes = len(whole) // len(value)
        return [whole[i * n_bytes : (i + 1) * n_bytes] for i in range(len(value))]


def _form(value: Any, n_points: int) -> object:
    """What two values must share to be joined; what is not one for each point has the form of no other."""
    if isinstance(value, Tensor) and value.shape[:1] == (n_points,):
        return value.shape[1:], value.dtype
    if isinstance(value, list | tuple) and len(value) == n_points:
        return list
    return value if value is None else object()


def _both(mine: Any, theirs: Any) -> Any:
    """Two values of one form, joined."""
    if isinstance(mine, Tensor):
        return torch.cat([mine, theirs])
    return None if mine is None else [*mine, *theirs]


def hash_of_points(hashes: Iterable[str]) -> str:
    """One SHA-256 of the hashes of many points, whatever their order."""
    return hashlib.sha256("".join(sorted(hashes)).encode()).hexdigest()


def _bytes(tensor: Tensor) -> bytes:
    """The bytes of a tensor, from a copy: one that NumPy has seen can no longer be resized."""
    return hashing.raw_bytes(tensor).clone().numpy().tobytes()


# --- All batches ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Data:
    """Points that were given, and how they are read."""

    given: Iterable[Any] | Tensor | Dataset[Any]
    role: str = "calibration"  # names the data in errors
    device: torch.device | None = None  # where its batches go; None: they stay where they are
    n_points: int | None = None  # the first that are taken; None: all
    batch_size: int | None = None  # of a tensor or a Dataset; None: by the size of a point
    refuses_non_finite: bool = True

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
        n_seen, has_end = 0, self.n_points is not None or _length(self.given) is not None
        for index, raw in _read(self._raw_batches(batch_size or self.batch_size), self.role):
            batch = as_batch(raw, index, self.role)
            if not has_end and n_seen > MOST_UNCOUNTED:
                raise DataError(
                    f"{self.role} does not seem to end: {n_seen:,} inputs so far, and no length is known",
                    fix="give finite data, such as a list of batches",
                )
            if batch.n_points == 0:
                continue
            if self.n_points is not None and batch.n_points > self.n_points - n_seen:
                batch = batch.at(slice(self.n_points - n_seen))
            batch = batch if self.device is None else batch.on(self.device)
            if self.refuses_non_finite:
                _refuse_non_finite(batch)
            n_seen += batch.n_points
            yield batch
            if n_seen == self.n_points:
                return
        if n_seen == 0:
            raise DataError(
                f"{self.role} holds no inputs; if it is an iterator, it was already used up",
                fix="give a list or a loader",
            )
        if self.n_points is not None:
            warn_caller(f"{self.n_points} inputs were asked for, but {self.role} has only {n_seen}")

    def in_memory(self) -> Data:
        """The points, read once and kept as a list of batches."""
        read = [batch.copied().as_given for batch in self.batches()]
        return replace(self, given=read, n_points=None)

    def hold_back(self) -> tuple[Data, Data]:
        """The points to score and those held back, one in `HELD_BACK_ONE_IN`, as two lists of batches in memory."""
        read = [batch.copied() for batch in self.batches()]
        most = max(batch.n_points for batch in read)
        scored, held_back = (
            [batch.as_given for batch in merged_batches(some, most)] for some in split_off(read, HELD_BACK_ONE_IN)
        )
        read_again = replace(self, n_points=None)
        return replace(read_again, given=scored), replace(read_again, given=held_back)

    def hashes(self) -> list[str]:
        """The hash of every point, in order; copies have equal ones."""
        return [found for batch in self.batches() for found in batch.hashes()]

    def _raw_batches(self, batch_size: int | None) -> Iterable[Any]:
        """The raw batches."""
        data, role = self.given, self.role
        if isinstance(data, tuple | Mapping):
            raise DataError(
                f"{role} is a single {type(data).__name__}, not an iterable of batches",
                fix="wrap it in a list, [batch]",
            )
        if isinstance(data, Tensor):
            _check_dense(data, role)
            if data.ndim > 0:
                step = numerics.points_per_batch(data, self.device or data.device)
                step = step if batch_size is None else min(batch_size, step) if numerics.is_tokens(data) else batch_size
                return data.split(step)
        if _is_map_style(data):
            if batch_size is None and isinstance(data, TensorDataset):  # of others a point may be random, or slow
                batch_size = numerics.points_per_batch(data.tensors[0], self.device or data.tensors[0].device)
            # a generator of its own, because a DataLoader would draw its base seed from the global one
            return DataLoader(data, batch_size=batch_size or numerics.FEWEST_POINTS, generator=torch.Generator())  # type: ignore[arg-type]
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
    """What was given, as a `Data`. If it is one already, only `n_points` is applied.

    A pair (inputs, labels) of two tensors, one label for each input, is a data set.
    """
    if isinstance(given, Data):
        return given if n_points is None else replace(given, n_points=n_points)
    if isinstance(given, tuple) and _is_labelled_batch(given):
        given = TensorDataset(*given)
    return Data(given, role, device, n_points, batch_size, refuses_non_finite)


def _is_labelled_batch(given: tuple[Any, ...]) -> bool:
    """Whether it is one tensor of inputs with a label each; of two tensors alike, the second may be an input too."""
    if len(given) != 2 or not all(isinstance(one, Tensor) for one in given):
        return False
    return bool(given[0].ndim > 1 and given[1].ndim == 1 and len(given[0]) == len(given[1]))


def split_off(batches: Sequence[Batch], one_in: int) -> tuple[list[Batch], list[Batch]]:
    """All points but those held back, and these: of every `one_in` different points one, at a random place.

    The same data is always split in the same way. A point that is held back counts once: its copies are in neither
    part. With fewer than `one_in` different points none is held back.
    """
    hashes = [found for batch in batches for found in batch.hashes()]
    different, generator = list(dict.fromkeys(hashes)), torch.Generator("cpu").manual_seed(0)
    starts = numerics.integers(0, len(different) if len(different) >= one_in else 0, one_in)
    places = starts + torch.randint(one_in, (len(starts),), generator=generator, dtype=torch.int64, device="cpu")
    held_back = {different[place] for place in places[places < len(different)].tolist()}
    first = {point: i for i, point in reversed(list(enumerate(hashes)))}

    def part(is_in: list[bool]) -> list[Batch]:
        is_in_N = torch.tensor(is_in, dtype=torch.bool, device="cpu")
        of_batches = zip(batches, is_in_N.split([batch.n_points for batch in batches]))
        return [batch.at(is_in_B.nonzero().flatten()) for batch, is_in_B in of_batches if bool(is_in_B.any())]

    return (
        part([point not in held_back for point in hashes]),
        part([point in held_back and first[point] == i for i, point in enumerate(hashes)]),
    )


def merged_batches(batches: Sequence[Batch], most: int) -> list[Batch]:
    """The points in fewer batches: neighbours of the same form are joined up to `most` points."""
    found: list[Batch] = []
    for batch in batches:
        fits = found and found[-1].n_points + batch.n_points <= most
        both = found[-1].joined(batch) if fits else None
        if both is None:
            found.append(batch)
        else:
            found[-1] = both
    return found


def _is_map_style(data: Any) -> bool:
    """Whether it is a map-style Dataset: one point per index."""
    return isinstance(data, Dataset) and not isinstance(data, IterableDataset)


def _length(data: Any) -> int | None:
    """The length of the data, if it has one. A __len__ may raise, as that of a loader of an IterableDataset does."""
    try:
        return len(data)
    except Exception:  # their code: anything may be raised, and the data itself may be fine
        return None


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


# --- One batch of what was given, checked -----------------------------------------------------------------------------

LABEL_NAMES = ("labels", "label")  # of a dict batch
WAYS_OUT = {
    "ndarray": "give torch.from_numpy(array)",
    "NoneType": "give batches without empty entries",
    "list": "give torch.tensor(list), or torch.stack(list) of tensors",
    "str": "give token numbers, as sipp.text(file, tokenizer) reads them",
    "PackedSequence": "give padded sequences and their lengths, and pack them in the model",
}


def as_batch(raw: Any, index: int, role: str) -> Batch:
    """The batch with this number, checked; an error names it."""
    where = f"{role} batch {index}"
    args, kwargs, labels = _arguments_and_labels(raw, where)
    named = [*((f"input {i}", value) for i, value in enumerate(args)), *kwargs.items()]
    for name, value in named:
        _check_dense(value, f"{where}, {name}")
        if value.ndim == 0:
            raise DataError(f"{where}, {name} holds a single number", fix="give tensors with the inputs in dimension 0")
    sizes = [len(value) for _, value in named]
    if len(set(sizes)) != 1:
        raise DataError(
            f"its tensors hold {sorted(set(sizes))} inputs; dimension 0 must be the same for all", where=where
        )
    if all(t.ndim == 1 for _, t in named) and any(t.is_floating_point() for _, t in named):
        raise DataError(
            f"{where} is a single vector of {sizes[0]} numbers, one input without a batch dimension",
            fix="stack the inputs, torch.stack(list), or give x[:, None] where each number is an input",
        )
    return Batch(index, where, args, kwargs, labels, sizes[0], _real_positions(kwargs, where))


def _arguments_and_labels(raw: Any, where: str) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """What the model is called with (positional, by name), and the labels; None without labels."""
    inputs, labels, is_pair = raw, None, False
    if _is_sequence(raw):
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
    return (tuple(inputs) if _is_sequence(inputs) else (inputs,)), {}, labels


def _is_sequence(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, PackedSequence | str)


def _check_dense(value: Any, where: str) -> None:
    """Raises a DataError unless this is a dense tensor of real numbers."""
    if not isinstance(value, Tensor):
        kind = type(value).__name__
        way_out = WAYS_OUT.get(kind, "convert it")
        raise DataError(
            f"{where} holds a {kind}; every argument is a dense tensor with the batch in dimension 0: {way_out}"
        )
    is_short = value.is_floating_point() and value.element_size() < 2
    for is_so, what, fix in (
        (
            value.layout != torch.strided or value.is_nested,
            f"is a sparse or nested tensor ({value.layout})",
            "x.to_dense()",
        ),
        (value.is_meta, "is on the meta device and holds no values", "real inputs"),
        (value.is_complex(), f"holds complex numbers ({value.dtype})", "torch.view_as_real(x)"),
        (is_short, f"holds numbers of 8 bits ({value.dtype})", "x.float()"),
    ):
        if is_so:
            raise DataError(f"{where} {what}", fix=f"give {fix}")


def _real_positions(kwargs: dict[str, Any], where: str) -> Tensor | None:
    """Which positions count (B x T), from an `attention_mask` of 0 and 1 or a bool `*padding_mask` (True: padding).

    None without such a mask, and if masks disagree or there are two sequences: it is not clear which one is meant.
    """
    if any(name.startswith(("tgt", "decoder_")) for name in kwargs):
        return None
    found = []
    for name, value in kwargs.items():
        if not _is_padding_mask(name) or value.ndim != 2:
            continue
        if name != "attention_mask":
            found += [~value] if value.dtype == torch.bool else []
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


def _is_padding_mask(name: str) -> bool:
    """Whether an input of this name says which positions are padding."""
    return name == "attention_mask" or name.endswith("padding_mask")


def _refuse_non_finite(batch: Batch) -> None:
    """Raises a DataError if an input is NaN or infinite anywhere."""
    for name, tensor in batch.tensors.items():
        if not tensor.is_floating_point() or tensor.numel() == 0:
            continue
        if "mask" in name:  # an additive attention mask says "never" with -inf
            tensor = tensor.clamp(min=torch.finfo(tensor.dtype).min)
        if is_finite(tensor):
            continue
        bad = ~torch.isfinite(tensor)
        first = int(bad.nonzero()[0, 0])
        raise DataError(
            f"{int(bad.sum())} of {tensor.numel()} values are NaN or infinite, first in input {first}",
            where=f"{batch.where}, {name}",
            fix="remove the NaN or infinite values",
        )


def is_finite(tensor: Tensor) -> bool:
    """Whether no value is NaN or infinite, in one pass: `aminmax` passes NaN on."""
    return all(map(math.isfinite, torch.stack(torch.aminmax(tensor.detach())).tolist()))
