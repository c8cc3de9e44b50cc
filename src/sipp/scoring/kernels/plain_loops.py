"""The kernel in plain compiled loops, float64: no vector code, nothing that belongs to one processor.

They serve what the float32 kernel does not: the rare points whose range of values it does not hold, means over several
uses of a weight, and all points where no vector code is written for the processor. The terms of each sum are added in
the same order whatever stands beside them and however many threads there are, which a matrix product does not promise.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from sipp.native import compiling, memory, threads
from sipp.scoring.kernels import reference
from sipp.scoring.kernels.protocol import KernelFunctions, max_chunk, sum_chunk

compiled = compiling.compiled


def quadrant_sums(weight_GRK: Tensor, patches_GKP: Tensor) -> Tensor:
    """D_SGRP of T2: the sums of w_k^s a_k over the fan-in, for both signs s of the weights."""
    shape = 2, *weight_GRK.shape[:2], patches_GKP.shape[-1]
    return _filled(_add_sums, shape, weight_GRK, patches_GKP, by_rows_of=weight_GRK)


def max_times(patches_GKP: Tensor, inverse_SGRP: Tensor, positive_GRK: Tensor) -> Tensor:
    """max over p of  a_kp * (1/D)_rp  with D of the weight's own sign: the (max, x) product of T2. Shape G x R x K."""
    given = patches_GKP.transpose(1, 2), inverse_SGRP, positive_GRK
    return _filled(_raise_to_products, positive_GRK.shape, *given, by_rows_of=positive_GRK)


def sum_times(patches_GKBN: Tensor, inverse_SGRBN: Tensor, positive_GRK: Tensor) -> Tensor:
    """sum over the N patches of each point of the products of T3: B x G x R x K."""
    given = patches_GKBN.permute(2, 0, 3, 1), inverse_SGRBN, positive_GRK
    return _filled(_add_products, (patches_GKBN.shape[2], *positive_GRK.shape), *given, by_rows_of=positive_GRK)


KERNEL = KernelFunctions(
    reference.extremes, partial(sum_chunk, quadrant_sums, sum_times), partial(max_chunk, quadrant_sums, max_times)
)


def _filled(loop: Callable[..., None], shape: tuple[int, ...], *given: Tensor, by_rows_of: Tensor) -> Tensor:
    """What a loop makes of these, in float64. A row is one thread's: its sums do not depend on their number."""
    arrays = [(x if x.dtype == torch.bool else x.to(torch.float64)).detach().contiguous().numpy() for x in given]
    result = memory.zeros(*shape, dtype=torch.float64)
    cuts = threads.cut_evenly(by_rows_of.shape[0] * by_rows_of.shape[1], torch.get_num_threads())
    threads.run_parallel(lambda i: loop(*arrays, *cuts[i], result.numpy()), len(cuts))
    return result


@compiled
def _add_sums(weight_GRK: np.ndarray, patches_GKP: np.ndarray, first: int, last: int, sums_SGRP: np.ndarray) -> None:
    """Adds |w_k| a_k to the sum of the weight's sign, column after column, for rows first.. of all groups together."""
    n_rows = weight_GRK.shape[1]
    for row in range(first, last):
        g, r = row // n_rows, row % n_rows
        for k in range(weight_GRK.shape[2]):
            w, line = weight_GRK[g, r, k], patches_GKP[g, k]
            out = sums_SGRP[0 if w > 0.0 else 1, g, r]
            for p in range(line.shape[0] if w != 0.0 else 0):
                out[p] += abs(w) * line[p]


@compiled
def _add_products(
    patches_BGNK: np.ndarray,
    inverse_SGRBN: np.ndarray,
    positive_GRK: np.ndarray,
    first: int,
    last: int,
    sums_BGRK: np.ndarray,
) -> None:
    """Adds a_k / D to the sum of each weight, patch after patch, for rows first.. of all groups together."""
    n_rows = positive_GRK.shape[1]
    for row in range(first, last):
        g, r = row // n_rows, row % n_rows
        positive = positive_GRK[g, r]
        for b in range(patches_BGNK.shape[0]):
            out = sums_BGRK[b, g, r]
            for n in range(patches_BGNK.shape[2]):
                line, above, below = patches_BGNK[b, g, n], inverse_SGRBN[0, g, r, b, n], inverse_SGRBN[1, g, r, b, n]
                for k in range(line.shape[0]):
                    out[k] += line[k] * (above if positive[k] else below)


@compiled
def _raise_to_products(
    patches_GPK: np.ndarray,
    inverse_SGRP: np.ndarray,
    positive_GRK: np.ndarray,
    first: int,
    last: int,
    best_GRK: np.ndarray,
) -> None:
    """Raises the maximum of each weight to a_k / D, patch after patch, for rows first.. of all groups together."""
    n_rows = positive_GRK.shape[1]
    for row in range(first, last):
        g, r = row // n_rows, row % n_rows
        positive, best = positive_GRK[g, r], best_GRK[g, r]
        for p in range(patches_GPK.shape[1]):
            line, above, below = patches_GPK[g, p], inverse_SGRP[0, g, r, p], inverse_SGRP[1, g, r, p]
            for k in range(line.shape[0]):
                product = line[k] * (above if positive[k] else below)
                best[k] = product if product > best[k] else best[k]
