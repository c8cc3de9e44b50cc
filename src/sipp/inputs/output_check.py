"""Compares a layer's real output with what was captured, to find layers that compute something else.

A subclass, a hook or a patched forward may change the input unseen, or use the weight in another way. Then the
captured patches are not what the weight was multiplied by, and its scores would be wrong.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from sipp.errors import ModelError
from sipp.inputs.layers import PrunableLayer, by_point
from sipp.inputs.patches import all_sums, n_groups_of, n_patches_of, n_positions_of, steps, values_at
from sipp.records.batches import Batch, WeightUse
from sipp.records.numerics import exact_matmul, places_of
from sipp.records.ranking import Weight, to_rows

MOST_VALUES = 1 << 14  # compared in one use: some points and positions, far apart, show as much as all
FEW_POINTS = 8  # at least, if there are many positions to compare
MOST_ROWS = 64  # of a group, evenly spaced too
KEPT_PLACES = 64  # cached choices of rows, points and positions: networks have many layers of few sizes

# How much two ways to compute a sum may differ, relative to the root of its squared terms. The precision of the
# products decides. A replay of many steps may differ ten times as much.
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4}
COARSE_TOLERANCE = 5e-3  # half precision, TF32
MANY_STEPS = 10

_log = logging.getLogger("sipp")


@dataclass(frozen=True)
class Expected:
    """What the output of one call must be: all of it, or its values at some patches and rows."""

    values: Tensor  # of some patches and rows, B x N (see `_outputs_looked_at`), or the whole output as the layer's own
    squares: Callable[[], Tensor | float]  # the sums of the squared terms of each point; 0 if only values are known
    tolerance: float
    use: WeightUse | None  # None: `values` is the whole output
    weight: Weight | None


@dataclass(frozen=True)
class Gap:
    """How far an output is from what it must be, for each point or in all. A GPU may still be computing it.

    It keeps no input or output alive: memory must not grow with the pass.
    """

    layer: PrunableLayer
    off_BN: Tensor  # differences of the values compared; for a whole output one number, their norm
    values_BN: Tensor  # what these must be; their norm is at most the root of all squared terms
    exact_off: Callable[[], Tensor]  # the differences in float64, which cannot overflow
    squares: Callable[[], Tensor | float]  # of the terms of each point; counted with the squared norm of `values_BN`
    tolerance: float
    least: float  # how much products that underflow in the layer's dtype may add up to


def expected_output(
    layer: PrunableLayer, args: tuple[Any, ...], kwargs: dict[str, Any], by_use: list[Expected | None]
) -> Expected | None:
    """What this call must return, computed before the layer runs; None if that is not possible, which is logged.

    `by_use` holds the `products` of each of its uses.
    """
    output = layer.adapter.output
    if callable(output):
        values = _first_tensor(output(layer.module, args, kwargs))
        if values is not None:
            # a copy: the result may be a view of an input that forward changes in place
            tolerance = MANY_STEPS * tolerance_of(values)
            return Expected(values.detach().to(torch.float64, copy=True), float, tolerance, None, None)
    elif not by_use or (output == "products" and len(by_use) == 1 and by_use[0] is not None):
        return by_use[0] if by_use else None  # in a call without patches there is nothing to check
    _log.warning("%s: sipp cannot compute its output, so it is not checked", layer.label)
    return None


def products(layer: PrunableLayer, weight: Weight, use: WeightUse) -> Expected | None:
    """The products of some patches of a use with the rows, plus the bias; None unless it is a use of all rows."""
    if use.row_start != 0 or use.n_rows not in (None, weight.n_rows) or use.windows.numel() == 0:
        return None
    windows, n_groups = use.windows, n_groups_of(use)
    n_points, n_positions = map(len, _looked_at(use))
    dtype = torch.float64 if windows.dtype == torch.float64 else torch.float32
    places = _places_looked_at(tuple(windows.shape), windows.stride(), use.n_position_dims, windows.device)
    patches_GPK = values_at(windows, places).to(dtype).view(n_groups, n_points * n_positions, weight.fan_in)
    rows = _rows_looked_at(weight.n_rows, n_groups, windows.device)
    rows_FK = to_rows(weight, layer.parameter(use.parameter).detach())
    rows_GRK = rows_FK[rows].unflatten(0, (n_groups, -1)).to(dtype)
    bias = getattr(layer.module, "bias", None)
    with exact_matmul():
        if isinstance(bias, Tensor) and bias.numel() == weight.n_rows:
            bias_G1R = bias.detach().flatten()[rows].view(n_groups, 1, -1).to(dtype)
            values_GPR = torch.baddbmm(bias_G1R, patches_GPK, rows_GRK.mT)
        else:
            values_GPR = torch.bmm(patches_GPK, rows_GRK.mT)
    by_point = values_GPR if n_groups == 1 else values_GPR.unflatten(1, (n_points, -1)).transpose(0, 1)
    values_BN = by_point.reshape(n_points, -1)

    def squares_B() -> Tensor:
        # of a point's patches and these rows: sum_k (sum_p a_pk^2) (sum_r w_rk^2), no second product
        squares_GBK = patches_GPK.double().square().unflatten(1, (n_points, -1)).sum(2)
        return (squares_GBK * rows_GRK.double().square().sum(1)[:, None]).sum((0, 2))

    return Expected(values_BN, squares_B, tolerance_of(windows), use, weight)


def gap_of(layer: PrunableLayer, expected: Expected, output: Any, batch: Batch) -> Gap:
    """How far the real output is from the expected one; raises ModelError if it has another form."""
    real = _first_tensor(output)
    if real is None or not real.is_floating_point():
        raise ModelError(f"{_not_the_map(layer, batch)}: it gives no real numbers but a {type(output).__name__}")
    laid_out = real if expected.use is None else _laid_out(real, expected.use, expected.weight, batch.n_points)
    if laid_out is None or laid_out.shape != expected.values.shape:
        raise ModelError(f"{_not_the_map(layer, batch)}: its output has the shape {tuple(real.shape)}")
    off, values, n_times = laid_out - expected.values, expected.values, 1
    if expected.use is None:
        # an overflow in the layer is refused by the layers after it
        off, values, n_times = _finite(off).norm().view(1, 1), _finite(values).norm().view(1, 1), MANY_STEPS
    tolerance = max(expected.tolerance, n_times * tolerance_of(real))
    least = torch.finfo(real.dtype).tiny * laid_out.numel() ** 0.5

    def exact_off() -> Tensor:
        return off if expected.use is None else laid_out.double() - values.double()

    return Gap(layer, off, values, exact_off, expected.squares, tolerance, least)


def _finite(values: Tensor) -> Tensor:
    """The values, with 0 for those that are not finite."""
    return values.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def refuse_nan_biases(layers: Sequence[PrunableLayer]) -> None:
    """Raises ModelError if the bias of a layer is all NaN: no later layer could refuse the output of the last one."""
    named = [(layer, getattr(layer.module, "bias", None)) for layer in layers if layer.adapter.output == "products"]
    biases = [(layer, bias.detach()) for layer, bias in named if isinstance(bias, Tensor) and bias.numel() > 0]
    if not biases:
        return
    are_nan = torch.stack([bias.isnan().all() for _, bias in biases]).tolist()  # the only GPU sync
    for (layer, _), is_nan in zip(biases, are_nan):
        if is_nan:
            raise ModelError(
                f"{layer.label}: its output is all NaN, although its inputs and weights are finite",
                fix="look at its bias",
            )


def refuse_gaps(gaps: Sequence[Gap], batch: Batch) -> None:
    """Raises ModelError unless every real output of a pass is the expected one, up to rounding."""
    if not gaps:
        return
    norms = torch.cat([_norms(values_BN) for gap in gaps for values_BN in (gap.off_BN, gap.values_BN)])
    norms = norms.cpu()  # the only GPU sync
    by_gap = norms.split([2 * len(gap.off_BN) for gap in gaps])
    for gap, (distance_B, size_B) in zip(gaps, (one.view(2, -1).numpy() for one in by_gap)):
        if not (distance_B <= gap.tolerance * size_B).all():  # true for NaN, too
            _refuse(gap, batch)


def _refuse(gap: Gap, batch: Batch) -> None:
    """Raises ModelError unless the finite part of this output is the expected one, relative to all squared terms.

    An overflow in the layer is refused by the layers after it.
    """
    distance_B, norm_B = _norms(_finite(gap.exact_off())), _norms(_finite(gap.values_BN))
    if bool((distance_B <= gap.tolerance * norm_B).all()):
        return
    terms_B = _finite(gap.squares() + norm_B.square()).sqrt()
    size_B = torch.where(terms_B > 0, terms_B, 1)
    distance_B -= gap.least
    if bool((distance_B > gap.tolerance * size_B).any()):
        ratio = float((distance_B / size_B).max())
        raise ModelError(f"{_not_the_map(gap.layer, batch)}: its output is off by {ratio:.2g} of its size")


def _norms(values_BN: Tensor) -> Tensor:
    return torch.linalg.vector_norm(values_BN, dim=1, dtype=torch.float64)


def _not_the_map(layer: PrunableLayer, batch: Batch) -> str:
    return (
        f"{layer.label}: its forward is not the known map of {layer.known_as} (its class, a patched forward or a "
        f"hook changes what goes in or comes out), so its scores would be wrong; leave it as it is with "
        f"exclude={layer.module_name!r}, or teach its type with sipp.inputs.layers.register. On {batch.where}"
    )


def _looked_at(use: WeightUse) -> tuple[Tensor, Tensor]:
    return _some_of(tuple(use.windows.shape), use.n_position_dims, use.windows.device)


def _some_of(shape: tuple[int, ...], n_position_dims: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The points and the (flat) positions whose patches are compared: evenly spaced, with the first and the last."""
    n_all, n_positions = shape[0], math.prod(shape[2 : 2 + n_position_dims])
    n_patches = max(4, MOST_VALUES * n_all * n_positions // math.prod(shape))
    n_at = min(n_positions, max(2, n_patches // min(n_all, FEW_POINTS)))
    n_points = min(n_all, max(2, n_patches // n_at))
    return _spread(n_all, n_points, device), _spread(n_positions, n_at, device)


@lru_cache(maxsize=KEPT_PLACES)
def _places_looked_at(
    shape: tuple[int, ...], strides: tuple[int, ...], n_position_dims: int, device: torch.device
) -> Tensor:
    """The memory offsets of these patches' values from the first one: groups x points x positions x fan."""
    points, positions = _some_of(shape, n_position_dims, device)
    ends = 2 + n_position_dims
    at_positions = torch.zeros_like(positions)
    for place, stride in zip(places_of(positions, shape[2:ends]), strides[2:ends]):
        at_positions += place * stride
    fan = [steps(size, stride, device) for size, stride in zip(shape[ends:], strides[ends:])]
    return all_sums([steps(shape[1], strides[1], device), points * strides[0], at_positions, *fan])


@lru_cache(maxsize=KEPT_PLACES)
def _rows_looked_at(n_all_rows: int, n_groups: int, device: torch.device) -> Tensor:
    """The rows that are compared, the same number in each group."""
    n_rows = n_all_rows // n_groups
    within_R = _spread(n_rows, min(n_rows, max(1, MOST_ROWS // n_groups)), device)
    starts_G = torch.arange(0, n_all_rows, n_rows, dtype=torch.int64, device=device)
    return (starts_G[:, None] + within_R).flatten()


@lru_cache(maxsize=KEPT_PLACES)
def _spread(n_all: int, n_taken: int, device: torch.device) -> Tensor:
    return torch.linspace(0, n_all - 1, n_taken, dtype=torch.float64, device=device).round().long()


def _laid_out(real: Tensor, use: WeightUse, weight: Weight | None, n_points: int) -> Tensor | None:
    """The outputs of the compared patches, B x N (`_outputs_looked_at`); None if the output has another shape."""
    n_dims, sizes = max(1, use.n_position_dims), use.windows.shape
    if weight is None or real.ndim < n_dims or real.shape[-n_dims] != weight.n_rows:
        return None
    if real.numel() != n_patches_of(use) * weight.n_rows:
        return None
    rows_last = real.movedim(-n_dims, -1)
    if n_dims == 1:
        rows_last = by_point(rows_last, n_points).windows
    by_row = rows_last.reshape(sizes[0], n_positions_of(use), weight.n_rows)
    places = _outputs_looked_at(tuple(sizes), use.n_position_dims, weight.n_rows, by_row.stride(), by_row.device)
    return values_at(by_row, places).view(len(_looked_at(use)[0]), -1)


@lru_cache(maxsize=KEPT_PLACES)
def _outputs_looked_at(
    shape: tuple[int, ...], n_position_dims: int, n_rows: int, strides: tuple[int, ...], device: torch.device
) -> Tensor:
    """The memory offsets of these patches' outputs, in an output of points x positions x rows.

    The offsets are points x groups x positions x rows of a group.
    """
    points, positions = _some_of(shape, n_position_dims, device)
    rows_GR = _rows_looked_at(n_rows, shape[1], device).view(shape[1], -1) * strides[2]
    at_GPR = rows_GR[:, None] + (positions * strides[1])[:, None]
    return ((points * strides[0])[:, None] + at_GPR.flatten()).flatten()


def tolerance_of(tensor: Tensor) -> float:
    """How much values may change with the order of summation, relative to their size."""
    # a GPU's convolutions use TF32 by default
    is_coarse = tensor.device.type != "cpu" or torch.get_float32_matmul_precision() != "highest"
    if tensor.dtype == torch.float32 and is_coarse:
        return COARSE_TOLERANCE
    return TOLERANCE.get(tensor.dtype, COARSE_TOLERANCE)


def _first_tensor(output: Any) -> Tensor | None:
    if isinstance(output, PackedSequence):
        return output.data
    if isinstance(output, tuple | list) and output:
        return _first_tensor(output[0])
    return output if isinstance(output, Tensor) else None
