"""A prunable weight as F x K rows, and how its patches are made: one adapter per layer type, one registry.

A layer type becomes prunable by one call, with a function that says what meets the weight in a forward pass:

    from sipp.inputs.layers import Adapter, register, vectors

    def uses(module, args, kwargs, n_points):
        yield vectors("weight", args[0], n_points)

    register(MyLinear, Adapter(weights=lambda module: ("weight",), uses=uses))

For a few points the real output is compared with the products of patches and rows, plus `bias`. A layer whose output is
something else returns it from `uses`, at the end.
"""

from sipp.inputs.layers.linear import vectors
from sipp.inputs.layers.registry import (
    Adapter,
    PrunableLayer,
    find_prunable_layers,
    register,
    unwrap,
)
from sipp.inputs.patches import WeightUse

__all__ = [
    "Adapter",
    "PrunableLayer",
    "WeightUse",
    "find_prunable_layers",
    "register",
    "unwrap",
    "vectors",
]
