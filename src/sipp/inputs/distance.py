"""How far the output of one network is from that of another: the one measure for blends, repairs and cuts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from sipp.inputs.batches import fresh
from sipp.inputs.capture import run_batch, scoring_mode
from sipp.inputs.independence import tensors_in
from sipp.records.batches import Batch
from sipp.records.numerics import BOUND_DTYPE
from sipp.records.options import NormStats

OUTPUT_BYTES = 256 << 20  # of dense outputs that are kept; those beyond are computed anew

Outputs = Callable[[int], list[Tensor]]


def output_error(dense: nn.Module, other: nn.Module, batches: Sequence[Batch]) -> float | None:
    """The distance between both networks' outputs on these points, by the norm of the dense ones.

    None where the dense output holds no real numbers; infinite where the distance is no number.
    """
    return error_of(other, batches, outputs_of(dense, batches))


def outputs_of(dense: nn.Module, batches: Sequence[Batch], norm_stats: NormStats = "running") -> Outputs:
    """A function that gives the tensors of the dense output on batch i; as many as fit the memory are kept."""
    kept: dict[int, list[Tensor]] = {}
    left = OUTPUT_BYTES

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
    """||f^ - f|| / ||f|| over all points together: one point of a small output does not decide."""
    distance = size = 0.0
    n_tensors = 0
    for i, batch in enumerate(batches):
        with scoring_mode(model, norm_stats):
            far, large = squares(run_batch(model, fresh(batch)), wanted(i), batch)
        distance, size, n_tensors = distance + float(far), size + float(large), n_tensors + len(wanted(i))
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
        gap = tensor.double() - aim.double()
        real_BT = batch.real_BT
        if real_BT is not None and tensor.shape[:2] == real_BT.shape:
            is_real = real_BT.to(gap.device, torch.bool).view(*real_BT.shape, *[1] * (gap.ndim - 2))
            gap, aim = torch.where(is_real, gap, 0.0), torch.where(is_real, aim, 0.0)
        distance = distance + gap.square().sum()
        size = size + aim.double().square().sum()
    return distance, size
