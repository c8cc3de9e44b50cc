"""Tensors as compiled code takes them: memory of a named dtype on the CPU, and its address.

torch's default dtype and device, which the caller may have set to anything, decide nothing here.
"""

from __future__ import annotations

import ctypes
import sys

import numpy as np
import torch
from torch import Tensor

from sipp.errors import DataError

_MMAP_THRESHOLD = -3  # of glibc's malloc.h
LARGE = 1 << 17  # bytes


def blank(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Memory on the CPU for compiled code to write to; what it holds before is anything."""
    return torch.empty(shape, dtype=dtype, device="cpu")


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Memory on the CPU for compiled code, set to 0."""
    return torch.zeros(shape, dtype=dtype, device="cpu")


def clear(whole: Tensor, start: int, stop: int) -> None:
    """Sets these of a tensor's bytes to 0, faster than torch does where they are few."""
    if not 0 <= start <= stop <= len(whole):
        raise DataError(f"bytes {start} to {stop} of {len(whole)} are to be cleared: this is a fault of sipp")
    ctypes.memset(address(whole, torch.uint8) + start, 0, stop - start)


def array(tensor: Tensor, dtype: torch.dtype = torch.float32) -> np.ndarray:
    """The memory of a tensor as compiled code takes it; a DataError unless of this dtype, on the CPU, without gaps."""
    _check_plain(tensor, dtype)
    return tensor.numpy()


def address(tensor: Tensor, dtype: torch.dtype = torch.float32) -> int:
    """Where such a tensor begins, for compiled code that is given numbers alone."""
    _check_plain(tensor, dtype)
    return tensor.data_ptr()


def plain(tensor: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The tensor itself, for a record of which compiled code is given addresses (`as_numbers`); checked as above."""
    _check_plain(tensor, dtype)
    return tensor


def strided_address(tensor: Tensor, dtype: torch.dtype = torch.float32) -> int:
    """Where a tensor begins, with gaps or without, for code that is given its strides; a DataError as above."""
    _check_plain(tensor, dtype, may_have_gaps=True)
    return tensor.data_ptr()


def _check_plain(tensor: Tensor, dtype: torch.dtype, *, may_have_gaps: bool = False) -> None:
    """Raises DataError unless compiled code for this dtype can go through the memory from its first byte on."""
    has_gaps = not tensor.is_contiguous()
    if tensor.dtype != dtype or tensor.device.type != "cpu" or (has_gaps and not may_have_gaps):
        raise DataError(
            f"compiled code was to be given {tensor.dtype} on {tensor.device} {'with' if has_gaps else 'without'} "
            f"gaps; it takes {dtype} on the CPU{'' if may_have_gaps else ' without gaps'}: this is a fault of sipp",
            fix="please report it",
        )


def give_back_large_pieces() -> None:
    """From now on large pieces of memory go back to the system when they are freed, where the C library can do that.

    Left alone, glibc takes them from one heap after a while, whose gaps grow with every block of a network that passes.
    It is for the whole process.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, LARGE)


def give_back_freed() -> None:
    """Hands what was freed in gaps of the heap back to the system, where the C library can do that.

    glibc keeps pieces below 32 MB for later: after a network has passed, as much again as is in use.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
