"""Tensors for compiled code: CPU memory with an explicit dtype, and its address.

torch's default dtype and device, which the caller may have changed, are never used here.
"""

from __future__ import annotations

import ctypes
import sys

import torch
from torch import Tensor

from sipp.errors import DataError

_MMAP_THRESHOLD = -3  # of glibc's malloc.h
LARGE = 1 << 17  # bytes


def blank(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Uninitialised CPU memory for compiled code to write to."""
    return torch.empty(shape, dtype=dtype, device="cpu")


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """CPU memory for compiled code, set to 0."""
    return torch.zeros(shape, dtype=dtype, device="cpu")


def address(tensor: Tensor, dtype: torch.dtype = torch.float32) -> int:
    """The address of such a tensor, for compiled code that takes only numbers."""
    _check_plain(tensor, dtype)
    return tensor.data_ptr()


def strided_address(tensor: Tensor, dtype: torch.dtype = torch.float32) -> int:
    """The address of a tensor that need not be contiguous, for code that gets its strides too; checked as above."""
    _check_plain(tensor, dtype, may_have_gaps=True)
    return tensor.data_ptr()


def _check_plain(tensor: Tensor, dtype: torch.dtype, *, may_have_gaps: bool = False) -> None:
    """Raises DataError unless compiled code for this dtype can read the memory directly."""
    has_gaps = not tensor.is_contiguous()
    if tensor.dtype != dtype or tensor.device.type != "cpu" or (has_gaps and not may_have_gaps):
        raise DataError(
            f"compiled code was to be given {tensor.dtype} on {tensor.device} {'with' if has_gaps else 'without'} "
            f"gaps; it takes {dtype} on the CPU{'' if may_have_gaps else ' without gaps'}: this is a bug in sipp",
            fix="please report it with the model's code",
        )


def give_back_large_pieces() -> None:
    """Makes glibc return large allocations to the system as soon as they are freed, for the whole process.

    By default glibc starts to take them from its heap after a while, which fragments with every block of a network that
    is processed.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, LARGE)


def give_back_freed() -> None:
    """Makes glibc return freed heap memory to the system.

    It keeps pieces below 32 MB for later; after a network was processed, these are as much as is in use.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
