"""The kernel in plain compiled loops, float64: no vector code, nothing that belongs to one processor.

They serve what the float32 kernel does not: the rare points whose range of values it does not hold, means over several
uses of a weight, and all points where no vector code is written for the processor. The terms of each sum are added in
the same order whatever stands beside them and however many threads there are, which a matrix product does not promise.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from sipp.native import compiling, memory, threads
from sipp.scoring.kernels import protocol, reference
from sipp.scoring.kernels.protocol import KernelFunctions

CompiledLoop, double_at, put_double = compiling.CompiledLoop, compiling.double_at, compiling.put_double
DOUBLE_BYTES = 8
IS_MAXIMUM, IS_SUM = 0, 1  # of products


def quadrant_sums(weight_GRK: Tensor, patches_GKP: Tensor) -> Tensor:
    """D_SGRP of T2: the sums of w_k^s a_k over the fan-in, for both signs s of the weights."""
    shape = *weight_GRK.shape, patches_GKP.shape[-1]
    return _filled(_add_sums, (2, *weight_GRK.shape[:2], shape[-1]), shape, weight_GRK, patches_GKP)


def max_times(patches_GKP: Tensor, inverse_SGRP: Tensor, positive_GRK: Tensor) -> Tensor:
    """max over p of  a_kp * (1/D)_rp  with D of the weight's own sign: the (max, x) product of T2. Shape G x R x K."""
    sizes = *positive_GRK.shape, patches_GKP.shape[-1], IS_MAXIMUM
    return _filled(_take_products, positive_GRK.shape, sizes, positive_GRK, patches_GKP.mT, inverse_SGRP)


def sum_times(patches_GKBN: Tensor, inverse_SGRBN: Tensor, positive_GRK: Tensor) -> Tensor:
    """sum over the N patches of each point of the products of T3: B x G x R x K."""
    sizes, found = (*positive_GRK.shape, patches_GKBN.shape[-1], IS_SUM), list[Tensor]()
    for patches_GKN, inverse_SGRN in zip(patches_GKBN.unbind(2), inverse_SGRBN.unbind(3)):
        found.append(_filled(_take_products, sizes[:3], sizes, positive_GRK, patches_GKN.mT, inverse_SGRN))
    return torch.stack(found)


max_chunk = partial(protocol.max_chunk, quadrant_sums, max_times)
sum_chunk = partial(protocol.sum_chunk, quadrant_sums, sum_times)
KERNEL = KernelFunctions(reference.extremes, partial(protocol.ChunkRatios, max_chunk, sum_chunk))


def _filled(loop: compiling.CompiledLoop, shape: tuple[int, ...], sizes: tuple[int, ...], *given: Tensor) -> Tensor:
    """What a loop makes of these, in float64; sizes are groups, rows of each, fan-in and patches, and what is found.

    A row is one thread's: its sums do not depend on their number.
    """
    held = [x.detach().to(torch.float64).contiguous() for x in given]
    result = memory.zeros(*shape, dtype=torch.float64)
    addresses = [memory.address(x, torch.float64) for x in (*held, result)]
    cuts = threads.cut_evenly(sizes[0] * sizes[1], torch.get_num_threads())
    compiling.call_each(loop, [(*addresses, *sizes, *cut) for cut in cuts])
    return result


@CompiledLoop
def _add_sums(
    weight_GRK: int, patches_GKP: int, sums_SGRP: int,
    n_groups: int, n_rows: int, fan_in: int, n_patches: int, first: int, last: int,
) -> None:  # fmt: skip
    """Adds |w_k| a_k to the sum of the weight's sign, column after column, for rows first.. of all groups together."""
    for row in range(first, last):
        for k in range(fan_in):
            w = double_at(weight_GRK, row * fan_in + k)
            if w != 0.0:
                line = patches_GKP + (row // n_rows * fan_in + k) * n_patches * DOUBLE_BYTES
                of_sign = row if w > 0.0 else n_groups * n_rows + row
                out = sums_SGRP + of_sign * n_patches * DOUBLE_BYTES
                for p in range(n_patches):
                    put_double(out, p, double_at(out, p) + abs(w) * double_at(line, p))


@CompiledLoop
def _take_products(
    positive_GRK: int, patches_GPK: int, inverse_SGRP: int, found_GRK: int,
    n_groups: int, n_rows: int, fan_in: int, n_patches: int, is_sum: int, first: int, last: int,
) -> None:  # fmt: skip
    """Takes a_k / D into the sum or the maximum of each weight, patch by patch, for rows first.. of all groups."""
    for row in range(first, last):
        positive, out = positive_GRK + row * fan_in * DOUBLE_BYTES, found_GRK + row * fan_in * DOUBLE_BYTES
        for p in range(n_patches):
            line = patches_GPK + (row // n_rows * n_patches + p) * fan_in * DOUBLE_BYTES
            above = double_at(inverse_SGRP, row * n_patches + p)
            below = double_at(inverse_SGRP, (n_groups * n_rows + row) * n_patches + p)
            for k in range(fan_in):
                product = double_at(line, k) * (above if double_at(positive, k) > 0.0 else below)
                known = double_at(out, k)
                put_double(out, k, known + product if is_sum else (product if product > known else known))
