"""Runs a model on a batch and leaves it as it was, copies models, and runs grouped attention fast."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from sipp.errors import DataError, ModelError, OptionError
from sipp.inputs.data import Batch
from sipp.results import NormStats, numerics

# Held while a model is not in the state its owner left it in. One lock for all models: they may share parts, and one
# of PyTorch's switches is global.
ONE_AT_A_TIME = threading.RLock()


def run_batch(model: nn.Module, batch: Batch, own_errors: Sequence[Exception] = ()) -> Any:
    """The model's output on a batch; if the model raises, a DataError names the batch and its shapes.

    Errors of sipp's own (also those listed in `own_errors`) and out-of-memory errors are raised unchanged.
    """
    try:
        return model(*batch.args, **batch.kwargs)
    except (DataError, ModelError, OptionError):
        raise
    except Exception as error:  # their network, their data: anything may be raised
        if numerics.is_out_of_memory(error) or any(error is one for one in own_errors):
            raise
        raise DataError(_failure(model, batch, error)) from error


def _failure(model: nn.Module, batch: Batch, error: Exception) -> str:
    """The message for a forward that failed: on which inputs, with which error, and what to try."""
    inputs = {name: value for name, value in batch.tensors.items() if isinstance(value, Tensor)}
    given = ", ".join(f"{name}: {str(t.dtype)[6:]} {' x '.join(map(str, t.shape))}" for name, t in inputs.items())
    text = f"{batch.where} ({given}): the model raised {type(error).__name__}: {error}"
    if isinstance(error, TypeError) and batch.labels is not None and batch.kwargs:
        text += " (the labels of a dict batch are not passed; if the model takes them, give the pair (dict, labels))"
    wanted = {p.dtype for p in model.parameters() if p.is_floating_point()}
    if wanted and not {t.dtype for t in inputs.values()} <= wanted and "type" in str(error):
        names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in wanted))
        return f"{text}; its parameters are {names}: convert the inputs to that if it takes no others"
    return f"{text}; give inputs of the shape and type that the model takes"


@contextmanager
def scoring_mode(model: nn.Module, norm_stats: NormStats) -> Iterator[list[nn.Module]]:
    """A context without gradients in which the model is in eval mode; afterwards it is as it was.

    Yields all modules of the model.
    With `norm_stats="batch"` BatchNorm layers use the statistics of the batch and leave their buffers untouched.
    PyTorch's fused attention path is off: it runs a whole encoder layer without calling the layers inside it.
    Threads wait for each other, so that none mistakes the state another one set for the model's own.
    """
    modules = list(model.modules())
    norms: list[Any] = [m for m in modules if _uses_batch(m)] if norm_stats == "batch" else []
    with ONE_AT_A_TIME, restoring(modules):
        fastpath, configs = torch.backends.mha.get_fastpath_enabled(), turn_off_caches(modules)
        try:
            if any(module.training for module in modules):
                model.eval()
            for module in norms:
                module.training = True
                module.track_running_stats = False
            torch.backends.mha.set_fastpath_enabled(False)
            with torch.no_grad(), _fused_attention(modules):
                yield modules
        finally:
            torch.backends.mha.set_fastpath_enabled(fastpath)
            for config in configs:
                config.use_cache = True


@contextmanager
def restoring(modules: Sequence[nn.Module]) -> Iterator[None]:
    """A context after which every attribute and buffer of these modules is the same object, with the same values.

    Inside it they have copies of their buffers.
    """
    scripted = [(module, module.training) for module in modules if isinstance(module, torch.jit.ScriptModule)]
    plain = [module for module in modules if not isinstance(module, torch.jit.ScriptModule)]
    before = [(module, dict(vars(module)), dict(module._buffers)) for module in plain]
    buffers = {id(one): one for _, _, some in before for one in some.values() if one is not None and not is_lazy(one)}
    copies = {key: buffer.detach().clone() for key, buffer in buffers.items()}
    for module, _, own in before:
        module._buffers.update({name: copies[id(one)] for name, one in own.items() if id(one) in copies})
    try:
        yield
    finally:
        for module, attributes, own in before:
            for current, was in ((vars(module), attributes), (module._buffers, own)):
                if list(current) != list(was):  # the order of buffers is that of the state_dict
                    current.clear()
                current.update(was)
        for module, was_training in scripted:
            module.train(was_training)


def turn_off_caches(modules: Iterable[nn.Module]) -> list[Any]:
    """Turns off the key-value cache of a transformers model, given all of its modules; returns the configs it changed.

    A pass over whole sequences does not need the cache, which takes memory and cannot be traced.
    """
    configs: list[Any] = [vars(module).get("config") for module in modules]
    found = {id(one): one for one in configs if getattr(one, "use_cache", None) is True}
    for config in found.values():
        config.use_cache = False
    return list(found.values())


def depends_on_batch(model: nn.Module, norm_stats: NormStats) -> bool:
    """Whether a point's activations depend on the other points of its batch (batch statistics somewhere)."""
    return any(_uses_batch(m) and (norm_stats == "batch" or m.running_mean is None) for m in model.modules())


def _uses_batch(module: nn.Module) -> bool:
    return isinstance(module, _NormBase) and not isinstance(module, _InstanceNorm)


# --- Copies -----------------------------------------------------------------------------------------------------------


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


# --- Attention with grouped heads (GQA) in float32 on a GPU -----------------------------------------------------------

# Torch has no fused kernel for `enable_gqa=True` in float32: it computes and stores every score, which takes as long as
# the rest of a small language model. With keys and values repeated for each query head, it has one.

N_GROUPS = "num_key_value_groups"  # attribute of attention layers: query heads for each head of keys and values
DEVICES = ("cuda",)  # where a fused kernel needs repeated heads


def _fused_attention(modules: Sequence[nn.Module]) -> AbstractContextManager[Any]:
    """A context in which grouped attention among these modules of transformers runs by a fused kernel.

    It does nothing for other models: looking at every operation costs time, most of all where these are short.
    """
    is_grouped = any(isinstance(n := vars(module).get(N_GROUPS), int) and n > 1 for module in modules)
    return RepeatedHeads() if is_grouped else nullcontext()


class RepeatedHeads(TorchFunctionMode):
    """Repeats the keys and values of grouped attention, so that there are as many as queries."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention or not kwargs.get("enable_gqa") or not _is_slow(*args[:3]):
            return func(*args, **kwargs)
        query, key, value, *rest = args
        key, value = (heads.repeat_interleave(query.shape[-3] // heads.shape[-3], -3) for heads in (key, value))
        return func(query, key, value, *rest, **kwargs | {"enable_gqa": False})


def _is_slow(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether a fused kernel needs repeated heads; torch refuses itself what does not fit."""
    fits = min(query.ndim, key.ndim, value.ndim) >= 4 and query.shape[-3] % key.shape[-3] == 0
    return fits and query.device.type in DEVICES and query.dtype == torch.float32
