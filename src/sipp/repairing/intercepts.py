"""Where the intercept of a refitted weight can go: the layer's own bias, or the running mean of the norm after it.

A BatchNorm subtracts its running mean, so a layer without a bias gets an intercept b if that mean is lowered by b. This
is the same only if nothing but the norm reads the layer's output; one watched pass shows whether that is so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from sipp.inputs.capture import run_batch, scoring_mode
from sipp.inputs.data import fresh
from sipp.inputs.layer_checks import every_tensor
from sipp.inputs.layers import PrunableLayer
from sipp.inputs.outputs import tensors_in
from sipp.repairing.residual_connections import reads_values
from sipp.results.batches import Batch
from sipp.results.repair import Intercept

_OWN_KINDS = (nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention)  # with known biases, though no "products"
_PACKED = ("q_proj_weight", "k_proj_weight", "v_proj_weight")  # of attention: one tensor holds their biases in order


@dataclass(frozen=True)
class Place:
    """A tensor of the model that takes intercepts, from entry `start` on, added or subtracted."""

    kind: Intercept
    name: str
    start: int
    sign: int


NOWHERE = Place("none", "", 0, 0)


def find_places(model: nn.Module, layers: Sequence[PrunableLayer], batch: Batch) -> dict[str, Place]:
    """Where the intercepts of each weight go; a weight that several modules hold has none."""
    holders = Counter(weight.name for layer in layers for weight in layer.weights.values())
    norms = _norms_behind(model, layers, batch)
    found = {}
    for layer in layers:
        for local, weight in layer.weights.items():
            place = _bias(model, layer, local, weight.n_rows) or norms.get(weight.name, NOWHERE)
            found[weight.name] = place if holders[weight.name] == 1 else NOWHERE
    return found


def _bias(model: nn.Module, layer: PrunableLayer, local: str, n_rows: int) -> Place | None:
    """The module's own bias of this weight, if it has one that no other module shares."""
    if layer.adapter.output != "products" and not isinstance(layer.module, _OWN_KINDS):
        return None
    names = dict(layer.module.named_parameters())
    bias_name = "in_proj_bias" if local in _PACKED else local.replace("weight", "bias")
    bias = names.get(bias_name)
    start = _PACKED.index(local) * n_rows if local in _PACKED else 0
    if bias is None or bias.ndim != 1 or len(bias) < start + n_rows or (local not in _PACKED and len(bias) != n_rows):
        return None
    if sum(own is bias for module in model.modules() for own in module._parameters.values()) != 1:
        return None
    prefix = f"{layer.module_name}." if layer.module_name else ""
    return Place("bias", prefix + bias_name, start, 1)


def _norms_behind(model: nn.Module, layers: Sequence[PrunableLayer], batch: Batch) -> dict[str, Place]:
    """The running mean for each weight without a bias whose layer's output only that norm reads."""
    bare = {
        id(layer.module.get_parameter(local)): weight.name
        for layer in layers
        for local, weight in layer.weights.items()
        if layer.adapter.output == "products" and getattr(layer.module, "bias", None) is None
    }
    means = {
        id(module.running_mean): (name, len(module.running_mean))
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and module.running_mean is not None
    }
    if not means:
        return {}
    with scoring_mode(model, "running"), _Readers(bare) as readers:
        output = run_batch(model, fresh(batch))
    shown = {id(tensor) for tensor in tensors_in(output)}
    n_rows = {weight.name: weight.n_rows for layer in layers for weight in layer.weights.values()}
    n_reads = Counter(mean for reads in readers.reads.values() for mean in reads)
    found = {}
    for weight, outputs in readers.outputs.items():
        reads = readers.reads[weight]
        if len(outputs) != 1 or len(reads) != 1 or id(outputs[0]) in shown or reads[0] not in means:
            continue
        norm, n_features = means[reads[0]]
        if n_features == n_rows[weight] and n_reads[reads[0]] == readers.norm_calls[reads[0]] == 1:
            found[weight] = Place("norm", f"{norm}.running_mean" if norm else "running_mean", 0, -1)
    return found


class _Readers(TorchFunctionMode):
    """Notes which functions read the outputs of the watched weights: a batch_norm by its running mean, others as 0."""

    def __init__(self, watched: dict[int, str]) -> None:
        super().__init__()
        self.watched = watched
        self.outputs: dict[str, list[Tensor]] = {}  # kept alive, so that ids stay unique
        self.reads: dict[str, list[int]] = {}
        self.norm_calls: Counter[int] = Counter()
        self._of: dict[int, str] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        mean = 0
        if func is F.batch_norm:
            given = args[1] if len(args) > 1 else kwargs.get("running_mean")
            mean = id(given)
            self.norm_calls[mean] += 1
        name = getattr(func, "__name__", "")
        for tensor in every_tensor((args, kwargs)):
            weight = self._of.get(id(tensor))
            if weight is not None and reads_values(name, result):
                self.reads[weight].append(mean)
            used = self.watched.get(id(tensor))
            if used is not None and isinstance(result, Tensor) and result is not tensor and name != "__get__":
                self.outputs.setdefault(used, []).append(result)
                self.reads.setdefault(used, [])
                self._of[id(result)] = used
        return result


def shift(model: nn.Module, place: Place, shift_F: Tensor) -> Tensor:
    """What `apply_shift` really adds, after rounding to the tensor's dtype (float64)."""
    current = _target(model, place, len(shift_F))
    moved = (current.to(shift_F) + place.sign * shift_F).to(current.dtype)
    return place.sign * (moved.to(shift_F) - current.to(shift_F))


def apply_shift(model: nn.Module, place: Place, shift_F: Tensor) -> None:
    """Adds the intercepts to the tensor in place."""
    current = _target(model, place, len(shift_F))
    with torch.no_grad():
        current.copy_(current.to(shift_F) + place.sign * shift_F)


def _target(model: nn.Module, place: Place, n_rows: int) -> Tensor:
    owner, _, local = place.name.rpartition(".")
    tensor: Tensor = getattr(model.get_submodule(owner), local)
    return tensor.detach()[place.start : place.start + n_rows]
