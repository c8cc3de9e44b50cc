"""Checks that the output at a point depends on that point alone, which every count of independent points needs.

A few points of a batch, in reversed order and by themselves, must give the outputs that they gave within the batch. A
small subset exposes batch statistics, the reversed order exposes time in dimension 0, a second run exposes randomness.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from sipp.inputs.batches import points_at, tensors_of_inputs
from sipp.records.batches import Batch
from sipp.records.numerics import integers

# Rounding depends on the batch size. On a CPU it changes the output of deep float32 networks by about 4e-7 (ResNet20,
# LSTM, encoders); 40 times as much is allowed. On a GPU, which may use TF32, and in half precision, a few units of that
# precision are allowed. Batch statistics and noise are far larger.
CPU_ALLOWED = {torch.float32: 1.5e-5, torch.float64: 1e-10}
LEAST_ALLOWED = 64  # units of rounding of the dtype: no comparison is finer, however small the error to be claimed
N_ROUNDINGS = 8
COARSEST = 2.0**-11  # of TF32
MOST_ALONE = 4  # points that are run by themselves: the fewer, the more statistics of the batch differ
OF_LARGEST = 2.0**-5  # a coordinate's own size is taken to be at least this share of the largest output's

AT_ONCE = 1 << 24  # numbers that are compared at once: logits of long sequences in float64 would fill a GPU

Alone = tuple[Tensor, Any]  # which points of a batch were run by themselves, in which order, and their output

CHANCE = "two runs on the same inputs differ: dropout or noise is active at inference; turn it off"
NEIGHBOURS = (
    "the output for one input depends on the others in its batch: a layer normalises by the batch (give it running "
    "statistics), or dimension 0 is time, not the batch (put the batch first, batch_first=True)"
)
ORDER = (
    "the output for one input depends on those before it: dimension 0 seems to be time, not the batch; put the batch "
    "first (batch_first=True, or wrap the model in one that transposes)"
)


def allowed_between(model: nn.Module, batch: Batch, finest: float | None = None) -> float:
    """The share of its output by which a point may differ in another batch, from the device and the dtypes.

    At most `finest`, the error that is to be claimed, unless that is below rounding.
    """
    tensors = [*model.parameters(), *model.buffers()]
    is_cpu = all(t.device.type == "cpu" for t in tensors) and torch.get_float32_matmul_precision() == "highest"
    floats = {t.dtype for t in (*tensors, *tensors_of_inputs(batch).values()) if t.is_floating_point()}
    if torch.is_autocast_enabled("cpu"):
        floats.add(torch.get_autocast_dtype("cpu"))
    coarsest = max(floats or {torch.float32}, key=lambda dtype: torch.finfo(dtype).eps)
    eps = torch.finfo(coarsest).eps
    allowed = CPU_ALLOWED.get(coarsest, 0.0) if is_cpu else N_ROUNDINGS * max(COARSEST, eps)
    allowed = allowed or N_ROUNDINGS * eps
    return allowed if finest is None else min(allowed, max(finest, LEAST_ALLOWED * eps))


def is_same_alone(n_points: int, whole: Any, alone: Alone, allowed: float) -> bool:
    """Whether some points of a batch, at most half, gave by themselves what they gave within it."""
    index, output = alone
    pairs = _pairs(whole, n_points, output, len(index))
    return _is_part(index, n_points) and bool(pairs) and _agree(pairs, index, allowed)


def why_dependent(
    batch: Batch, run: Callable[[Batch], Any], allowed: float, whole: Any = None, alone: Alone | None = None
) -> str:
    """Why the output at a point is not a function of that point alone, in words; "" if nothing suggests so.

    `run` returns the model's output for a batch: a tensor, or any nesting of tuples, lists and dicts of tensors. Those
    that hold real numbers and one row per point are compared. `allowed`: see `allowed_between`. `whole`: the output
    for this batch, if known. `alone`: that of some of its points, in another order, by themselves.
    """
    n = batch.n_points
    whole = run(batch) if whole is None else whole
    back = integers(n - 1, -1, -1)
    if alone is None or not _is_part(alone[0], n):
        last = back[: min(n - n // 2, MOST_ALONE)]
        try:
            alone = last, run(points_at(batch, last))
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            return f"the model cannot run on {len(last)} of the {n} inputs by themselves ({error})"
    index, output = alone
    pairs = _pairs(whole, n, output, len(index))
    if not pairs:
        return f"no output has one row for each of the {n} inputs along dimension 0"
    if _agree(pairs, index, allowed):
        return ""
    again = run(points_at(batch, index))
    if not _agree(_pairs(output, len(index), again, len(index)), integers(0, len(index)), allowed):
        return CHANCE
    return NEIGHBOURS if _agree(_pairs(whole, n, run(points_at(batch, back)), n), back, allowed) else ORDER


def _is_part(index: Tensor, n: int) -> bool:
    """Whether these, copies counted once, are at most half of the batch, so that their statistics are others."""
    return 2 * len(index.unique()) <= n


def _pairs(whole: Any, n: int, part: Any, n_part: int) -> list[tuple[Tensor, Tensor]]:
    """The tensors of real numbers at the same place in both outputs that have one row per point."""
    places = zip(tensors_in(whole), tensors_in(part))
    return [(a, b) for a, b in places if a.shape[:1] == (n,) and b.shape[:1] == (n_part,) and a.numel() > 0]


def _agree(pairs: list[tuple[Tensor, Tensor]], index: Tensor, allowed: float) -> bool:
    """Whether, in each pair, the rows at `index` of the first are those of the second, up to rounding."""
    return all(_close(a, b, index, allowed) for a, b in pairs)


def _close(whole: Tensor, part: Tensor, index: Tensor, allowed: float) -> bool:
    """Whether every point keeps its output, by the norm of a claim (T14) and in every coordinate.

    A point with a small output, a difference of large numbers, is compared with the median point.
    """
    if whole.shape[1:] != part.shape[1:]:
        return False
    allowed = max(allowed, N_ROUNDINGS * torch.finfo(whole.dtype).eps)
    a, b = (t.detach().reshape(len(t), -1) for t in (whole, part))
    step, at = max(1, AT_ONCE // len(a)), index.to(a.device)
    parts = [slice(start, start + step) for start in range(0, a.shape[1], step)]
    squares_B, gaps_B = (torch.zeros(len(t), dtype=torch.float64, device=a.device) for t in (a, at))
    tops = []  # the largest magnitude of each coordinate
    for some in parts:
        finite = _finite(a[:, some])
        squares_B += torch.linalg.vector_norm(finite, dim=1, dtype=torch.float64).square()
        tops.append(finite.abs().amax(0).double())
    size_B, least = squares_B.sqrt(), OF_LARGEST * torch.cat(tops).amax()
    typical = torch.where(size_B > 0, size_B, torch.nan).nanmedian().nan_to_num()  # 0 where all are
    are_close = []
    for some, top in zip(parts, tops):
        mine, theirs = a[:, some][at].double(), b[:, some].double()
        gap = torch.where((mine == theirs) | (mine.isnan() & theirs.isnan()), 0.0, (mine - theirs).abs())
        are_close.append((gap <= allowed * torch.maximum(top, least)).all())
        gaps_B += gap.square().sum(1)
    are_close.append((gaps_B.sqrt() <= allowed * torch.maximum(size_B[at], typical)).all())
    return bool(torch.stack(are_close).all())  # a GPU is waited for only here


def _finite(values: Tensor) -> Tensor:
    return values.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def tensors_in(output: Any) -> Iterator[Tensor]:
    """The tensors of real numbers in an output, in order, made dense. Containers that contain themselves are fine."""
    waiting, seen = [output], set()
    while waiting:
        value = waiting.pop()
        if isinstance(value, Tensor):
            if value.is_floating_point() and not value.is_nested:
                yield value if value.layout == torch.strided else value.to_dense()
        elif isinstance(value, dict | list | tuple) and id(value) not in seen:
            seen.add(id(value))
            waiting += reversed(list(value.values()) if isinstance(value, dict) else value)
