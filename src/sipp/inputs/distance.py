"""The distance between the outputs of two networks: the measure used for blends, repairs and cuts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sipp.inputs.batches import fresh, points_at
from sipp.inputs.capture import run_batch, scoring_mode
from sipp.inputs.data import is_tokens
from sipp.inputs.independence import tensors_in
from sipp.records.batches import Batch
from sipp.records.numerics import BOUND_DTYPE, device_of, for_device
from sipp.records.options import NormStats

OUTPUT_BYTES = 256 << 20  # of dense outputs that are kept; the others are computed again
AT_ONCE = 1 << 22  # numbers that are compared at once, in float64
TOKENS_AT_ONCE = {"cpu": 1024, "cuda": 8192}  # in a batch: their logits may be larger than the network

Outputs = Callable[[int], list[Tensor]]


def output_error(dense: nn.Module, other: nn.Module, batches: Sequence[Batch]) -> float | None:
    """The distance between both networks' outputs on these points, relative to the norm of the dense ones.

    None if the dense output has no real numbers; infinite if the distance is not finite.
    """
    small = in_small_parts(batches, device_of(dense))
    return error_of(other, small, outputs_of(dense, small, most=0))  # each is needed once


def outputs_of(
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
            found = [tensor.detach() for tensor in tensors_in(run_batch(dense, fresh(batches[i])))]
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
            far, large = squares(run_batch(model, fresh(batch)), aims, batch)
        distance, size, n_tensors = distance + float(far), size + float(large), n_tensors + len(aims)
        del aims  # before the next ones are made
    if n_tensors == 0:
        return None
    if not math.isfinite(distance) or not math.isfinite(size):
        return math.inf
    return math.sqrt(distance / size) if size > 0 else (0.0 if distance == 0 else math.inf)


def squares(output: object, wanted: list[Tensor], batch: Batch) -> tuple[Tensor, Tensor]:
    """The squared distance of an output to the wanted one, and the squared norm of that (float64); padding left out."""
    device = wanted[0].device if wanted else torch.device("cpu")
    distance, size = (torch.zeros((), dtype=BOUND_DTYPE, device=device) for _ in range(2))
    found = list(tensors_in(output))
    if [tensor.shape for tensor in found] != [tensor.shape for tensor in wanted]:
        return distance + math.nan, size
    for tensor, aim in zip(found, wanted):
        real_BT = batch.real_BT
        is_real = None
        if real_BT is not None and tensor.shape[:2] == real_BT.shape:
            is_real = real_BT.to(aim.device, torch.bool).view(*real_BT.shape, *[1] * (tensor.ndim - 2))
        for part in _slices(tensor):
            gap, size_of = tensor[part].double() - aim[part].double(), aim[part].double()
            if is_real is not None:
                gap, size_of = torch.where(is_real[part], gap, 0.0), torch.where(is_real[part], size_of, 0.0)
            distance = distance + gap.square().sum()
            size = size + size_of.square().sum()
    return distance, size


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


def in_small_parts(batches: Sequence[Batch], device: torch.device) -> list[Batch]:
    """The batches, split where they have so many tokens that their logits would be large."""
    most = for_device(TOKENS_AT_ONCE, device)
    return [part for batch in batches for part in _of_tokens(batch, most)]


def _of_tokens(batch: Batch, most: int) -> list[Batch]:
    ids = next((value for value in (*batch.args, *batch.kwargs.values()) if isinstance(value, Tensor)), None)
    if ids is None or not is_tokens(ids) or ids.numel() <= most or len(ids) != batch.n_points:
        return [batch]
    step = max(1, most // ids.shape[1])
    return [points_at(batch, slice(start, start + step)) for start in range(0, batch.n_points, step)]
