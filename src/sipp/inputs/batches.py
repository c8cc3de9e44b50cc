"""Checks a user's batch; selects, copies, moves and joins checked ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from sipp.errors import DataError
from sipp.records.batches import Batch
from sipp.records.numerics import integers

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


def is_padding_mask(name: str) -> bool:
    """Whether an input of this name says which positions are padding."""
    return name == "attention_mask" or name.endswith("padding_mask")


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

    return replace(_changed(batch, cut), n_points=len(integers(0, batch.n_points)[where]))


def fresh(batch: Batch) -> Batch:
    """A copy, safe from layers that work in place and loaders that reuse their memory."""

    def copied(value: Any) -> Any:
        if isinstance(value, PackedSequence):
            return value._replace(data=value.data.clone())
        return value.clone() if isinstance(value, Tensor) else value

    return _changed(batch, copied)


def on_device(batch: Batch, device: torch.device) -> Batch:
    """The batch with its tensors on this device."""

    def move(value: Any) -> Any:
        movable: Any = value  # PackedSequence.to is typed for dtypes only
        return movable.to(device) if isinstance(value, Tensor | PackedSequence) else value

    return _changed(batch, move)


def _changed(batch: Batch, change: Callable[[Any], Any]) -> Batch:
    return replace(
        batch,
        args=tuple(change(value) for value in batch.args),
        kwargs={name: change(value) for name, value in batch.kwargs.items()},
        labels=change(batch.labels),
        real_BT=change(batch.real_BT),
    )


def as_given(batch: Batch) -> tuple[Any, Any]:
    """The batch as a caller would give it: (inputs, labels)."""
    return batch.kwargs or batch.args, batch.labels


def tensors_of_inputs(batch: Batch) -> dict[str, Tensor]:
    """The tensor of every input, by its name in errors; of a packed sequence, its data."""
    named = {f"input {i}": value for i, value in enumerate(batch.args)} | batch.kwargs
    return {name: value.data if isinstance(value, PackedSequence) else value for name, value in named.items()}


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


def every_tensor(value: Any) -> list[Tensor]:
    """All tensors in a value, in order: itself, or those of a tuple, a list or a dict, however deep."""
    found: list[Tensor] = []
    _gather(value if isinstance(value, (tuple, list)) else (value,), found)
    return found


def _gather(values: Iterable[Any], found: list[Tensor]) -> None:
    # not a generator, and called for containers only: this runs for every operation of a network
    for one in values:
        if isinstance(one, Tensor):
            found.append(one)
        elif isinstance(one, (tuple, list)):
            _gather(one, found)
        elif isinstance(one, dict):
            _gather(one.values(), found)


def tensors_in(output: Any) -> list[Tensor]:
    """The tensors of real numbers in an output, in order, made dense."""
    found = [tensor for tensor in every_tensor(output) if tensor.is_floating_point() and not tensor.is_nested]
    return [tensor if tensor.layout == torch.strided else tensor.to_dense() for tensor in found]
