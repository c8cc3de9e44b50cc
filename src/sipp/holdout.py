"""Runs two networks over a holdout and tells what was looked at: outputs point by point, content hashes of all."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from sipp.batches import batches_of
from sipp.capture import scoring_mode
from sipp.errors import DataError, ModelError, OptionError
from sipp.pointkeys import keys_of, raw_bytes
from sipp.records import Batch

Output = int | str | Callable[[Any], Any] | None

BATCH_POINTS = 256  # points per forward pass where the caller gave no batches
CALLABLE = "callable "  # how a record names an `output=` function, which it cannot hold
WRAPPERS = ("module", "_orig_mod")  # what DDP and torch.compile add to names


def look(
    dense: nn.Module,
    pruned: nn.Module,
    holdout: Any,
    measure: Callable[[Tensor, Tensor, Batch], Tensor],
    output: Output,
    calibration: Any,
) -> tuple[Tensor, dict[str, Any]]:
    """What `measure` says of every point (n x ...), and the fields of a record that tell what was looked at."""
    for role, model in (("dense", dense), ("pruned", pruned)):
        check_model(role, model)
    if not (output is None or callable(output) or type(output) in (int, str)):
        raise OptionError(f"output = {output!r} must be an index, a key or a function of the model's output")
    known = set() if calibration is None else set(point_keys(calibration, "calibration"))
    measured: list[Tensor] = []
    keys: list[bytes] = []
    dtypes: set[str] = set()
    with scoring_mode(dense, "running"), scoring_mode(pruned, "running"):
        for batch in holdout_batches(holdout):
            keys += keys_of(batch)
            f, g = run_model(dense, batch, output), run_model(pruned, batch, output)
            if f.shape != g.shape:
                raise ModelError(
                    f"{batch.where}: dense gives {tuple(f.shape)}, pruned {tuple(g.shape)}; they must agree"
                )
            dtypes |= {str(t.dtype).removeprefix("torch.") for t in (f, g)}
            measured.append(measure(f, g, batch))
    _refuse_shared(keys, known)
    evidence = {
        "n": len(keys),
        "n_duplicates": len(keys) - len(set(keys)),
        "data_hash": hashlib.sha256(b"".join(sorted(keys))).hexdigest(),
        "dense_hash": model_hash(dense),
        "pruned_hash": model_hash(pruned),
        "dtype": "/".join(sorted(dtypes)),
        "output": CALLABLE + getattr(output, "__qualname__", repr(output)) if callable(output) else output,
        "calibration_checked": calibration is not None,
    }
    return torch.cat(measured), evidence


def check_model(role: str, model: nn.Module) -> None:
    """Nothing; ModelError where the output at a point is no function of that point alone."""
    if not isinstance(model, nn.Module):
        raise ModelError(f"the {role} network is a {type(model).__name__}, not an nn.Module")
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and module.running_mean is None:
            raise ModelError(
                f"{role}: {name or type(module).__name__} normalises by the batch, so outputs depend on neighbours and "
                "points are not independent; give it running statistics (track_running_stats=True)"
            )


def run_model(model: nn.Module, batch: Batch, output: Output) -> Tensor:
    """The selected output of the model for the batch: a real n x ... tensor on the CPU."""
    device = next((t.device for t in itertools.chain(model.parameters(), model.buffers())), torch.device("cpu"))
    # Copies: a first layer that works in place must not change what the other network, or the caller, sees.
    args = [t.to(device, copy=True) for t in batch.args]
    result = model(*args, **{name: t.to(device, copy=True) for name, t in batch.kwargs.items()})
    if callable(output):
        result = output(result)
    elif output is not None:
        try:
            if isinstance(result, Tensor):  # an index would pick a point, not a part of the output
                raise TypeError("nothing to select from a single tensor")
            result = result[output]
        except (KeyError, IndexError, TypeError) as error:
            raise OptionError(f"output = {output!r} does not exist in the model's {type(result).__name__}") from error
    if not isinstance(result, Tensor):
        raise ModelError(
            f"the model returns a {type(result).__name__}; select one tensor with output= (index, key, function)"
        )
    if not result.is_floating_point() or result.dim() == 0 or result.shape[0] != batch.n_points or result.numel() == 0:
        raise ModelError(
            f"{batch.where}: the output is {result.dtype} {tuple(result.shape)}, not {batch.n_points} rows of real "
            "numbers (points along dimension 0); select or rearrange it with output="
        )
    return result.detach().cpu()


def point_keys(data: Any, role: str) -> list[bytes]:
    """The key of every point, in order."""
    return [key for batch in holdout_batches(data, role) for key in keys_of(batch)]


def refuse_overlap(holdout: Any, calibration: Any) -> None:
    """Nothing; DataError if a holdout point is a calibration point too."""
    _refuse_shared(point_keys(holdout, "holdout"), set(point_keys(calibration, "calibration")))


def holdout_batches(data: Any, role: str = "holdout") -> Iterator[Batch]:
    """The batches, values as they are: what is not finite is for the claim to count, not to be refused."""
    return batches_of(data, role=role, batch_size=BATCH_POINTS, refuses_non_finite=False)


def _refuse_shared(keys: list[bytes], known: set[bytes]) -> None:
    shared = [index for index, key in enumerate(keys) if key in known]
    if shared:
        raise DataError(
            f"{len(shared)} of {len(keys)} holdout points are also calibration points, the first at index {shared[0]}; "
            "a certificate needs points the pruning has not seen: take them out of the holdout"
        )


def model_hash(model: nn.Module) -> str:
    """SHA-256 over the state_dict's names, dtypes, shapes and bytes, sorted by name; DDP and compile change nothing."""
    return state_hash(model.state_dict())


def state_hash(state: Mapping[str, Any]) -> str:
    """The hash that a network with this state_dict has."""
    digest = hashlib.sha256()
    named = [(".".join(p for p in name.split(".") if p not in WRAPPERS), v) for name, v in state.items()]
    for name, value in sorted(named, key=lambda pair: pair[0]):
        if value is not None and not isinstance(value, (Tensor, str, int, float, bytes)):
            raise ModelError(f"state_dict entry {name!r} is a {type(value).__name__}, whose content has no stable hash")
        if isinstance(value, Tensor):
            digest.update(json.dumps([name, str(value.dtype), list(value.shape)]).encode())
            digest.update(raw_bytes(value).numpy().data)
        else:
            digest.update(json.dumps([name, repr(value)]).encode())
    return digest.hexdigest()
