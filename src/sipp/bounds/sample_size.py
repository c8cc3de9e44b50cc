"""How many calibration inputs the guarantees need (T4)."""

from __future__ import annotations

from typing import Any

from torch import nn

from sipp.bounds.statements import PRUNE_FACTOR, calibration_needed
from sipp.errors import DataError
from sipp.inputs import Batch, Weight, WeightUse, read_uses
from sipp.results import PruneOptions, Selector
from sipp.scoring import task_of


def sample_size(
    model: nn.Module,
    example: Any,
    delta: float = PruneOptions.delta,
    *,
    include: Selector | None = None,
    exclude: Selector | None = None,
    k_constant: float = PruneOptions.k_constant,
) -> int:
    """Returns how many calibration inputs the theory asks for at failure probability `delta`.

    `example` is one batch; the sizes of the model's outputs and patches are read from one run on it. The
    method `sipp-simple` needs a few more.

    Example:
        >>> import sipp, torch
        >>> sipp.sample_size(torch.nn.Linear(4, 3), torch.rand(1, 4), delta=1e-16)
        125
    """
    task = task_of(model, [example], include=include, exclude=exclude)
    outputs: dict[str, int] = {}
    fan_ins: list[int] = []

    def on_use(weight: Weight, use: WeightUse, batch: Batch) -> None:
        most = use.n_positions if use.counts_B is None else int(use.counts_B.max())
        outputs[weight.name] = outputs.get(weight.name, 0) + most * use.n_rows_of(weight)
        fan_ins.append(weight.fan_in)

    for batch in task.batches():
        read_uses(task.model, task.layers, batch, on_use)
    if not fan_ins:
        raise DataError("the example reaches no prunable weight", fix="give a batch of at least one whole input")
    n_outputs = sum(outputs.values())
    return calibration_needed(n_outputs, max(fan_ins), delta, factor=PRUNE_FACTOR, k_constant=k_constant)
