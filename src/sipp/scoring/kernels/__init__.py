"""The choice of a kernel: the definition (`reference.py`), compiled loops (`cpu.py`) or Triton (`gpu.py`).

`protocol.py` says which functions each of them has.
"""

from __future__ import annotations

import functools
import logging
from typing import Literal, get_args

import torch

from sipp.errors import OptionError
from sipp.results import check
from sipp.scoring.kernels import reference
from sipp.scoring.kernels.protocol import KernelFunctions

Kernel = Literal["auto", "reference", "cpu", "gpu"]

_log = logging.getLogger("sipp")


def pick(kernel: Kernel, device: torch.device) -> KernelFunctions:
    """The functions that run on `device`; raises if the chosen ones cannot."""
    check.choice("kernel", kernel, get_args(Kernel))
    if kernel == "reference":
        return reference.KERNEL
    if kernel == "auto":
        return _automatic(device.type)
    if kernel == "cpu":
        if device.type != "cpu":
            raise OptionError(
                f"kernel='cpu' cannot run on {device}", fix="move the model to the CPU or use kernel='auto'"
            )
        return _automatic("cpu")
    if device.type != "cuda":
        raise OptionError(
            f"kernel='gpu' cannot run on {device}", fix="move the model to a CUDA device or use kernel='auto'"
        )
    try:
        from sipp.scoring.kernels import gpu
    except ImportError as error:
        raise OptionError(
            f"kernel='gpu' needs Triton, which cannot be imported ({error})", fix="use kernel='auto'"
        ) from None
    return gpu.KERNEL


@functools.cache
def _automatic(device_type: str) -> KernelFunctions:
    """The fastest functions for a type of device; warns once if they are a slower substitute."""
    if device_type == "cpu":
        return _for_processor()
    if device_type == "cuda":
        try:
            from sipp.scoring.kernels import gpu

            return gpu.KERNEL
        except ImportError as error:
            _log.warning("Triton cannot be imported (%s): the float64 reference runs on the GPU, slower", error)
            return reference.KERNEL
    _log.warning("no kernel is written for %s devices: the float64 reference runs there, slower", device_type)
    return reference.KERNEL


def _for_processor() -> KernelFunctions:
    """The fastest functions for this machine's processor."""
    from sipp.native import processor

    if not processor.IS_COMPILED:
        _log.warning("NUMBA_DISABLE_JIT is set: nothing is compiled, the float64 reference runs, slower")
        return reference.KERNEL
    if not processor.HAS_VECTOR_CODE:
        from sipp.scoring.kernels import plain_loops

        _log.warning(
            "no vector code is written for %s processors: plain float64 loops run, slower", processor.PROCESSOR
        )
        return plain_loops.KERNEL
    from sipp.scoring.kernels import cpu

    return cpu.KERNEL
