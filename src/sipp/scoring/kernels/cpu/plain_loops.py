"""The kernels in plain compiled loops, float64: no vector code, nothing that belongs to one processor.

They serve the rare points whose range of values float32 does not hold, and all points where no vector code is written
for the processor. The terms of each sum are added in the same order whatever stands beside them and however many
threads there are, which a matrix product does not promise. `kernel.sum_times` uses the same loop in float32.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch import Tensor

from sipp.native import compiled, memory, threads
from sipp.scoring.kernels import checks, reference
from sipp.scoring.kernels.protocol import KernelFunctions, max_chunk, sum_chunk


def quadrant_sums(weight_GRK: Tensor, patches_GKP: Tensor) -> Tensor:
    """D_SGRP of T2: the sums of w_k^s a_k over the fan-in, for both signs s of the weights."""
    checks.check_sums("quadrant_sums", weight_GRK, patches_GKP, device="cpu")
    weight, patches = (_in_line(x, torch.float64) for x in (weight_GRK, patches_GKP))
    n_groups, n_rows, _ = weight_GRK.shape
    result = memory.zeros(2, n_groups, n_rows, patches_GKP.shape[-1], dtype=torch.float64)
    out, cuts = memory.array(result, torch.float64), _cuts(n_groups * n_rows)
    threads.run_parallel(lambda i: _add_sums(weight, patches, cuts[i], cuts[i + 1], out), len(cuts) - 1)
    return result


def max_times(patches_GKP: Tensor, inverse_SGRP: Tensor, positive_GRK: Tensor) -> Tensor:
    """max over p of  a_kp * (1/D)_rp  with D of the weight's own sign: the (max, x) product of T2. Shape G x R x K."""
    checks.check_products("max_times", patches_GKP, inverse_SGRP, positive_GRK, device="cpu")
    patches = _in_line(patches_GKP.transpose(1, 2), torch.float64)
    inverse, positive = _in_line(inverse_SGRP, torch.float64), _in_line(positive_GRK, torch.bool)
    result = memory.zeros(*positive_GRK.shape, dtype=torch.float64)
    out, cuts = memory.array(result, torch.float64), _cuts(positive_GRK.shape[0] * positive_GRK.shape[1])
    threads.run_parallel(
        lambda i: _raise_to_products(patches, inverse, positive, cuts[i], cuts[i + 1], out), len(cuts) - 1
    )
    return result


def sum_times(patches_GKBN: Tensor, inverse_SGRBN: Tensor, positive_GRK: Tensor) -> Tensor:
    """sum over the N patches of each point of the products of T3: B x G x R x K."""
    return sum_in_order(patches_GKBN, inverse_SGRBN, positive_GRK, torch.float64)


def sum_in_order(patches_GKBN: Tensor, inverse_SGRBN: Tensor, positive_GRK: Tensor, dtype: torch.dtype) -> Tensor:
    """`sum_times` in this dtype, patch after patch."""
    checks.check_products("sum_times", patches_GKBN, inverse_SGRBN, positive_GRK, n_dims=2, device="cpu")
    n_points = patches_GKBN.shape[2]
    patches = _in_line(patches_GKBN.permute(2, 0, 3, 1), dtype)
    inverse, positive = _in_line(inverse_SGRBN, dtype), _in_line(positive_GRK, torch.bool)
    result = memory.zeros(n_points, *positive_GRK.shape, dtype=dtype)
    out, cuts = memory.array(result, dtype), _cuts(positive_GRK.shape[0] * positive_GRK.shape[1])
    threads.run_parallel(lambda i: _add_products(patches, inverse, positive, cuts[i], cuts[i + 1], out), len(cuts) - 1)
    return result


KERNEL = KernelFunctions(
    reference.extremes, partial(sum_chunk, quadrant_sums, sum_times), partial(max_chunk, quadrant_sums, max_times)
)


def _in_line(tensor: Tensor, dtype: torch.dtype) -> np.ndarray:
    return memory.array(tensor.detach().to(dtype).contiguous(), dtype)


def _cuts(n_rows: int) -> list[int]:
    """Where each thread's rows start, and the end. A row is one thread's: its sums do not depend on their number."""
    n_threads = min(n_rows, torch.get_num_threads())
    return [n_rows * i // n_threads for i in range(n_threads + 1)]


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
