"""Finds layers that do not compute what was captured of them, which would make their scores wrong.

A subclass, a hook or a patched forward may change the input unseen, or use the weight in another way. So, for a few
points, the real output of each layer is compared with the one that follows from its uses: the products of patches and
rows, or what its adapter returns.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sipp.errors import ModelError
from sipp.inputs.batches import Batch, Weight, WeightUse, to_rows
from sipp.inputs.layers import PrunableLayer, by_point
from sipp.results import numerics

_log = logging.getLogger("sipp")

MOST_VALUES = 1 << 14  # of patches, compared in one use: some positions, far apart, show as much as all
MOST_ROWS = 64  # of a group, evenly spaced too

# How much two ways to compute a sum may differ, relative to the root of its squared terms. The precision of the
# products decides. A replay of many steps may differ ten times as much.
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4}
COARSE_TOLERANCE = 5e-3  # half precision, TF32
MANY_STEPS = 10

Uses = list[tuple[Weight, WeightUse]]


@dataclass(frozen=True)
class _Expected:
    """What the output of one call must be: N values (float64), and the sum of the squared terms they are made of."""

    values_N: Tensor
    squares: Tensor
    found_in: Callable[[Any], Tensor | None]  # the same values of a real output; None if it has another form
    tolerance: float


class LayerChecks:
    """The checks of one run: `expect` before a layer runs, `compare` when it has."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.products: set[str] = set()  # the modules whose output is the products of one use, plus a bias
        self.returned: set[str] = set()  # those whose output is what their adapter returns
        self._awaited: dict[str, list[_Expected | None]] = {}

    def expect(self, layer: PrunableLayer, uses: Uses, returned: Any) -> None:
        """Notes what a call must return, from its uses or from what its adapter returns."""
        expected = None
        if returned is not None:
            expected = _as_returned(returned)
            self.returned.add(layer.module_name)
        elif len(uses) == 1 and _has_all_rows(*uses[0]):
            expected = _products(layer, *uses[0], self.batch.n_points)
            self.products.add(layer.module_name)
        elif uses:
            _log.warning("%s: sipp cannot compute its output, so it is not checked", layer.label)
        self._awaited.setdefault(layer.module_name, []).append(expected)

    def compare(self, layer: PrunableLayer, output: Any) -> None:
        """Raises ModelError unless the finite part of an output is the expected one, relative to its squared terms.

        An overflow is refused where it is scored.
        """
        awaited = self._awaited.get(layer.module_name)
        expected = awaited.pop() if awaited else None
        if expected is None:
            return
        not_the_map = (
            f"{layer.label}: sipp cannot reproduce this layer's output as a {layer.known_as} (its class, a patched "
            "forward or a hook changes what goes in or comes out), so its scores would be wrong; leave it as it is "
            f"with exclude={layer.module_name!r}, or register an adapter (sipp.inputs.layers.register). On "
            f"{self.batch.where}"
        )
        found_N = expected.found_in(output)
        if found_N is None:
            shape = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
            raise ModelError(f"{not_the_map}: its output has another form ({shape})")
        tolerance = max(expected.tolerance, tolerance_of(found_N.device, found_N.dtype))
        distance = _norm(found_N.double() - expected.values_N)
        distance = distance - torch.finfo(found_N.dtype).tiny * found_N.numel() ** 0.5  # for products that underflow
        size = (expected.squares + _norm(expected.values_N).square()).sqrt()
        ratio = float(distance / size) if float(size) > 0 else float(distance)
        if ratio > tolerance:
            raise ModelError(f"{not_the_map}: its output is off by {ratio:.2g} of its size")


def _has_all_rows(weight: Weight, use: WeightUse) -> bool:
    return use.row_start == 0 and use.n_rows in (None, weight.n_rows)


def _as_returned(returned: Any) -> _Expected:
    """All tensors of real numbers that an adapter returns, one after the other."""
    shapes = [tensor.shape for tensor in _reals(returned)]

    def values(output: Any) -> Tensor | None:
        tensors = _reals(output)
        if [tensor.shape for tensor in tensors] != shapes:
            return None
        return torch.cat([tensor.detach().flatten() for tensor in tensors])

    found_N = values(returned)
    assert found_N is not None
    zero = torch.zeros((), dtype=torch.float64, device=found_N.device)
    return _Expected(found_N.double(), zero, values, MANY_STEPS * tolerance_of(found_N.device, found_N.dtype))


def _reals(output: Any) -> list[Tensor]:
    return [tensor for tensor in every_tensor(output) if tensor.is_floating_point()]


def _products(layer: PrunableLayer, weight: Weight, use: WeightUse, n_points: int) -> _Expected | None:
    """The products of some patches of each point with some rows, plus the bias; None after an overflow."""
    windows, n_groups, n_positions = use.windows, use.n_groups, use.n_positions
    n_at = max(2, MOST_VALUES * n_positions // windows.numel())
    positions = _evenly_spaced(n_positions, min(n_positions, n_at), windows.device)
    rows = _compared_rows(weight.n_rows, n_groups, windows.device)
    at: tuple[Any, ...] = (
        slice(None),
        slice(None),
        *numerics.places_of(positions, windows.shape[2 : 2 + use.n_position_dims]),
    )
    patches_GPK = windows[at].flatten(3).transpose(0, 1).flatten(1, 2).double()
    if not bool(patches_GPK.isfinite().all()):
        return None
    rows_GRK = to_rows(weight, layer.parameter(use.parameter).detach())[rows].double().unflatten(0, (n_groups, -1))
    values_PF = torch.bmm(patches_GPK, rows_GRK.mT).transpose(0, 1).flatten(1)
    squares = torch.einsum("gpk,grk->", patches_GPK.square(), rows_GRK.square())
    bias = getattr(layer.module, "bias", None)
    if isinstance(bias, Tensor) and bias.numel() == weight.n_rows:
        values_PF = values_PF + bias.detach().flatten()[rows].double()

    def found_in(real: Any) -> Tensor | None:
        n_dims = max(1, use.n_position_dims)  # rows come before those of positions, or last
        if not isinstance(real, Tensor) or not real.is_floating_point() or real.ndim < n_dims:
            return None
        n_values = len(windows) * n_positions * weight.n_rows
        if real.shape[-n_dims] != weight.n_rows or real.numel() != n_values:
            return None
        rows_last = real.detach().movedim(-n_dims, -1)
        rows_last = by_point(rows_last, n_points).windows if n_dims == 1 else rows_last
        return rows_last.reshape(len(windows), n_positions, -1)[:, positions[:, None], rows].flatten()

    return _Expected(values_PF.flatten(), squares, found_in, tolerance_of(windows.device, windows.dtype))


def _compared_rows(n_all_rows: int, n_groups: int, device: torch.device) -> Tensor:
    """The rows that are compared, the same number in each group."""
    n_rows = n_all_rows // n_groups
    within_R = _evenly_spaced(n_rows, min(n_rows, max(1, MOST_ROWS // n_groups)), device)
    starts_G = torch.arange(0, n_all_rows, n_rows, dtype=torch.int64, device=device)
    return (starts_G[:, None] + within_R).flatten()


def _evenly_spaced(n_all: int, n_taken: int, device: torch.device) -> Tensor:
    return torch.linspace(0, n_all - 1, n_taken, dtype=torch.float64, device=device).round().long()


def _norm(values: Tensor) -> Tensor:
    """The norm of the finite values."""
    return torch.linalg.vector_norm(finite_or_zero(values), dtype=torch.float64)


def finite_or_zero(values: Tensor) -> Tensor:
    """The values, with 0 for those that are not finite."""
    return values.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def tolerance_of(device: torch.device, dtype: torch.dtype) -> float:
    """How much values may change with the order of summation, relative to their size."""
    # a GPU's convolutions use TF32 by default
    is_coarse = device.type != "cpu" or torch.get_float32_matmul_precision() != "highest"
    if dtype == torch.float32 and is_coarse:
        return COARSE_TOLERANCE
    return TOLERANCE.get(dtype, COARSE_TOLERANCE)


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
