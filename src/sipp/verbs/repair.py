"""`repair`: a pruned network with its kept weights refitted to the dense one."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from sipp.errors import OptionError
from sipp.inputs.data import AnyData
from sipp.inputs.layers import unwrap
from sipp.records.checking import check_flag, check_number, check_seed, check_whole
from sipp.records.network_hash import tensors_hash
from sipp.records.options import ChunkBytes
from sipp.records.pruned import Pruned, unstated
from sipp.repairing.layer_by_layer import LEARNING_RATE, repair_network

MOST_STEPS = 10_000_000
UNSTATED = (
    "repair gave the kept weights new values; sipp.assess(model, repaired.model, data) states what holds for them (T17)"
)


@torch.inference_mode(False)
def repair(
    model: nn.Module,
    pruned: Pruned,
    data: AnyData,
    *,
    steps: int = 0,
    learning_rate: float = LEARNING_RATE,
    n_points: int | None = None,
    seed: int = 0,
    chunk_bytes: ChunkBytes = "auto",
    progress: bool = True,
) -> Pruned:
    """The pruned network with its kept weights refitted to the dense `model`, without labels; masks stay as they are.

    Layer by layer in the order of execution, each row's kept weights and its intercept get the least-squares fit of the
    dense layer's outputs, on the inputs that the repaired network itself meets. Then `steps` of Adam bring the outputs
    of the whole network nearer to the dense ones. One point in twenty of `data` chooses: a layer that is not better
    there is left alone, and the polish stops where it no longer gains. One in twenty does nothing but judge the result,
    if there are 80 points or more: with fewer the record has no estimate. `repair` of the record says what was done.
    All points are used unless `n_points` says how many; all of them are held in memory. Neither model is changed.

    Example:
        >>> import sipp, torch
        >>> _ = torch.manual_seed(0)
        >>> net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
        >>> points = torch.rand(200, 8)
        >>> fixed = sipp.repair(net, sipp.prune(net, points, keep=0.5, method="wt"), points)
        >>> fixed.repair.output_after < fixed.repair.output_before
        True
    """
    steps = check_whole("steps", steps, least=0, most=MOST_STEPS)
    check_number("learning_rate", learning_rate, above=0)
    check_seed(seed)
    check_flag("progress", progress)
    _check_record(pruned)
    found = repair_network(
        unwrap(model),
        unwrap(pruned.model),
        pruned.masks,
        data,
        steps=steps,
        learning_rate=learning_rate,
        n_points=n_points,
        seed=seed,
        chunk_bytes=chunk_bytes,
        progress=progress,
    )
    return replace(
        unstated(pruned, UNSTATED),  # what was promised spoke of the old values
        model=found.model,
        stated=tensors_hash(found.model),
        repair=found.record,
        moved=found.moved,
        seen=pruned.seen | found.keys,
    )


def _check_record(pruned: object) -> None:
    """Raises unless it is the record of a pruning."""
    if not isinstance(pruned, Pruned):
        raise OptionError(
            f"pruned is a {type(pruned).__name__}, not the record of a pruning",
            fix="give what sipp.prune or sipp.assess gives",
        )
