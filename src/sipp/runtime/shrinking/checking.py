"""Checks on an example that two networks compute the same, in float64 where they can."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from sipp.errors import SippError
from sipp.inputs.capture import run_batch, scoring_mode
from sipp.native import pytree
from sipp.records.batches import Batch
from sipp.runtime.examples import copies

Call = tuple[tuple[Any, ...], dict[str, Any]]


def outputs(model: nn.Module, call: Call) -> list[Any]:
    """All that the network gives for the example, in eval mode; what this pass changes is put back.

    A network that draws numbers draws the same ones in every such pass.
    """
    args, kwargs = copies(*call)
    batch = Batch(index=0, where="the example", args=args, kwargs=kwargs, labels=None, n_points=1)
    with torch.random.fork_rng(), scoring_mode(model, "running"):
        torch.manual_seed(0)
        return list(pytree.tree_leaves(run_batch(model, batch)))


def float64_copy(model: nn.Module, call: Call) -> tuple[nn.Module, Call, list[Any]] | None:
    """A float64 copy of the network, the example for it and its outputs; None: it does not run in float64."""
    try:
        precise = copy.deepcopy(model).double()
        wide = pytree.tree_map(lambda x: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x, call)
        return precise, wide, outputs(precise, wide)
    except (SippError, RuntimeError, TypeError):
        return None


def more_points(model: nn.Module, call: Call) -> list[tuple[Call, list[Any]]]:
    """The example with its points twice, and the network's outputs; nothing where it does not take that."""
    doubled = pytree.tree_map(lambda x: torch.cat((x, x)) if isinstance(x, Tensor) and x.ndim else x, call)
    try:
        return [(doubled, outputs(model, doubled))]
    except SippError:
        return []
