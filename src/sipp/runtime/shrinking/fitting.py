"""The least squares of a layer that loses inputs, on what the network made so far gives it (T21, T23).

Its target is what the dense network has behind it: behind its norm and, where its output is added to a stream, in the
sum. So a block also mends what earlier blocks lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from sipp.repairing import Sums
from sipp.results import numerics
from sipp.runtime.graph import named_arguments, operation_name, shape_of
from sipp.runtime.shrinking.sites import Site
from sipp.runtime.shrinking.traced import LAYERS, BothRuns, Tensors, Traced

NORM_LEAVES = ("weight", "bias", "running_mean", "running_var")
IDENTITIES = ("dropout", "clone", "alias", "detach", "contiguous")  # in eval mode
PATCH_BYTES = 256 << 20  # of the patches that are laid out at a time
PATCHES_PER_INPUT = 100  # neighbours in an image are alike: more change little and cost much
LEAST_SCALE = 1e-6  # of a norm's largest factor: an output below has no say in the stream, and keeps its weights


@dataclass(frozen=True)
class RefittedLayer:
    """A layer whose weight is used once, with what lies between its output and the stream of the network."""

    node: Node  # the product
    weight: str
    bias: str | None
    norm: Node | None  # a BatchNorm that alone reads the product
    norm_names: tuple[str | None, ...]  # of its weight, bias, mean and variance
    stream: Node | None  # what the result is added to

    @property
    def inputs(self) -> Node:
        inputs: Node = named_arguments(self.node)["input"]
        return inputs


def layers_in(traced: Traced, weights: Mapping[str, str | None]) -> list[RefittedLayer]:
    """The layers of these weights (with their biases), each of which is used once, in the order of the program."""
    found: list[RefittedLayer] = []
    taken: set[Node] = set()
    names = traced.leaves
    for node in traced.nodes:
        if node.op != "call_function" or operation_name(node) not in LAYERS:
            continue
        weight = names.get(named_arguments(node)["weight"])
        if weight is None or weight not in weights:
            continue
        norm = _norm_behind(node, names)
        end = node if norm is None else norm
        while len(end.users) == 1 and operation_name(reader := next(iter(end.users))) in IDENTITIES:
            end = reader
        stream = None
        total = next(iter(end.users)) if len(end.users) == 1 else None
        if total is not None and operation_name(total) in ("add", "add_") and total not in taken:
            other = next((read for read in total.all_input_nodes if read is not end), None)
            # of two products that meet in a sum, the first is fitted to what the other leaves
            if other is not None and shape_of(other) == shape_of(end) and not _reaches(node, other):
                stream = other
                taken.add(total)
        held = () if norm is None else tuple(named_arguments(norm)[name] for name in NORM_LEAVES)
        leaves = tuple(None if leaf is None else names[leaf] for leaf in held)
        found.append(RefittedLayer(node, weight, weights[weight], norm, leaves, stream))
    return found


def _norm_behind(node: Node, names: Mapping[Node, str]) -> Node | None:
    """The BatchNorm that alone reads a product, with statistics and parameters that nothing else reads."""
    norm = next(iter(node.users)) if len(node.users) == 1 else None
    if norm is None or operation_name(norm) != "batch_norm":
        return None
    arguments = named_arguments(norm)
    leaves = [arguments[name] for name in NORM_LEAVES]
    known = [leaf for leaf in leaves if leaf is not None]
    is_plain = not arguments["training"] and leaves[2] is not None and leaves[3] is not None
    return norm if is_plain and all(leaf in names and len(leaf.users) == 1 for leaf in known) else None


def _reaches(node: Node, other: Node) -> bool:
    """Whether the other value is computed from this node."""
    seen, stack = set[Node](), [other]
    while stack:
        at = stack.pop()
        if at is node:
            return True
        new = [read for read in at.all_input_nodes if read not in seen]
        seen.update(new)
        stack += new
    return False


# --- The least squares of a layer -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Problem:
    """The least squares of one layer, behind its norm: inputs of the smaller network, outputs of the dense one."""

    layer: RefittedLayer
    tensors: Tensors  # of the smaller network
    old_KF: Tensor  # the weights times the norm's factors
    scale_F: Tensor  # the norm as a factor and a summand of each output: 1 and 0 without one
    shift_F: Tensor
    sums: Sums

    @staticmethod
    def of(layer: RefittedLayer, values: BothRuns) -> Problem:
        tensors = values.small_tensors
        weight = tensors[layer.weight]
        scale_F, shift_F = _norm(layer, tensors)
        old_KF = weight.flatten(1).to(numerics.BOUND_DTYPE).T * scale_F
        return Problem(layer, tensors, old_KF, scale_F, shift_F, _sums(layer, values, old_KF))

    @property
    def system(self) -> tuple[Tensor, Tensor]:
        return self.sums.system(self.old_KF)

    def inputs_of(self, site: Site) -> Tensor:
        """The inputs of each channel of a site: the columns of the flattened weight (G x S)."""
        n = self.tensors[self.layer.weight][0, 0].numel()  # entries of a kernel
        offsets = numerics.integers(0, n)
        return (site.columns_GC[..., None] * n + offsets).flatten(1).to(self.old_KF.device)

    def solution(self, new_KF: Tensor, *, refits: bool) -> Tensors:
        """The tensors that change: the weight, and what takes the intercept.

        An output that the norm ignores keeps its weights, except those of inputs that are gone.
        """
        layer, tensors = self.layer, self.tensors
        old = tensors[layer.weight]
        is_used = self.scale_F.abs() > LEAST_SCALE * self.scale_F.abs().max()
        kept_KF = old.flatten(1).to(numerics.BOUND_DTYPE).T * (new_KF != 0).any(1, keepdim=True)
        own_KF = torch.where(is_used, new_KF / self.scale_F, kept_KF)
        found = {layer.weight: own_KF.T.reshape(old.shape).to(old.dtype)}
        if not (refits and self.sums.has_intercept):
            return found
        intercept_F = self.sums.intercept(new_KF)
        bias_F = torch.zeros_like(self.scale_F) if layer.bias is None else tensors[layer.bias].to(numerics.BOUND_DTYPE)
        moved_F = torch.where(is_used, intercept_F - self.scale_F * bias_F - self.shift_F, 0.0)
        _, bias, mean, _ = layer.norm_names or (None, layer.bias, None, None)
        if bias is not None:
            found[bias] = (tensors[bias] + moved_F).to(tensors[bias].dtype)
        elif mean is not None:
            lowered_F = torch.where(is_used, moved_F / self.scale_F, 0.0)
            found[mean] = (tensors[mean] - lowered_F).to(tensors[mean].dtype)
        return found


def _norm(layer: RefittedLayer, tensors: Tensors) -> tuple[Tensor, Tensor]:
    """The norm behind a product as a factor and a summand of each output; 1 and 0 without one."""
    weight = tensors[layer.weight]
    if layer.norm is None:
        one_F = torch.ones(len(weight), dtype=numerics.BOUND_DTYPE, device=weight.device)
        return one_F, torch.zeros_like(one_F)
    gain, bias, mean, variance = (
        None if name is None else tensors[name].to(numerics.BOUND_DTYPE) for name in layer.norm_names
    )
    assert mean is not None and variance is not None
    scale_F = (variance + named_arguments(layer.norm)["eps"]).rsqrt() * (1.0 if gain is None else gain)
    return scale_F, (0.0 if bias is None else bias) - mean * scale_F


def _sums(layer: RefittedLayer, values: BothRuns, old_KF: Tensor) -> Sums:
    """The sums over the patches of all batches, or over as many at random places as are enough for so many inputs."""
    fan_in = len(old_KF)
    has_intercept = layer.norm is not None or layer.bias is not None
    sums = Sums.zeros(fan_in, old_KF.shape[1], old_KF.device, has_intercept=has_intercept)
    generator = torch.Generator("cpu").manual_seed(0)
    most = -(-PATCHES_PER_INPUT * fan_in // values.n_batches)
    at_once = max(1, PATCH_BYTES // (fan_in * old_KF.element_size()))
    for batch in range(values.n_batches):
        target = values.computed(layer.node, batch, is_small=False)
        if layer.norm is not None:
            target = values.computed(layer.norm, batch, is_small=False, given={layer.node: target})
        if layer.stream is not None and values.is_changed(layer.stream):
            dense, small = (values.of(layer.stream, batch, is_small=which) for which in (False, True))
            target = target + (dense - small)
        x = values.of(layer.inputs, batch, is_small=True)
        if operation_name(layer.node) != "linear":
            x, target = _windows(x, layer), target.movedim(1, -1)
        n_places = target[..., 0].numel()
        places = torch.randperm(n_places, generator=generator, dtype=torch.int64, device="cpu")[:most]
        for some in places.sort().values.to(x.device).split(at_once):
            index = torch.unravel_index(some, target.shape[:-1])
            sums.add(x[index].flatten(1), target[index])
    return sums


def _windows(x: Tensor, layer: RefittedLayer) -> Tensor:
    """The windows of a convolution: points and positions, then channels and kernel (a view)."""
    arguments = named_arguments(layer.node)
    kernel = arguments["weight"].meta["val"].shape[2:]
    n = len(kernel)
    stride, dilation, padding = (_each(arguments[name], n) for name in ("stride", "dilation", "padding"))
    spans = [d * (k - 1) + 1 for d, k in zip(dilation, kernel)]
    if padding[0] == "same":
        pads = [((span - 1) // 2, span - 1 - (span - 1) // 2) for span in spans]
    else:
        pads = [(0, 0) if p == "valid" else (p, p) for p in padding]
    x = F.pad(x, [one for pair in reversed(pads) for one in pair])
    for i in range(n):
        x = x.unfold(2 + i, spans[i], stride[i])[..., :: dilation[i]]
    return x.movedim(1, 1 + n)


def _each(given: Any, n: int) -> list[Any]:
    """One value for each dimension of a kernel."""
    several = list(given) if isinstance(given, (list, tuple)) else [given]
    return several * n if len(several) == 1 else several
