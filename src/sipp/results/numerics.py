"""Shared numerical conventions: dtypes, rounding limits, zero denominators, and small tensor helpers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sipp.errors import ModelError, OptionError
from sipp.results import check

SCORE_DTYPE = torch.float32  # what patches, denominators and sensitivities are computed in
BOUND_DTYPE = torch.float64  # what sums of sensitivities and every bound are computed in

# How many points are put in a batch, if the data is a tensor or a Dataset: many small ones, few large ones.
FEWEST_POINTS, MOST_POINTS = 16, 1024
BATCH_BYTES, GPU_BATCH_BYTES = 2**20, 2**26
# The same for token ids, whose activations are large: tokens in a batch, on a GPU by its memory
BATCH_TOKENS, FEWEST_GPU_TOKENS, GPU_BYTES_A_TOKEN = 2048, 4096, 4 << 20
MOST_WEIGHTS_OF_SMALL = 4 << 20  # a network with more weights is large: a repair fits all of it only once


def integers(first: int, last: int, step: int = 1) -> Tensor:
    """torch.arange as int64 on the CPU, whatever torch's default dtype and device are."""
    return torch.arange(first, last, step, dtype=torch.int64, device="cpu")


def for_device(table: Mapping[str, int], device: torch.device) -> int:
    """The entry of a table by type of device; that of "cpu" for types that have none."""
    return table.get(device.type, table["cpu"])


def on_device(numbers: np.ndarray, device: torch.device) -> Tensor:
    """The numbers on a device. A GPU copies them out of pinned memory in its own time; otherwise it is waited for."""
    tensor = torch.from_numpy(numbers)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def inverse_or_zero(denominator: Tensor) -> Tensor:
    """1 / denominator, and 0 where the denominator is 0: the convention 0/0 := 0 of T2 (numerators are 0 there)."""
    return torch.where(denominator > 0, denominator.reciprocal(), 0.0)


def dead_rows(before_FK: Tensor, left_FK: Tensor) -> int:
    """How many rows had weights and have none now; `left_FK` are the values that are left, or their mask."""
    return int(((before_FK != 0).any(1) & ~(left_FK != 0).any(1)).sum())


def budget_of(keep: float, n_weights: int) -> int:
    """The number of weights that the share `keep` means, rounded; raises if it is 0."""
    check.keep("keep", keep)
    budget = math.floor(keep * n_weights + 0.5)
    if budget == 0:
        raise OptionError(
            f"keep={keep!r} of {n_weights} prunable weights keeps none",
            fix=f"ask for at least {1 / n_weights:.2g}",
            option="keep",
        )
    return budget


@contextmanager
def exact_matmul(*operands: Tensor, allow_tf32: bool = False) -> Iterator[None]:
    """A context for our own products: float32 is float32, not TF32 or bfloat16, whatever the caller's settings.

    If all `operands` are in half precision on a GPU, TF32 is exact for them and is used. With `allow_tf32` a GPU may
    always use it. Autocast is off, also inside of a model that switches it on.
    """
    halves = (torch.float16, torch.bfloat16)
    allow_tf32 |= bool(operands) and all(operand.is_cuda and operand.dtype in halves for operand in operands)
    is_cast = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
    if not is_cast and _float32_settings() == ("high" if allow_tf32 else "highest", []):
        yield  # the settings are these already, and to set them takes longer than a small product
        return
    with (
        float32_products(allow_tf32=allow_tf32),
        torch.autocast("cpu", enabled=False),
        torch.autocast("cuda", enabled=False),
    ):
        yield


@contextmanager
def float32_products(*, allow_tf32: bool) -> Iterator[None]:
    """A context for passes of a model: its float32 products use TF32 or full float32, whatever the caller's setting."""
    before, by_backend = _float32_settings()
    torch.set_float32_matmul_precision("high" if allow_tf32 else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
        for backend, precision in by_backend:
            backend.fp32_precision = precision


def _float32_settings() -> tuple[str, list[tuple[Any, str]]]:
    """The caller's precision of float32 products: for all backends, and for those that were set one by one.

    Torch 2.9 and later refuse to name a common one then.
    """
    try:
        return torch.get_float32_matmul_precision(), []
    except RuntimeError:
        matmuls: list[Any] = [torch.backends.cuda.matmul, torch.backends.mkldnn.matmul]  # type: ignore[attr-defined]
        return "highest", [(backend, backend.fp32_precision) for backend in matmuls]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out: torch raises a plain RuntimeError on the CPU, and its own error on a GPU."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in str(error)


def parameters_and_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by all of their names."""
    return dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)])


def device_of(model: nn.Module) -> torch.device:
    """The device of the model's parameters; raises if they are on several."""
    devices = sorted(map(str, {parameter.device for parameter in model.parameters()}))
    if len(devices) != 1:
        raise ModelError(
            f"the model's parameters are on {', '.join(devices) or 'no device'}", fix="move the model to one device"
        )
    return torch.device(devices[0])


def points_per_batch(inputs: Tensor, device: torch.device) -> int:
    """The batch size that fits the byte budget; smaller for token ids, whose activations are large."""
    is_cpu = device.type == "cpu"
    if is_tokens(inputs):
        n_tokens = BATCH_TOKENS
        if device.type == "cuda":  # many on a large GPU, which would otherwise wait for Python
            memory = torch.cuda.get_device_properties(device).total_memory
            n_tokens = max(FEWEST_GPU_TOKENS, memory // GPU_BYTES_A_TOKEN)
        return max(1, min(FEWEST_POINTS if is_cpu else MOST_POINTS, n_tokens // inputs.shape[1]))
    # torch's half-precision products are slow on a CPU, and on some they crash (illegal instruction)
    if not inputs.is_floating_point() or (is_cpu and inputs.element_size() < 4):
        return FEWEST_POINTS
    point_bytes = max(1, inputs.element_size() * inputs.shape[1:].numel())
    return min(max((BATCH_BYTES if is_cpu else GPU_BATCH_BYTES) // point_bytes, FEWEST_POINTS), MOST_POINTS)


def is_tokens(inputs: Tensor) -> bool:
    """Whether the points are sequences of whole numbers."""
    return inputs.ndim == 2 and inputs.shape[1] > 0 and not inputs.is_floating_point()
