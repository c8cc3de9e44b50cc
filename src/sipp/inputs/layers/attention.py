"""Patches of MultiheadAttention: its projections read query, key and value; out_proj reads the attention output.

The attention output shows only while the layer runs. So it is run here, with the identity in place of out_proj.
"""

from __future__ import annotations

import inspect
from collections.abc import Generator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sipp.inputs.layers.registry import Adapter
from sipp.inputs.patches import WeightUse, sequences

SIGNATURE = inspect.signature(nn.MultiheadAttention.forward)
INPUTS = ("query", "key", "value")


def attention_weights(module: nn.MultiheadAttention) -> tuple[str, ...]:
    """Packed (one in_proj_weight) or separate projections, and the output projection."""
    if module.in_proj_weight is not None:
        return ("in_proj_weight", "out_proj.weight")
    return ("q_proj_weight", "k_proj_weight", "v_proj_weight", "out_proj.weight")


def attention_uses(
    module: nn.MultiheadAttention, args: tuple[Any, ...], kwargs: dict[str, Any], n_points: int
) -> Generator[WeightUse, None, tuple[Tensor, Tensor | None]]:
    """Every position of query, key and value is a patch, but for the keys and values that key_padding_mask hides."""
    given = SIGNATURE.bind(module, *args, **kwargs).arguments
    mask, is_packed = given.get("key_padding_mask"), module.in_proj_weight is not None
    is_same = given["query"] is given["key"] is given["value"] and mask is None
    if is_same and is_packed:  # all rows meet the same patches, which are read once
        yield sequences("in_proj_weight", _by_sequence(module, given["query"]), n_points)
    for i, name in enumerate(INPUTS if not (is_same and is_packed) else ()):
        steps_BTK, is_real_BT = _by_sequence(module, given[name]), None
        if mask is not None and name != "query":
            is_real_BT = (~mask if mask.dtype == torch.bool else mask != -torch.inf).reshape(len(steps_BTK), -1)
        use = sequences(f"{name[0]}_proj_weight", steps_BTK, n_points, is_real_BT)
        rows = {"parameter": "in_proj_weight", "row_start": i * module.embed_dim, "n_rows": module.embed_dim}
        yield replace(use, **rows) if is_packed else use
    attended, shares = _before_projection(module, args, kwargs)
    yield replace(sequences("out_proj.weight", _by_sequence(module, attended), n_points), is_own_copy=True)
    swaps = module.batch_first and attended.ndim == 3  # torch projects with the time first
    output = F.linear(attended.transpose(0, 1) if swaps else attended, module.out_proj.weight, module.out_proj.bias)
    return output.transpose(0, 1) if swaps else output, shares


def _by_sequence(module: nn.MultiheadAttention, tensor: Tensor) -> Tensor:
    """Sequences x positions x features, whichever of the three layouts of nn.MultiheadAttention was given."""
    if tensor.ndim == 2:  # unbatched
        return tensor.unsqueeze(0)
    return tensor if module.batch_first else tensor.transpose(0, 1)


def _before_projection(
    module: nn.MultiheadAttention, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor | None]:
    """The concatenated heads in the layout of the output, and the shares of attention if they are asked for."""
    weight = module.out_proj.weight
    one = torch.eye(module.embed_dim, dtype=weight.dtype, device=weight.device)
    vars(module)["out_proj"] = SimpleNamespace(weight=one, bias=None)  # found before the submodule
    try:
        found: tuple[Tensor, Tensor | None] = nn.MultiheadAttention.forward(module, *args, **kwargs)
    finally:
        del vars(module)["out_proj"]
    return found


ATTENTION: Adapter = Adapter(attention_weights, attention_uses)
