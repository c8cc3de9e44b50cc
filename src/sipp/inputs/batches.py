"""A batch ready for the model, a prunable weight as rows, and the inputs that reach one weight in a batch.

Axis letters, used as suffixes of tensor names everywhere:
    B points of a batch     P patches        F rows of a weight (parameter groups)    K fan-in of a row
    G groups of a grouped convolution (1 elsewhere)      R rows of one group, F = G * R
    S, T signs of weights and of activations             Q quadrants of signs, and Z itself
    N, C, M: anything that is counted in one file (rows of all groups, knots of a curve, weights of a pattern); 1: kept
So `weight_FK` has one row per parameter group, `patches_GKP` holds P patches of fan-in K for each of G groups.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from sipp.results import hashing, numerics

DIGITS = 32  # hexadecimal, half of a SHA-256: two of a billion points share them with a probability below 1e-20


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
        """The tensor of every input, by its name in errors; of a packed sequence, its data."""
        named = {f"input {i}": value for i, value in enumerate(self.args)} | self.kwargs
        return {name: value.data if isinstance(value, PackedSequence) else value for name, value in named.items()}

    @property
    def as_given(self) -> tuple[Any, Any]:
        """The batch as a caller would give it: (inputs, labels)."""
        return self.kwargs or self.args, self.labels

    def at(self, where: slice | Tensor) -> Batch:
        """The batch of these points alone, in this order."""
        numbers = numerics.integers(0, self.n_points)[where]

        def cut(value: Any) -> Any:
            if isinstance(value, PackedSequence):
                padded, lengths = pad_packed_sequence(value, batch_first=True)
                return pack_padded_sequence(padded[where], lengths[where], batch_first=True, enforce_sorted=False)
            if isinstance(value, Tensor) and value.shape[:1] == (self.n_points,):  # labels may be of any shape
                return value[where]
            if isinstance(value, list | tuple) and len(value) == self.n_points:
                return [value[i] for i in numbers.tolist()]
            return value

        return replace(self._changed(cut), n_points=len(numbers))

    def copied(self, device: torch.device | None = None, dtype: torch.dtype | None = None) -> Batch:
        """A copy, safe from layers that work in place: on a device, its real numbers in a dtype (None: as they are)."""

        def copy(tensor: Tensor) -> Tensor:
            return tensor.to(device, dtype if tensor.is_floating_point() else None, copy=True)

        def copied(value: Any) -> Any:
            if isinstance(value, PackedSequence):
                moved: Any = value  # PackedSequence.to is typed for dtypes only
                return (moved if device is None else moved.to(device))._replace(data=copy(value.data))
            return copy(value) if isinstance(value, Tensor) else value

        return self._changed(copied)

    def on(self, device: torch.device) -> Batch:
        """The batch with its tensors on this device."""

        def moved(value: Any) -> Any:
            movable: Any = value
            return movable.to(device) if isinstance(value, Tensor | PackedSequence) else value

        return self._changed(moved)

    def joined(self, other: Batch) -> Batch | None:
        """One batch of the points of both, without labels; None unless all inputs are tensors of the same form."""
        mine, theirs = self._by_name, other._by_name
        if mine.keys() != theirs.keys():
            return None
        for name, value in mine.items():
            if not isinstance(value, Tensor) or not isinstance(theirs[name], Tensor):
                return None
            if value.shape[1:] != theirs[name].shape[1:] or value.dtype != theirs[name].dtype:
                return None
        both = {name: torch.cat([value, theirs[name]]) for name, value in mine.items()}
        args, kwargs = tuple(both[i] for i in range(len(self.args))), {name: both[name] for name in self.kwargs}
        n_points = self.n_points + other.n_points
        return replace(self, args=args, kwargs=kwargs, labels=None, n_points=n_points, real_BT=both.get(None))

    def hashes(self) -> list[str]:
        """One SHA-256 a point, of the bytes of all its inputs as they are given.

        It finds the points of one set in another, and the copies within a set. Padding is not content: positions where
        `real_BT` is False are left out, and so is the mask itself.
        """
        names = [name for name in sorted(self.kwargs) if self.real_BT is None or not is_padding_mask(name)]
        parts = [self._rows(value) for value in (*self.args, *(self.kwargs[name] for name in names))]
        return [_digits(b"".join(point)) for point in zip(*parts, strict=True)]

    @property
    def _by_name(self) -> dict[int | str | None, Any]:
        """The inputs by position or name; under None, the mask of positions that count."""
        real = [] if self.real_BT is None else [(None, self.real_BT)]
        return dict([*enumerate(self.args), *self.kwargs.items(), *real])

    def _changed(self, change: Callable[[Any], Any]) -> Batch:
        return replace(
            self,
            args=tuple(map(change, self.args)),
            kwargs={name: change(value) for name, value in self.kwargs.items()},
            labels=change(self.labels),
            real_BT=change(self.real_BT),
        )

    def _rows(self, value: Tensor | PackedSequence) -> list[bytes]:
        """The bytes of each point, without padding."""
        real_BT = self.real_BT
        if isinstance(value, PackedSequence):
            padded, lengths = pad_packed_sequence(value, batch_first=True)
            return [_bytes(sequence[:length]) for sequence, length in zip(padded, lengths.tolist())]
        if real_BT is not None and value.ndim > 1 and value.shape[1] == real_BT.shape[1]:
            return [_bytes(point[real]) for point, real in zip(value, real_BT.to(value.device))]
        whole = _bytes(value)
        n_bytes = len(whole) // len(value)
        return [whole[i * n_bytes : (i + 1) * n_bytes] for i in range(len(value))]


def hash_of_points(hashes: Iterable[str]) -> str:
    """One SHA-256 of the hashes of many points, whatever their order."""
    return hashlib.sha256("".join(sorted(hashes)).encode()).hexdigest()


def hash_of_batch(hashes: Iterable[str]) -> str:
    """The hash of a batch that counts as one draw."""
    return _digits("".join(hashes).encode())


def is_padding_mask(name: str) -> bool:
    """Whether an input of this name says which positions are padding."""
    return name == "attention_mask" or name.endswith("padding_mask")


def _digits(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:DIGITS]


def _bytes(tensor: Tensor) -> bytes:
    """The bytes of a tensor, from a copy: one that NumPy has seen can no longer be resized."""
    return hashing.raw_bytes(tensor).clone().numpy().tobytes()


@dataclass(frozen=True)
class Weight:
    """One prunable parameter, seen as F rows of fan-in K."""

    name: str  # canonical parameter name, without wrapper prefixes
    aliases: tuple[str, ...]  # other names of the same tensor (tied weights)
    layer_type: str  # class name of the layer that holds it
    n_rows: int
    fan_in: int
    rows_last: bool  # stored transposed, K x F instead of F x K

    @property
    def n_weights(self) -> int:
        return self.n_rows * self.fan_in


def to_rows(weight: Weight, tensor: Tensor) -> Tensor:
    """The parameter-shaped tensor as an F x K matrix (a view wherever the layout allows one)."""
    return tensor.t() if weight.rows_last else tensor.reshape(weight.n_rows, weight.fan_in)


def from_rows(weight: Weight, matrix_FK: Tensor, like: Tensor) -> Tensor:
    """The F x K matrix in the shape of the parameter `like`."""
    return matrix_FK.t().contiguous() if weight.rows_last else matrix_FK.reshape(like.shape)


@dataclass(frozen=True)
class WeightUse:
    """The inputs of (some rows of) a weight in one call of its layer, as a layer adapter reports them.

    `windows` is a view of shape (B, G, *positions, *fan_in): positions are the patches of a point; the fan-in
    dimensions are in the weight's own order. `real_BP` marks patches that are not padding. Before a use is passed on,
    padding is set to zero, and `counts_B` holds the number of real patches.
    """

    parameter: str  # local name in the module: "weight", "weight_ih_l0", "out_proj.weight"
    windows: Tensor
    n_position_dims: int = 1
    row_start: int = 0
    n_rows: int | None = None  # None: all rows from row_start on
    counts_B: Tensor | None = None
    attributed: bool = True  # False: patches cannot be assigned to points; B is 1 for the whole batch
    real_BP: Tensor | None = None  # bool, for one position dimension: False is padding. None: no padding
    is_own_copy: bool = False  # the windows view memory that the model does not have, and cannot write to

    @property
    def n_groups(self) -> int:
        """The groups of rows, each with inputs of its own: 1 except for grouped convolutions."""
        return self.windows.shape[1]

    @property
    def n_positions(self) -> int:
        """The patches of each point, padding included."""
        return self.windows.shape[2 : 2 + self.n_position_dims].numel()

    @property
    def n_patches(self) -> int:
        """Points x positions: the patches of all points, padding included."""
        return self.windows.shape[0] * self.n_positions

    @property
    def fan_in(self) -> int:
        """The number of values in one patch."""
        return self.windows.shape[2 + self.n_position_dims :].numel()

    def n_rows_of(self, weight: Weight) -> int:
        """How many rows of the weight meet these inputs."""
        return weight.n_rows - self.row_start if self.n_rows is None else self.n_rows

    def rows_of(self, weight: Weight) -> slice:
        """Which rows of the weight meet these inputs."""
        return slice(self.row_start, self.row_start + self.n_rows_of(weight))
