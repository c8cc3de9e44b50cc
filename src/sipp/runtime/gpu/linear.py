"""A linear layer and an example in, the fastest way to run it on this GPU out, or why torch keeps it.

Few tokens read the weight, and little else: what is stored without its zeros is read faster (`kernels.py`). With many
tokens tensor cores multiply faster than zeros can be skipped, unless the zeros are 2:4, for which they have a mode.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from sipp.native import two_of_four
from sipp.runtime.gpu import recording
from sipp.runtime.gpu.layouts import MOST_COLUMNS, as_walks, int8_scales
from sipp.runtime.steps import LEAST_GAIN

MOST_TOKENS = 16  # that are few
# threads a row, warps of a program, pairs of blocks on their way
FEW_WAYS = ((32, 8, 3), (32, 16, 3), (16, 16, 2), (16, 16, 4))
WARP = 32  # threads
MOST_BYTES = 0.95  # of the dense ones: with more it cannot be faster
# how far a sum may be from torch's, of the largest one: rounding of the result, and the order of the sums
TINY = 1e-300
AGREEMENT = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 1e-4}


@dataclass(frozen=True)
class Way:
    """One way to run a layer: `call(x, tensors)` gives tokens x rows for x of tokens x columns."""

    name: str
    call: Callable[[Tensor, tuple[Tensor, ...]], Tensor]
    tensors: tuple[Tensor, ...]

    @property
    def n_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


MakeWay = Callable[[Tensor, Tensor | None], Way]  # of a weight and a bias


@dataclass(frozen=True)
class Chosen:
    """How layers of one kind are run; `why` torch keeps them, where it does."""

    make: MakeWay
    is_dense: bool
    seconds: float | None = None
    dense_seconds: float | None = None
    why: str = ""


def fastest_way(
    weight: Tensor, bias: Tensor | None, x: Tensor, n_copies: int, dense: Callable[[], float] | None = None
) -> Chosen:
    """The fastest way for x (tokens x columns), each timed on so many copies of its weights in turn.

    So they come from the memory they would come from in a network of so many such layers. `dense`: what torch takes,
    where that is not this layer as it is.
    """
    makers, why = _ways(weight, x)
    ways = {make: make(weight, bias) for make in makers}
    ways = {make: way for make, way in ways.items() if way.n_bytes <= MOST_BYTES * weight.nbytes}
    if not ways:
        return Chosen(dense_way, True, why=why or "values and places take no fewer bytes")
    off = {make: way_error(way, weight, bias, x) for make, way in ways.items()}
    ways = {make: way for make, way in ways.items() if off[make] <= AGREEMENT[x.dtype]}
    if not ways:
        return Chosen(dense_way, True, why=is_off(min(off.values())))
    dense_seconds = way_seconds(dense_way(weight, bias), x, n_copies) if dense is None else dense()
    times = {make: way_seconds(way, x, n_copies) for make, way in ways.items()}
    best = min(times, key=times.__getitem__)
    if times[best] > LEAST_GAIN * dense_seconds:
        return Chosen(dense_way, True, times[best], dense_seconds, "dense is as fast")
    return Chosen(best, False, times[best], dense_seconds)


def dense_way(weight: Tensor, bias: Tensor | None) -> Way:
    """torch's own."""
    return Way("dense", lambda x, own: F.linear(x, own[0], bias), (weight,))


def way_seconds(way: Way, x: Tensor, n_copies: int) -> float:
    """How long a way takes, on so many copies of its weights in turn."""
    copies = [way.tensors, *(tuple(t.clone() for t in way.tensors) for _ in range(n_copies - 1))]
    return recording.kernel_seconds([partial(way.call, x, own) for own in copies])


def is_off(by: float) -> str:
    """Why a way is not taken that gives other sums than torch."""
    return f"the kernel is {by:.0e} off on the example"


def way_error(way: Way, weight: Tensor, bias: Tensor | None, x: Tensor) -> float:
    """The largest difference from torch's sums, of the largest of these; infinite where the kernel refuses."""
    expected = F.linear(x, weight, bias).double()
    try:
        sums = way.call(x, way.tensors).double()
    except RuntimeError:
        return math.inf
    return float((sums - expected).abs().max() / expected.abs().max().clamp(min=TINY))


def timing_group(weight: Tensor, x: Tensor) -> Hashable:
    """What decides which ways there are, beside sizes and the share of zeros: layers of one form are timed once."""
    if weight.dtype not in AGREEMENT or weight.dtype != x.dtype:
        return None
    has_pattern = int8_scales(weight) is not None if len(x) <= MOST_TOKENS else _is_two_of_four(weight)
    return bool((weight != 0).all()), bool(x.isfinite().all()), bool(weight.isfinite().all()), has_pattern


def _ways(weight: Tensor, x: Tensor) -> tuple[list[MakeWay], str]:
    """The ways that could be faster than torch's; where there is none, why."""
    if bool((weight != 0).all()):
        return [], "no zeros"
    if x.dtype not in AGREEMENT or weight.dtype != x.dtype:
        return [], f"{str(x.dtype).removeprefix('torch.')} numbers"
    if not bool(x.isfinite().all()) or not bool(weight.isfinite().all()):
        return [], "the example is not finite here"
    return _for_few(weight) if len(x) <= MOST_TOKENS else _for_many(weight, x)


def _for_few(weight: Tensor) -> tuple[list[MakeWay], str]:
    if weight.shape[1] > MOST_COLUMNS:
        return [], f"more than {MOST_COLUMNS:,} columns"
    if importlib.util.find_spec("triton") is None:
        return [], "needs Triton, which is not installed"
    is_int8 = (False,) if int8_scales(weight) is None else (False, True)
    return [partial(walks_way, way=way, as_int8=as_int8) for way in FEW_WAYS for as_int8 in is_int8], ""


def walks_way(weight: Tensor, bias: Tensor | None, way: tuple[int, int, int], as_int8: bool) -> Way:
    """Threads that walk from kept weight to kept weight; as int8 where rows have scales."""
    from sipp.runtime.gpu.kernels import few_tokens  # Triton is asked for only here

    n_lanes, n_warps, ahead = way
    scales = int8_scales(weight) if as_int8 else None
    walks = as_walks(weight, n_lanes=n_lanes, n_rows=n_warps * WARP // n_lanes, scales=scales)

    def call(x: Tensor, own: tuple[Tensor, ...]) -> Tensor:
        return few_tokens(x.contiguous(), walks.on(own), bias, ahead=ahead)

    values = "int8" if scales is not None else f"{weight.itemsize * 8}-bit"
    return Way(f"walks, {values} values", call, walks.tensors)


def _for_many(weight: Tensor, x: Tensor) -> tuple[list[MakeWay], str]:
    n_rows, n_columns = weight.shape
    if not _is_two_of_four(weight):
        return [], f"{len(x):,} tokens: tensor cores multiply faster than zeros are skipped"
    if x.dtype == torch.float32:
        return [], "2:4 needs fp16 or bf16"
    if n_rows % two_of_four.ROWS or n_columns % two_of_four.COLUMNS or len(x) % two_of_four.TOKENS:
        sizes = f"{two_of_four.ROWS} rows, {two_of_four.COLUMNS} columns, {two_of_four.TOKENS} tokens"
        return [], f"2:4 needs multiples of {sizes}"
    if not two_of_four.is_there():
        return [], "2:4 needs cuSPARSELt, which this torch does not have"
    fastest = two_of_four.fastest(two_of_four.compressed(weight), x)
    return [partial(_two_of_four_way, kernel=kernel) for kernel in {fastest, two_of_four.FIRST}], ""


def _is_two_of_four(weight: Tensor) -> bool:
    n_rows, n_columns = weight.shape
    return n_columns % 4 == 0 and int((weight.view(n_rows, -1, 4) != 0).sum(-1).max()) <= 2


def _two_of_four_way(weight: Tensor, bias: Tensor | None, kernel: int) -> Way:
    packed = two_of_four.compressed(weight)
    return Way(f"2:4, kernel {kernel}", lambda x, own: two_of_four.product(x, own[0], bias, kernel), (packed,))
