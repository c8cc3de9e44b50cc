"""Tensors that share memory: whether they can all have the values that a file gives them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

Groups = list[tuple[tuple[str, ...], Tensor]]  # tensors with all their names


def sharing_of(groups: Groups) -> list[Groups]:
    """The tensors that share memory without being the same (one is the other's .T, or a part of it)."""
    by_memory: dict[object, Groups] = {}
    for names, tensor in groups:
        if tensor.numel() and 0 not in tensor.stride():  # one that repeats itself takes no values
            by_memory.setdefault((tensor.device, tensor.untyped_storage().data_ptr()), []).append((names, tensor))
    return [shared for shared in by_memory.values() if len(shared) > 1]


def torn(sharing: list[Groups], state: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Names of tensors that share memory and cannot all have the values in `state`; none where they can."""
    for shared in sharing:
        memory = shared[0][1].untyped_storage().cpu().clone()
        views = [
            torch.empty(0, dtype=one.dtype, device="cpu").set_(memory, one.storage_offset(), one.shape, one.stride())
            for _, one in shared
        ]
        values = [state[names[0]] for names, _ in shared]
        for view, value in zip(views, values):
            view.copy_(value)
        if any(bits_differ(view, value) for view, value in zip(views, values)):
            return tuple(names[0] for names, _ in shared)
    return ()


def bits_differ(one: Tensor, other: Tensor) -> bool:
    return one is not other and not torch.equal(*(t.reshape(-1).view(torch.uint8) for t in (one, other)))
