"""A certified upper bound on the norm of one zero-padded convolution, from the factorisation of its own Gram matrix.

The transfer form of T13 bounds the circular map, of which a zero-padded map A is only a section: 9 against 8.29 for the
3 x 3 kernel of ones on 8 x 8. It adds up over layers. With this file `sound_bound` of a trained `digits-cnn` at a keep
of 0.9 is 1.36, without it 1.73; of a trained CNN of two convolutions on 8 x 8 0.0662 and 0.0678; of ResNet20 1.6e8 and
2.2e8, where neither says anything. Here the section itself is bounded:

 1. Lanczos steps estimate sigma^2, the largest eigenvalue of A'A. Like power iteration they converge from BELOW (T13),
    so the estimate is never a bound; it only says where to look.
 2. lambda, a little above the estimate, is at least sigma^2 if and only if lambda I - A'A is positive semidefinite. A
    Cholesky factorisation that goes through proves that, up to a rounding error with a known bound; one that breaks
    down refuses lambda.

A'A and AA' have the same norm: the cheaper side is factorised. Its positions are `members`; the positions of the other
side, at which members meet, are `hubs`. Two members are coupled only if they meet, so in image order the matrix is
banded, and a window as wide as the band moves down its diagonal.

Axes: G groups, H hubs, T taps, P member positions, M channels of a member position, A channels of a hub, K = M x T what
a hub reads, E coupled pairs of positions.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import permutations
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from scipy.linalg import eigvalsh_tridiagonal
from scipy.sparse import csr_array
from torch import Tensor

from sipp.records.numerics import integers

# lambda is tried at these shares above the estimate. A bound that is accepted is at most sqrt(1.012) = 1.006 times the
# norm, since the estimate is not above sigma^2; forms already that close are left as they are.
MARGINS = (1e-3, 5e-3, 1.2e-2)
# The estimate is looked at every LANCZOS_STRIDE steps, and good enough once it rises by no more than this share.
LANCZOS_STEPS, LANCZOS_STRIDE, LANCZOS_RISE = 64, 8, 1e-4
LANCZOS_SEED = 0  # any start does: only whether lambda is accepted depends on it, never whether it is right
# Above this many multiply-adds for one lambda (1 to 2 seconds on two cores), or this many numbers in any one tensor
# (256 MiB), there is no section form.
MAX_SECTION_WORK = 5e10
MAX_SECTION_ENTRIES = 1 << 25
# About this many columns are eliminated at once; a step takes at least as long as this many multiply-adds.
STEP_COLUMNS = 256
STEP_OVERHEAD = 1e6
NUMBERS_PER_MEETING = 8  # index numbers held for two taps that meet at a hub
N_REMEMBERED = 1024
UNIT_ROUNDOFF = 2.0**-53

Side = Literal["inputs", "outputs"]


@dataclass(frozen=True)
class Axis:
    """The windows of a convolution along one axis: inputs, taps, stride, dilation, padding on the left, windows."""

    n_in: int
    kernel: int
    stride: int
    dilation: int
    left: int
    n_out: int


@dataclass(frozen=True)
class _Plan:
    """Which Gram matrix is factorised, in which order of the axes, and how far apart coupled positions can lie."""

    members: Side
    order: tuple[int, ...]
    n_positions: int
    n_channels: int
    reach: int
    n_eliminated: int  # positions eliminated in one step
    work: float  # multiply-adds
    n_numbers: int  # in the largest tensor


@dataclass(frozen=True)
class _Coupling:
    """The lower half of a Gram matrix: one M x M block for each pair (row, column) of positions that meet, sorted."""

    rows_E: Tensor
    columns_E: Tensor
    blocks_EGMM: Tensor
    n_terms: int  # products added up in one entry, at most


def section_norm(weight_GFCT: Tensor, axes: Sequence[Axis], known: float) -> float | None:
    """A certified bound on the norm of a zero-padded convolution; None if it costs too much or `known` is as good.

    `known` is an upper bound from elsewhere. Weights on another device are brought to the CPU. Where it is not None,
    the bound is at most 1.006 times the norm.
    """
    plan = _plan(weight_GFCT, axes)
    if plan is None:
        return None
    weight_GFCT = weight_GFCT.detach().to("cpu", torch.float64).contiguous()
    digest = hashlib.sha256(weight_GFCT.numpy().tobytes()).hexdigest()
    # A network's norms are asked for again with every batch of data.
    answer = _remembered(digest, tuple(weight_GFCT.shape), tuple(axes), known)
    if not answer:
        answer.append(_section_norm(weight_GFCT, axes, plan, known))
    return answer[0]


@lru_cache(maxsize=N_REMEMBERED)
def _remembered(digest: str, shape: tuple[int, ...], axes: tuple[Axis, ...], known: float) -> list[float | None]:
    """The place of the answer for these weights: empty until it was found."""
    return []


def _section_norm(weight_GFCT: Tensor, axes: Sequence[Axis], plan: _Plan, known: float) -> float | None:
    """What `section_norm` says, for weights on the CPU and within the limits."""
    table_HT = _meetings([axes[i] for i in plan.order], plan.members)
    # Taps that meet no input (a wide kernel on a small image) do not belong to the map.
    used_T = (table_HT >= 0).any(dim=0)
    table_HT, taps_GFCT = table_HT[:, used_T], _reordered(weight_GFCT, axes, plan.order)[..., used_T]
    scale = float(taps_GFCT.abs().max()) if taps_GFCT.numel() else 0.0
    if scale == 0.0:
        return 0.0
    # With the largest weight 1 the largest entry of the Gram matrix is at least 1: nothing that matters underflows.
    taps_GAMT = (taps_GFCT if plan.members == "inputs" else taps_GFCT.transpose(1, 2)) / scale
    estimate = _largest_from_below(taps_GAMT, table_HT, plan.n_positions)
    if known <= scale * math.sqrt(estimate * (1.0 + MARGINS[-1])):
        return None
    coupling = _coupling(taps_GAMT, table_HT)
    for margin in MARGINS:
        bound = _certified(coupling, plan, estimate * (1.0 + margin))
        if bound is not None:
            return math.sqrt(bound) * scale
    return None


def _plan(weight_GFCT: Tensor, axes: Sequence[Axis]) -> _Plan | None:
    """The cheapest side and order of the axes, or None beyond the limits."""
    if min(min(axis.n_in, axis.n_out) for axis in axes) < 1:
        return None
    sides: tuple[Side, Side] = ("inputs", "outputs")
    plans = [
        _side_plan(weight_GFCT, axes, members, order) for order in permutations(range(len(axes))) for members in sides
    ]
    best = min(plans, key=lambda plan: plan.work)
    return None if best.work > MAX_SECTION_WORK or best.n_numbers > MAX_SECTION_ENTRIES else best


def _side_plan(weight_GFCT: Tensor, axes: Sequence[Axis], members: Side, order: tuple[int, ...]) -> _Plan:
    """What it costs to estimate, build and factorise one side."""
    n_groups, n_rows, n_channels, _ = weight_GFCT.shape
    if members == "outputs":
        n_channels, n_rows = n_rows, n_channels
    n_positions, n_hubs, n_taps, n_neighbours, reach = 1, 1, 1, 1, 0
    for axis in (axes[i] for i in order):
        size, across = (axis.n_in, axis.n_out) if members == "inputs" else (axis.n_out, axis.n_in)
        step = 1 if members == "inputs" else axis.stride
        axis_reach = min(axis.dilation * (axis.kernel - 1) // step, size - 1)
        n_positions, n_hubs, reach = n_positions * size, n_hubs * across, reach * size + axis_reach
        n_neighbours *= 2 * axis_reach + 1
        n_taps *= min(axis.kernel, axis.n_in * axis.n_out)  # no more than that can meet an input
    n_eliminated = max(1, min(STEP_COLUMNS, (reach + 1) * n_channels) // n_channels)
    columns, window = n_eliminated * n_channels, (n_eliminated + reach) * n_channels
    numbers = (
        n_groups * window**2,
        n_groups * n_channels**2 * n_positions * (n_neighbours // 2 + 1),  # blocks of the Gram matrix
        n_groups * n_channels**2 * n_taps**2,
        n_groups * n_channels * n_positions * LANCZOS_STEPS,
        n_groups * n_channels * n_hubs * n_taps,  # the windows
        n_hubs * n_taps**2 * NUMBERS_PER_MEETING,
    )
    products = n_groups * n_rows * n_channels * n_taps
    lanczos, gram = 2.0 * LANCZOS_STEPS * products * n_hubs, float(products) * n_channels * n_taps
    factor = -(-n_positions // n_eliminated) * max(float(n_groups * columns) * window**2, STEP_OVERHEAD)
    work = lanczos + gram + factor
    return _Plan(members, order, n_positions, n_channels, reach, n_eliminated, work, max(numbers))


def _meetings(axes: Sequence[Axis], members: Side) -> Tensor:
    """The member that each hub meets by each tap, hubs x taps; -1 where the tap falls on padding or between windows."""
    table_HT = torch.zeros(1, 1, dtype=torch.int64, device="cpu")
    for axis in axes:
        taps = axis.dilation * integers(0, axis.kernel) - axis.left
        if members == "inputs":
            size, own_HT = axis.n_in, axis.stride * integers(0, axis.n_out).unsqueeze(1) + taps
            meets_HT = (own_HT >= 0) & (own_HT < size)
        else:
            starts_HT = integers(0, axis.n_in).unsqueeze(1) - taps
            size, own_HT = axis.n_out, starts_HT.div(axis.stride, rounding_mode="floor")
            meets_HT = (starts_HT.remainder(axis.stride) == 0) & (own_HT >= 0) & (own_HT < size)
        outer, inner = table_HT[:, None, :, None], torch.where(meets_HT, own_HT, -1)[None, :, None, :]
        joint = torch.where((outer >= 0) & (inner >= 0), outer * size + inner, -1)
        table_HT = joint.flatten(2).flatten(0, 1)
    return table_HT


def _reordered(weight_GFCT: Tensor, axes: Sequence[Axis], order: Sequence[int]) -> Tensor:
    """The taps in another order of the axes."""
    kernel = weight_GFCT.unflatten(3, [axis.kernel for axis in axes])
    return kernel.permute(0, 1, 2, *(3 + i for i in order)).flatten(3)


def _largest_from_below(taps_GAMT: Tensor, table_HT: Tensor, n_positions: int) -> float:
    """The largest Ritz value of A'A after a few Lanczos steps: an estimate from below, never a bound (T13)."""
    n_groups, _, n_channels, _ = taps_GAMT.shape
    size = n_groups * n_channels * n_positions
    filters_GAK = taps_GAMT.flatten(2)
    # What meets nothing reads, and writes to, one further position that is always zero.
    places = torch.where(table_HT >= 0, table_HT, n_positions).T.flatten()

    def gram_times(vector: Tensor) -> Tensor:
        image_GMP = F.pad(vector.reshape(n_groups, n_channels, n_positions), (0, 1))
        windows_GKH = image_GMP[..., places].reshape(n_groups, filters_GAK.shape[2], -1)
        back_GKH = filters_GAK.mT @ (filters_GAK @ windows_GKH)
        image_GMP = torch.zeros_like(image_GMP).index_add_(2, places, back_GKH.reshape(n_groups, n_channels, -1))
        return image_GMP[..., :-1].flatten()

    generator = torch.Generator("cpu").manual_seed(LANCZOS_SEED)
    start = torch.randn(size, dtype=torch.float64, device="cpu", generator=generator)
    basis = torch.zeros(min(LANCZOS_STEPS, size), size, dtype=torch.float64, device="cpu")
    basis[0] = start / start.norm()
    diagonal: list[float] = []
    beside: list[float] = []
    estimate = 0.0
    for step in range(len(basis)):
        image, known = gram_times(basis[step]), basis[: step + 1]
        diagonal.append(float(image @ basis[step]))
        for _ in range(2):  # twice is enough to keep the basis orthogonal
            image = image - known.T @ (known @ image)
        length = float(image.norm())
        ends = step + 1 == len(basis) or length <= UNIT_ROUNDOFF * size * max(diagonal)
        if ends or step % LANCZOS_STRIDE == LANCZOS_STRIDE - 1:
            before, estimate = estimate, float(eigvalsh_tridiagonal(diagonal, beside)[-1])
            if ends or estimate <= before * (1.0 + LANCZOS_RISE):
                break
        beside.append(length)
        basis[step + 1] = image / length
    return estimate


def _coupling(taps_GAMT: Tensor, table_HT: Tensor) -> _Coupling:
    """The lower half of A'A: for every hub and two of its taps, the product of their weights at the two members."""
    n_groups, n_hub_channels, n_channels, n_taps = taps_GAMT.shape
    stacked_GAK = taps_GAMT.transpose(2, 3).flatten(2)
    gram = (stacked_GAK.mT @ stacked_GAK).reshape(n_groups, n_taps, n_channels, n_taps, n_channels)
    gram_TT = gram.permute(1, 3, 0, 2, 4).reshape(n_taps**2, -1)
    lower_HTT = (table_HT.unsqueeze(2) >= table_HT.unsqueeze(1)) & (table_HT.unsqueeze(1) >= 0)
    hub, tap, other_tap = lower_HTT.nonzero(as_tuple=True)
    rows, columns = table_HT[hub, tap], table_HT[hub, other_tap]
    n_reached = int(table_HT.max()) + 1
    pairs_E, which = torch.unique(rows * n_reached + columns, return_inverse=True)
    # How often each pair of positions meets by each pair of taps: 0 or 1.
    meets = csr_array(
        (np.ones(len(which)), (which.numpy(), (tap * n_taps + other_tap).numpy())), shape=(len(pairs_E), n_taps**2)
    )
    blocks = torch.from_numpy(meets @ gram_TT.numpy()).reshape(-1, n_groups, n_channels, n_channels)
    return _Coupling(pairs_E // n_reached, pairs_E % n_reached, blocks, n_hub_channels + n_taps)


def _certified(coupling: _Coupling, plan: _Plan, level: float) -> float | None:
    """An upper bound on the largest eigenvalue of the Gram matrix just above `level`, or None if `level` is refused.

    A factorisation that goes through is the exact one of lambda I - A'A + E, each entry of E at most gamma_t lambda, t
    the products behind it. Those of A'A are at most `n_terms`, and two columns of A have a product of at most the
    largest entry of its diagonal (Cauchy-Schwarz), which is below lambda or the factorisation would have broken down.
    Those of the factor R are at most the width of the window, and |R'||R| is nowhere larger than the diagonal of
    lambda I - A'A (Higham, Accuracy and Stability of Numerical Algorithms, theorem 10.3). A row of the band has at most
    2 width - 1 entries, so ||E|| <= (2 width - 1) gamma_t lambda (8e-10 lambda for 16 channels on 32 x 32). The
    factor 2 takes in second-order terms, the 8 the rounding of single operations.
    """
    if not _factorises(coupling, plan, level):
        return None
    width = (plan.n_eliminated + plan.reach) * plan.n_channels
    return level * (1.0 + 2.0 * (2 * width) * (width + coupling.n_terms + 8) * UNIT_ROUNDOFF)


def _factorises(coupling: _Coupling, plan: _Plan, level: float) -> bool:
    """Whether the Cholesky factorisation of level I - A'A goes through, all groups at once."""
    n_first = plan.n_eliminated * plan.n_channels
    window = _strip(coupling, plan, level, first=0, last=plan.n_eliminated + plan.reach, start=0)
    for start in range(0, plan.n_positions, plan.n_eliminated):
        factor, info = torch.linalg.cholesky_ex(window[:, :n_first, :n_first])
        if bool((info != 0).any()) or not bool(torch.isfinite(factor).all()):
            return False
        following = start + plan.n_eliminated
        if following >= plan.n_positions:
            return True
        # Only the lower half of the window is ever read; below is (eliminated, the rest of the window).
        below = torch.linalg.solve_triangular(factor, window[:, n_first:, :n_first].mT, upper=False)
        rest = torch.baddbmm(window[:, n_first:, n_first:], below.mT, below, alpha=-1.0)
        first = following + plan.reach
        entering = _strip(coupling, plan, level, first=first, last=first + plan.n_eliminated, start=following)
        window = torch.cat([F.pad(rest, (0, n_first)), entering], dim=1)
    return True


def _strip(coupling: _Coupling, plan: _Plan, level: float, *, first: int, last: int, start: int) -> Tensor:
    """The rows of level I - A'A at positions first .. last, in a window's columns from `start`; G x rows x columns.

    Positions beyond the image are coupled to nothing: their rows are those of level I.
    """
    edges = torch.tensor([first, last], dtype=torch.int64, device="cpu")
    begin, end = torch.searchsorted(coupling.rows_E, edges).tolist()
    n_groups, n_channels = coupling.blocks_EGMM.shape[1:3]
    shape = (last - first, plan.n_eliminated + plan.reach, n_groups, n_channels, n_channels)
    strip = torch.zeros(shape, dtype=torch.float64, device="cpu")
    strip[coupling.rows_E[begin:end] - first, coupling.columns_E[begin:end] - start] = -coupling.blocks_EGMM[begin:end]
    own = integers(first, last)
    strip[own - first, own - start] += level * torch.eye(n_channels, dtype=torch.float64, device="cpu")
    return strip.permute(2, 0, 3, 1, 4).flatten(3).flatten(1, 2)
