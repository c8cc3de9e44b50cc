"""How many calibration points the guarantees need (T4)."""

from __future__ import annotations

import itertools
import math
from typing import Any, Literal

from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, default_collate

from sipp.checking import check_number, check_share, check_whole
from sipp.errors import DataError, OptionError
from sipp.inputs.batches import Data, batches_of
from sipp.inputs.capture import capture
from sipp.inputs.layers import Selector, find_sites, unwrap
from sipp.numerics import device_of
from sipp.records import Batch, Use, Weight

C_CONSTANT = 3.0  # C of the regularity assumption of T4
K_CONSTANT = 3.0  # K_s of the same

# The factor c of T4: how many events share the failure probability.
PRUNE_FACTOR = 8
SIMPLE_FACTOR = 16
NETWORK_FACTOR = 6


def factor_of(method: str) -> int:
    """The factor c of T4 for the statement about the rows that a method prunes."""
    if not isinstance(method, str):
        raise OptionError(f"method={method!r:.60} must be the name of a method, such as sipp-det")
    return SIMPLE_FACTOR if method == "sipp-simple" else PRUNE_FACTOR


def sample_size(
    model: nn.Module,
    example: Any,
    delta: float = 1e-16,
    *,
    method: str = "sipp-hybrid",
    k_constant: float = K_CONSTANT,
    include: Selector | None = None,
    exclude: Selector | None = None,
) -> int:
    """The number of calibration points that pruning needs for its guarantee at failure probability `delta` (T4).

    `example` is one batch; eta and rho are read off one dry run of the model over it. `method` decides how many events
    share delta: `sipp-simple` needs a few points more.

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
    if not fan_ins:
        raise DataError("the example brings no patch to any prunable weight: give a batch of at least one whole point")
    return points_needed(sum(outputs.values()), max(fan_ins), delta, factor=factor_of(method), k_constant=k_constant)


def points_needed(n_outputs: int, max_fan_in: int, delta: float, *, factor: int, k_constant: float) -> int:
    """n = ceil(K_s ln(c eta rho / delta)) of T4."""
    check_delta(delta)
    check_number("k_constant", k_constant, above=0)
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
    method: str = "sipp-hybrid",
    k_constant: float = K_CONSTANT,
    include: Selector | None = None,
    exclude: Selector | None = None,
) -> tuple[int | None, Data]:
    """The number of points to use, and the data, whose first batch "theory" looks at without losing it."""
    if not isinstance(n_points, str) or n_points != "theory":
        return None if n_points is None else check_whole("n_points (or 'theory')", n_points, least=1), data
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
        if hasattr(data, "__next__"):  # anything else begins anew
            data = itertools.chain([example], batches)
    needed = sample_size(model, example, delta, method=method, k_constant=k_constant, include=include, exclude=exclude)
    return needed, data
