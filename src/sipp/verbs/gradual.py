"""`gradual`: prunes in small steps during a user's own training loop (the schedule: `results/gradual.py`)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sipp.errors import ModelError, OptionError
from sipp.inputs import AnyData, check_can_be_written, data_of
from sipp.progress import progress_line
from sipp.pruning import cut, hold, lora_merged, masks_of, rank, release
from sipp.results import (
    Gradual,
    Method,
    PruneOptions,
    Selector,
    budget_at,
    check,
    cut_times,
    numerics,
    other_names,
)
from sipp.scoring import checked_method, task_of

MOST_STEPS = 10**9  # a larger number is taken for a mistake


@other_names.explain_unknown_options
@torch.inference_mode(False)
def gradual(
    model: nn.Module,
    train_step: Callable[[int], object],
    data: AnyData | None,
    *,
    keep: float,
    steps: int,
    method: Method = PruneOptions.method,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    average: nn.Module | Sequence[nn.Module] | None = None,
    include: Selector | None = None,
    exclude: Selector | None = None,
    progress: bool = True,
) -> Gradual:
    """Calls `train_step(step)` for steps 0, 1, ... `steps` - 1, and prunes `model` little by little in between.

    `train_step` trains the model in place. Pass the `optimizer` that it uses, so that nothing it remembers brings a
    pruned weight back, and the `average` of the model (EMA, SWA) that it updates, which is pruned too. Each cut scores
    the current model on `data`, which is read once per cut. If LoRA is trained (peft), what it adds to a weight is
    scored and masked with it, and merged at the end. What is held at zero at the start (`hold(model, model)` after a
    checkpoint was loaded) stays pruned, and the schedule goes on from there. At the end, the model has `keep` of its
    prunable weights and is a plain module again; the masks are in the record.

    Example:
        >>> import sipp, torch
        >>> net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
        >>> optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        >>> def train_step(step):
        ...     optimizer.zero_grad()
        ...     net(torch.rand(32, 8)).square().mean().backward()
        ...     optimizer.step()
        >>> done = sipp.gradual(net, train_step, torch.rand(50, 8), keep=0.25, steps=40, optimizer=optimizer)
        >>> done.kept, done.n_weights, len(done.path)
        (48, 192, 10)
    """
    _check_loop(train_step, data, steps, progress)
    options = PruneOptions(method=method)
    info = checked_method(options, masks_only="training finds the values here")
    start = task_of(model, None, include=include, exclude=exclude)
    n_weights = sum(weight.n_weights for weight in start.weights)
    last = numerics.budget_of(keep, n_weights)
    check_can_be_written(model)
    masks, held_before = dict[str, Tensor](), masks_of(model)
    if held_before:  # of a training that goes on
        everything = {name: torch.ones_like(weight, dtype=torch.bool) for name, weight in start.parameters().items()}
        masks = {name: held_before.get(name, mask).cpu() for name, mask in everything.items()}
    n_left = _n_kept(masks) if masks else n_weights
    if n_left < last:
        raise OptionError(
            f"keep={keep} asks for {last:,} weights, but held masks leave {n_left:,}",
            fix="ask for fewer, or call release(model) first",
            option="keep",
        )
    averages = _checked_averages(model, average)
    times = cut_times(steps)
    path: list[tuple[int, float]] = []
    with ExitStack() as at_the_end:
        hold(model, {}, optimizer=optimizer)  # of which nothing is pruned yet
        for held in (model, *averages):
            at_the_end.callback(release, held)
        for averaged in averages:
            hold(averaged, masks)
        for step in range(steps):
            train_step(step)
            if step + 1 not in times:
                continue
            with lora_merged(model):
                task = task_of(model, data, include=include, exclude=exclude)
                ranking, budget = rank(task, options, alive=masks), budget_at(times[step + 1], n_left, last)
                masks = cut(ranking, budget, seed=options.seed, into=ranking.model).masks
            hold(model, masks)
            for averaged in averages:
                hold(averaged, masks)
            path.append((step + 1, _n_kept(masks) / n_weights))
            left = f"{path[-1][1]:.2%} of the weights left (cut {len(path)} of {len(times)})"
            progress_line(f"gradual: step {step + 1:,} of {steps:,}, {left}", shown=progress)
    return Gradual(
        model=model,
        masks=masks,
        path=tuple(path),
        method=info.name,
        n_weights=n_weights,
        kept=_n_kept(masks),
        seed=options.seed,
    )


def _n_kept(masks: dict[str, Tensor]) -> int:
    return sum(int(mask.sum()) for mask in masks.values())


def _checked_averages(model: nn.Module, average: nn.Module | Sequence[nn.Module] | None) -> list[nn.Module]:
    """The averages as a list; raises if one is no copy of the model whose masks can be held."""
    if not isinstance(average, nn.Module | list | tuple | None):
        raise OptionError(
            f"average must be an nn.Module, not a {type(average).__name__}",
            fix="give an AveragedModel, or a list of them",
        )
    averages = [] if average is None else [average] if isinstance(average, nn.Module) else list(average)
    shapes = [parameter.shape for parameter in model.parameters()]
    for copied in averages:
        is_copy = isinstance(copied, nn.Module) and copied is not model
        if not is_copy or [parameter.shape for parameter in copied.parameters()] != shapes:
            raise OptionError(
                f"average is a {type(copied).__name__} that is not a copy of the model", fix="make it from the model"
            )
        if masks_of(copied):
            raise ModelError("masks of the average are held, and would be released", fix="release(average) first")
    return averages


def _check_loop(train_step: object, data: AnyData | None, steps: int, progress: bool) -> None:
    """Raises unless these can be run as a loop that reads the data several times."""
    check.flag("progress", progress)
    try:
        inspect.signature(train_step).bind(0)  # type: ignore[arg-type]
    except TypeError as error:
        fix = "give a function that takes the number of the step"
        raise OptionError(f"train_step(0) cannot be called: {error}", fix=fix, option="train_step") from error
    check.whole("steps", steps, least=1, most=MOST_STEPS)
    if data is not None and not data_of(data).can_be_read_again:
        raise OptionError(
            "the data is read again at every pruning", fix="give a list, a loader or a tensor", option="data"
        )
