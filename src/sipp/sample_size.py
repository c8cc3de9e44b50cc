"""How many calibration points the guarantees need (T4)."""

from __future__ import annotations

import itertools
import math
from typing import Any, Literal

from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, default_collate

from sipp.batches import Data, batches_of
from sipp.capture import capture
from sipp.checking import check_share
from sipp.errors import DataError
from sipp.layers import Selector, find_sites, unwrap
from sipp.numerics import device_of
from sipp.records import Batch, Use, Weight

C_CONSTANT = 3.0  # C of the regularity assumption of T4
K_CONSTANT = 3.0  # K_s of the same

# The factor c of T4: how many events share the failure probability.
PRUNE_FACTOR = 8
SIMPLE_FACTOR = 16
NETWORK_FACTOR = 6


def sample_size(
    model: nn.Module,
    example: Any,
    delta: float = 1e-16,
    *,
    k_constant: float = K_CONSTANT,
    include: Selector | None = None,
    exclude: Selector | None = None,
) -> int:
    """The number of calibration points that pruning needs for its guarantee at failure probability `delta` (T4).

    `example` is one batch; eta and rho are read off one dry run of the model over it.

    Example:
        >>> import sipp, torch
        >>> sipp.sample_size(torch.nn.Linear(4, 3), torch.rand(1, 4), delta=1e-16)
        125
    """
    model = unwrap(model)
    sites = find_sites(model, include=include, exclude=exclude)
    outputs: dict[str, int] = {}
    fan_ins: list[int] = []

    def on_use(weight: Weight, use: Use, batch: Batch) -> None:
        per_point = use.windows.shape[2 : 2 + use.n_position_dims].numel()
        most = per_point if use.counts_B is None else int(use.counts_B.max())
        outputs[weight.name] = outputs.get(weight.name, 0) + most * (use.n_rows or weight.n_rows - use.row_start)
        fan_ins.append(weight.fan_in)

    batches = batches_of([example], device=device_of(model))
    capture(model, sites, batches, on_use=on_use, on_output=lambda output, batch: None)
    return points_needed(sum(outputs.values()), max(fan_ins), delta, factor=PRUNE_FACTOR, k_constant=k_constant)


def points_needed(n_outputs: int, max_fan_in: int, delta: float, *, factor: int, k_constant: float) -> int:
    """n = ceil(K_s ln(c eta rho / delta)) of T4."""
    check_delta(delta)
    return math.ceil(k_constant * (math.log(factor * n_outputs * max_fan_in) - math.log(delta)))


def check_delta(delta: float) -> None:
    """Refuses what is no probability strictly between 0 and 1."""
    check_share("delta", delta)


def resolve_points(
    model: nn.Module,
    data: Data,
    n_points: int | Literal["theory"] | None,
    delta: float,
    *,
    k_constant: float = K_CONSTANT,
    include: Selector | None = None,
    exclude: Selector | None = None,
) -> tuple[int | None, Data]:
    """The number of points to use, and the data, whose first batch "theory" looks at without losing it."""
    if n_points != "theory":
        return n_points, data
    example: Any
    if isinstance(data, Tensor):
        example = data[:1]
    elif isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        example = default_collate([data[0]])
    else:
        batches = iter(data)
        example = next(batches, None)
        if example is None:
            raise DataError("the data holds no batch: at least one batch with one point is needed")
        data = itertools.chain([example], batches)
    return sample_size(model, example, delta, k_constant=k_constant, include=include, exclude=exclude), data
