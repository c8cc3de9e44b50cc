"""The portable GPU kernels, interpreted on the CPU. Run by test_gpu.py in a process with TRITON_INTERPRET=1."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from sipp.kernels import gpu, reference

assert os.environ.get("TRITON_INTERPRET") == "1"


def operands(groups: int, rows: int, fan_in: int, patches: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    a = (torch.rand(groups, fan_in, patches, generator=generator) - 0.3).clamp(min=0)
    weight = torch.randn(groups, rows, fan_in, generator=generator)
    sums = reference.quadrant_sums(weight, a)
    return a, torch.where(sums > 0, 1 / sums, 0).float(), weight > 0, weight


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (1, 5, 7, 33), (3, 2, 9, 70), (1, 18, 33, 65)])
def test_the_portable_kernel_agrees(shape: tuple[int, int, int, int]) -> None:
    a, inverse, positive, weight = operands(*shape)
    expected = reference.max_times(a, inverse, positive)
    torch.testing.assert_close(gpu.max_times(a, inverse, positive).double(), expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(
        gpu.quadrant_sums(weight, a).double(), reference.quadrant_sums(weight, a), rtol=1e-5, atol=0
    )
    by_point = a.unflatten(-1, (1, -1)), inverse.unflatten(-1, (1, -1))
    torch.testing.assert_close(
        gpu.sum_times(*by_point, positive).double(), reference.sum_times(*by_point, positive), rtol=1e-5, atol=0
    )


def test_stretches_of_patches_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "STRETCH", 64)
    a, inverse, positive, _ = operands(1, 3, 5, 200)
    expected = reference.max_times(a, inverse, positive)
    torch.testing.assert_close(gpu.max_times(a, inverse, positive).double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_operands_are_computed_in_float32(dtype: torch.dtype) -> None:
    a, inverse, positive, weight = operands(1, 4, 6, 40)
    low = a.to(dtype), inverse.to(dtype), positive
    torch.testing.assert_close(gpu.max_times(*low).double(), reference.max_times(*low), rtol=1e-6, atol=0)
    sums = gpu.quadrant_sums(weight.to(dtype), a.to(dtype))
    assert sums.dtype == torch.float32
    expected = reference.quadrant_sums(weight.to(dtype), a.to(dtype))
    torch.testing.assert_close(sums.double(), expected, rtol=1e-5, atol=0)
