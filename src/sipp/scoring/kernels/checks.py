"""Checks the size, dtype, device and strides of every tensor before its address is passed to compiled code.

Compiled code does not check bounds: with one column too many it would access memory that is not its own. A check takes
microseconds, whatever the size of the tensors. `native/memory.py` allocates what the kernels write to.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sipp.errors import DataError

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
N_SIGNS = 2


class Operand(NamedTuple):
    """One tensor argument of a kernel, with the shape and the dtypes it must have."""

    name: str
    tensor: Tensor
    shape: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...] = FLOATS


def check_sums(where: str, weight_GRK: Tensor, patches_GKP: Tensor, *, device: str | None = None) -> None:
    """Raises DataError unless these are the operands of `quadrant_sums`, all on one device (of this type)."""
    n_groups, _, fan_in = _sizes(where, "weight_GRK", weight_GRK, 3)
    n_patches = _sizes(where, "patches_GKP", patches_GKP, 3)[2]
    weight = Operand("weight_GRK", weight_GRK, tuple(weight_GRK.shape))
    _check(where, [weight, Operand("patches_GKP", patches_GKP, (n_groups, fan_in, n_patches))], device)


def check_products(
    where: str, patches: Tensor, inverse: Tensor, positive_GRK: Tensor, *, n_dims: int = 1, device: str | None = None
) -> None:
    """Raises DataError unless these are operands of `max_times` or, with points apart, of `sum_times`."""
    n_groups, n_rows, fan_in = _sizes(where, "positive_GRK", positive_GRK, 3)
    each = _sizes(where, "patches", patches, 2 + n_dims)[2:]
    positive = Operand("positive_GRK", positive_GRK, (n_groups, n_rows, fan_in), (torch.bool,))
    a = Operand("patches", patches, (n_groups, fan_in, *each))
    u = Operand("inverse", inverse, (N_SIGNS, n_groups, n_rows, *each))
    _check(where, [positive, a, u], device)


def check_rows(where: str, weight_GRK: Tensor, row_factors_GR: Tensor) -> None:
    """Raises DataError unless these are weights, and a factor for each of their rows, on a CPU."""
    n_groups, n_rows, fan_in = _sizes(where, "weight_GRK", weight_GRK, 3)
    weight = Operand("weight_GRK", weight_GRK, (n_groups, n_rows, fan_in))
    _check(where, [weight, Operand("row_factors_GR", row_factors_GR, (n_groups, n_rows), (torch.float64,))], "cpu")


def check_ratios(
    where: str,
    windows: Tensor,
    n_position_dims: int,
    shape: tuple[int, int, int],
    *,
    factors_TB: Tensor,
    others: Sequence[Operand] = (),
) -> None:
    """Raises DataError unless these are float32 windows on a CPU that meet weights of this shape, G x R x K."""
    sizes = _sizes(where, "windows", windows, None)
    if not (isinstance(n_position_dims, int) and 0 <= n_position_dims <= len(sizes) - 2):
        raise DataError(
            f"windows of shape {sizes} do not have {n_position_dims!r} dimensions of positions", where=where
        )
    (n_groups, _, fan_in), shown = shape, math.prod(sizes[2 + n_position_dims :])
    if sizes[1] != n_groups or shown != fan_in:
        raise DataError(
            f"windows of shape {sizes} show {sizes[1]} groups of {shown} values for each patch; the "
            f"weight has {n_groups} groups of fan-in {fan_in}",
            where=where,
            fix="give inputs of the size that the layer takes",
        )
    operands = [
        Operand("windows", windows, sizes, (torch.float32,)),
        Operand("factors_TB", factors_TB, (N_SIGNS, sizes[0]), (torch.float32,)),
        *others,
    ]
    _check(where, operands, "cpu")


def check_lines(where: str, values_BN: Tensor, *, device: str | None = None) -> None:
    """Raises DataError unless these are lines of real numbers, at least one of at least one number."""
    _check(where, [Operand("values_BN", values_BN, _sizes(where, "values_BN", values_BN, 2))], device)


def _sizes(where: str, name: str, tensor: Tensor, n_dims: int | None) -> tuple[int, ...]:
    """The shape of a tensor, refused where it has another number of dimensions (None: at least two) or no elements."""
    if not isinstance(tensor, Tensor):
        raise DataError(f"{name} is a {type(tensor).__name__}, it must be a tensor", where=where)
    sizes = tuple(tensor.shape)
    if (len(sizes) < 2 if n_dims is None else len(sizes) != n_dims) or 0 in sizes:
        wanted = "at least two" if n_dims is None else n_dims
        raise DataError(f"{name} has shape {sizes}; it must have {wanted} dimensions, none of them 0", where=where)
    return sizes


def _check(where: str, operands: list[Operand], device: str | None) -> None:
    """Raises DataError unless each has its shape and dtype, and all are on one device (of this type)."""
    place = operands[0].tensor.device
    for one in operands:
        tensor = one.tensor
        if not isinstance(tensor, Tensor) or tuple(tensor.shape) != one.shape:
            found = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            first = f"{operands[0].name} of shape {operands[0].shape}"
            raise DataError(f"{one.name} has shape {found}; next to {first} it must have {one.shape}", where=where)
        if tensor.dtype not in one.dtypes:
            wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in one.dtypes)
            raise DataError(f"{one.name} is {tensor.dtype}; it must be {wanted}", where=where)
        if tensor.device != place or (device is not None and place.type != device):
            raise DataError(f"{one.name} is on {tensor.device}; all must be on {device or place}", where=where)
        if tensor.layout != torch.strided or tensor.is_neg():
            raise DataError(
                f"{one.name} is not an ordinary dense tensor ({tensor.layout})", where=where, fix="make it one"
            )
        _check_memory(where, one)


def _check_memory(where: str, one: Operand) -> None:
    """Raises DataError unless every element of the tensor lies within its storage."""
    tensor, strides = one.tensor, one.tensor.stride()
    last = sum((size - 1) * stride for size, stride in zip(one.shape, strides))
    n_bytes = (tensor.storage_offset() + last + 1) * tensor.element_size()
    if min(strides, default=0) < 0 or n_bytes > tensor.untyped_storage().nbytes():
        raise DataError(
            f"{one.name} of shape {one.shape} and strides {strides} views memory it does not have", where=where
        )
