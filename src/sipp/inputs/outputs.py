"""Compares outputs: how far two networks are apart, and whether a point's output depends on that point alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from sipp.inputs.capture import finite_or_zero, run_batch, scoring_mode
from sipp.inputs.data import Batch
from sipp.inputs.recording import every_tensor
from sipp.results import NormStats, numerics

AT_ONCE = 1 << 22  # numbers that are compared at once, in float64: logits of long sequences would fill a GPU

OUTPUT_BYTES = 256 << 20  # of dense outputs that are kept; the others are computed again
TOKENS_AT_ONCE = {"cpu": 1024, "cuda": 8192}  # in a batch: their logits may be larger than the network

Outputs = Callable[[int], list[Tensor]]


def tensors_in(output: Any) -> list[Tensor]:
    """The tensors of real numbers in an output, in order, made dense."""
    found = [tensor for tensor in every_tensor(output) if tensor.is_floating_point() and not tensor.is_nested]
    return [tensor if tensor.layout == torch.strided else tensor.to_dense() for tensor in found]


def output_error(dense: nn.Module, other: nn.Module, batches: Sequence[Batch]) -> float | None:
    """The distance between both networks' outputs on these points, relative to the norm of the dense ones.

    None if the dense output has no real numbers; infinite if the distance is not finite.
    """
    small = split_long_batches(batches, numerics.device_of(dense))
    return error_of(other, small, dense_outputs(dense, small, most=0))  # each is needed once


def dense_outputs(
    dense: nn.Module, batches: Sequence[Batch], norm_stats: NormStats = "running", most: int = OUTPUT_BYTES
) -> Outputs:
    """A function that returns the tensors of the dense output on batch i; at most `most` bytes of them are kept."""
    kept: dict[int, list[Tensor]] = {}
    left = most

    def outputs(i: int) -> list[Tensor]:
        nonlocal left
        if i in kept:
            return kept[i]
        with scoring_mode(dense, norm_stats):
            found = [tensor.detach() for tensor in tensors_in(run_batch(dense, batches[i].copied()))]
        n_bytes = sum(tensor.numel() * tensor.element_size() for tensor in found)
        if n_bytes <= left:
            kept[i], left = found, left - n_bytes
        return found

    return outputs


def error_of(
    model: nn.Module, batches: Sequence[Batch], wanted: Outputs, norm_stats: NormStats = "running"
) -> float | None:
    """||f^ - f|| / ||f|| over all points together, so that no point with a small output dominates."""
    distance = size = 0.0
    n_tensors = 0
    for i, batch in enumerate(batches):
        aims = wanted(i)  # once: large outputs are not kept
        with scoring_mode(model, norm_stats):
            far, large = squared_distance(run_batch(model, batch.copied()), aims, batch)
        distance, size, n_tensors = distance + float(far), size + float(large), n_tensors + len(aims)
        del aims  # before the next ones are made
    if n_tensors == 0:
        return None
    if not math.isfinite(distance) or not math.isfinite(size):
        return math.inf
    return math.sqrt(distance / size) if size > 0 else (0.0 if distance == 0 else math.inf)


def squared_distance(output: object, wanted: list[Tensor], batch: Batch) -> tuple[Tensor, Tensor]:
    """||output - wanted||^2 and ||wanted||^2 in float64, padding left out; NaN and 0 if their shapes differ."""
    device = wanted[0].device if wanted else torch.device("cpu")
    distance, size = (torch.zeros((), dtype=numerics.BOUND_DTYPE, device=device) for _ in range(2))
    found = tensors_in(output)
    if [tensor.shape for tensor in found] != [tensor.shape for tensor in wanted]:
        return distance + math.nan, size
    for tensor, aim in zip(found, wanted):
        is_real = real_positions(tensor, batch)
        for part in _slices(tensor):
            gap, size_of = tensor[part].double() - aim[part].double(), aim[part].double()
            if is_real is not None:
                gap, size_of = torch.where(is_real[part], gap, 0.0), torch.where(is_real[part], size_of, 0.0)
            distance = distance + gap.square().sum()
            size = size + size_of.square().sum()
    return distance, size


def real_positions(tensor: Tensor, batch: Batch) -> Tensor | None:
    """Which positions of an output are not padding, B x T x 1 ...; None if all count, or if it has none."""
    real_BT = batch.real_BT
    if real_BT is None or tensor.shape[:2] != real_BT.shape:
        return None
    return real_BT.to(tensor.device, torch.bool).view(*real_BT.shape, *[1] * (tensor.ndim - 2))


def _slices(tensor: Tensor) -> list[Any]:
    """Slices that are small enough to compare at once: all of it, some points, or some positions of a point."""
    if tensor.ndim == 0 or tensor.numel() <= AT_ONCE:
        return [...]
    n_points = AT_ONCE * len(tensor) // tensor.numel()
    if n_points == 0 and tensor.ndim > 2:
        n_positions = max(1, AT_ONCE // tensor[0, 0].numel())
        steps = range(0, tensor.shape[1], n_positions)
        return [(slice(i, i + 1), slice(start, start + n_positions)) for i in range(len(tensor)) for start in steps]
    return [slice(start, start + max(1, n_points)) for start in range(0, len(tensor), max(1, n_points))]


def split_long_batches(batches: Sequence[Batch], device: torch.device) -> list[Batch]:
    """The batches, split where they have so many tokens that their logits would be large."""
    most = numerics.for_device(TOKENS_AT_ONCE, device)
    return [part for batch in batches for part in _of_tokens(batch, most)]


def _of_tokens(batch: Batch, most: int) -> list[Batch]:
    ids = next((value for value in (*batch.args, *batch.kwargs.values()) if isinstance(value, Tensor)), None)
    if ids is None or not numerics.is_tokens(ids) or ids.numel() <= most or len(ids) != batch.n_points:
        return [batch]
    step = max(1, most // ids.shape[1])
    return [batch.at(slice(start, start + step)) for start in range(0, batch.n_points, step)]


def output_norms(output: Any, n_points: int) -> Tensor | None:
    """||f(x)|| for each point (float64), over all floating-point tensors of the output; None if they have no points."""
    tensors = [t for t in tensors_in(output) if t.ndim > 0 and len(t) == n_points]
    return reduce(torch.add, map(_squared_norms, tensors)).sqrt() if tensors else None


def _squared_norms(tensor: Tensor) -> Tensor:
    """The squared norm of each row (float64), a few rows at a time if they are large."""
    rows = tensor.detach().reshape(len(tensor), -1)
    parts = rows.split(max(1, AT_ONCE // max(1, rows.shape[1])))
    return torch.cat([part.double().square().sum(1) for part in parts])


def row_norms(rows: Tensor) -> Tensor:
    """The norm of each row, scaled by its largest entry so that squares neither overflow nor vanish."""
    largest = rows.abs().amax(dim=1)
    scale = torch.where(largest > 0, largest, 1.0)
    return scale * torch.linalg.vector_norm(rows / scale[:, None], dim=1)


# --- Does the output at a point depend on that point alone? -----------------------------------------------------------

# Every count of independent points needs that. A few points of a batch, in reversed order and by themselves, must give
# the outputs that they gave within the batch. A small subset exposes batch statistics, the reversed order exposes time
# in dimension 0, a second run exposes randomness.

# Rounding depends on the batch size. On a CPU it changes the output of deep float32 networks by about 4e-7 (ResNet20,
# LSTM, encoders); 40 times as much is allowed. On a GPU, which may use TF32, and in half precision, a few units of that
# precision are allowed. Batch statistics and noise are far larger.
CPU_ALLOWED = {torch.float32: 1.5e-5, torch.float64: 1e-10}
LEAST_ALLOWED = 64  # units of rounding of the dtype: no comparison is finer, however small the error to be claimed
N_ROUNDINGS = 8
COARSEST = 2.0**-11  # of TF32
MOST_ALONE = 4  # points that are run by themselves: the fewer, the more statistics of the batch differ
OF_LARGEST = 2.0**-5  # a coordinate's own size is taken to be at least this share of the largest output's

CHANCE = "two runs on the same inputs differ: dropout or noise is active at inference; turn it off"
NEIGHBOURS = (
    "the output for one input depends on the others in its batch: a layer normalises by the batch (give it running "
    "statistics), or dimension 0 is time, not the batch (put the batch first, batch_first=True)"
)
ORDER = (
    "the output for one input depends on those before it: dimension 0 seems to be time, not the batch; put the batch "
    "first (batch_first=True, or wrap the model in one that transposes)"
)


def allowed_difference(model: nn.Module, batch: Batch, finest: float | None = None) -> float:
    """The share of its output by which a point may differ in another batch, from the device and the dtypes.

    At most `finest`, the error that is to be claimed, unless that is below rounding.
    """
    tensors = [*model.parameters(), *model.buffers()]
    is_cpu = all(t.device.type == "cpu" for t in tensors) and torch.get_float32_matmul_precision() == "highest"
    floats = {t.dtype for t in (*tensors, *batch.tensors.values()) if t.is_floating_point()}
    if torch.is_autocast_enabled("cpu"):
        floats.add(torch.get_autocast_dtype("cpu"))
    coarsest = max(floats or {torch.float32}, key=lambda dtype: torch.finfo(dtype).eps)
    eps = torch.finfo(coarsest).eps
    allowed = CPU_ALLOWED.get(coarsest, 0.0) if is_cpu else N_ROUNDINGS * max(COARSEST, eps)
    allowed = allowed or N_ROUNDINGS * eps
    return allowed if finest is None else min(allowed, max(finest, LEAST_ALLOWED * eps))


def why_dependent(batch: Batch, run: Callable[[Batch], Any], allowed: float, whole: Any = None) -> str:
    """Why the output at a point is not a function of that point alone, in words; "" if nothing suggests so.

    `run` returns the model's output for a batch: a tensor, or any nesting of tuples, lists and dicts of tensors. Those
    that hold real numbers and one row per point are compared. `allowed`: see `allowed_difference`. `whole`: the output
    for this batch, if known.
    """
    n = batch.n_points
    whole = run(batch) if whole is None else whole
    back = numerics.integers(n - 1, -1, -1)
    last = back[: min(n - n // 2, MOST_ALONE)]  # at most half of the batch, so that its statistics are others
    try:
        alone = run(batch.at(last))
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        return f"the model cannot run on {len(last)} of the {n} inputs by themselves ({error})"
    pairs = _pairs(whole, n, alone, len(last))
    if not pairs:
        return f"no output has one row for each of the {n} inputs along dimension 0"
    if _agree(pairs, last, allowed):
        return ""
    again = run(batch.at(last))
    if not _agree(_pairs(alone, len(last), again, len(last)), numerics.integers(0, len(last)), allowed):
        return CHANCE
    return NEIGHBOURS if _agree(_pairs(whole, n, run(batch.at(back)), n), back, allowed) else ORDER


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
        finite = finite_or_zero(a[:, some])
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
