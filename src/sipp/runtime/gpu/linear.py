"""The kernels that may run a linear layer on a GPU in place of torch's, and how they are compared with it and timed.

For few tokens, reading the weight takes most of the time, so storing it without zeros helps (`kernels.py`). For many
tokens, tensor cores multiply faster than zeros can be skipped, unless the zeros are 2:4, which they support.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from sipp.native import two_of_four
from sipp.results import numerics
from sipp.runtime.examples import AGREEMENT
from sipp.runtime.gpu import recording
from sipp.runtime.gpu.layouts import MOST_COLUMNS, WARP, as_walks, int8_scales

MOST_TOKENS = 8  # up to this many are few: each is a product of its own, dense takes as long for all as for one
# threads per row, warps per program, pairs of blocks prefetched
FEW_TOKEN_SHAPES = ((32, 8, 3), (32, 16, 3), (16, 16, 2), (16, 16, 4))
TINY = 1e-300
# allowed difference from float32 sums, relative to the largest: rounding, and another order of the terms
LIMITS = {dtype: max(AGREEMENT, 2 * torch.finfo(dtype).eps) for dtype in (torch.float16, torch.bfloat16, torch.float32)}


@dataclass(frozen=True)
class LinearKernel:
    """One implementation of a layer: `call(x, tensors)` maps tokens x columns to tokens x rows."""

    name: str
    call: Callable[[Tensor, tuple[Tensor, ...]], Tensor]
    tensors: tuple[Tensor, ...]
    n_bytes: int  # that it reads of them


MakeKernel = Callable[[Tensor, Tensor | None], LinearKernel]  # from a weight and a bias


def dense_kernel(weight: Tensor, bias: Tensor | None) -> LinearKernel:
    """torch's own linear layer."""
    return LinearKernel("dense", lambda x, own: F.linear(x, own[0], bias), (weight,), weight.nbytes)


def walk_kernel(weight: Tensor, bias: Tensor | None, shape: tuple[int, int, int], as_int8: bool) -> LinearKernel:
    """A kernel whose threads walk from kept weight to kept weight; with int8 values if rows have scales."""
    from sipp.runtime.gpu.kernels import few_tokens  # imports Triton

    n_lanes, n_warps, ahead = shape
    scales = int8_scales(weight) if as_int8 else None
    walks = as_walks(weight, n_lanes=n_lanes, n_rows=n_warps * WARP // n_lanes, scales=scales)

    def call(x: Tensor, own: tuple[Tensor, ...]) -> Tensor:
        return few_tokens(x.contiguous(), walks.on(own), bias, ahead=ahead)

    values = "int8" if scales is not None else f"{weight.itemsize * 8}-bit"
    return LinearKernel(f"walks, {values} values", call, walks.tensors, walks.n_bytes)


def _two_of_four_kernel(weight: Tensor, bias: Tensor | None, algorithm: int) -> LinearKernel:
    packed = two_of_four.compress(weight)
    return LinearKernel(
        f"2:4, kernel {algorithm}",
        lambda x, own: two_of_four.product(x, own[0], bias, algorithm),
        (packed,),
        packed.nbytes,
    )


def candidates(weight: Tensor, x: Tensor) -> tuple[list[MakeKernel], str]:
    """The kernels that could be faster than torch's for x (tokens x columns); if there are none, the reason."""
    if bool((weight != 0).all()):
        return [], "no zeros"
    if x.dtype not in LIMITS or weight.dtype != x.dtype:
        return [], f"{str(x.dtype).removeprefix('torch.')} numbers"
    return _for_few_tokens(weight) if len(x) <= MOST_TOKENS else _for_many_tokens(weight, x)


def _for_few_tokens(weight: Tensor) -> tuple[list[MakeKernel], str]:
    if weight.shape[1] > MOST_COLUMNS:
        return [], f"more than {MOST_COLUMNS:,} columns"
    if importlib.util.find_spec("triton") is None or not hasattr(importlib.import_module("triton.language"), "tuple"):
        return [], "needs Triton 3.3 or newer"
    is_int8 = (False,) if int8_scales(weight) is None else (False, True)
    return [partial(walk_kernel, shape=shape, as_int8=as_int8) for shape in FEW_TOKEN_SHAPES for as_int8 in is_int8], ""


def _for_many_tokens(weight: Tensor, x: Tensor) -> tuple[list[MakeKernel], str]:
    n_rows, n_columns = weight.shape
    if not is_two_of_four(weight):
        return [], f"{len(x):,} tokens: tensor cores multiply faster than zeros are skipped"
    if x.dtype == torch.float32:
        return [], "2:4 needs fp16 or bf16"
    if n_rows % two_of_four.ROWS or n_columns % two_of_four.COLUMNS or len(x) % two_of_four.TOKENS:
        sizes = f"{two_of_four.ROWS} rows, {two_of_four.COLUMNS} columns, {two_of_four.TOKENS} tokens"
        return [], f"2:4 needs multiples of {sizes}"
    if not two_of_four.is_available():
        return [], "2:4 needs cuSPARSELt, which this torch does not have"
    try:
        fastest = two_of_four.fastest(two_of_four.compress(weight), x)
    except recording.kernel_errors() as error:
        return [], f"2:4: cuSPARSELt does not run here ({str(error).splitlines()[0][:80]})"
    return [partial(_two_of_four_kernel, algorithm=algorithm) for algorithm in {fastest, two_of_four.FIRST}], ""


def is_two_of_four(weight: Tensor) -> bool:
    n_rows, n_columns = weight.shape
    return n_columns % 4 == 0 and int((weight.view(n_rows, -1, 4) != 0).sum(-1).max()) <= 2


def kernel_error(kernel: LinearKernel, weight: Tensor, bias: Tensor | None, x: Tensor) -> float:
    """The largest difference from float32 sums, relative to the largest; infinite if the kernel fails."""
    with numerics.exact_matmul():  # TF32 would be further off than the kernels are
        expected = F.linear(x.float(), weight.float(), None if bias is None else bias.float()).double()
    try:
        sums = kernel.call(x, kernel.tensors).double()
    except recording.kernel_errors():
        return math.inf
    return float((sums - expected).abs().max() / expected.abs().max().clamp(min=TINY))


def time_kernel(kernel: LinearKernel, x: Tensor, n_copies: int) -> float:
    """Seconds per call, on `n_copies` copies of the weights in turn."""
    copies = [kernel.tensors, *(tuple(t.clone() for t in kernel.tensors) for _ in range(n_copies - 1))]
    return recording.kernel_seconds([partial(kernel.call, x, own) for own in copies])
