"""A prunable weight as F x K rows, and how its patches are made: one adapter per layer type, one registry.

A layer type becomes prunable by one call, with a function that gives the inputs of its weight in a forward pass:

    from sipp.inputs.layers import Adapter, register, vectors

    def uses(module, args, kwargs, n_points):
        yield vectors("weight", args[0], n_points)

    register(MyLinear, Adapter(weights=lambda module: ("weight",), uses=uses))

For a few points the real output is compared with the products of patches and rows, plus `bias`. A layer whose output is
something else returns it from `uses`, at the end.
"""

from typing import TYPE_CHECKING

from sipp.doors import door

if TYPE_CHECKING:
    from sipp.inputs.layers.attention import ATTENTION as ATTENTION
    from sipp.inputs.layers.conv import CONV as CONV
    from sipp.inputs.layers.experts import EXPERTS as EXPERTS
    from sipp.inputs.layers.recurrent import (
        CELL as CELL,
        RECURRENT as RECURRENT,
    )
    from sipp.inputs.layers.registry import (
        Adapter as Adapter,
        PrunableLayer as PrunableLayer,
        find_prunable_layers as find_prunable_layers,
        register as register,
        unwrap as unwrap,
    )
    from sipp.inputs.patches import (
        WeightUse as WeightUse,
        vectors as vectors,
    )
else:
    __getattr__, __dir__, __all__ = door(__name__, __file__)
