"""The choice of a kernel: the definition (`reference.py`), compiled loops (`cpu.py`) or Triton (`gpu.py`).

`protocol.py` says which functions each of them has.
"""

from __future__ import annotations

import functools
import logging
from typing import Literal, get_args

import torch

from sipp.results import check
from sipp.scoring.kernels import reference
from sipp.scoring.kernels.protocol import KernelFunctions

Kernel = Literal["auto", "reference"]

_log = logging.getLogger("sipp")


def pick(kernel: Kernel, device: torch.device) -> KernelFunctions:
    """The functions that run on `device`: the fastest, or the definition."""
    check.choice("kernel", kernel, get_args(Kernel))
    return reference.KERNEL if kernel == "reference" else _automatic(device.type)


@functools.cache
def _automatic(device_type: str) -> KernelFunctions:
    """The fastest functions for a type of device; warns once if they are a slower substitute."""
    from sipp.native import processor

    if device_type == "cuda":
        try:
            from sipp.scoring.kernels import gpu

            return gpu.KERNEL
        except ImportError as error:
            _log.warning("Triton cannot be imported (%s): the float64 reference runs on the GPU, slower", error)
    elif device_type != "cpu":
        _log.warning("no kernel is written for %s devices: the float64 reference runs there, slower", device_type)
    elif not processor.IS_COMPILED:
        _log.warning("NUMBA_DISABLE_JIT is set: nothing is compiled, the float64 reference runs, slower")
    elif processor.HAS_VECTOR_CODE:
        from sipp.scoring.kernels import cpu

        return cpu.KERNEL
    else:
        from sipp.scoring.kernels import plain_loops

        _log.warning(
            "no vector code is written for %s processors: plain float64 loops run, slower", processor.PROCESSOR
        )
        return plain_loops.KERNEL
    return reference.KERNEL
