"""What makes two points the same: a hash of each point's content, whatever batch, layout or padding it comes in.

`keys_of` knows dtype and shape: it names the very points that were looked at. For the overlap of two sets that is too
strict: the same image may come as uint8, as float32 in [0, 1] or as float64. So `Known` holds the points of a set in
every form in which points of another kind can be compared with them, and two kinds are compared in the narrower one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from sipp.batches import is_padding_mask
from sipp.records import Batch

SKETCH_SIZE = 256  # of the smallest hashes of a set of points: what is left of a large set in a ledger
PREFIX_BYTES = 8  # of a hash in a sketch

Kind = tuple[torch.dtype, ...]  # of the inputs of a point
# Floats no wider than this (None: as they are), whole numbers divided by that (0: as whole numbers)
Form = tuple[torch.dtype | None, int]
Known = dict[tuple[Kind, Form], set[bytes]]

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


def n_distinct(batches: Iterable[Batch]) -> int:
    """How many different points there are (T18: equal points count once)."""
    return len({key for batch in batches for key in keys_of(batch)})


def sketch_of(plain_keys: Iterable[bytes]) -> list[str]:
    """The smallest hashes of a set of points: two sets that share many points share some of these."""
    return [key[:PREFIX_BYTES].hex() for key in sorted(set(plain_keys))[:SKETCH_SIZE]]


def plain_keys_of(batch: Batch) -> list[bytes]:
    """One hash per point of its numbers as float32, without dtype and shape."""
    return _keys_without_shape(batch, lambda tensor: tensor.to(torch.float32) + 0.0)


def add_known(known: Known, batch: Batch) -> None:
    """Adds the points of the batch to the known ones, in every form that a comparison may need."""
    kind = _kind(batch)
    forms = {_canonical(kind, (width, divisor)) for width in WIDTHS for divisor in DIVISORS if width or not divisor}
    for form in forms:
        known.setdefault((kind, form), set()).update(_form_keys(batch, form))


def are_known(known: Known, batch: Batch) -> list[bool]:
    """For each point of the batch whether it is a known one, in the same dtype or another."""
    found = [False] * batch.n_points
    kind = _kind(batch)
    for other in {kind for kind, _ in known}:
        for form in _forms_between(kind, other):
            keys = known[other, _canonical(other, form)]
            mine = _form_keys(batch, form)
            found = [was or key in keys for was, key in zip(found, mine)]
    return found


def raw_bytes(tensor: Tensor) -> Tensor:
    """The tensor's values as one flat row of bytes on the CPU (every dtype, bfloat16 included)."""
    flat = tensor.detach().to_dense() if tensor.layout != torch.strided else tensor.detach()
    return flat.cpu().contiguous().reshape(-1).view(torch.uint8)


# ---- forms


def _kind(batch: Batch) -> Kind:
    return tuple(part[0].dtype for part in _inputs(batch))


def _forms_between(a: Kind, b: Kind) -> tuple[Form, ...]:
    """The forms in which points of two kinds are compared: as they are where the kinds agree, else the narrower one.

    float16 and bfloat16 are compared as bfloat16; what was rounded twice on the way there may be missed.
    """
    if len(a) != len(b):
        return ()
    mixed = [(x, y) for x, y in zip(a, b) if x.is_floating_point != y.is_floating_point]
    floats = [(x, y) for x, y in zip(a, b) if x.is_floating_point and y.is_floating_point and x != y]
    narrow = [_narrower(x, y) for x, y in floats]
    narrow += [_narrower(x if x.is_floating_point else y, torch.float32) for x, y in mixed]
    if not narrow:
        return (AS_IT_IS,)
    width = narrow[0]
    for other in narrow[1:]:
        width = _narrower(width, other)
    return ((width, 1), (width, 255)) if mixed else ((width, 0),)


def _narrower(a: torch.dtype, b: torch.dtype) -> torch.dtype:
    return min(a, b, key=lambda dtype: (dtype.itemsize, str(dtype)))


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


def _form_keys(batch: Batch, form: Form) -> list[bytes]:
    return _keys_without_shape(batch, lambda tensor: _in_form(tensor, form))


def _keys_without_shape(batch: Batch, cast: Callable[[Tensor], Tensor]) -> list[bytes]:
    inputs = [cast(part) if isinstance(part, Tensor) else [cast(point) for point in part] for part in _inputs(batch)]
    heads = [json.dumps([t.numel() for t in point]).encode() for point in _heads(inputs)]
    return _hashes(inputs, heads, batch.n_points)


# ---- content

_Input = Tensor | list[Tensor]  # n x ..., or n tensors of unequal length


def _inputs(batch: Batch) -> list[_Input]:
    """What the points are made of: every input, without padding and without the mask that marks it."""
    names = sorted(batch.kwargs)
    if batch.real_BT is not None:
        names = [name for name in names if not is_padding_mask(name)]
    return [_content(value, batch.real_BT) for value in (*batch.args, *(batch.kwargs[name] for name in names))]


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
