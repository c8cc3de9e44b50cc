"""An example input in, the call of the model that it means out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from sipp.errors import DataError
from sipp.inputs.batches import fresh
from sipp.inputs.capture import run_batch, scoring_mode
from sipp.records import Batch


def call_of(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments and named arguments of a call with this example."""
    if isinstance(example, Tensor):
        return (example,), {}
    if isinstance(example, Mapping):
        return (), dict(example)
    if isinstance(example, tuple):
        return example, {}
    raise DataError(
        f"the example is a {type(example).__name__}", fix="give a tensor, a tuple of arguments or a dict of named ones"
    )


def try_example(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raises a DataError where the model does not run on the example; what this pass changes is put back."""
    if any(isinstance(value, Tensor) and value.layout is not torch.strided for value in (*args, *kwargs.values())):
        raise DataError("the example holds a sparse tensor", fix="give a dense one")
    batch = Batch(index=0, where="the example", args=args, kwargs=kwargs, labels=None, n_points=1)
    with scoring_mode(model, "running"):
        run_batch(model, fresh(batch))
