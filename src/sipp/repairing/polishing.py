"""Brings the pruned network's outputs closer to the dense ones by steps of Adam: no labels, masks held."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from sipp.errors import DataError
from sipp.inputs.batches import fresh, points_at
from sipp.inputs.capture import run_batch, scoring_mode
from sipp.inputs.distance import error_of, outputs_of, squares
from sipp.progress import progress_bar
from sipp.pruning.masking import hold, release
from sipp.records.batches import Batch
from sipp.records.repair import Polish
from sipp.repairing.data_split import DataSplit, merged_batches

N_CHECKS = 16  # looks at the points kept aside, evenly spread over the steps
WARM_UP = 0.1  # share of the steps in which the rate rises: Adam's first steps are long, whatever the gradient
PATIENCE = 8  # looks without a gain after which it stops; a rate that is too large gains only when it falls
FIRST_LOOKS = 3  # without any gain, from the start again at a quarter of the rate: it was too large for this network
LOWER = 0.25
NEAR = 2.0  # an error below half of the output's length lowers the rate in proportion: what is near needs small steps
N_MIXED = 8  # batches whose points change places: no more of them are copied at a time
NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def polish(
    dense: nn.Module,
    repaired: nn.Module,
    masks: Mapping[str, Tensor],
    split: DataSplit,
    *,
    steps: int,
    learning_rate: float,
    seed: int,
    progress: bool,
) -> tuple[Polish, float | None]:
    """What the steps did to `repaired`, in place, and its output error on the points kept aside.

    Kept weights, the biases beside them and the norms are trained, in eval mode. The points come in new batches each
    time round, as large as those that were given; the rate rises from zero for a tenth of the steps, and falls to zero
    along a cosine. A network whose output is near to the dense one already has a smaller rate; so has one that the
    first steps only took away from it: then they begin anew.
    """
    fitted, validation = split.fit, split.validation
    trained = _trained(repaired, masks)
    flags = [(parameter, parameter.requires_grad) for parameter in repaired.parameters()]
    judged = outputs_of(dense, validation)
    if not outputs_of(dense, fitted[:1])(0):
        raise DataError("the model's output holds no real numbers that a polish could bring nearer", fix="use steps=0")
    optimizer = torch.optim.Adam(trained, lr=learning_rate)
    for parameter, _ in flags:
        parameter.requires_grad_(any(parameter is one for one in trained))
    hold(repaired, masks, optimizer=optimizer)
    best, best_step, since = error_of(repaired, validation, judged), 0, 0
    rate = learning_rate * (1.0 if best is None else min(1.0, NEAR * best))
    kept = [parameter.detach().clone() for parameter in trained]
    mixed, taken, is_lowered = _mixed(fitted, seed), 0, False
    try:
        with progress_bar("polishing", steps, shown=progress) as advance:
            while taken < steps and since < PATIENCE:
                for group in optimizer.param_groups:
                    group["lr"] = rate * _share_of_rate((taken + 0.5) / steps)
                batch = next(mixed)
                _step(repaired, optimizer, batch, outputs_of(dense, [batch])(0))
                taken += 1
                advance(1)
                if taken * N_CHECKS // steps > (taken - 1) * N_CHECKS // steps:
                    found = error_of(repaired, validation, judged)
                    since += 1
                    if found is not None and best is not None and found < best:
                        best, best_step, since = found, taken, 0
                        kept = [parameter.detach().clone() for parameter in trained]
                    elif best_step == 0 and since == FIRST_LOOKS and not is_lowered:
                        rate, since, is_lowered = LOWER * rate, 0, True
                        optimizer.state.clear()
                        _put_back(trained, kept)
    finally:
        release(repaired)
        _put_back(trained, kept)
        for parameter, flag in flags:
            parameter.requires_grad_(flag)
    return Polish(asked=steps, taken=taken, best=best_step, rate=rate), best


def _put_back(trained: Sequence[nn.Parameter], kept: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for parameter, value in zip(trained, kept):
            parameter.copy_(value)
            parameter.grad = None


def _share_of_rate(done: float) -> float:
    """The share of the learning rate when this share of the steps is done."""
    return min(1.0, done / WARM_UP) * (1 + math.cos(math.pi * done)) / 2


def _trained(model: nn.Module, masks: Mapping[str, Tensor]) -> list[nn.Parameter]:
    """The parameters of the layers that hold a masked weight, and of the norms, each once."""
    owners = {name.rpartition(".")[0] for name in masks}
    found: dict[int, nn.Parameter] = {}
    for name, module in model.named_modules():
        if name in owners or isinstance(module, NORMS):
            found |= {id(p): p for p in module.parameters(recurse=False) if p.is_floating_point()}
    return list(found.values())


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, wanted: list[Tensor]) -> None:
    """One step on one batch, in eval mode: no dropout, norms with their running statistics."""
    with ExitStack() as stack:
        stack.enter_context(scoring_mode(model, "running"))
        stack.enter_context(torch.enable_grad())
        if any(isinstance(module, nn.RNNBase) for module in model.modules()):
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))  # it has no gradients in eval mode
        optimizer.zero_grad(set_to_none=True)
        distance, size = squares(run_batch(model, fresh(batch)), wanted, batch)
        if float(size) == 0 or not bool(torch.isfinite(distance)):
            return
        (distance / size).backward()
        optimizer.step()


def _mixed(batches: Sequence[Batch], seed: int) -> Iterator[Batch]:
    """The points in new batches, again and again: those of a few batches that are alike change places."""
    generator = torch.Generator("cpu").manual_seed(seed)
    most = max(batch.n_points for batch in batches)

    def shuffled(n: int) -> Tensor:
        return torch.randperm(n, generator=generator, dtype=torch.int64, device="cpu")

    while True:
        for some in shuffled(len(batches)).split(N_MIXED):
            for pool in merged_batches([batches[i] for i in some.tolist()], N_MIXED * most):
                for at in shuffled(pool.n_points).chunk(-(-pool.n_points // most)):
                    yield points_at(pool, at)
