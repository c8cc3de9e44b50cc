"""`max_times` and its relatives: a definition (reference), the CPU version (Numba), and the choice between them."""

from __future__ import annotations

from types import ModuleType
from typing import Literal

import torch

from sipp.errors import OptionError
from sipp.kernels import reference

Kernel = Literal["auto", "reference", "cpu"]
KERNELS: tuple[Kernel, ...] = ("auto", "reference", "cpu")


def pick(kernel: Kernel, device: torch.device) -> ModuleType:
    """The module whose functions run on `device`; an impossible choice raises."""
    if kernel not in KERNELS:
        raise OptionError(f"kernel={kernel!r} is not one of {', '.join(KERNELS)}")
    if kernel == "reference" or (kernel == "auto" and device.type != "cpu"):
        return reference
    if device.type != "cpu":
        raise OptionError(f"kernel='cpu' cannot run on {device}: move the model to the CPU or use kernel='auto'")
    from sipp.kernels import cpu

    return cpu
