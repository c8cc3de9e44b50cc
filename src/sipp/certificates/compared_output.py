"""Runs a network on a batch and selects the output to compare, without padding, or raises if there is none."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from sipp.errors import DataError, ModelError, OptionError
from sipp.inputs import Batch, check_has_values, outputs, run_batch

Output = int | str | Callable[[Any], Any] | None

PADDING_ALLOWED = 1e-3  # relative; attention over fewer positions rounds differently
BEST_NAMES = ("logits", "last_hidden_state", "out")  # keys of a dict output that an error suggests first


def check_model(role: str, model: nn.Module) -> None:
    """Raises a ModelError for what is no nn.Module, has no values yet, or normalises by batch statistics."""
    if not isinstance(model, nn.Module):
        raise ModelError(f"the {role} network is a {type(model).__name__}, not an nn.Module")
    check_has_values(role, model)
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and module.running_mean is None:
            raise ModelError(
                f"{name or type(module).__name__} normalises by the batch, so an output depends on the other inputs",
                where=role,
                fix="give it running statistics (track_running_stats=True)",
            )


def run_model(model: nn.Module, batch: Batch, output: Output) -> Tensor:
    """The selected output of the model for the batch: a real n x ... tensor on the CPU."""
    return model_output(model, batch, output).cpu()


def model_output(model: nn.Module, batch: Batch, output: Output) -> Tensor:
    """The selected output on the model's device. Without `output`, the only tensor in a tuple or dict is taken."""
    device = next((t.device for t in itertools.chain(model.parameters(), model.buffers())), torch.device("cpu"))
    # A copy: a first layer that works in place must not change what the other network, or the caller, sees.
    result = run_batch(model, batch.copied(device))
    if callable(output):
        try:
            result = output(result)
        except Exception as error:  # their function: anything may be raised
            raise OptionError(f"output={output!r:.60} fails on the model's output: {error}", option="output") from error
    elif output is not None:
        try:
            if isinstance(result, Tensor):  # an index would pick a point, not a part of the output
                raise TypeError("nothing to select from a single tensor")
            result = result[output]
        except (KeyError, IndexError, TypeError) as error:
            raise OptionError(
                f"output={output!r:.60} does not exist in the model's {type(result).__name__}", option="output"
            ) from error
    if output is None:
        result = _only_tensor(result)
    if not isinstance(result, Tensor):
        raise ModelError(
            f"the model returns a {type(result).__name__}{_choices(result)}",
            fix="select one tensor with output= (index, key, function)",
            option="output",
        )
    if not result.is_floating_point() or result.dim() == 0 or result.shape[0] != batch.n_points or result.numel() == 0:
        raise ModelError(
            f"the output is {result.dtype} {tuple(result.shape)}, not {batch.n_points} rows of real "
            "numbers (inputs along dimension 0)",
            where=batch.where,
            fix="select or rearrange it with output=",
            option="output",
        )
    return result.detach()


def _only_tensor(result: Any) -> Any:
    """The tensor of an output that holds nothing else; other outputs are returned as they are."""
    values = list(result.values()) if isinstance(result, Mapping) else result
    is_one = isinstance(values, list | tuple) and len(values) == 1 and isinstance(values[0], Tensor)
    return values[0] if is_one else result


def _choices(result: Any) -> str:
    """The names or the number of the tensors in an output, in words, with an example."""
    if isinstance(result, Mapping):
        names = [name for name, value in result.items() if isinstance(value, Tensor) and isinstance(name, str)]
        best = next((name for name in BEST_NAMES if name in names), names[0] if names else None)
        return f" with {', '.join(map(repr, names))} (for example output={best!r})" if names else ""
    if isinstance(result, tuple | list):
        first = next((i for i, value in enumerate(result) if isinstance(value, Tensor)), None)
        return "" if first is None else f" of {len(result)} (for example output={first})"
    return ""


def follows_positions(model: nn.Module, batch: Batch, output: Output, result: Tensor) -> bool | None:
    """Whether dimension 1 of the output are the positions of `real_BT`; None if this batch cannot tell.

    The points with the most and the least padding are run alone and without it, and must give the same output at their
    real positions. Otherwise the padding of the output is elsewhere (or there are as many classes as positions), and it
    is not removed: a claim about the whole output is also true.
    """
    real_BT = batch.real_BT
    if real_BT is None or bool(real_BT.all()) or real_BT.shape[1] < 2:
        return None
    if result.dim() < 2 or result.shape[1] != real_BT.shape[1]:
        return False
    n_real_B = real_BT.sum(1)
    n_padded_B = real_BT.shape[1] - n_real_B
    fewest = int(torch.where(n_padded_B > 0, n_padded_B, real_BT.shape[1]).argmin())
    return all(_is_kept(model, batch, output, result, i) for i in {int(n_padded_B.argmax()), fewest})


def _is_kept(model: nn.Module, batch: Batch, output: Output, result: Tensor, i: int) -> bool:
    """Whether point i without its padding gives the output that it has at its real positions."""
    assert batch.real_BT is not None
    real_T = batch.real_BT[i].cpu()

    def cut(value: Any) -> Any:
        has_length = isinstance(value, Tensor) and value.ndim > 1 and value.shape[1] == len(real_T)
        return value[:, real_T.to(value.device)] if has_length else value

    point = batch.at(slice(i, i + 1))
    kwargs = {name: cut(value) for name, value in point.kwargs.items()}
    args = tuple(cut(value) for value in point.args)
    try:
        alone = run_model(model, replace(point, args=args, kwargs=kwargs, real_BT=None), output)
    except (DataError, ModelError, OptionError):
        return False
    there = result[i : i + 1, real_T]
    if alone.shape != there.shape:
        return False
    gap, size = (alone - there).double().norm(), there.double().norm()
    # Not "gap > ...": NaN must count as a difference
    return bool(gap <= max(PADDING_ALLOWED, outputs.allowed_difference(model, batch)) * size)


def without_padding(result: Tensor, batch: Batch, has_positions: bool | None) -> Tensor:
    """The output with 0 at padding positions, so that they add nothing to a norm."""
    real = outputs.real_positions(result, batch) if has_positions else None
    return result if real is None else result.masked_fill(~real, 0.0)
