"""Two networks and an example in; whether they compute the same out, in float64 where they run in it."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from sipp.errors import SippError
from sipp.inputs.capture import run_batch, scoring_mode
from sipp.native import pytree
from sipp.records.batches import Batch

Call = tuple[tuple[Any, ...], dict[str, Any]]


def outputs(model: nn.Module, call: Call) -> list[Any]:
    """All that the network gives for the example, in eval mode; what this pass changes is put back.

    A network that draws numbers draws the same ones in every such pass.
    """
    args, kwargs = pytree.tree_map(lambda x: x.detach().clone() if isinstance(x, Tensor) else x, call)
    batch = Batch(index=0, where="the example", args=args, kwargs=kwargs, labels=None, n_points=1)
    with torch.random.fork_rng(), scoring_mode(model, "running"):
        torch.manual_seed(0)
        return list(pytree.tree_leaves(run_batch(model, batch)))


def in_float64(model: nn.Module, call: Call) -> tuple[nn.Module, Call, list[Any]] | None:
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


def off_by(found: list[Any], expected: list[Any]) -> float:
    """The largest difference of an output, by its largest number; infinite where shapes or plain numbers differ."""
    if [_kind(one) for one in found] != [_kind(one) for one in expected]:
        return torch.inf
    worst = 0.0
    for one, other in zip(found, expected):
        if isinstance(other, Tensor) and other.numel() and not torch.equal(one, other):
            gap = (one.double() - other.double()).abs().max() / other.double().abs().max()
            worst = max(worst, torch.inf if bool(gap.isnan()) else float(gap))
    return worst


def _kind(value: Any) -> Any:
    """What must be equal of an output: a tensor's shape, a number or a text itself, the type of anything else."""
    if isinstance(value, Tensor):
        return value.shape
    return value if isinstance(value, int | float | str) else type(value)
