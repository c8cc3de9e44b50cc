"""Calls a model with an example input, and compares two outputs."""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from sipp.errors import DataError
from sipp.inputs import Batch, run_batch, scoring_mode
from sipp.native import pytree

AGREEMENT = 1e-4  # how far outputs may differ, relative to the largest: float32 sums may have another order
UNITS = 64  # times the epsilon of a dtype: what its rounding may cause

Call = tuple[tuple[Any, ...], dict[str, Any]]  # positional and keyword arguments


def call_of(example: Any) -> Call:
    """The positional and keyword arguments of a call with this example, ready to be traced."""
    _check_dense(example, "the example")
    if isinstance(example, Tensor):
        return without_aliases((example,), {})
    if isinstance(example, Mapping):
        odd = next((name for name in example if not isinstance(name, str)), None)
        if odd is not None:
            raise DataError(f"the example has the key {odd!r:.60}", fix="its keys are the names of the model's inputs")
        return without_aliases((), dict(example))
    if isinstance(example, tuple):
        return without_aliases(example, {})
    raise DataError(
        f"the example must be a tensor, a tuple of arguments or a dict of named ones, not a {type(example).__name__}"
    )


def _check_dense(values: Any, where: str) -> None:
    if any(isinstance(value, Tensor) and value.layout is not torch.strided for value in pytree.tree_leaves(values)):
        raise DataError(f"{where} contains a sparse tensor", fix="give a dense one")


def without_aliases(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """The arguments, ready to be traced: repeated tensors and tensors from inference mode are cloned.

    torch.export would treat one tensor in two places as a single input.
    """
    met: set[int] = set()

    def own(value: Any) -> Any:
        if not isinstance(value, Tensor) or not (value.is_inference() or id(value) in met):
            met.add(id(value))
            return value
        return value.detach().clone()

    return pytree.tree_map(own, (args, kwargs))


def cloned(values: Any) -> Any:
    """The same with copies of all tensors: of inputs, which a network may write to, or of results that are reused."""
    return pytree.tree_map(lambda x: x.detach().clone() if isinstance(x, Tensor) else x, values)


def in_signature_order(model: nn.Module, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments in the order of the forward signature; a call may give them in any order."""
    if len(kwargs) < 2:
        return kwargs
    listed = list(inspect.signature(model.forward).parameters)
    known = {name: kwargs[name] for name in listed if name in kwargs}
    return known | {name: kwargs[name] for name in sorted(kwargs.keys() - known.keys())}


def input_signature(args: tuple[Any, ...], kwargs: dict[str, Any], device: str) -> Hashable:
    """What a plan is compiled for: shape and dtype of tensors, values of other arguments, and autocast."""
    cast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    if len(args) == 1 and not kwargs and isinstance(args[0], Tensor):
        return cast, _leaf_signature(args[0])
    leaves, spec = pytree.tree_flatten((args, kwargs))
    return cast, repr(spec), *(_leaf_signature(leaf) for leaf in leaves)


def _leaf_signature(leaf: Any) -> Hashable:
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.dtype, leaf.layout, leaf.device
    if not isinstance(leaf, Hashable):
        raise DataError(f"an argument contains a {type(leaf).__name__}", fix="give tensors, numbers and strings")
    return type(leaf), leaf


def try_example(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, where: str = "the example", device: str = "cpu"
) -> None:
    """Raises DataError if the model does not run on a copy of the example; restores the buffers that this changes."""
    _check_dense((args, kwargs), where)
    for value in pytree.tree_leaves((args, kwargs)):
        if isinstance(value, Tensor) and value.device.type != device:
            here = "the CPU" if device == "cpu" else "the GPU"
            raise DataError(f"{where} contains a tensor on {value.device}", fix=f"give it on {here}, where this runs")
    own_args, own_kwargs = cloned((args, kwargs))
    with scoring_mode(model, "running"):
        run_batch(model, Batch(index=0, where=where, args=own_args, kwargs=own_kwargs, labels=None, n_points=1))


def output_difference(outputs: list[Any], expected: list[Any]) -> float:
    """The largest difference relative to the largest value of an output; infinite if shapes or plain numbers differ.

    Values that are not finite must be identical.
    """
    if [_exact_part(output) for output in outputs] != [_exact_part(output) for output in expected]:
        return torch.inf
    worst = 0.0
    for output, other in zip(outputs, expected):
        if isinstance(other, Tensor) and not torch.equal(output, other):
            output, other = (t.to(torch.complex128 if t.is_complex() else torch.float64) for t in (output, other))
            known = other.isfinite()
            if not torch.allclose(output[~known], other[~known], rtol=0, atol=0, equal_nan=True):
                return torch.inf
            if bool(known.any()):
                gap = (output - other)[known].abs().max() / other[known].abs().max()
                worst = max(worst, torch.inf if bool(gap.isnan()) else float(gap))
    return worst


def numeric_pairs(outputs: Any, expected: Any) -> list[tuple[Tensor, Tensor]]:
    """The tensors of real or complex numbers in two outputs; integers are left out, rounding may decide them."""
    pairs = zip(pytree.tree_leaves(outputs), pytree.tree_leaves(expected), strict=True)
    return [(a, b) for a, b in pairs if isinstance(b, Tensor) and (b.is_floating_point() or b.is_complex())]


def numeric_difference(outputs: Any, expected: Any) -> tuple[float, bool]:
    """The largest difference of real numbers, relative to the largest of an output, and whether all are rounding."""
    pairs = numeric_pairs(outputs, expected)
    gaps = [output_difference([own], [other]) for own, other in pairs]
    return max(gaps, default=0.0), all(gap <= rounding_tolerance([other]) for gap, (_, other) in zip(gaps, pairs))


def rounding_tolerance(expected: list[Any]) -> float:
    """How far outputs may differ, relative to the largest, because a network computes in their dtypes."""
    return max(AGREEMENT, rounding_of(expected))


def rounding_of(values: Iterable[Any]) -> float:
    """How far outputs may differ, relative to the largest, if a float64 network computes these values on the way.

    It follows from the narrowest dtype. Kernels may compute in float32 whatever they are given.
    """
    kinds = [value.dtype for value in values if isinstance(value, Tensor) and value.is_floating_point()]
    return UNITS * max(torch.finfo(kind).eps for kind in [torch.float32, *kinds])


def _exact_part(value: Any) -> Any:
    """What must match exactly: a tensor's shape, a number or text itself, the type of anything else."""
    if isinstance(value, Tensor):
        return value.shape
    return value if isinstance(value, int | float | str) else type(value)
