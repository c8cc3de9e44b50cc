"""Copies models, and restores a model after our passes, whatever its forward changed; runs grouped attention fast."""

from __future__ import annotations

import copy
import operator
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from sipp.errors import ModelError

# Held while a model is not in the state its owner left it in. One lock for all models: they may share parts, and one
# of PyTorch's switches is global.
ONE_AT_A_TIME = threading.RLock()


class StopForward(BaseException):
    """Ends a forward pass early. Not an Exception, so that no model catches it."""


def copy_of(model: nn.Module) -> nn.Module:
    """A deep copy that shares no parameter or buffer with the model."""
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
    """Raises if a tensor of the model was made under torch.inference_mode: it can be neither written nor trained."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not is_lazy(tensor) and tensor.is_inference():
            raise ModelError(
                f"{name} was made under torch.inference_mode: it can be neither changed nor trained",
                fix="give copy.deepcopy(model), made outside of it",
            )


@contextmanager
def restoring(all_modules: Sequence[nn.Module]) -> Iterator[None]:
    """A context after which every buffer has the values it had before, and every attribute is the same object.

    Attributes are restored along with buffers, because they may belong together: a cache and its length. Only what is
    written into a sparse buffer stays.
    """
    modules = [m for m in all_modules if not isinstance(m, LazyModuleMixin | torch.jit.ScriptModule)]
    flags = [(m, m.training) for m in all_modules if isinstance(m, torch.jit.ScriptModule)]
    bindings = [(module, dict(vars(module)), dict(module._buffers)) for module in modules]
    every: dict[int, Tensor] = {id(b): b for m in all_modules for b in m._buffers.values() if b is not None}
    values = _values_of([b for b in every.values() if not is_lazy(b) and not b.is_meta and b.layout == torch.strided])
    try:
        yield
    finally:
        for module, attributes, buffers in bindings:
            _rebind(vars(module), attributes)
            _rebind(module._buffers, buffers)
        for scripted, was_training in flags:  # its attributes are not Python's, and we change only this one
            if scripted.training != was_training:
                scripted.training = was_training
        with torch.no_grad():
            for buffer, before in (pair for some in values for pair in some.changed()):
                _write_back(buffer, before)


@contextmanager
def without_caches(modules: Iterable[nn.Module]) -> Iterator[None]:
    """A context in which transformers models keep no key-value cache."""
    changed = turn_off_caches(modules)
    try:
        yield
    finally:
        for config in changed:
            config.use_cache = True


def turn_off_caches(modules: Iterable[nn.Module]) -> list[Any]:
    """Turns off the key-value cache of a transformers model, given all of its modules; returns the configs it changed.

    A pass over whole sequences does not need the cache, which takes memory and cannot be traced.
    """
    configs: list[Any] = [vars(module).get("config") for module in modules]
    found = {id(one): one for one in configs if getattr(one, "use_cache", None) is True}
    for config in found.values():
        config.use_cache = False
    return list(found.values())


def _rebind(current: dict[str, Any], before: dict[str, Any]) -> None:
    if list(current) == list(before) and all(map(operator.is_, current.values(), before.values())):
        return
    current.clear()  # not key by key: the order of buffers is that of the state_dict
    current.update(before)


@dataclass(frozen=True)
class _Values:
    """Buffers of one dtype and device with the values they had, concatenated: one copy and one comparison for all."""

    buffers: list[Tensor]
    shapes: list[torch.Size]
    held: Tensor  # all values, flat

    def changed(self) -> list[tuple[Tensor, Tensor]]:
        """The buffers that changed, and what they held. Others are not written to, which would count as a change."""
        if [one.shape for one in self.buffers] == self.shapes and torch.equal(_flat(self.buffers), self.held):
            return []
        parts = self.held.split([shape.numel() for shape in self.shapes])
        befores = (part.view(shape) for part, shape in zip(parts, self.shapes))
        return [(one, before) for one, before in zip(self.buffers, befores) if not torch.equal(one, before)]


def _values_of(buffers: list[Tensor]) -> list[_Values]:
    by_kind: dict[Any, list[Tensor]] = {}
    for one in buffers:
        by_kind.setdefault((one.device, one.dtype), []).append(one)
    return [_Values(some, [one.shape for one in some], _flat(some)) for some in by_kind.values()]


def _flat(buffers: list[Tensor]) -> Tensor:
    with torch.no_grad():
        if all(one.ndim == 0 for one in buffers):  # the counters of norms
            return torch.stack(buffers)
        return torch.cat([one.flatten() for one in buffers])


def _write_back(buffer: Tensor, before: Tensor) -> None:
    if buffer.shape != before.shape:
        buffer.resize_(before.shape)  # a per-channel observer of quantisation starts with empty buffers
    buffer.copy_(before)


@contextmanager
def replaced_forwards(forwards: Iterable[tuple[nn.Module, Callable[..., Any]]]) -> Iterator[None]:
    """A context in which these modules run the given functions instead of their own forward."""
    before = []
    try:
        for module, forward in forwards:
            before.append((module, vars(module).get("forward")))
            module.forward = forward
        yield
    finally:
        for module, own in before:
            del module.forward
            if own is not None:
                module.forward = own


# --- Attention with grouped heads (GQA) in float32 on a GPU -----------------------------------------------------------

# Torch has no fused kernel for `enable_gqa=True` in float32: it computes and stores every score, which takes as long as
# the rest of a small language model. With keys and values repeated for each query head, it has one.

N_GROUPS = "num_key_value_groups"  # attribute of attention layers: query heads for each head of keys and values
DEVICES = ("cuda",)  # where a fused kernel needs repeated heads


def fused_attention(modules: Sequence[nn.Module]) -> AbstractContextManager[Any]:
    """A context in which grouped attention among these modules of transformers runs by a fused kernel.

    It does nothing for other models: looking at every operation costs time, most of all where these are short.
    """
    is_grouped = any(isinstance(n := vars(module).get(N_GROUPS), int) and n > 1 for module in modules)
    return RepeatedHeads() if is_grouped else nullcontext()


class RepeatedHeads(TorchFunctionMode):
    """Repeats the keys and values of grouped attention, so that there are as many as queries."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        is_grouped = func is F.scaled_dot_product_attention and len(args) >= 3 and kwargs.get("enable_gqa", False)
        if not is_grouped or not _is_slow(args[0]) or not _has_whole_groups(*args[:3]):
            return func(*args, **kwargs)
        query, key, value, *rest = args
        key, value = (heads.repeat_interleave(query.shape[-3] // heads.shape[-3], -3) for heads in (key, value))
        return func(query, key, value, *rest, **kwargs | {"enable_gqa": False})


def _has_whole_groups(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether each head of keys and values serves as many heads of queries; torch refuses everything else itself."""
    if min(query.ndim, key.ndim, value.ndim) < 4 or query.shape[-3] == 0:
        return False
    return all(heads.shape[-3] > 0 and query.shape[-3] % heads.shape[-3] == 0 for heads in (key, value))


def _is_slow(tensor: Tensor) -> bool:
    return tensor.device.type in DEVICES and tensor.dtype == torch.float32
