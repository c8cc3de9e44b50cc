"""Products with 2:4 weights by cuSPARSELt, through torch's operators for it, which are private.

Torch makes the plan of such a product anew in every call, 0.4 to 0.9 ms; in a recorded CUDA graph only the kernel is
left. Which of its kernels is fastest, cuSPARSELt finds out by trying.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

ROWS, COLUMNS, TOKENS = 32, 64, 8  # sizes are multiples of these
FIRST = 0  # the kernel that torch takes where none is named


def is_there() -> bool:
    """Whether torch has cuSPARSELt, and can look for its fastest kernel."""
    library = getattr(torch.backends, "cusparselt", None)
    return library is not None and library.is_available() and hasattr(_own(), "mm_search")


def compressed(weight: Tensor) -> Tensor:
    """The weight (rows x columns), with at most two of any four neighbours not 0, as cuSPARSELt stores it."""
    return torch._cslt_compress(weight)


def fastest(packed: Tensor, x: Tensor) -> int:
    """The number of the kernel that cuSPARSELt finds fastest for x (tokens x columns)."""
    return int(_own().mm_search(packed, x.t(), None, None, None, False)[0])


def product(x: Tensor, packed: Tensor, bias: Tensor | None, kernel: int) -> Tensor:
    """x (tokens x columns) times the weight's transpose, plus the bias."""
    return torch._cslt_sparse_mm(packed, x.t(), bias=bias, alg_id=kernel).t()


def _own() -> Any:
    return getattr(torch._C, "_cusparselt", None)
