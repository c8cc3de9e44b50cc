"""Matrix products with 2:4 sparse weights by cuSPARSELt, through torch's private operators.

Torch rebuilds cuSPARSELt's plan in every call, which takes 0.4 to 0.9 ms; in a recorded CUDA graph only the kernel is
left. cuSPARSELt finds its fastest kernel by timing them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

ROWS, COLUMNS, TOKENS = 32, 64, 8  # sizes must be multiples of these
FIRST = 0  # torch's default kernel


def is_available() -> bool:
    """Whether torch has cuSPARSELt and its search for the fastest kernel."""
    library = getattr(torch.backends, "cusparselt", None)
    return library is not None and library.is_available() and hasattr(_cusparselt(), "mm_search")


def compress(weight: Tensor) -> Tensor:
    """Compresses a weight (rows x columns) with at most two nonzeros in every group of four."""
    return torch._cslt_compress(weight)


def fastest(packed: Tensor, x: Tensor) -> int:
    """The number of the kernel that cuSPARSELt finds fastest for x (tokens x columns)."""
    return int(_cusparselt().mm_search(packed, x.t(), None, None, None, False)[0])


def product(x: Tensor, packed: Tensor, bias: Tensor | None, kernel: int) -> Tensor:
    """x (tokens x columns) times the weight's transpose, plus the bias."""
    return torch._cslt_sparse_mm(packed, x.t(), bias=bias, alg_id=kernel).t()


def _cusparselt() -> Any:
    return getattr(torch._C, "_cusparselt", None)
