"""Finds layers that do not compute what was captured of them, which would make their scores wrong.

A subclass, a hook or a patched forward may change the input unseen, or use the weight in another way: the real output
is compared with the one that follows from what was captured.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from sipp.errors import ModelError
from sipp.inputs.batches import Batch, Weight, WeightUse, to_rows
from sipp.inputs.layers import PrunableLayer, by_point
from sipp.inputs.patches import n_groups_of, n_patches_of, n_positions_of
from sipp.results import numerics

_log = logging.getLogger("sipp")

MOST_VALUES = 1 << 14  # compared in one use: some points and positions, far apart, show as much as all
FEW_POINTS = 8  # at least, if there are many positions to compare
MOST_ROWS = 64  # of a group, evenly spaced too

# How much two ways to compute a sum may differ, relative to the root of its squared terms. The precision of the
# products decides. A replay of many steps may differ ten times as much.
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4}
COARSE_TOLERANCE = 5e-3  # half precision, TF32
MANY_STEPS = 10


@dataclass(frozen=True)
class Expected:
    """What the output of one call must be: all of it (as one point), or its values at some patches and rows."""

    values_BN: Tensor
    found_in: Callable[[Tensor], Tensor | None]  # the same values of a real output; None if it has another shape
    squares: Callable[[], Tensor | float]  # the sums of the squared terms of each point; 0 if only values are known
    tolerance: Callable[[Tensor], float]  # for a real output


def expected_output(
    layer: PrunableLayer, args: tuple[Any, ...], kwargs: dict[str, Any], by_use: list[Expected | None]
) -> Expected | None:
    """What this call must return, computed before the layer runs; None if that is not possible, which is logged.

    `by_use` holds the `expected_products` of each of its uses.
    """
    output = layer.adapter.output
    if callable(output):
        values = _first_tensor(output(layer.module, args, kwargs))
        if values is not None:
            # a copy: the result may be a view of an input that forward changes in place
            values_1N, shape, own = (
                values.detach().to(torch.float64, copy=True).reshape(1, -1),
                values.shape,
                values.dtype,
            )
            return Expected(
                values_1N,
                lambda real: real.reshape(1, -1) if real.shape == shape else None,
                float,
                lambda real: MANY_STEPS * max(tolerance_of(real.device, own), tolerance_of(real.device, real.dtype)),
            )
    elif not by_use or (output == "products" and len(by_use) == 1 and by_use[0] is not None):
        return by_use[0] if by_use else None  # in a call without patches there is nothing to check
    _log.warning("%s: sipp cannot compute its output, so it is not checked", layer.label)
    return None


def expected_products(layer: PrunableLayer, weight: Weight, use: WeightUse, n_points: int) -> Expected | None:
    """The products of some patches of a use with some rows, plus the bias; None unless it is a use of all rows."""
    if use.row_start != 0 or use.n_rows not in (None, weight.n_rows):
        return None
    windows, n_groups = use.windows, n_groups_of(use)
    points, positions = _compared_places(use)
    rows = _compared_rows(weight.n_rows, n_groups, windows.device)
    dtype = torch.float64 if windows.dtype == torch.float64 else torch.float32
    at: tuple[Any, ...] = (
        points[:, None],
        slice(None),
        *numerics.places_of(positions, windows.shape[2 : 2 + use.n_position_dims]),
    )
    patches_BPGK = windows[at].flatten(3).to(dtype)
    patches_GPK = patches_BPGK.flatten(0, 1).transpose(0, 1)
    rows_GRK = to_rows(weight, layer.parameter(use.parameter).detach())[rows].to(dtype).unflatten(0, (n_groups, -1))
    with numerics.exact_matmul():
        values_PF = torch.bmm(patches_GPK, rows_GRK.mT).transpose(0, 1).flatten(1)
    bias = getattr(layer.module, "bias", None)
    if isinstance(bias, Tensor) and bias.numel() == weight.n_rows:
        values_PF = values_PF + bias.detach().flatten()[rows].to(dtype)

    def squares_B() -> Tensor:
        # of a point's patches and these rows: sum_k (sum_p a_pk^2) (sum_r w_rk^2), no second product
        squares_BGK = patches_BPGK.double().square().sum(1)
        return (squares_BGK * rows_GRK.double().square().sum(1)).sum((1, 2))

    def found_in(real: Tensor) -> Tensor | None:
        n_dims = max(1, use.n_position_dims)  # rows come before those of positions, or last
        if real.ndim < n_dims or real.shape[-n_dims] != weight.n_rows:
            return None
        if real.numel() != n_patches_of(use) * weight.n_rows:
            return None
        rows_last = real.movedim(-n_dims, -1)
        if n_dims == 1:
            rows_last = by_point(rows_last, n_points).windows
        by_row = rows_last.reshape(len(windows), n_positions_of(use), weight.n_rows)
        return by_row[points[:, None, None], positions[:, None], rows].flatten(1)

    def tolerance(real: Tensor) -> float:
        return max(tolerance_of(windows.device, windows.dtype), tolerance_of(real.device, real.dtype))

    return Expected(values_PF.view(len(points), -1), found_in, squares_B, tolerance)


def _compared_places(use: WeightUse) -> tuple[Tensor, Tensor]:
    """The points and the (flat) positions whose patches are compared: evenly spaced, with the first and the last."""
    n_all, n_positions, device = len(use.windows), n_positions_of(use), use.windows.device
    n_patches = max(4, MOST_VALUES * n_all * n_positions // use.windows.numel())
    n_at = min(n_positions, max(2, n_patches // min(n_all, FEW_POINTS)))
    n_points = min(n_all, max(2, n_patches // n_at))
    return _evenly_spaced(n_all, n_points, device), _evenly_spaced(n_positions, n_at, device)


def _compared_rows(n_all_rows: int, n_groups: int, device: torch.device) -> Tensor:
    """The rows that are compared, the same number in each group."""
    n_rows = n_all_rows // n_groups
    within_R = _evenly_spaced(n_rows, min(n_rows, max(1, MOST_ROWS // n_groups)), device)
    starts_G = torch.arange(0, n_all_rows, n_rows, dtype=torch.int64, device=device)
    return (starts_G[:, None] + within_R).flatten()


def _evenly_spaced(n_all: int, n_taken: int, device: torch.device) -> Tensor:
    return torch.linspace(0, n_all - 1, n_taken, dtype=torch.float64, device=device).round().long()


def refuse_other_output(layer: PrunableLayer, expected: Expected, output: Any, batch: Batch) -> None:
    """Raises ModelError unless the finite part of an output is the expected one, relative to its squared terms.

    An overflow in the layer is refused by the layers after it.
    """
    not_the_map = (
        f"{layer.label}: sipp cannot reproduce this layer's output as a {layer.known_as} (its class, a patched "
        f"forward or a hook changes what goes in or comes out), so its scores would be wrong; leave it as it is with "
        f"exclude={layer.module_name!r}, or register an adapter (sipp.inputs.layers.register). On {batch.where}"
    )
    real = _first_tensor(output)
    if real is None or not real.is_floating_point():
        raise ModelError(f"{not_the_map}: it gives no real numbers but a {type(output).__name__}")
    found_BN = expected.found_in(real)
    if found_BN is None:
        raise ModelError(f"{not_the_map}: its output has the shape {tuple(real.shape)}")
    distance_B = _norms(found_BN.double() - expected.values_BN.double())  # beyond the range of float32, too
    distance_B -= torch.finfo(real.dtype).tiny * found_BN.numel() ** 0.5  # what products that underflow may add up to
    size_B = _norms(expected.values_BN)
    size_B = torch.maximum(size_B, finite_or_zero(expected.squares() + size_B.square()).sqrt())
    ratio_B = distance_B / torch.where(size_B > 0, size_B, 1)
    if bool((ratio_B > expected.tolerance(real)).any()):
        raise ModelError(f"{not_the_map}: its output is off by {float(ratio_B.max()):.2g} of its size")


def _norms(values_BN: Tensor) -> Tensor:
    """The norm of the finite values of each point."""
    return torch.linalg.vector_norm(finite_or_zero(values_BN), dim=1, dtype=torch.float64)


def finite_or_zero(values: Tensor) -> Tensor:
    """The values, with 0 for those that are not finite."""
    return values.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def refuse_nan_biases(layers: Sequence[PrunableLayer]) -> None:
    """Raises ModelError if the bias of a layer is all NaN: no later layer could refuse the output of the last one."""
    named = [(layer, getattr(layer.module, "bias", None)) for layer in layers if layer.adapter.output == "products"]
    biases = [(layer, bias.detach()) for layer, bias in named if isinstance(bias, Tensor) and bias.numel() > 0]
    if not biases:
        return
    sums = torch.stack([bias.sum(dtype=torch.float64) for _, bias in biases]).tolist()  # the only GPU sync
    for (layer, bias), total in zip(biases, sums):
        if math.isnan(total) and bool(bias.isnan().all()):
            raise ModelError(
                f"{layer.label}: its output is all NaN, although its inputs and weights are finite",
                fix="look at its bias",
            )


def tolerance_of(device: torch.device, dtype: torch.dtype) -> float:
    """How much values may change with the order of summation, relative to their size."""
    # a GPU's convolutions use TF32 by default
    is_coarse = device.type != "cpu" or torch.get_float32_matmul_precision() != "highest"
    if dtype == torch.float32 and is_coarse:
        return COARSE_TOLERANCE
    return TOLERANCE.get(dtype, COARSE_TOLERANCE)


def _first_tensor(output: Any) -> Tensor | None:
    if isinstance(output, PackedSequence):
        return output.data
    if isinstance(output, tuple | list) and output:
        return _first_tensor(output[0])
    return output if isinstance(output, Tensor) else None


def every_tensor(value: Any) -> list[Tensor]:
    """All tensors in a value, in order: itself, or those of a tuple, a list or a dict, however deep."""
    found: list[Tensor] = []
    _gather(value if isinstance(value, (tuple, list)) else (value,), found)
    return found


def _gather(values: Iterable[Any], found: list[Tensor]) -> None:
    # not a generator, and called for containers only: this runs for every operation of a network
    for one in values:
        if isinstance(one, Tensor):
            found.append(one)
        elif isinstance(one, (tuple, list)):
            _gather(one, found)
        elif isinstance(one, dict):
            _gather(one.values(), found)
