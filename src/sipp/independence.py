"""Whether the output at a point is a function of that point alone: what every count of independent points rests on.

The last few points of a batch, in reversed order and by themselves, must give the outputs that they gave within the
batch. So small a part exposes statistics of the batch, the order a dimension 0 that is time, a second run chance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from sipp.batches import points_at
from sipp.records import Batch

# Kernels round otherwise at another batch size, by some roundings of the largest output: of the dtype, and for wider
# ones of TF32, in which GPUs may multiply float32. Batch statistics and noise are far above that.
N_ROUNDINGS = 8
MOST_ALONE = 4  # points that are run by themselves: the fewer, the more statistics of the batch differ
COARSEST = 2.0**-11  # of TF32

CHANCE = "two runs on the same points differ: dropout or noise is at work at inference, turn it off"
NEIGHBOURS = (
    "the output at a point depends on the other points of its batch: a normalisation by the batch (give it running "
    "statistics), or dimension 0 is time, not points (put the points first, batch_first=True)"
)
ORDER = (
    "the output at a point depends on the points before it: dimension 0 seems to be time, not points; put the points "
    "first (batch_first=True, or wrap the model in one that transposes)"
)


def why_dependent(batch: Batch, run: Callable[[Batch], Any], whole: Any = None) -> str:
    """Why the output at a point is no function of that point alone, in words; "" where nothing speaks against it.

    `run` gives the model's output for a batch: a tensor, or any nesting of tuples, lists and dicts of tensors, of which
    those are compared that hold real numbers and one row per point. `whole`: the output for this batch, if known.
    """
    n = batch.n_points
    whole = run(batch) if whole is None else whole
    back = torch.arange(n - 1, -1, -1)
    last = back[: min(n - n // 2, MOST_ALONE)]
    part = points_at(batch, last)
    try:
        alone = run(part)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        return f"the model cannot run on {part.n_points} of the {n} points by themselves ({error})"
    pairs = _pairs(whole, n, alone, part.n_points)
    if not pairs:
        return f"no output has one row for each of the {n} points along dimension 0"
    if _agree(pairs, last):
        return ""
    if not _agree(_pairs(alone, part.n_points, run(part), part.n_points), torch.arange(part.n_points)):
        return CHANCE
    return NEIGHBOURS if _agree(_pairs(whole, n, run(points_at(batch, back)), n), back) else ORDER


def _pairs(whole: Any, n: int, part: Any, n_part: int) -> list[tuple[Tensor, Tensor]]:
    """The tensors of real numbers that stand at the same place in both outputs and hold a row for each point."""
    places = zip(tensors_in(whole), tensors_in(part))
    return [(a, b) for a, b in places if a.shape[:1] == (n,) and b.shape[:1] == (n_part,) and a.numel() > 0]


def _agree(pairs: list[tuple[Tensor, Tensor]], index: Tensor) -> bool:
    """Whether the rows at `index` of the one are the rows of the other, up to rounding."""
    return all(_close(a, b, index) for a, b in pairs)


def _close(whole: Tensor, part: Tensor, index: Tensor) -> bool:
    if whole.shape[1:] != part.shape[1:]:
        return False
    allowed = N_ROUNDINGS * max(COARSEST, torch.finfo(whole.dtype).eps)
    a, b = whole.detach().double(), part.detach().double()
    largest = torch.where(a.isfinite(), a, 0.0).abs().max()
    a = a[index.to(a.device)]
    is_same = (a == b) | (a.isnan() & b.isnan()) | ((a - b).abs() <= allowed * largest)
    return bool(is_same.all())


def tensors_in(output: Any) -> Iterator[Tensor]:
    """The tensors of real numbers in an output, in order, as dense ones; a nest within itself is looked at once."""
    waiting, seen = [output], set()
    while waiting:
        value = waiting.pop()
        if isinstance(value, Tensor):
            if value.is_floating_point() and not value.is_nested:
                yield value if value.layout == torch.strided else value.to_dense()
        elif isinstance(value, dict | list | tuple) and id(value) not in seen:
            seen.add(id(value))
            waiting += reversed(list(value.values()) if isinstance(value, dict) else value)
