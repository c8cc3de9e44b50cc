"""What makes two points the same: a hash of each point's content, whatever batch, layout or padding it comes in.

`keys_of` knows dtype and shape: it names the very points that were looked at. For the overlap of two sets that is too
strict: the same image may come as uint8, as float32 in [0, 1] or as float64, and an input by position or by name. So
`Known` holds the points of a set in every form in which points of another kind can be compared with them, as sets of
tensors; two kinds are compared in the narrower one. Two points are the same if all tensors of the one are tensors of
the other. The same image with another condition is another point; an input of zeros or ones alone (a mask, the types of
tokens) beside a larger or equal one says nothing. For counts of different draws see `draw_keys_of`.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from sipp.inputs.batches import is_padding_mask
from sipp.inputs.content import content_keys
from sipp.records.batches import Batch
from sipp.records.network_hash import raw_bytes

SKETCH_SIZE = 256  # of the smallest hashes of a set of points: what is left of a large set in a ledger
PREFIX_BYTES = 8  # of a hash in a sketch

MOST_TENSORS = 6  # of a point, that parts of it are looked up; one of more must agree as a whole

Kind = tuple[torch.dtype, ...]  # of the inputs of a point, sorted by name
# Floats no wider than this (None: as they are), whole numbers divided by that (0: as whole numbers)
Form = tuple[torch.dtype | None, int]
Content = frozenset[bytes]  # the hashes of the tensors of a point
# For each kind and form: the points, and every part of one
Known = dict[tuple[Kind, Form], tuple[set[Content], set[Content]]]

AS_IT_IS: Form = (None, 0)
WIDTHS = (None, torch.float32, torch.float16, torch.bfloat16)
DIVISORS = (0, 1, 255)  # an image of 0 .. 255 is often given as 0 .. 1


def keys_of(batch: Batch) -> list[bytes]:
    """One SHA-256 per point over dtype, shape and bytes of its inputs; how they are passed (names) does not matter.

    Padding is no content: positions where `real_BT` is False are left out, and so is the mask that says so.
    """
    inputs = _inputs(batch)
    heads = [json.dumps([[str(t.dtype), list(t.shape)] for t in point]).encode() for point in _heads(inputs)]
    return _hashes(inputs, heads, batch.n_points)


def labels_of(batch: Batch) -> list[str]:
    """The label of each point in words that can be compared; "" without labels."""
    labels = batch.labels
    if labels is None:
        return [""] * batch.n_points
    rows = labels.detach().cpu().tolist() if isinstance(labels, Tensor) else labels
    if not isinstance(rows, Sequence) or len(rows) != batch.n_points:
        return [repr(rows)] * batch.n_points
    return [repr(row) for row in rows]


def set_hash(keys: Iterable[bytes]) -> str:
    """One hash of all points (of `keys_of`), whatever their order."""
    return hashlib.sha256(b"".join(sorted(keys))).hexdigest()


def draw_keys_of(batch: Batch) -> list[bytes]:
    """One key per point for counting different draws (T18): of its numbers as float32, however written and passed.

    Computed where the points lie, in one reading. Points in half precision and the same ones in float32 are different
    numbers, and count as different draws.
    """
    inputs = _inputs(batch)
    by_part = [content_keys(part) for part in inputs]
    if len(by_part) == 1:
        return by_part[0]
    says = _says(inputs, batch.n_points)
    return [
        _one_key(frozenset(key for key, counts in zip(keys, point) if counts))
        for keys, point in zip(zip(*by_part, strict=True), says, strict=True)
    ]


def batch_key(keys: Sequence[bytes]) -> bytes:
    """The key of a draw that is a whole batch."""
    return hashlib.sha256(b"".join(keys)).digest()


def sketch_of(plain_keys: Iterable[bytes]) -> list[str]:
    """The smallest hashes of a set of points: two sets that share many points share some of these."""
    return [key[:PREFIX_BYTES].hex() for key in sorted(set(plain_keys))[:SKETCH_SIZE]]


def plain_keys_of(batch: Batch) -> list[bytes]:
    """One hash per point of its numbers as float32, without dtype and shape, however its inputs are passed."""
    inputs = _inputs(batch)
    return [_one_key(content) for content in _contents(inputs, _says(inputs, batch.n_points), _to(torch.float32))]


def add_known(known: Known, batch: Batch) -> None:
    """Adds the points of the batch to the known ones, in every form that a comparison may need."""
    for inputs in _views(batch):
        kind, says = _kind(inputs), _says(inputs, batch.n_points)
        forms = {_canonical(kind, (width, divisor)) for width in WIDTHS for divisor in DIVISORS if width or not divisor}
        for form in forms:
            whole, parts = known.setdefault((kind, form), (set(), set()))
            for content in _contents(inputs, says, lambda tensor, form=form: _in_form(tensor, form)):  # type: ignore[misc]
                whole.add(content)
                parts.update(_parts(content))


def are_known(known: Known, batch: Batch) -> list[bool]:
    """For each point of the batch whether it is a known one, in the same dtype or another, or a part or more of one."""
    found = [False] * batch.n_points
    for inputs in _views(batch):
        kind, says = _kind(inputs), _says(inputs, batch.n_points)
        mine: dict[Form, list[Content]] = {}
        for other in {kind for kind, _ in known}:
            for form in _forms_between(kind, other):
                own = _canonical(kind, form)
                if own not in mine:
                    mine[own] = _contents(inputs, says, lambda tensor, own=own: _in_form(tensor, own))  # type: ignore[misc]
                whole, parts = known[other, _canonical(other, form)]
                for index, content in enumerate(mine[own]):
                    found[index] |= content in parts or not whole.isdisjoint(_parts(content))
    return found


# ---- forms


def _kind(inputs: list[_Input]) -> Kind:
    return tuple(sorted((part[0].dtype for part in inputs), key=str))


def _forms_between(a: Kind, b: Kind) -> tuple[Form, ...]:
    """The forms in which points of two kinds are compared: as they are where the kinds agree, else the narrower one.

    float16 and bfloat16 are compared as bfloat16; what was rounded twice on the way there may be missed.
    """
    floats_a, floats_b = ([dtype for dtype in kind if dtype.is_floating_point] for kind in (a, b))
    if floats_a == floats_b and len(set(floats_a)) < 2:
        return (AS_IT_IS,)
    width = min({*floats_a, *floats_b, torch.float32}, key=_by_width)
    # Where one has fewer floats, its whole numbers may be what is a float in the other
    fewer = a if len(floats_a) < len(floats_b) else b
    is_mixed = len(floats_a) != len(floats_b) and not all(dtype.is_floating_point for dtype in fewer)
    return ((width, 0), (width, 1), (width, 255)) if is_mixed else ((width, 0),)


def _by_width(dtype: torch.dtype) -> tuple[int, str]:
    return dtype.itemsize, str(dtype)


def _narrower(a: torch.dtype, b: torch.dtype) -> torch.dtype:
    return min(a, b, key=_by_width)


def _canonical(kind: Kind, form: Form) -> Form:
    """The plainest form that gives points of this kind the same numbers."""
    width, divisor = form
    has_whole = not all(dtype.is_floating_point for dtype in kind)
    divisor = divisor if has_whole else 0
    if divisor == 0 and (width is None or all(_cast_to(dtype, width) == dtype for dtype in kind)):
        width = None
    return width, divisor


def _cast_to(dtype: torch.dtype, width: torch.dtype) -> torch.dtype:
    """What a tensor of this dtype becomes; whole numbers stay what they are here."""
    return _narrower(dtype, width) if dtype.is_floating_point else dtype


def _in_form(tensor: Tensor, form: Form) -> Tensor:
    width, divisor = form
    if tensor.is_floating_point():
        numbers = tensor if width is None else tensor.to(_cast_to(tensor.dtype, width))
    elif divisor == 0:
        return tensor.to(torch.int64)
    else:
        # float32 before a half type: how images are usually made into numbers from 0 to 1
        numbers = (tensor.to(torch.float64) / divisor).to(torch.float32).to(width)
    return numbers + 0.0  # -0 and 0 are one number


def _to(width: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor.to(width) + 0.0


# ---- content

_Input = Tensor | list[Tensor]  # n x ..., or n tensors of unequal length


def _inputs(batch: Batch) -> list[_Input]:
    """What the points are made of: every input, without padding and without the mask that marks it."""
    names = sorted(batch.kwargs)
    if batch.real_BT is not None:
        names = [name for name in names if not is_padding_mask(name)]
    return [_content(value, batch.real_BT) for value in (*batch.args, *(batch.kwargs[name] for name in names))]


def _views(batch: Batch) -> Iterable[list[_Input]]:
    """The inputs without padding, and as they are: a mask that is passed by position is not known to be one."""
    yield _inputs(batch)
    if batch.real_BT is not None:
        yield _inputs(replace(batch, real_BT=None))


def _says(inputs: list[_Input], n_points: int) -> list[list[bool]]:
    """For each point which of its tensors count: not those of only 0 or only 1 that another is as large as."""
    blank = [[False] * n_points if len(inputs) == 1 else _blank(part, n_points) for part in inputs]
    sizes = [[part[0].numel()] * n_points if isinstance(part, Tensor) else [t.numel() for t in part] for part in inputs]
    says = []
    for i in range(n_points):
        largest = max((size[i] for size, void in zip(sizes, blank) if not void[i]), default=-1)
        says.append([not void[i] or size[i] > largest for size, void in zip(sizes, blank)])
    return says


def _blank(part: _Input, n_points: int) -> list[bool]:
    """Whether the tensor holds only 0 or only 1, for each point."""
    rows = part.reshape(n_points, -1) if isinstance(part, Tensor) and part.numel() else part
    if isinstance(rows, Tensor) and rows.numel():
        return (((rows == rows[:, :1]).all(1)) & ((rows[:, 0] == 0) | (rows[:, 0] == 1))).tolist()
    return [bool((row == 0).all() or (row == 1).all()) for row in rows]


def _contents(inputs: list[_Input], says: list[list[bool]], cast: Callable[[Tensor], Tensor]) -> list[Content]:
    """The hashes of the tensors of each point: how many numbers, and these in the form that `cast` gives."""
    by_part = []
    for part in inputs:
        tensors: _Input = cast(part) if isinstance(part, Tensor) else [cast(point) for point in part]
        heads = [json.dumps([point.numel()]).encode() for (point,) in _heads([tensors])]
        by_part.append(_hashes([tensors], heads, len(says)))
    return [
        frozenset(key for key, counts in zip(keys, point) if counts)
        for keys, point in zip(zip(*by_part, strict=True), says, strict=True)
    ]


def _one_key(content: Content) -> bytes:
    """One hash of all tensors of a point."""
    return next(iter(content)) if len(content) == 1 else hashlib.sha256(b"".join(sorted(content))).digest()


def _parts(content: Content) -> Iterable[Content]:
    """The point itself and every part of it that holds some of its tensors."""
    if len(content) > MOST_TENSORS:
        return [content]
    sizes = range(1, len(content) + 1)
    return (frozenset(some) for size in sizes for some in itertools.combinations(content, size))


def _content(value: Tensor | PackedSequence, real_BT: Tensor | None) -> _Input:
    if isinstance(value, PackedSequence):
        padded, lengths = pad_packed_sequence(value, batch_first=True)
        return [sequence[:length] for sequence, length in zip(padded, lengths.tolist())]
    if real_BT is None or value.ndim < 2 or value.shape[1] != real_BT.shape[1]:
        return value
    return [point[real] for point, real in zip(value, real_BT.to(value.device))]


def _heads(inputs: list[_Input]) -> Iterable[list[Tensor]]:
    """One point after another as its tensors; of points that are all alike in shape only the first."""
    if all(isinstance(part, Tensor) for part in inputs):
        return [[part[0] for part in inputs]]
    return ([part[i] for part in inputs] for i in range(len(inputs[0])))


def _hashes(inputs: list[_Input], heads: list[bytes], n_points: int) -> list[bytes]:
    """The SHA-256 of each point: its head (one for all, or one each), then the bytes of its inputs."""
    parts = [
        list(raw_bytes(part).reshape(n_points, part[0].nbytes).numpy())
        if isinstance(part, Tensor)
        else [raw_bytes(point).numpy() for point in part]
        for part in inputs
    ]
    return [
        hashlib.sha256(heads[index % len(heads)] + b"".join(part[index].tobytes() for part in parts)).digest()
        for index in range(n_points)
    ]
