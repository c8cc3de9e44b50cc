"""Runs attention with grouped heads (GQA) in float32 on a GPU by a fused kernel.

Torch has no fused kernel for `enable_gqa=True` in float32: it computes and stores every score, which takes as long as
the rest of a small language model. With keys and values repeated for each query head, it has one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

N_GROUPS = "num_key_value_groups"  # attribute of attention layers: query heads for each head of keys and values
DEVICES = ("cuda",)  # where a fused kernel needs repeated heads


def fused_attention(modules: Sequence[nn.Module]) -> AbstractContextManager[Any]:
    """A context in which grouped attention among these modules of transformers runs by a fused kernel.

    It does nothing for other models: looking at every operation costs time, most of all where these are short.
    """
    is_grouped = any(isinstance(n := vars(module).get(N_GROUPS), int) and n > 1 for module in modules)
    return RepeatedHeads() if is_grouped else nullcontext()


class RepeatedHeads(TorchFunctionMode):
    """Repeats the keys and values of grouped attention, so that there are as many as queries."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        is_grouped = func is F.scaled_dot_product_attention and len(args) >= 3 and kwargs.get("enable_gqa", False)
        if not is_grouped or not _is_slow(args[0]) or not _has_whole_groups(*args[:3]):
            return func(*args, **kwargs)
        query, key, value, *rest = args
        key, value = (heads.repeat_interleave(query.shape[-3] // heads.shape[-3], -3) for heads in (key, value))
        return func(query, key, value, *rest, **kwargs | {"enable_gqa": False})


def _has_whole_groups(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether each head of keys and values serves as many heads of queries; torch refuses everything else itself."""
    if min(query.ndim, key.ndim, value.ndim) < 4 or query.shape[-3] == 0:
        return False
    return all(heads.shape[-3] > 0 and query.shape[-3] % heads.shape[-3] == 0 for heads in (key, value))


def _is_slow(tensor: Tensor) -> bool:
    return tensor.device.type in DEVICES and tensor.dtype == torch.float32
