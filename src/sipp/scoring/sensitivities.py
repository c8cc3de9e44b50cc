"""Empirical sensitivities of every prunable weight, and the norms the bounds need, from one pass over the data.

T1-T3: for row i, weight j of sign s and activations of sign t,
    s_ij = max over points and patches p of  w_ij a_pj^t / D_pi^{st},    D^{st} = W^s a^t,    0/0 := 0
         = |w_ij| * max_p ( a_pj^t * 1/D_pi^{st} ):  a matrix product in the (max, x) semiring.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, get_args

import torch
from torch import Tensor, nn

from sipp.errors import DataError
from sipp.inputs import (
    AnyData,
    Batch,
    ModelMap,
    Weight,
    WeightUse,
    depends_on_batch,
    hash_of_points,
    map_for,
    outputs,
    read_uses,
    run_batch,
    scoring_mode,
    value_range,
)
from sipp.progress import progress_bar
from sipp.results import NormStats, Reduce, SeenInputs, Selector, check, numerics
from sipp.scoring import kernels
from sipp.scoring.kernels import Kernel
from sipp.scoring.running import RunningWeight, unreached_error
from sipp.scoring.task import LayerSensitivities, ScoringTask, Sensitivities, task_of

FEW_POINTS = 16  # in a batch, where sums for all of its points are held in memory
MOST_CHECKED_AGAIN = 8  # points, when an output that seems to depend on others is checked again
# A CPU works in cache-sized tiles whatever the chunk; a GPU needs large chunks (docs/performance.md).
AUTO_CHUNK_BYTES, FEWEST_GPU_CHUNK_BYTES = 32 << 20, 1 << 30
GPU_CHUNK_SHARE = 1 / 64  # of its memory


@torch.inference_mode(False)
def sensitivity(
    model: nn.Module,
    data: AnyData,
    *,
    reduce: Reduce = "max",
    include: Selector | None = None,
    exclude: Selector | None = None,
    norm_stats: NormStats = "running",
    kernel: Kernel = "auto",
    progress: bool = True,
) -> dict[str, Tensor]:
    """Returns the sensitivity of every prunable weight: {parameter name: float32 tensor of its shape}, in [0, 1].

    `norm_stats="batch"` runs BatchNorm with the statistics of each batch, for networks that are not trained.
    `kernel="reference"` computes the definition, slowly.

    Example:
        >>> import sipp, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2))
        >>> scores = sipp.sensitivity(model, torch.rand(8, 4))
        >>> {name: tuple(score.shape) for name, score in scores.items()}
        {'0.weight': (3, 4), '2.weight': (2, 3)}
    """
    check.flag("progress", progress)
    task = task_of(model, data, include=include, exclude=exclude, norm_stats=norm_stats, kernel=kernel)
    with progress_bar("scoring", task.points.n_points_known, shown=progress) as advance:
        scores = measure_sensitivities(task, reduce=reduce, on_batch=lambda batch: advance(batch.n_points))
    parameters = task.parameters()
    return {
        layer.weight.name: layer.weight.shaped(layer.sensitivity_FK, parameters[layer.weight.name])
        for layer in scores.layers
    }


def measure_sensitivities(
    task: ScoringTask,
    *,
    reduce: Reduce = "max",
    on_batch: Callable[[Batch], None] | None = None,
    with_means: bool = False,
) -> Sensitivities:
    """The scores of all weights of a task over the calibration points (T3), with the norms of T11 and T12.

    `with_means` adds the means over patches, from the same pass (T20), unless patches cannot be assigned to points.
    """
    check.choice("reduce", reduce, get_args(Reduce))
    model, norm_stats = task.model, task.norm_stats
    is_batch_dependent = depends_on_batch(model, norm_stats)
    both = with_means and reduce == "max"
    scoring_pass = _ScoringPass(task, _running(task, reduce), _running(task, "mean") if both else {})
    seen, draws, sizes = set[str](), set[str](), list[int]()
    dependence, found = "", None
    with _current_device(model):
        for batch, found in _batches(task, waits=both or reduce == "mean"):
            hashes = batch.hashes()
            seen.update(hashes)
            draws.update([hash_of_points(hashes)] if is_batch_dependent else hashes)
            output = scoring_pass.run(batch, found)
            scoring_pass.finish_batch(output, batch)
            if not sizes and not is_batch_dependent:
                dependence = _dependence(model, batch, norm_stats, output)
            sizes.append(batch.n_points)
            if on_batch is not None:
                on_batch(batch)
    assert found is not None  # data without a batch is refused
    return Sensitivities(
        layers=scoring_pass.layers(),
        n_points=sum(sizes),
        largest_batch=max(sizes),
        reduce=reduce,
        norm_stats=norm_stats,
        batch_dependent=is_batch_dependent,
        draws=frozenset(draws),
        seen=SeenInputs(frozenset(seen), is_all=True),
        dependence=dependence,
        map=found,
    )


@dataclass
class _ScoringPass:
    """The running scores of all weights in one pass over the data."""

    task: ScoringTask
    running: dict[str, RunningWeight]
    means: dict[str, RunningWeight]  # empty if none are asked for, or patches cannot be assigned to points
    met: dict[str, int] = field(default_factory=dict)  # weights that were used, and their place in order of first use

    def run(self, batch: Batch, found: ModelMap) -> Any:
        """The model's output for a batch, whose uses of weights are scored on the way."""

        def on_use(weight: Weight, use: WeightUse, batch: Batch) -> None:
            name, mine, n_uses = weight.name, self.running[weight.name], found.n_uses.get(weight.name, 1)
            self.met.setdefault(name, len(self.met))
            values = value_range(use.windows, mine.kernel.extremes)
            mine.add(use, batch, values, n_uses)
            if not use.attributed:  # a use that the probe did not meet is not attributed either
                self.means = {}
            elif name in self.means:
                self.means[name].add(use, batch, values, n_uses)

        task = self.task
        return read_uses(task.model, task.layers, batch, on_use, found, task.norm_stats)

    def finish_batch(self, output: Any, batch: Batch) -> None:
        """Adds the finished batch to the sensitivities."""
        on_device_B = outputs.output_norms(output, batch.n_points)
        norms_B = None if on_device_B is None else on_device_B.cpu()
        for one in (*self.running.values(), *self.means.values()):
            one.finish_batch(batch.n_points, norms_B)

    def layers(self) -> tuple[LayerSensitivities, ...]:
        """The scores of all weights; raises if no input ever reached one."""
        for name in self.running:
            if name not in self.met:
                raise unreached_error(name)
        means = {name: one.sensitivities() for name, one in self.means.items()}
        return tuple(one.result(self.met[name], means.get(name)) for name, one in self.running.items())


def _running(task: ScoringTask, reduce: Reduce) -> dict[str, RunningWeight]:
    """The running state of every weight, empty."""
    device = numerics.device_of(task.model)
    kernel, n_bytes = kernels.pick(task.kernel, device), chunk_bytes_on(device)
    parameters = task.parameters()
    return {
        weight.name: RunningWeight(weight, parameters[weight.name], kernel, reduce, n_bytes) for weight in task.weights
    }


def ratios_of(task: ScoringTask, draw: Batch, known: ModelMap | None) -> tuple[list[tuple[Weight, Tensor]], ModelMap]:
    """g_j(x) of T2 (F x K) for every weight that these points reach: the largest ratios of one batch alone.

    And what is known of the model, for the next call.
    """
    found = map_for(task.model, task.layers, draw, known, task.norm_stats)
    scoring_pass = _ScoringPass(task, _running(task, "max"), {})
    with _current_device(task.model):
        scoring_pass.run(draw, found)
    running = scoring_pass.running.items()
    return [(one.weight, one.sensitivities()) for name, one in running if name in scoring_pass.met], found


def _batches(task: ScoringTask, *, waits: bool) -> Iterator[tuple[Batch, ModelMap]]:
    """The batches, each with what is known of the model on such batches.

    A mean over a point's patches is complete after the last use. With `waits`, if a weight has several uses, sums for
    all points of a batch are held in memory, so batches are made small if we may choose their size.
    """
    found = None
    for batch in task.batches():
        found = map_for(task.model, task.layers, batch, found, task.norm_stats)
        is_ours = task.points.is_in_tensors
        if not (waits and is_ours and max(found.n_uses.values(), default=0) > 1 and batch.n_points > FEW_POINTS):
            yield batch, found
            continue
        for start in range(0, batch.n_points, FEW_POINTS):
            yield batch.at(slice(start, start + FEW_POINTS)), found


def _dependence(model: nn.Module, batch: Batch, norm_stats: NormStats, output: Any) -> str:
    """Why the output at a point of this batch is not a function of that point alone; raises if dimension 0 is time."""

    def run(part: Batch) -> Any:
        with scoring_mode(model, norm_stats):
            return run_batch(model, part.copied())

    allowed = outputs.allowed_difference(model, batch)
    if numerics.device_of(model).type == "cpu":
        reason = outputs.why_dependent(batch, run, allowed, output)
    else:  # TF32 in a deep network may look like a dependence, so a few points are run without it
        with numerics.float32_products(allow_tf32=False), torch.backends.cudnn.flags(allow_tf32=False):
            reason = outputs.why_dependent(batch.at(slice(MOST_CHECKED_AGAIN)), run, allowed)
    if reason == outputs.ORDER:
        raise DataError(
            f"{reason}",
            where=batch.where,
            fix="put the inputs along dimension 0, and make outputs independent of each other",
        )
    return reason


def chunk_bytes_on(device: torch.device) -> int:
    """How much memory patches and what is made of them may take on this device, beside the model."""
    if device.type != "cuda":
        return AUTO_CHUNK_BYTES
    total = torch.cuda.get_device_properties(device).total_memory
    return max(FEWEST_GPU_CHUNK_BYTES, math.floor(GPU_CHUNK_SHARE * total))


def _current_device(model: nn.Module) -> AbstractContextManager[Any]:
    """A context in which the model's GPU is the current one: Triton launches kernels there, and events are its own."""
    device = numerics.device_of(model)
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
