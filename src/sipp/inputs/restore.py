"""Puts a model back as it was: what its forward changes (observers, counters, caches) does not outlive our passes."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy

from sipp.errors import ModelError

# Held while a model is in another state than its owner left it in. One for all of them: models share parts, and a
# switch of PyTorch's own is for the whole process.
ONE_AT_A_TIME = threading.RLock()


def copy_of(model: nn.Module) -> nn.Module:
    """A deep copy that shares no parameter or buffer with the model, so that the given one is never written to."""
    try:
        with ONE_AT_A_TIME:  # as its owner left it, whatever other threads do with it meanwhile
            made = copy.deepcopy(model)
    except Exception as error:  # their classes, their __deepcopy__: anything may be raised
        raise ModelError(
            f"the {type(model).__name__} cannot be copied ({type(error).__name__}: {error})",
            fix="keep what has no copy (locks, files, tensors with a history) out of its attributes, or give it "
            "a __deepcopy__",
        ) from error
    if not isinstance(made, nn.Module):
        raise ModelError(f"the deep copy of the {type(model).__name__} is a {type(made).__name__}, not an nn.Module")
    own = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    shared = [name for name, tensor in (*made.named_parameters(), *made.named_buffers()) if id(tensor) in own]
    if shared:
        raise ModelError(f"a deep copy of the model shares {shared[0]} with it: a __deepcopy__ must copy its tensors")
    return made


def check_can_be_written(model: nn.Module) -> None:
    """Raises where a tensor of the model was made under torch.inference_mode: it takes no writes, and no gradients."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not is_lazy(tensor) and tensor.is_inference():
            raise ModelError(
                f"{name} was made under torch.inference_mode: it can be neither changed nor trained",
                fix="give copy.deepcopy(model), made outside of it",
            )


@contextmanager
def left_as_it_was(model: nn.Module) -> Iterator[None]:
    """A context after which every buffer holds the values it held before, and every attribute is the same object.

    Attributes come back together with the buffers: a cache and the number that says how long it is belong together.
    """
    all_modules = list(model.modules())
    modules = [m for m in all_modules if not isinstance(m, LazyModuleMixin | torch.jit.ScriptModule)]
    flags = [(m, m.training) for m in all_modules if isinstance(m, torch.jit.ScriptModule)]
    bindings = [(module, dict(vars(module)), dict(module._buffers)) for module in modules]
    values = [(b, b.detach().clone()) for b in model.buffers() if not is_lazy(b) and not b.is_meta]
    try:
        yield
    finally:
        for module, attributes, buffers in bindings:
            _rebind(vars(module), attributes)
            _rebind(module._buffers, buffers)
        for scripted, was_training in flags:  # its attributes are not Python's; only this one is changed by us
            if scripted.training != was_training:
                scripted.training = was_training
        with torch.no_grad():
            for buffer, before in _changed(values):
                _write_back(buffer, before)


@contextmanager
def without_caches(model: nn.Module) -> Iterator[None]:
    """A context in which a model of transformers gives its output without keys and values for later tokens."""
    changed = turn_off_caches(model)
    try:
        yield
    finally:
        for config in changed:
            config.use_cache = True


def turn_off_caches(model: nn.Module) -> list[Any]:
    """Lets a model of transformers keep no keys and values for later tokens, and gives the configurations it changed.

    They are of no use to a pass over whole sequences, take memory, and cannot be traced.
    """
    configs: list[Any] = [vars(module).get("config") for module in model.modules()]
    found = {id(one): one for one in configs if getattr(one, "use_cache", None) is True}
    for config in found.values():
        config.use_cache = False
    return list(found.values())


def _rebind(current: dict[str, Any], before: dict[str, Any]) -> None:
    if current.keys() == before.keys() and all(current[name] is value for name, value in before.items()):
        return
    current.clear()  # and not key by key: the order of buffers is the order of the state_dict
    current.update(before)


def _changed(values: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """The buffers that were written to. The others are not: a write would count as a change of the tensor."""
    if _are_as_before(values):
        return []
    differs: list[Tensor | bool] = [
        (buffer != before).any() if buffer.shape == before.shape and buffer.layout == torch.strided else True
        for buffer, before in values
    ]
    by_device: dict[torch.device, list[Tensor]] = {}  # one transfer each: a GPU would be waited for at every buffer
    for flag in differs:
        if isinstance(flag, Tensor):
            by_device.setdefault(flag.device, []).append(flag)
    answers = {device: iter(torch.stack(flags).tolist()) for device, flags in by_device.items()}
    return [
        pair
        for pair, flag in zip(values, differs)
        if (next(answers[flag.device]) if isinstance(flag, Tensor) else flag)
    ]


def _are_as_before(values: list[tuple[Tensor, Tensor]]) -> bool:
    """Whether all buffers hold what they held, where that can be seen at once: one look at all instead of one each."""
    by_kind: dict[tuple[torch.device, torch.dtype], list[tuple[Tensor, Tensor]]] = {}
    for buffer, before in values:
        if buffer.shape != before.shape or buffer.layout != torch.strided:
            return False
        by_kind.setdefault((buffer.device, buffer.dtype), []).append((buffer.flatten(), before.flatten()))
    return all(torch.equal(*map(torch.cat, zip(*pairs))) for pairs in by_kind.values())


def _write_back(buffer: Tensor, before: Tensor) -> None:
    if buffer.shape != before.shape:
        buffer.resize_(before.shape)  # an observer of channels grows its buffers from nothing
    buffer.copy_(before)
