"""Patches of MultiheadAttention: its projections meet query, key and value; out_proj meets the attention output."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sipp.errors import DataError, ModelError
from sipp.inputs.batches import WeightUse
from sipp.inputs.layers.linear import Points, by_size, refuse_points_along_time

# the arguments of its forward; None for query, key and value, which have no default
_DEFAULTS: dict[str, Any] = {
    name: None if one.default is one.empty else one.default
    for name, one in inspect.signature(nn.MultiheadAttention.forward).parameters.items()
    if name != "self"
}


def attention_weights(module: nn.MultiheadAttention) -> tuple[str, ...]:
    """Packed (one in_proj_weight) or separate projections, and the output projection."""
    if module.in_proj_weight is not None:
        return ("in_proj_weight", "out_proj.weight")
    return ("q_proj_weight", "k_proj_weight", "v_proj_weight", "out_proj.weight")


def attention_recorded(module: nn.MultiheadAttention) -> tuple[str, ...]:
    """The weight whose operand is the attention output."""
    return ("out_proj.weight",)


def attention_uses(
    module: nn.MultiheadAttention, args: tuple[Any, ...], kwargs: dict[str, Any], n_points: int
) -> Iterator[WeightUse]:
    """Every position of query, key and value is a patch, but for the keys and values that key_padding_mask hides."""
    given = _given(module, args, kwargs)
    is_real_BS = _is_real(module, given)
    n_sequences, n_steps, _ = _by_sequence(module, given["query"]).shape
    refuse_points_along_time(n_sequences, n_steps, n_points)
    is_same = given["query"] is given["key"] is given["value"] and is_real_BS is None
    if is_same and module.in_proj_weight is not None:  # all rows meet the same patches, which are read once
        yield WeightUse("in_proj_weight", *_points(module, given["query"], n_points))
        return
    for i, name in enumerate(("query", "key", "value")):
        patches = _points(module, given[name], n_points)
        real_BP = None
        if is_real_BS is not None and name != "query":
            real_BP = is_real_BS if patches.attributed else is_real_BS.flatten()[None]
        if module.in_proj_weight is not None:
            block = patches._replace(row_start=i * module.embed_dim, n_rows=module.embed_dim)
            yield WeightUse("in_proj_weight", *block, real_BP=real_BP)
        else:
            yield WeightUse(f"{name[0]}_proj_weight", *patches, real_BP=real_BP)


def attention_uses_after(
    module: nn.MultiheadAttention,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    output: Any,
    operands: dict[str, list[Tensor]],
    n_points: int,
) -> Iterator[WeightUse]:
    """The attention output as out_proj met it; computed again if it was not seen, as in another precision."""
    given = _given(module, args, kwargs)
    query, met = given["query"], operands.get("out_proj.weight", [])
    n_sequences, n_steps, n_features = _by_sequence(module, query).shape
    if len(met) == 1 and tuple(met[0].shape) == (n_steps * n_sequences, n_features):  # time first, in any layout
        by_step = met[0].view(n_steps, n_sequences, n_features)
        attended = by_step[:, 0] if query.ndim == 2 else by_step.transpose(0, 1) if module.batch_first else by_step
    else:
        attended = _before_projection(module, given)
    yield WeightUse("out_proj.weight", *_points(module, attended, n_points))


def _points(module: nn.MultiheadAttention, tensor: Tensor, n_points: int) -> Points:
    """The positions of each sequence as patches of its point; together if sequences are not points."""
    sequence = _by_sequence(module, tensor)
    attributed = len(sequence) == n_points
    windows = sequence[:, None] if attributed else sequence.flatten(0, 1)[None, None]
    return Points(windows, 1, 0, None, None, attributed)


def attention_output(module: nn.MultiheadAttention, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The attention output, projected."""
    attended = _before_projection(module, _given(module, args, kwargs))
    return F.linear(attended, module.out_proj.weight, module.out_proj.bias)


def _given(module: nn.MultiheadAttention, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, after checking that query, key and value fit the layer and each other."""
    given = _DEFAULTS | dict(zip(_DEFAULTS, args)) | kwargs
    if len(args) > len(_DEFAULTS) or len(given) > len(_DEFAULTS):
        raise ModelError("is called with other arguments than attention takes, so sipp cannot reproduce its output")
    sizes = {"query": module.embed_dim, "key": module.kdim, "value": module.vdim}
    for name, size in sizes.items():
        tensor = given[name]
        if not isinstance(tensor, Tensor) or tensor.is_nested:
            raise DataError(f"takes plain tensors, but its {name} is a nested one or a {type(tensor).__name__}")
        if tensor.ndim not in (2, 3) or tensor.ndim != given["query"].ndim or tensor.shape[-1] != size:
            raise DataError(
                f"takes a {name} of {size} features in 2 dimensions, or 3 with a batch, not {by_size(tensor.shape)}"
            )
    query, key, value = (_by_sequence(module, given[name]) for name in sizes)
    if key.shape[:2] != value.shape[:2] or len(key) != len(query) or query.numel() == 0 or key.numel() == 0:
        shapes = ", ".join(by_size(tensor.shape) for tensor in (query, key, value))
        raise DataError(f"takes query, key and value of as many sequences, key and value as long, not {shapes}")
    return given


def _by_sequence(module: nn.MultiheadAttention, tensor: Tensor) -> Tensor:
    """Sequences x positions x features, whichever of the three layouts of nn.MultiheadAttention was given."""
    if tensor.ndim == 2:  # unbatched
        return tensor.unsqueeze(0)
    return tensor if module.batch_first else tensor.transpose(0, 1)


def _is_real(module: nn.MultiheadAttention, given: dict[str, Any]) -> Tensor | None:
    """Which positions of key and value the call does not hide (sequences x positions); None where it hides none."""
    mask = given["key_padding_mask"]
    if mask is None:
        return None
    shape = tuple(_by_sequence(module, given["key"]).shape[:2])
    expected = shape if given["key"].ndim == 3 else shape[1:]
    if not isinstance(mask, Tensor) or tuple(mask.shape) != expected:
        got = by_size(mask.shape) if isinstance(mask, Tensor) else f"a {type(mask).__name__}"
        raise DataError(f"takes a key_padding_mask of {by_size(expected)}, not {got}")
    return ~mask.reshape(shape) if mask.dtype == torch.bool else mask.reshape(shape) != -torch.inf


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
