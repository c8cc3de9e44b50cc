"""Compiled functions of single rows: the bound of T6, U(N) and N(m) of T7, sums and selection.

They use float64 and work row by row, so that a row stays in the first-level cache from one loop to the next. They are
called from compiled loops in `curves`, `envelope` and, in `pruning/`, `sampling` and `sampled_rows`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from sipp.errors import DataError
from sipp.native.compiling import compiled, product_and_sum
from sipp.native.threads import run_parallel
from sipp.results.numerics import BOUND_DTYPE

UNION_FACTOR = 16.0  # T6: two tails, four quadrants, half of delta for the ES inequality
MAX_DRAWS = 1e300  # more draws than this would be infinite in float64, and an infinite N would claim an error of 0
LARGEST_SHARE = 1.0 - 2.0**-53  # keeps log(1 - q) finite where one weight has all of a row's sensitivity

# Of the table of curves (allocation/curves.py); here, because compiled code in two other files holds them.
KNOTS_PER_OCTAVE = 3
SPACING = math.log(2.0) / KNOTS_PER_OCTAVE  # in log N

_SMALL_SHARE = 0.3  # up to it the series of log(1 - q) below is exact to rounding
_LARGEST_DECAY = 708.0  # beyond it e^-y leaves the normal range of float64 and counts as 0
_LOG2_E = 1.0 / math.log(2.0)
_LN2_HIGH, _LN2_LOW = 0.693147180559890330, 5.49792301870837115e-14  # the first is exact in 42 bits: k * it is exact
_EXPONENT_BIAS, _FRACTION_BITS = 1023, 52  # of float64
_E2, _E3, _E4, _E5, _E6, _E7, _E8, _E9, _E10, _E11, _E12, _E13 = (
    (-1.0) ** i / math.factorial(i) for i in range(2, 14)
)  # of e^-r for |r| <= log(2) / 2: the next term is below 2^-53 of the first

_SOLVER_STEPS = 200
_LAST_STEP = 1e-6  # relative; the error after a step is of the order of its cube

SHARED_WEIGHTS = 2**14  # fewer weights than this per thread are not worth starting it

# Number j of a row goes to the sum j % N_SUMS, and these meet at the end: vectors, without leave to reorder anything.
N_SUMS = 32

# A part of the compiled loops that call it: what only a cache or a C caller would need is no work for the compiler.
_PART: dict[str, Any] = {"nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True}
row_part = numba.njit(**_PART)


def sampling_constant(total_F: Tensor, *, n_outputs: int, delta: float, c_constant: float) -> Tensor:
    """S~ of T6, float64: (S C / 3) ln(16 eta / delta)."""
    log_union = math.log(UNION_FACTOR) + math.log(n_outputs) - math.log(delta)
    return total_F.to(BOUND_DTYPE) * (c_constant / 3.0 * log_union)


def check_sensitivity(sensitivity_FK: Tensor, where: str = "sensitivity") -> None:
    """Raises a DataError unless the tensor is F x K, finite and non-negative."""
    if sensitivity_FK.ndim != 2 or sensitivity_FK.dtype not in (torch.float32, torch.float64):
        raise DataError(
            f"{where} must be a float32 or float64 matrix of F rows and K columns, "
            f"got {sensitivity_FK.dtype} of shape {tuple(sensitivity_FK.shape)}"
        )
    if sensitivity_FK.numel():
        low, high = (float(end) for end in torch.aminmax(sensitivity_FK))
        if not (low >= 0.0 and math.isfinite(high)):
            raise DataError(
                f"{where} holds values outside [0, inf) (from {low} to {high}): a NaN, infinite or "
                "negative sensitivity has no bound",
                fix="look for NaN in the weights or the data",
            )


# --- Compiled loops ---------------------------------------------------------------------------------------------------


def compiled_rows(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function compiled, for loops that call those of this folder: a change here makes their cached code stale."""
    return compiled(function, calls_into=Path(__file__).parent)


def over_rows(
    work: Callable[[int, int, int, np.ndarray], None], shapes: Sequence[tuple[int, ...]], *, n_scratch: int
) -> None:
    """Calls work(layer, first row, end, scratch) for all rows of layers of these shapes (F, K).

    Runs on torch's threads if there is enough work; `scratch` is n_scratch x K float64. Rows must not depend on each
    other, so that the number of threads does not change the result.
    """
    ends = np.cumsum([0, *(n_rows * fan_in for n_rows, fan_in in shapes)])
    n_threads = int(max(1, min(torch.get_num_threads(), ends[-1] // SHARED_WEIGHTS)))
    scratches = np.empty((n_threads, n_scratch * max((fan_in for _, fan_in in shapes), default=0)))

    def stretch(thread: int) -> None:
        begin, end = (ends[-1] * i // n_threads for i in (thread, thread + 1))
        for layer, (n_rows, fan_in) in enumerate(shapes):
            first, last = (min(max(-(-(edge - ends[layer]) // max(1, fan_in)), 0), n_rows) for edge in (begin, end))
            if first < last:
                scratch = scratches[thread, : n_scratch * fan_in].reshape(n_scratch, fan_in)  # no gaps: loops vectorise
                work(layer, first, last, scratch)

    run_parallel(stretch, n_threads)


def as_array(rows: Tensor) -> np.ndarray:
    """The tensor as a contiguous NumPy array on the CPU, for compiled loops."""
    return rows.detach().cpu().contiguous().numpy()


@row_part
def _power_of_two(exponent: int) -> float:
    """2^exponent: the bits of a float64, put together."""
    return np.int64((_EXPONENT_BIAS + exponent) << _FRACTION_BITS).view(np.float64)


@row_part
def _four(x: float, a: float, b: float, c: float, d: float, tail: float) -> float:
    """a + b x + c x^2 + d x^3 + tail x^4."""
    upper = product_and_sum(x, product_and_sum(x, tail, d), c)
    return product_and_sum(x, product_and_sum(x, upper, b), a)


@row_part
def decay(y: float) -> tuple[float, float]:
    """(1 - e^-y, e^-y) for y >= 0, each to its last bit or two; plain arithmetic, so that loops over it vectorise."""
    bounded = min(y, _LARGEST_DECAY)
    k = np.floor(product_and_sum(bounded, _LOG2_E, 0.5))
    r = (bounded - k * _LN2_HIGH) - k * _LN2_LOW
    shrink = r * _four(r, -1.0, _E2, _E3, _E4, _four(r, _E5, _E6, _E7, _E8, _four(r, _E9, _E10, _E11, _E12, _E13)))
    scale = _power_of_two(-int(k))  # shrink is e^-r - 1
    left = product_and_sum(scale, shrink, scale) if y < _LARGEST_DECAY else 0.0
    return product_and_sum(-scale, shrink, 1.0 - scale), left


@row_part
def _small_rate(q: float) -> float:
    """-log(1 - q) for 0 <= q <= 0.3: 2 artanh(q / (2 - q)), with q as a factor so that the tiniest share stays."""
    half = 1.0 / (2.0 - q)
    z = (q * half) * (q * half)
    tail = _four(z, 1 / 9, 1 / 11, 1 / 13, 1 / 15, product_and_sum(z, 1 / 19, 1 / 17))
    return q * (2.0 * half * _four(z, 1.0, 1 / 3, 1 / 5, 1 / 7, tail))


@row_part
def joined(sums: np.ndarray) -> float:
    """The sum of N_SUMS sums, half and half."""
    n = N_SUMS // 2
    while n > 0:
        for i in range(n):
            sums[i] += sums[i + n]
        n //= 2
    return sums[0]


@row_part
def total_of(values_K: np.ndarray) -> float:
    """The sum of a row in float64, in a fixed order: the same bits in every process."""
    sums = np.zeros(N_SUMS)
    for start in range(0, values_K.shape[0], N_SUMS):
        part = values_K[start : start + N_SUMS]
        for i in range(part.shape[0]):
            sums[i] += np.float64(part[i])
    return joined(sums)


@row_part
def add_up(sensitivity_K: np.ndarray) -> tuple[float, int]:
    """The row's sum of sensitivities, and how many of them are positive."""
    n_positive = 0
    for j in range(sensitivity_K.shape[0]):
        n_positive += int(sensitivity_K[j] > 0)
    return total_of(sensitivity_K), n_positive


@compiled
def fill_rates(sensitivity_K: np.ndarray, total: float, rates_K: np.ndarray) -> None:
    """-log(1 - q) with q = s / S: the rate at which U's terms decay in N."""
    n_large = 0
    for j in range(sensitivity_K.shape[0]):
        q = np.float64(sensitivity_K[j]) / total
        n_large += int(q > _SMALL_SHARE)
        rates_K[j] = _small_rate(min(q, _SMALL_SHARE))
    if n_large > 0:
        for j in range(sensitivity_K.shape[0]):
            q = np.float64(sensitivity_K[j]) / total
            if q > _SMALL_SHARE:
                rates_K[j] = -math.log1p(-min(q, LARGEST_SHARE))


@compiled
def kept_after(rates_K: np.ndarray, n_draws: float) -> tuple[float, float, float]:
    """U(N), dU/d log N and sum_j y_j^2 e^-y_j with y_j = -N log(1 - q_j): minus d2U/d(log N)^2 plus dU/d log N."""
    sums = np.zeros(3 * N_SUMS)  # one piece of memory: a vectoriser has less to tell apart
    kept, gain, curvature = sums[:N_SUMS], sums[N_SUMS : 2 * N_SUMS], sums[2 * N_SUMS :]
    for start in range(0, rates_K.shape[0], N_SUMS):
        rates = rates_K[start : start + N_SUMS]
        for i in range(rates.shape[0]):
            y = rates[i] * n_draws
            hit, left = decay(y)
            falling = y * left
            kept[i] += hit
            gain[i] += falling
            curvature[i] = product_and_sum(falling, y, curvature[i])
    return joined(kept), joined(gain), joined(curvature)


@compiled
def draws_of_row(rates_K: np.ndarray, cap: float, kept: float) -> float:
    """N(m) for 0 < m < cap: where log(cap - U(N)), which is convex in N, reaches log(cap - m).

    Halley's method, Newton's where that bends too much (from below it never passes the solution), between two bounds.
    """
    total_rate = total_of(rates_K)
    # U(N) <= cap (1 - exp(-N mean rate)) since 1 - e^-y is concave: the first guess is below N(m), exact for equal q.
    n_draws = min(-(cap / total_rate) * math.log1p(-kept / cap), MAX_DRAWS)
    low, high = 0.0, math.inf
    for _ in range(_SOLVER_STEPS):
        reached, gain, curvature = kept_after(rates_K, n_draws)
        lack = cap - reached
        excess = math.log1p((kept - reached) / (cap - kept))
        if reached < kept:
            low = n_draws
        else:
            high = n_draws
        fall, bend = gain / lack, curvature / lack - (gain / lack) ** 2  # -N d/dN and N^2 d2/dN2 of log(cap - U)
        curved = 2.0 * fall * fall - excess * bend
        step = 2.0 * excess * fall / curved if curved > fall * fall else excess / fall
        n_draws *= 1.0 + step
        if abs(step) <= _LAST_STEP:
            break
        if n_draws >= MAX_DRAWS and high == math.inf:
            break
        if not low < n_draws < high:
            n_draws = 2.0 * low if high == math.inf else math.sqrt(low) * math.sqrt(high)
    return min(n_draws, MAX_DRAWS)


@compiled
def smallest_of(keys_K: np.ndarray, n_wanted: int) -> tuple[int, int]:
    """(c, room): the n smallest of these whole numbers are those below c and the first `room` that equal it.

    By counting, which vectorises, up to where the number is to be expected between two known counts, and up to the
    middle every third time. 0 < n <= K, and numbers less than 2^63 apart.
    """
    low, high = keys_K[0], keys_K[0]
    for j in range(1, keys_K.shape[0]):
        low, high = min(low, keys_K[j]), max(high, keys_K[j])
    low -= 1
    n_low, n_high, n_trials = 0, keys_K.shape[0], 0
    while high - low > 1:
        n_trials += 1
        share = 0.5 if n_trials % 3 == 0 else (n_wanted - n_low) / (n_high - n_low)
        middle = min(max(low + np.int64(share * (high - low)), low + 1), high - 1)
        n_up_to = 0
        for j in range(keys_K.shape[0]):
            n_up_to += int(keys_K[j] <= middle)
        if n_up_to == n_wanted:
            return middle + 1, 0
        if n_up_to < n_wanted:
            low, n_low = middle, n_up_to
        else:
            high, n_high = middle, n_up_to
    return high, n_wanted - n_low


@row_part
def eps_rand(share: float) -> float:
    """The bound of a sampled row (T6), for share = S~ / N."""
    return share + math.sqrt(share) * math.sqrt(share + 6.0)


@row_part
def log_slope(share: float, gain: float) -> float:
    """log(-d eps / d U) on a row's curve, for share = S~ / N (T6) and gain = dU / d log N.

    -d eps / d log N is eps^2 / (2 root) with root = sqrt(t (t + 6)).
    """
    root = math.sqrt(share) * math.sqrt(share + 6.0)
    eps = share + root
    return math.log(eps / (2.0 * root) * (eps / gain))
