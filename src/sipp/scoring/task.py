"""What is scored (`ScoringTask`: a model, its prunable weights, the points) and what is found (`Sensitivities`)."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import get_args

from torch import Tensor, nn

from sipp.errors import DataError, OptionError
from sipp.inputs import (
    AnyData,
    Batch,
    Data,
    ModelMap,
    OnUse,
    PrunableLayer,
    Weight,
    data_of,
    find_prunable_layers,
    read_uses,
    unwrap,
)
from sipp.results import (
    Loss,
    NormStats,
    Reduce,
    SeenInputs,
    Selector,
    check,
    numerics,
)
from sipp.scoring.kernels import Kernel

LOGITS = "logits_to_keep"  # of models of transformers: at how many last positions logits are computed


@dataclass(frozen=True)
class ScoringTask:
    """The input of every score: a model, its prunable weights, the data, and how to run them."""

    model: nn.Module  # without wrappers
    layers: tuple[PrunableLayer, ...]  # the modules that hold the chosen weights
    data: Data | None
    seed: int = 0
    norm_stats: NormStats = "running"  # of BatchNorm: its own, or those of each batch
    loss: Loss | None = None  # of (outputs, labels), for methods that take gradients; None: cross-entropy
    kernel: Kernel = "auto"
    read: set[str] | None = None  # collects the hashes of all inputs that `batches` gives

    @cached_property
    def weights(self) -> tuple[Weight, ...]:
        """The chosen weights, in the order of the model's parameters."""
        return tuple({weight.name: weight for layer in self.layers for weight in layer.weights.values()}.values())

    def parameters(self) -> dict[str, nn.Parameter]:
        """The chosen weights by name."""
        return {weight.name: self.model.get_parameter(weight.name) for weight in self.weights}

    @property
    def points(self) -> Data:
        """The data, which must be there."""
        if self.data is None:
            raise DataError(
                "the method needs data, and there is none",
                fix="give a tensor of inputs, a Dataset or an iterable of batches (in the shell: --data)",
            )
        return self.data

    def batches(self, batch_size: int | None = None) -> Iterator[Batch]:
        """The points, checked, on the model's device; of a tensor or Dataset, `batch_size` at a time."""
        for batch in self.points.batches(batch_size):
            if self.read is not None:
                self.read.update(batch.hashes())
            yield batch

    def with_points(self, data: AnyData | None) -> ScoringTask:
        """The task with other data."""
        return replace(self, data=_data_for(self.model, data))

    def hold_back(self) -> tuple[ScoringTask, Data]:
        """The task with the points to score, and points held back for a sound bound (T18), a blend or `compare`."""
        scored, held_back = self.points.hold_back()
        return self.with_points(scored), held_back


def each_use(task: ScoringTask, on_use: OnUse) -> None:
    """Calls `on_use` for every use of a chosen weight, over all points."""
    spares_logits = _spares_logits(task)
    for batch in task.batches():
        if spares_logits:  # they are not needed, and may be larger than everything else
            batch = replace(batch, kwargs={LOGITS: 1} | batch.kwargs)
        read_uses(task.model, task.layers, batch, on_use, norm_stats=task.norm_stats)


def _spares_logits(task: ScoringTask) -> bool:
    """Whether the model can compute logits for the last position only, and its head is not scored."""
    head = getattr(task.model, "get_output_embeddings", lambda: None)()
    is_scored = any(layer.module is head for layer in task.layers)
    return LOGITS in inspect.signature(task.model.forward).parameters and not is_scored


def task_of(
    model: nn.Module,
    data: AnyData | None = None,
    *,
    include: Selector | None = None,
    exclude: Selector | None = None,
    seed: int = 0,
    norm_stats: NormStats = "running",
    loss: Loss | None = None,
    kernel: Kernel = "auto",
    warns: bool = True,
) -> ScoringTask:
    """A model without its wrappers, with the weights that are chosen by `include` and `exclude`.

    With `warns`, there is a warning if the head of a language model is left out.
    """
    check.choice("norm_stats", norm_stats, get_args(NormStats))
    if loss is not None and not callable(loss):
        raise OptionError(f"loss={loss!r:.60} must be a function of (outputs, labels), such as F.cross_entropy")
    model = unwrap(model)
    layers = find_prunable_layers(model, include=include, exclude=exclude, warns=warns)
    return ScoringTask(model, layers, _data_for(model, data), seed, norm_stats, loss, kernel)


def _data_for(model: nn.Module, data: AnyData | None) -> Data | None:
    return None if data is None else data_of(data, device=numerics.device_of(model))


# --- What is found ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayerSensitivities:
    """Sensitivities and norms of one weight, from one pass over the calibration points (T1-T3, T11, T12)."""

    weight: Weight
    sensitivity_FK: Tensor
    order: int  # position of the layer's first use in the forward pass: the l of T12
    n_outputs: int  # eta_l: output scalars for one input
    sign_complexity: float | None  # Delta_l; None if patches cannot be assigned to points
    output_ratio: float | None  # max over S of ||Z_l(x)|| / ||f(x)||, the data part of kappa_l
    quadrants_B: Tensor | None  # of each point: the sum of the four ||Z_l^{st}(x)||, over ||f(x)|| (T18); None: unknown
    mean_FK: Tensor | None = None  # the mean over patches instead of the maximum, if both were asked for (T20)


@dataclass(frozen=True)
class Sensitivities:
    """The sensitivities of a network, and the data they were computed on."""

    layers: tuple[LayerSensitivities, ...]  # in the order of the model's parameters
    n_points: int
    largest_batch: int
    reduce: Reduce
    norm_stats: NormStats
    batch_dependent: bool  # patches depend on the batch (batch statistics): T4-T12 are about batches
    draws: frozenset[str]  # hashes of the distinct draws: points, or batches if batch_dependent
    seen: SeenInputs  # the points that were scored, and others that chose something: a blend, repaired values
    map: ModelMap  # of the model on such inputs
    dependence: str  # why outputs depend on other points, so that nothing is guaranteed; empty: they do not

    @property
    def n_distinct(self) -> int:
        """n of T4 and T18: the number of distinct draws (points or batches) under the maxima."""
        return len(self.draws)

    def n_new(self, holdout: Sensitivities) -> int:
        """How many draws of a holdout did not influence the pruning, and therefore can test it."""
        return len(holdout.draws - self.draws - self.seen.hashes)

    @property
    def n_outputs(self) -> int:
        """eta of T4: output scalars of all layers for one draw."""
        return sum(layer.n_outputs for layer in self.layers) * (self.largest_batch if self.batch_dependent else 1)

    @property
    def max_fan_in(self) -> int:
        """rho of T4: the largest fan-in."""
        return max(layer.weight.fan_in for layer in self.layers)
