"""A prunable weight as rows, and the inputs that reach it in a call: checked, cut into pieces, laid out as patches.

Axis letters, used as suffixes of tensor names everywhere:
    B points of a batch     P patches        F rows of a weight (parameter groups)    K fan-in of a row
    G groups of a grouped convolution (1 elsewhere)      R rows of one group, F = G * R
    S, T signs of weights and of activations             Q quadrants of signs, and Z itself
    T time steps or positions, where a B stands before it     H, I hidden and inner width     C, H, W of an image
    S rows that a channel takes out (T23)                A, C, D, L, M, N, X: what is counted in one file; 1: kept
So `weight_FK` has one row per parameter group, `patches_GKP` holds P patches of fan-in K for each of G groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from sipp.errors import DataError, ModelError
from sipp.inputs.data import Batch
from sipp.results import numerics

LARGEST_EXPONENT = 1023  # of a finite float64
SIGNS_T1 = np.array([[1.0], [-1.0]])  # t of activations

Extremes = Callable[[Tensor], Tensor]  # B x N -> 3 x B


@dataclass(frozen=True)
class Weight:
    """One prunable parameter, seen as F rows of fan-in K."""

    name: str  # canonical parameter name, without wrapper prefixes
    aliases: tuple[str, ...]  # other names of the same tensor (tied weights)
    layer_type: str  # class name of the layer that holds it
    n_rows: int
    fan_in: int
    rows_last: bool  # stored transposed, K x F instead of F x K

    @property
    def n_weights(self) -> int:
        return self.n_rows * self.fan_in

    def rows(self, tensor: Tensor) -> Tensor:
        """The parameter-shaped tensor as an F x K matrix (a view wherever the layout allows one)."""
        return tensor.t() if self.rows_last else tensor.reshape(self.n_rows, self.fan_in)

    def shaped(self, matrix_FK: Tensor, like: Tensor) -> Tensor:
        """The F x K matrix in the shape of the parameter `like`."""
        return matrix_FK.t().contiguous() if self.rows_last else matrix_FK.reshape(like.shape)


@dataclass(frozen=True)
class WeightUse:
    """The inputs of (some rows of) a weight in one call of its layer, as a layer adapter reports them.

    `windows` is a view of shape (B, G, *positions, *fan_in): positions are the patches of a point; the fan-in
    dimensions are in the weight's own order. `real_BP` marks patches that are not padding. Before a use is passed on,
    padding is set to zero, and `counts_B` (never set by an adapter) holds the number of real patches.
    """

    parameter: str  # local name in the module: "weight", "weight_ih_l0", "out_proj.weight"
    windows: Tensor
    n_position_dims: int = 1
    row_start: int = 0
    n_rows: int | None = None  # None: all rows from row_start on
    counts_B: Tensor | None = None
    attributed: bool = True  # False: patches cannot be assigned to points; B is 1 for the whole batch
    real_BP: Tensor | None = None  # bool, for one position dimension: False is padding. None: no padding
    is_own_copy: bool = False  # the windows view memory that the model does not have, and cannot write to

    @property
    def n_groups(self) -> int:
        """The groups of rows, each with inputs of its own: 1 except for grouped convolutions."""
        return self.windows.shape[1]

    @property
    def n_positions(self) -> int:
        """The patches of each point, padding included."""
        return self.windows.shape[2 : 2 + self.n_position_dims].numel()

    @property
    def n_patches(self) -> int:
        """Points x positions: the patches of all points, padding included."""
        return self.windows.shape[0] * self.n_positions

    @property
    def fan_in(self) -> int:
        """The number of values in one patch."""
        return self.windows.shape[2 + self.n_position_dims :].numel()

    def n_rows_of(self, weight: Weight) -> int:
        """How many rows of the weight are multiplied with these inputs."""
        return weight.n_rows - self.row_start if self.n_rows is None else self.n_rows

    def rows_of(self, weight: Weight) -> slice:
        """Which rows of the weight are multiplied with these inputs."""
        return slice(self.row_start, self.row_start + self.n_rows_of(weight))


@dataclass(frozen=True)
class ValueRange:
    """The range of the activations of each point (B, float64): all that scaling and guards need.

    NumPy arrays, because for so few numbers the overhead of torch's operations dominates.
    """

    device: torch.device  # of the windows
    peak_B: np.ndarray  # the largest magnitude; NaN or infinite where any activation is
    smallest_B: np.ndarray  # the smallest magnitude above 0; infinite where there is none
    signs_TB: np.ndarray  # 1 where a point has positive activations, -1 where it has negative ones, otherwise 0
    peaks: tuple[float, float]  # the lowest and the highest peak; NaN or infinite if any activation is
    smallest: float  # over all points

    @cached_property
    def scale_B(self) -> np.ndarray:
        """Powers of two that bring each point's peak into [1, 2), so that its ratios do not depend on its batch.

        For a point of zeros any power is right.
        """
        return np.ldexp(1.0, np.minimum(1 - np.frexp(self.peak_B)[1], LARGEST_EXPONENT))

    @cached_property
    def scale_on_device_B(self) -> Tensor:
        """The same on the device of the windows."""
        return numerics.on_device(self.scale_B, self.device)

    @cached_property
    def factors_TB(self) -> np.ndarray:
        """The scales times the sign t of activations; 0 where a point has no activation of that sign."""
        return self.signs_TB * self.scale_B

    def scaled(self, windows: Tensor, points: slice) -> Tensor:
        """Windows of these points in float32, each point by its scale; values in several windows are copied once."""
        is_double = windows.dtype == numerics.BOUND_DTYPE
        scale_B = self.scale_on_device_B[points].to(numerics.BOUND_DTYPE if is_double else numerics.SCORE_DTYPE)
        if _overlaps(windows):
            copy_BN = (distinct_values(windows) * scale_B[:, None]).to(numerics.SCORE_DTYPE)
            return copy_BN.as_strided(windows.shape, (copy_BN.stride(0), *windows.stride()[1:]))
        return (windows * scale_B.view(-1, *[1] * (windows.ndim - 1))).to(numerics.SCORE_DTYPE)

    def occurs(self, points: slice) -> tuple[bool, bool]:
        """Whether any of these points has positive, and negative, activations."""
        positive_B, negative_B = self.signs_TB[:, points]
        return bool(positive_B.any()), bool(negative_B.any())


def together(use: WeightUse) -> WeightUse:
    """The use with the patches of all points together, as if they belonged to one."""
    if not use.attributed:
        return use
    windows = use.windows if use.n_position_dims else use.windows.unsqueeze(2)
    return replace(
        use,
        windows=windows.movedim(1, 0).flatten(1, 2)[None],
        n_position_dims=max(1, use.n_position_dims),
        attributed=False,
        real_BP=None if use.real_BP is None else use.real_BP.flatten()[None],
    )


def value_range(windows: Tensor, extremes: Extremes) -> ValueRange:
    """The range of the windows' values; waits for a GPU.

    Reads the underlying memory, so that a 3 x 3 window does not read each value nine times. `extremes` is the kernel
    of that name: lowest, highest and smallest non-zero magnitude of each line.
    """
    found_XB = extremes(distinct_values(windows)).cpu().to(numerics.BOUND_DTYPE).numpy()
    furthest_TB, smallest_B = found_XB[1::-1] * SIGNS_T1, found_XB[2]
    peak_B = np.maximum(*furthest_TB)
    least, most = np.minimum.reduce, np.maximum.reduce  # what min() and max() call after a detour through Python
    peaks = float(least(peak_B)), float(most(peak_B))  # NaN is both
    signs_TB = (furthest_TB > 0) * SIGNS_T1
    return ValueRange(windows.device, peak_B, smallest_B, signs_TB, peaks, float(least(smallest_B)))


def split_windows(use: WeightUse, *, bytes_per_window: int, chunk_bytes: int) -> Iterator[tuple[slice, Tensor]]:
    """Pieces of the use's windows that fit `chunk_bytes`: the points they belong to, and the windows.

    Splits along the points first, then along the positions if a single point is too large.
    """
    n_points = use.windows.shape[0]
    per_point = bytes_per_window * _n_windows(use.windows, use.n_position_dims) // n_points
    step = max(1, chunk_bytes // max(1, per_point))
    for start in range(0, n_points, step):
        piece = use.windows if step >= n_points else use.windows[start : start + step]
        for part in _split_positions(piece, 2, use.n_position_dims, chunk_bytes // bytes_per_window):
            yield slice(start, start + piece.shape[0]), part


def patches_of(windows: Tensor, n_position_dims: int, scale_B: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The windows (B, G, *positions, *fan_in), scaled if asked, as patches_GKP, P over points, then positions: a copy.

    Scaled in float64 if `dtype` or the windows are float64: the scale, or the values, may not fit float32.
    """
    position_dims = range(2, 2 + n_position_dims)
    fan_dims = range(2 + n_position_dims, windows.ndim)
    ordered = windows.permute(1, *fan_dims, 0, *position_dims)
    wide = numerics.BOUND_DTYPE if numerics.BOUND_DTYPE in (windows.dtype, dtype) else numerics.SCORE_DTYPE
    patches = torch.empty(ordered.shape, dtype=wide, device=windows.device)
    scale = None if scale_B is None else scale_B.to(windows.device, wide).view(-1, *[1] * n_position_dims)
    if scale is None:
        patches.copy_(ordered)
    elif windows.dtype == wide:
        torch.mul(ordered, scale, out=patches)
    else:
        patches.copy_(ordered).mul_(scale)
    n_patches = windows.shape[0] * windows.shape[2 : 2 + n_position_dims].numel()
    return patches.view(windows.shape[1], windows.shape[2 + n_position_dims :].numel(), n_patches).to(dtype)


def _span(windows: Tensor) -> int:
    """The number of elements in memory from the first to the last of one point's windows."""
    return 1 + sum((size - 1) * stride for size, stride in zip(windows.shape[1:], windows.stride()[1:]))


def _overlaps(windows: Tensor) -> bool:
    """Whether windows of a point overlap: they have more elements than the memory they view."""
    return _span(windows) < windows.shape[1:].numel()


def distinct_values(windows: Tensor) -> Tensor:
    """B x N: the values that the windows of each point view (a convolution's padded input), each once.

    If windows overlap, this is all the memory between their first and last element. It includes values that a stride
    skips, which are inputs of the layer all the same.
    """
    n_points, span = windows.shape[0], _span(windows)
    if span < windows.shape[1:].numel():  # they overlap
        return windows.as_strided((n_points, span), (windows.stride(0), 1))
    return windows.reshape(n_points, -1)


def _n_windows(windows: Tensor, n_position_dims: int) -> int:
    """Points x groups x positions."""
    return windows.shape[: 2 + n_position_dims].numel()


def _split_positions(piece: Tensor, dim: int, n_position_dims: int, most: int) -> Iterator[Tensor]:
    """The piece cut along position dimension `dim` and the following ones until it has at most `most` windows."""
    n_windows = _n_windows(piece, n_position_dims)
    if n_windows <= most or dim == 2 + n_position_dims:
        yield piece
        return
    size = piece.shape[dim]
    step = max(1, size * most // n_windows)
    for start in range(0, size, step):
        part = piece.narrow(dim, start, min(step, size - start))
        yield from _split_positions(part, dim + 1, n_position_dims, most)


# --- Uses that several layer types have -------------------------------------------------------------------------------


def vectors(parameter: str, inputs: Tensor, n_points: int) -> WeightUse:
    """The use of all rows of a weight whose patches are the vectors along the last dimension of `inputs`.

    Points run along the first dimension, one by one or in equal consecutive blocks (windows or frames folded into the
    batch). If that cannot be, the patches stay together and `attributed` is False: a maximum needs no more.
    """
    # an expert that got no tokens has none to attribute
    attributed = n_points == 1 or (inputs.ndim > 1 and inputs.numel() > 0 and inputs.shape[0] % n_points == 0)
    n_blocks = n_points if attributed else 1
    n_patches = inputs.shape[:-1].numel() // n_blocks
    return WeightUse(parameter, inputs.reshape(n_blocks, 1, n_patches, inputs.shape[-1]), attributed=attributed)


def sequences(parameter: str, steps_BTK: Tensor, n_points: int, is_real_BT: Tensor | None = None) -> WeightUse:
    """The use of all rows of a weight whose patches are the steps of sequences, one for each point or together."""
    if len(steps_BTK) == n_points:
        return WeightUse(parameter, steps_BTK[:, None], real_BP=is_real_BT)
    together = steps_BTK.flatten(0, 1)[None, None]
    real_BP = None if is_real_BT is None else is_real_BT.flatten()[None]
    return WeightUse(parameter, together, attributed=False, real_BP=real_BP)


def by_size(shape: tuple[int, ...]) -> str:
    """A shape in words: 200 x 9."""
    return " x ".join(map(str, shape)) or "a single number"


# --- Uses checked against their weight, and padding set to zero: later code relies on every shape ---------------------

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def has_patches(use: WeightUse, weight: Weight, device: torch.device, batch: Batch) -> bool:
    """Whether a use has any patches (an expert without tokens has none), after checking them: later code relies on it.

    Raises if the windows are not patches of the weight. Messages begin with a verb: the caller puts the layer first.
    """
    windows = use.windows
    why = _why_no_use(use, weight)
    if why:
        raise ModelError(f"has an adapter whose {why}")
    if use.fan_in != weight.fan_in:
        raise DataError(f"takes {weight.fan_in} features, not {use.fan_in}")
    if windows.dtype not in DTYPES:
        raise DataError(f"takes real numbers of 16 to 64 bits, not {str(windows.dtype).removeprefix('torch.')}")
    if windows.device != device:
        raise DataError(f"is on {device}, its input on {windows.device}: both must be on one device")
    if windows.numel() == 0:
        return False
    if len(windows) != (batch.n_points if use.attributed else 1):
        raise ModelError(f"has an adapter that reports {len(windows)} inputs, but the batch has {batch.n_points}")
    return True


def _why_no_use(use: WeightUse, weight: Weight) -> str:
    """How windows, rows and counts contradict each other, which is a bug of the adapter; "" if they do not."""
    windows, real_BP = use.windows, use.real_BP
    if windows.layout != torch.strided or use.n_position_dims < 0 or windows.ndim < 2 + use.n_position_dims:
        return "windows are not a dense tensor of (inputs, groups, *positions, *fan_in)"
    n_rows, rows = use.n_rows_of(weight), use.rows_of(weight)
    if rows.start < 0 or n_rows < 1 or rows.stop > weight.n_rows:
        return f"rows are {rows.start} to {rows.stop}, but the weight has {weight.n_rows}"
    if use.n_groups < 1 or n_rows % use.n_groups:
        return f"{n_rows} rows are in {use.n_groups} groups"
    if use.counts_B is not None:
        return "counts_B is set; padding is marked in real_BP"
    shape = (len(windows), use.n_positions)
    if real_BP is not None and (use.n_position_dims != 1 or real_BP.dtype != torch.bool or real_BP.shape != shape):
        return f"real_BP is not a truth value for each of {shape} patches"
    return ""


def with_padding_zeroed(use: WeightUse, batch: Batch) -> WeightUse:
    """The use with padding set to zero, as its adapter or the batch marks it, and the other patches counted.

    The mask of the batch applies if the use has one patch for each position of its points (B x T).
    """
    real_BP, given = use.real_BP, batch.real_BT
    is_of_points = use.attributed and use.n_position_dims == 1
    if given is not None and is_of_points and tuple(given.shape) == (len(use.windows), use.windows.shape[2]):
        given = given.to(use.windows.device, torch.bool)
        real_BP = given if real_BP is None else real_BP & given
    if real_BP is None:
        return use
    if bool(real_BP.all()):
        return replace(use, counts_B=real_BP.sum(1), real_BP=None)
    shaped = real_BP.view(len(real_BP), 1, real_BP.shape[1], *[1] * (use.windows.ndim - 3))
    windows = torch.where(shaped, use.windows, torch.zeros((), dtype=use.windows.dtype, device=use.windows.device))
    return replace(use, windows=windows, counts_B=real_BP.sum(1), real_BP=None)
