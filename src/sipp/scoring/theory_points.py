"""How many calibration points the guarantees need (T4)."""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from sipp.errors import DataError
from sipp.inputs.batches import as_given
from sipp.inputs.patches import n_positions_of, n_rows_of
from sipp.inputs.probing import runner
from sipp.inputs.scoring_task import ScoringTask, task_of
from sipp.records.batches import Batch, WeightUse
from sipp.records.checking import check_number, check_record, check_share
from sipp.records.options import DEFAULT_METHOD, DELTA, Constants, Method, Selector
from sipp.records.ranking import Weight
from sipp.scoring.methods import method_of

# The factor c of T4: how many events share the failure probability.
PRUNE_FACTOR = 8
SIMPLE_FACTOR = 16
NETWORK_FACTOR = 6


def factor_of(method: str) -> int:
    """The factor c of T4 for the statement about the rows that a method prunes."""
    return SIMPLE_FACTOR if method == "sipp-simple" else PRUNE_FACTOR


def sample_size(
    model: nn.Module,
    example: Any,
    delta: float = DELTA,
    *,
    method: Method = DEFAULT_METHOD,
    include: Selector | None = None,
    exclude: Selector | None = None,
    constants: Constants = Constants(),
) -> int:
    """Returns how many calibration inputs the theory asks for at failure probability `delta`.

    `example` is one batch; the sizes of the model's outputs and patches are read from one run on it. `method` is the
    one you will prune with: `sipp-simple` needs a few more inputs.

    Example:
        >>> import sipp, torch
        >>> sipp.sample_size(torch.nn.Linear(4, 3), torch.rand(1, 4), delta=1e-16)
        125
    """
    check_record("constants", constants, Constants)
    return _points_for(
        task_of(model, [example], include=include, exclude=exclude), delta, method_of(method).name, constants
    )


def _points_for(task: ScoringTask, delta: float, method: str, constants: Constants) -> int:
    """n of T4, with eta and rho read off the task's data, one batch."""
    outputs: dict[str, int] = {}
    fan_ins: list[int] = []

    def on_use(weight: Weight, use: WeightUse, batch: Batch) -> None:
        most = n_positions_of(use) if use.counts_B is None else int(use.counts_B.max())
        outputs[weight.name] = outputs.get(weight.name, 0) + most * n_rows_of(use, weight)
        fan_ins.append(weight.fan_in)

    run = runner(task.model, task.layers)
    for batch in task.batches():
        run(batch, on_use)
    if not fan_ins:
        raise DataError("the example reaches no prunable weight", fix="give a batch of at least one whole input")
    factor, n_outputs = factor_of(method), sum(outputs.values())
    return calibration_needed(n_outputs, max(fan_ins), delta, factor=factor, k_constant=constants.k_constant)


def calibration_needed(n_outputs: int, max_fan_in: int, delta: float, *, factor: int, k_constant: float) -> int:
    """n = ceil(K_s ln(c eta rho / delta)) of T4."""
    check_share("delta", delta)
    check_number("k_constant", k_constant, above=0)
    return math.ceil(k_constant * (math.log(factor * n_outputs * max_fan_in) - math.log(delta)))


def resolve_points(
    task: ScoringTask, delta: float, *, method: Method = DEFAULT_METHOD, constants: Constants = Constants()
) -> ScoringTask:
    """The task with "theory" as a number of points; reads the first batch for this and puts it back."""
    if task.scoring.n_points != "theory" or task.data is None:
        return task
    first, data = task.data.first_batch(batch_size=1)
    example = task.with_points(None, [as_given(first)])
    return task.with_points(_points_for(example, delta, method_of(method).name, constants), data)
