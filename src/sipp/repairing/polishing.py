"""Steps of Adam on the distance between the outputs of the dense and the pruned network: no labels, masks held."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from sipp.errors import DataError
from sipp.inputs.batches import fresh
from sipp.inputs.capture import run_batch, scoring_mode
from sipp.inputs.independence import tensors_in
from sipp.numerics import BOUND_DTYPE
from sipp.progress import Advance
from sipp.pruning.masking import hold, release
from sipp.records import Batch
from sipp.repairing.record import Polish

OUTPUT_BYTES = 256 << 20  # of dense outputs that are kept; those beyond are computed anew
N_CHECKS = 16  # looks at the points kept aside, evenly spread over the steps
WARM_UP = 0.1  # share of the steps in which the rate rises: Adam's first steps are long, whatever the gradient
PATIENCE = 8  # looks without a gain after which it stops; a rate that is too large gains only when it falls
FIRST_LOOKS = 3  # without any gain, from the start again at a quarter of the rate: it was too large for this network
LOWER = 0.25
NEAR = 2.0  # an error below half of the output's length lowers the rate in proportion: what is near needs small steps
NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)

Outputs = Callable[[int], list[Tensor]]


def output_error(dense: nn.Module, other: nn.Module, batches: Sequence[Batch]) -> float | None:
    """The distance between both networks' outputs on these points, by the norm of the dense ones.

    None where the dense output holds no real numbers; infinite where the distance is no number.
    """
    return _error(other, batches, _outputs_of(dense, batches))


def polish(
    dense: nn.Module,
    repaired: nn.Module,
    masks: Mapping[str, Tensor],
    fitted: Sequence[Batch],
    aside: Sequence[Batch],
    *,
    steps: int,
    learning_rate: float,
    seed: int,
    advance: Advance,
) -> tuple[Polish, float | None]:
    """What the steps did to `repaired`, in place, and its output error on the points kept aside.

    Kept weights, the biases beside them and the norms are trained, in eval mode. The batches come as they were given,
    in a new order each time round; the rate rises from zero for a tenth of the steps, and falls to zero along a cosine.
    A network whose output is near to the dense one already has a smaller rate; so has one that the first steps only
    took away from it: then they begin anew.
    """
    trained = _trained(repaired, masks)
    flags = [(parameter, parameter.requires_grad) for parameter in repaired.parameters()]
    wanted, judged = _outputs_of(dense, fitted), _outputs_of(dense, aside)
    if not wanted(0):
        raise DataError("the model's output holds no real numbers that a polish could bring nearer", fix="use steps=0")
    optimizer = torch.optim.Adam(trained, lr=learning_rate)
    for parameter, _ in flags:
        parameter.requires_grad_(any(parameter is one for one in trained))
    hold(repaired, masks, optimizer=optimizer)
    best, best_step, since = _error(repaired, aside, judged), 0, 0
    rate = learning_rate * (1.0 if best is None else min(1.0, NEAR * best))
    kept = [parameter.detach().clone() for parameter in trained]
    order, taken, is_lowered = _shuffled(len(fitted), seed), 0, False
    try:
        while taken < steps and since < PATIENCE:
            for group in optimizer.param_groups:
                group["lr"] = rate * _share_of_rate((taken + 0.5) / steps)
            i = next(order)
            _step(repaired, optimizer, fitted[i], wanted(i))
            taken += 1
            advance(1)
            if taken * N_CHECKS // steps > (taken - 1) * N_CHECKS // steps:
                found = _error(repaired, aside, judged)
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
        distance, size = _squares(run_batch(model, fresh(batch)), wanted, batch)
        if float(size) == 0 or not bool(torch.isfinite(distance)):
            return
        (distance / size).backward()
        optimizer.step()


def _outputs_of(dense: nn.Module, batches: Sequence[Batch]) -> Outputs:
    """A function that gives the tensors of the dense output on batch i; as many as fit the memory are kept."""
    kept: dict[int, list[Tensor]] = {}
    left = OUTPUT_BYTES

    def outputs(i: int) -> list[Tensor]:
        nonlocal left
        if i in kept:
            return kept[i]
        with scoring_mode(dense, "running"):
            found = [tensor.detach() for tensor in tensors_in(run_batch(dense, fresh(batches[i])))]
        n_bytes = sum(tensor.numel() * tensor.element_size() for tensor in found)
        if n_bytes <= left:
            kept[i], left = found, left - n_bytes
        return found

    return outputs


def _error(model: nn.Module, batches: Sequence[Batch], wanted: Outputs) -> float | None:
    distance = size = 0.0
    n_tensors = 0
    for i, batch in enumerate(batches):
        with scoring_mode(model, "running"):
            far, large = _squares(run_batch(model, fresh(batch)), wanted(i), batch)
        distance, size, n_tensors = distance + float(far), size + float(large), n_tensors + len(wanted(i))
    if n_tensors == 0:
        return None
    if not math.isfinite(distance) or not math.isfinite(size):
        return math.inf
    return math.sqrt(distance / size) if size > 0 else math.sqrt(distance)


def _squares(output: object, wanted: list[Tensor], batch: Batch) -> tuple[Tensor, Tensor]:
    """The squared distance of an output to the wanted one, and the squared norm of that (float64); padding left out."""
    device = wanted[0].device if wanted else torch.device("cpu")
    distance, size = (torch.zeros((), dtype=BOUND_DTYPE, device=device) for _ in range(2))
    found = list(tensors_in(output))
    if [tensor.shape for tensor in found] != [tensor.shape for tensor in wanted]:
        return distance + math.nan, size
    for tensor, aim in zip(found, wanted):
        gap = tensor.double() - aim.double()
        real_BT = batch.real_BT
        if real_BT is not None and tensor.shape[:2] == real_BT.shape:
            is_real = real_BT.to(gap.device, torch.bool).view(*real_BT.shape, *[1] * (gap.ndim - 2))
            gap, aim = torch.where(is_real, gap, 0.0), torch.where(is_real, aim, 0.0)
        distance = distance + gap.square().sum()
        size = size + aim.double().square().sum()
    return distance, size


def _shuffled(n: int, seed: int) -> Iterator[int]:
    """The numbers below n in a random order, again and again in a new one."""
    generator = torch.Generator("cpu").manual_seed(seed)
    while True:
        yield from torch.randperm(n, generator=generator, dtype=torch.int64, device="cpu").tolist()
