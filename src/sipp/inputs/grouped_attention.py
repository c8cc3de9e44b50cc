"""Attention with grouped heads (GQA) in float32 on a GPU, by a fused kernel.

Torch has no fused kernel for `enable_gqa=True` in float32: it computes and stores every score, which takes as long as
the rest of a small language model. With keys and values repeated for each query head, it has one.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

DEVICES = ("cuda",)  # where a fused kernel needs repeated heads


class RepeatedHeads(TorchFunctionMode):
    """Repeats the keys and values of grouped attention, so that there are as many as queries."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention or not kwargs.get("enable_gqa") or not _is_slow(*args[:3]):
            return func(*args, **kwargs)
        query, key, value, *rest = args
        key, value = (heads.repeat_interleave(query.shape[-3] // heads.shape[-3], -3) for heads in (key, value))
        return func(query, key, value, *rest, **kwargs | {"enable_gqa": False})


def _is_slow(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether a fused kernel needs repeated heads."""
    fits = min(query.ndim, key.ndim, value.ndim) >= 4 and query.shape[-3] % key.shape[-3] == 0
    return fits and query.device.type in DEVICES and query.dtype == torch.float32
