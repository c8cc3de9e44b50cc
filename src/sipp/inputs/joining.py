"""Two batches in, one batch of the points of both out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sipp.records.batches import Batch


def joined(first: Batch, second: Batch) -> Batch | None:
    """One batch of the points of both, without labels; None unless all inputs are tensors by point, and alike."""
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
    """The inputs by place or name; None names the positions that count."""
    real = [] if batch.real_BT is None else [(None, batch.real_BT)]
    return dict([*enumerate(batch.args), *batch.kwargs.items(), *real])


def _is_alike(a: Any, n_a: int, b: Any, n_b: int) -> bool:
    """Whether both are tensors of so many points, of the same form."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor) or a.ndim == 0 or b.ndim == 0:
        return False
    return (len(a), len(b)) == (n_a, n_b) and a.shape[1:] == b.shape[1:] and a.dtype == b.dtype
