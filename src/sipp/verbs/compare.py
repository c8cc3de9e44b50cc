"""`compare`: prunes a model by several methods and tests each result on inputs that chose no weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any

import torch
from torch import nn

from sipp.certificates import NetworkComparison, Output, compare_networks
from sipp.errors import DataError, OptionError, warn_caller
from sipp.inputs import AnyData, Data, data_of, labels
from sipp.progress import progress_bar
from sipp.pruning import Cut, Ranking, cut, rank, starts_from_wanda
from sipp.repairing import split_data
from sipp.results import (
    HELD_BACK_ONE_IN,
    Compared,
    Comparison,
    Loss,
    Method,
    PruneOptions,
    Selector,
    check,
    numerics,
    other_names,
)
from sipp.scoring import ScoringTask, method_of, task_of
from sipp.verbs.record import repaired_cut

KEEPS = (0.5, 0.3, 0.1)
USUAL: tuple[str, ...] = ("sipp-blend", "sipp-det", "magnitude", "lamp", "wanda", "random")
LABELLED: tuple[str, ...] = ("snip",)  # compared too if the data has labels


@other_names.explain_unknown_options
@torch.inference_mode(False)
def compare(
    model: nn.Module,
    data: AnyData,
    *,
    keeps: Sequence[float] = KEEPS,
    methods: Sequence[Method] | None = None,
    repair: bool = False,
    holdout: AnyData | None = None,
    include: Selector | None = None,
    exclude: Selector | None = None,
    output: Output = None,
    seed: int = 0,
    progress: bool = True,
) -> Comparison:
    """Compares what each method does to the output of `model` at a few values of keep. `print` the result.

    Methods are tested on the `holdout`, or on a quarter of `data` at random places, which then plays no part in the
    pruning. `repair` adds a row with that repair for every method. Without `methods`, a usual set is compared,
    including `snip` if there are labels. The best method is chosen on these inputs, so certify it on others. All inputs
    are held in memory.

    Example:
        >>> import sipp, torch
        >>> _ = torch.manual_seed(0)
        >>> net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
        >>> comparison = sipp.compare(net, torch.rand(200, 8), keeps=(0.8, 0.5), methods=("magnitude", "random"))
        >>> comparison.best(0.8).method, comparison.n_test, len(comparison.rows)
        ('magnitude', 50, 4)
    """
    check.flag("repair", repair)
    check.flag("progress", progress)
    task = task_of(model, data, include=include, exclude=exclude, loss=_loss_of(output), seed=check.seed("seed", seed))
    n_weights = sum(weight.n_weights for weight in task.weights)
    n_kept = [
        numerics.budget_of(keep, n_weights) for keep in _checked_list("keeps", keeps)
    ]  # which refuses what is no share
    budgets = dict(zip(map(float, keeps), n_kept))
    named_methods = None if methods is None else _by_name(methods)
    calibration, test = _points(task, holdout)
    named_methods = named_methods or {name: name for name in _usual(calibration)}
    # The dense network is tested first, which also checks that no holdout point chooses weights.
    known = None if holdout is None else calibration
    baseline = compare_networks(task.model, task.model, test, output, known=known)
    task = task.with_points(calibration)
    if baseline.why_no_accuracy and baseline.same_class is not None:
        warn_caller(f"accuracy is not compared: {baseline.why_no_accuracy}")
    fits = repair or any(method_of(method).fitting for method in named_methods.values())
    split = split_data(calibration) if fits else None
    rows: list[Compared] = []
    with progress_bar("comparing", len(named_methods) * len(budgets), shown=progress) as advance:
        for name, method in named_methods.items():
            rankings = _rankings(task, method, repair)
            for keep in sorted(budgets, reverse=True):
                for ranking in rankings:
                    budget, asked = budgets[keep], ranking.options.repair
                    network_cut = cut(ranking, budget, seed=seed)
                    if repairs := method_of(method).repairs(asked):
                        assert split is not None
                        network_cut, _ = repaired_cut(
                            ranking, network_cut.masks, split, repairs,
                            start=network_cut.model, budget=budget, seed=seed, choice=network_cut.choice,
                        )  # fmt: skip
                    tested = compare_networks(task.model, network_cut.model, test, output)
                    rows.append(_row(name, ranking, network_cut, keep, tested, is_repaired=bool(asked)))
                advance(1)
    n_calibration = sum(batch.n_points for batch in calibration.batches())
    return Comparison(
        rows=tuple(rows),
        n_weights=n_weights,
        n_calibration=n_calibration,
        n_test=baseline.evidence.n,
        is_held_back=holdout is None,
        dense_accuracy=None if baseline.accuracies is None else baseline.accuracies[0],
    )


def _rankings(task: ScoringTask, method: Method, repair: bool) -> list[Ranking]:
    """The ranking of a method, and another with the repair if it is asked for; mostly their scores are the same."""
    plain, repaired = PruneOptions(method=method), PruneOptions(method=method, repair=repair)
    ranking = rank(task, plain)
    if not repair:
        return [ranking]
    from_wanda = starts_from_wanda(task, method_of(method), repair=True)
    return [ranking, rank(task, repaired) if from_wanda else replace(ranking, options=repaired)]


def _points(task: ScoringTask, holdout: AnyData | None) -> tuple[Data, Data]:
    """The inputs that choose weights, and the test inputs: the holdout, or a quarter of the data."""
    if holdout is None:
        task, held_back = task.hold_back()
        if held_back.is_empty:
            raise DataError(
                "there are too few different inputs to hold some back",
                fix=f"give at least {HELD_BACK_ONE_IN}, or a holdout",
            )
        return task.points, replace(held_back, role="holdout")
    test = data_of(holdout, device=numerics.device_of(task.model), role="holdout")
    return task.points.in_memory(), test.in_memory()


def _by_name(methods: Sequence[Method]) -> dict[str, Method]:
    """{name in the table: method}; raises if two functions have one name."""
    by_name: dict[str, Method] = {}
    for method in _checked_list("methods", methods):
        if by_name.setdefault(method_of(method).name, method) != method:
            raise OptionError(f"two methods are called {method_of(method).name!r}", option="methods")
    return by_name


def _usual(data: Data) -> tuple[str, ...]:
    """The usual methods, and those that need labels if all batches have class numbers."""
    batches = list(data.batches())
    labelled = all(labels.truth_of(batch.labels, batch.n_points).classes_n is not None for batch in batches)
    return USUAL + (LABELLED if labelled else ())


def _loss_of(output: Output) -> Loss | None:
    """The cross-entropy of the compared output; None where that is the usual loss."""
    if output is None:
        return None
    pick = output if callable(output) else itemgetter(output)
    return lambda output, given: labels.cross_entropy(pick(output), given)


def _row(
    method: str, ranking: Ranking, network_cut: Cut, keep: float, tested: NetworkComparison, *, is_repaired: bool
) -> Compared:
    far_n, size = tested.points.squared_error, float(tested.points.squared_size.mean())
    moved_n = torch.where(far_n == 0, 0.0, far_n / size)  # a dense output of 0 that moved is infinitely off
    return Compared(
        method=method,
        keep=keep,
        is_repaired=is_repaired,
        kept=sum(int(mask.sum()) for mask in network_cut.masks.values()),
        dead_rows=sum(
            numerics.dead_rows(dense_FK, rows.values_FK) for dense_FK, rows in zip(ranking.dense, network_cut.rows)
        ),
        error=math.sqrt(float(moved_n.mean())) if bool(moved_n.isfinite().all()) else math.inf,
        same=tested.same_class,
        accuracy=None if tested.accuracies is None else tested.accuracies[1],
        moved=tuple(moved_n.tolist()),
    )


def _checked_list(name: str, value: Any) -> Sequence[Any]:
    """The value, if it is a non-empty list or tuple."""
    if not isinstance(value, list | tuple) or not value:
        raise OptionError(f"{name}={value!r:.60} must be a list with at least one entry", option=name)
    return value
