"""Patches of MultiheadAttention: its projections meet query, key and value; out_proj meets the attention output."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sipp.layers.linear import Points
from sipp.records import Use


def attention_weights(module: nn.MultiheadAttention) -> tuple[str, ...]:
    """Packed (one in_proj_weight) or separate projections, and the output projection."""
    if module.in_proj_weight is not None:
        return ("in_proj_weight", "out_proj.weight")
    return ("q_proj_weight", "k_proj_weight", "v_proj_weight", "out_proj.weight")


def attention_uses(
    module: nn.MultiheadAttention, args: tuple[Any, ...], kwargs: dict[str, Any], n_points: int
) -> Iterator[Use]:
    """Every given position of query, key and value is a patch, masked or not: the weight meets it all the same."""
    call = inspect.signature(module.forward).bind(*args, **kwargs)
    call.apply_defaults()
    given = call.arguments
    batch_first = module.batch_first

    def points(tensor: Tensor) -> Points:
        """B x positions x features, whichever of the three layouts of nn.MultiheadAttention was given."""
        if tensor.ndim == 2:  # unbatched
            tensor = tensor.unsqueeze(0 if batch_first else 1)
        sequence = tensor if batch_first else tensor.transpose(0, 1)
        attributed = len(sequence) == n_points
        windows = sequence[:, None] if attributed else sequence.flatten(0, 1)[None, None]
        return Points(windows, 1, 0, None, None, attributed)

    inputs = [points(given[name]) for name in ("query", "key", "value")]
    if module.in_proj_weight is not None:
        for i, patches in enumerate(inputs):
            block = patches._replace(row_start=i * module.embed_dim, n_rows=module.embed_dim)
            yield Use("in_proj_weight", *block)
    else:
        for letter, patches in zip("qkv", inputs):
            yield Use(f"{letter}_proj_weight", *patches)
    attended = _before_projection(module, given)
    yield Use("out_proj.weight", *points(attended))


def _before_projection(module: nn.MultiheadAttention, given: dict[str, Any]) -> Tensor:
    """The concatenated heads: PyTorch's own attention with the identity in place of the output projection."""
    query, key, value = given["query"], given["key"], given["value"]
    swap = module.batch_first and query.ndim == 3
    if swap:
        query, key, value = (tensor.transpose(0, 1) for tensor in (query, key, value))
    separate = module.in_proj_weight is None
    attended, _ = F.multi_head_attention_forward(
        query,
        key,
        value,
        module.embed_dim,
        module.num_heads,
        module.in_proj_weight,
        module.in_proj_bias,
        module.bias_k,
        module.bias_v,
        module.add_zero_attn,
        0.0,
        torch.eye(module.embed_dim, dtype=query.dtype, device=query.device),
        None,
        training=False,
        key_padding_mask=given["key_padding_mask"],
        need_weights=False,
        attn_mask=given["attn_mask"],
        use_separate_proj_weight=separate,
        q_proj_weight=module.q_proj_weight if separate else None,
        k_proj_weight=module.k_proj_weight if separate else None,
        v_proj_weight=module.v_proj_weight if separate else None,
        is_causal=given["is_causal"],
    )
    return attended.transpose(0, 1) if swap else attended
