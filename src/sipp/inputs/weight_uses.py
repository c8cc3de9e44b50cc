"""Checks a use against its weight and takes its padding out: what comes behind may trust every shape."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from sipp.errors import DataError, ModelError
from sipp.records.batches import Batch, WeightUse
from sipp.records.weights import Weight

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def checked_use(use: WeightUse, weight: Weight, device: torch.device, batch: Batch) -> WeightUse | None:
    """The use itself, where it fits; None where it has no patches (an expert without tokens).

    Raises where the windows are not patches of the weight. Messages begin with a verb: the caller names the layer.
    """
    windows = use.windows
    _check_form(use, weight)
    n_values = windows.shape[2 + use.n_position_dims :].numel()
    if n_values != weight.fan_in:
        raise DataError(f"takes {weight.fan_in} features, not {n_values}")
    if windows.dtype not in DTYPES:
        raise DataError(f"takes real numbers of 16 to 64 bits, not {str(windows.dtype).removeprefix('torch.')}")
    if windows.device != device:
        raise DataError(f"lies on {device}, its input on {windows.device}: both must be on one device")
    if windows.numel() == 0:
        return None
    if len(windows) != (batch.n_points if use.attributed else 1):
        raise ModelError(f"has an adapter that reports {len(windows)} inputs, but the batch has {batch.n_points}")
    _refuse_one_vector(use, weight, batch)
    return use


def _check_form(use: WeightUse, weight: Weight) -> None:
    """Raises unless windows, rows and counts hang together, whatever the data: an adapter's own business."""
    windows = use.windows
    if not isinstance(windows, Tensor) or windows.layout != torch.strided or use.n_position_dims < 0:
        raise ModelError("has an adapter whose windows are not a dense tensor of (inputs, groups, *positions, *fan_in)")
    if windows.ndim < 2 + use.n_position_dims:
        raise ModelError(
            f"has an adapter whose windows have {windows.ndim} dimensions, too few for inputs, groups and "
            f"{use.n_position_dims} of positions"
        )
    n_rows = weight.n_rows - use.row_start if use.n_rows is None else use.n_rows
    if use.row_start < 0 or n_rows < 1 or use.row_start + n_rows > weight.n_rows:
        raise ModelError(
            f"has an adapter that reports rows {use.row_start} to {use.row_start + n_rows}, but the weight has "
            f"{weight.n_rows}"
        )
    n_groups = windows.shape[1]
    if n_groups < 1 or n_rows % n_groups:
        raise ModelError(f"has an adapter that reports {n_groups} groups for {n_rows} rows")
    n_patches = windows.shape[2 : 2 + use.n_position_dims].numel()
    counts_B, real_BP = use.counts_B, use.real_BP
    if counts_B is not None:
        if counts_B.shape != windows.shape[:1] or counts_B.is_floating_point() or counts_B.is_complex():
            raise ModelError(f"has an adapter whose counts_B is not one whole number for each of {len(windows)} inputs")
        if counts_B.numel() and not 0 <= int(counts_B.min()) <= int(counts_B.max()) <= n_patches:
            raise ModelError(f"has an adapter whose counts_B is outside of 0 to {n_patches} patches")
    if real_BP is not None:
        shape = (len(windows), n_patches)
        if use.n_position_dims != 1 or real_BP.dtype != torch.bool or tuple(real_BP.shape) != shape:
            raise ModelError(f"has an adapter whose real_BP is not a truth value for each of {shape} patches")


def _refuse_one_vector(use: WeightUse, weight: Weight, batch: Batch) -> None:
    """Raises where the numbers of one vector were given as that many points."""
    n_patches = use.windows.shape[2 : 2 + use.n_position_dims].numel()
    if use.attributed or n_patches != 1 or batch.n_points != weight.fan_in:
        return
    if any(isinstance(value, Tensor) and value.ndim == 1 for value in (*batch.args, *batch.kwargs.values())):
        raise DataError(
            f"reads the {batch.n_points} inputs of the batch as the {weight.fan_in} features of one "
            "vector; inputs run along dimension 0",
            fix="give a batch of one input as x[None]",
        )


def with_padding_zeroed(use: WeightUse, batch: Batch) -> WeightUse:
    """The use with zeros in the patches that are padding, by its adapter or by the batch, and the others counted.

    The batch speaks of this use where its patches are just the positions of its points (B x T).
    """
    real_BP, given = use.real_BP, batch.real_BT
    is_of_points = use.attributed and use.n_position_dims == 1 and use.counts_B is None
    if given is not None and is_of_points and tuple(given.shape) == (len(use.windows), use.windows.shape[2]):
        given = given.to(use.windows.device, torch.bool)
        real_BP = given if real_BP is None else real_BP & given
    if real_BP is None:
        return use
    if bool(real_BP.all()):
        return replace(use, counts_B=real_BP.sum(1), real_BP=None)
    shaped = real_BP.view(len(real_BP), 1, real_BP.shape[1], *[1] * (use.windows.ndim - 3))
    windows = torch.where(shaped, use.windows, torch.zeros((), dtype=use.windows.dtype, device=use.windows.device))
    return replace(use, windows=windows, counts_B=real_BP.sum(1), real_BP=None)
