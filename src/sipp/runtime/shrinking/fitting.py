"""Looks at the layers of a network, or takes channels out of their inputs and refits them, in one walk (T21, T23).

Both networks run side by side (running.py). A layer is fitted just before it runs, on the inputs that it gets in the
network made so far. Its target is what the dense network has behind it: behind its norm and, where its output is added
to a stream, in the sum. So a block also mends what earlier blocks lost. Errors are counted there, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sipp.repairing import Sums, eliminate
from sipp.results import numerics
from sipp.runtime.shrinking.rules import named_arguments, operation_name
from sipp.runtime.shrinking.running import Tensors, Use, Values
from sipp.runtime.shrinking.sites import Site

PATCH_BYTES = 256 << 20  # of the patches that are laid out at a time
PATCHES_PER_INPUT = 100  # neighbours in an image are alike: more change little and cost much
LEAST_SCALE = 1e-6  # of a norm's largest factor: an output below has no say in the stream, and keeps its weights


@dataclass
class Look:
    """What the sites of a dense network could lose: filled in by a walk that changes nothing."""

    sites: Sequence[Site]
    orders: dict[int, Tensor] = field(default_factory=dict)  # channels of each site, as they would go
    errors: dict[int, Tensor] = field(default_factory=dict)  # squared, after the first 0, 1, 2, ... are gone
    variances: dict[int, float] = field(default_factory=dict)  # of all outputs of the layer together
    halved: dict[int, Tensors] = field(default_factory=dict)  # the tensors that change if every second one goes

    def visit(self, use: Use, values: Values) -> None:
        """Looks at one layer: every number of channels at each of its sites, the others left whole."""
        problem = _Problem.of(use, values)
        for i, site in enumerate(self.sites):
            if site.reader == use.weight:
                groups_GS = problem.inputs_of(site)
                found = eliminate(*problem.system, [groups_GS], [site.width])
                (self.orders[i],), self.errors[i] = found.orders, found.errors
                half = eliminate(*problem.system, [groups_GS], [site.width // 2])
                self.halved[i] = problem.solution(half.weight_KF, refits=True)
                self.variances[i] = float(problem.sums.about_means()[2].sum())


@dataclass
class Cut:
    """Takes channels out of the inputs of layers, so that a site has `widths` of them, and refits all layers."""

    sites: Sequence[Site]
    widths: Sequence[int]
    counts: Mapping[str, Tensor]  # how much each output of a weight counts in the choice: 0 if it will probably go
    refits: bool
    small: Tensors  # the smaller network: filled in by a walk over it, or without a refit over the dense one
    orders: dict[int, Tensor] = field(default_factory=dict)  # channels of each site that are gone

    def visit(self, use: Use, values: Values) -> None:
        """Fits one layer, if it loses inputs or if its inputs or its stream are not the dense network's."""
        own = [i for i, site in enumerate(self.sites) if site.reader == use.weight]
        reads = [use.inputs, *([] if use.stream is None else [use.stream])]
        n_removed = [self.sites[i].width - self.widths[i] for i in own]
        self.orders |= dict.fromkeys(own, numerics.integers(0, 0))
        if not any(n_removed) and not any(map(values.is_changed, reads)):
            return
        problem = _Problem.of(use, values)
        if own:
            groups = [problem.inputs_of(self.sites[i]) for i in own]
            counts_F = self.counts[use.weight].to(problem.old_KF.device)
            found = eliminate(*problem.system, groups, n_removed, counts_F)
            self.orders |= dict(zip(own, found.orders))
            new_KF = found.weight_KF
        else:
            new_KF = torch.linalg.solve(*problem.system)
        if not self.refits:
            new_KF = problem.old_KF * (new_KF != 0).any(1, keepdim=True)
        self.small.update(problem.solution(new_KF, refits=self.refits))


@dataclass(frozen=True)
class _Problem:
    """The least squares of one layer, behind its norm: inputs of the smaller network, outputs of the dense one."""

    use: Use
    tensors: Tensors  # of the smaller network
    old_KF: Tensor  # the weights times the norm's factors
    scale_F: Tensor  # the norm as a factor and a summand of each output: 1 and 0 without one
    shift_F: Tensor
    sums: Sums

    @staticmethod
    def of(use: Use, values: Values) -> _Problem:
        tensors = values.small_tensors
        weight = tensors[use.weight]
        scale_F, shift_F = _norm(use, tensors)
        old_KF = weight.flatten(1).to(numerics.BOUND_DTYPE).T * scale_F
        return _Problem(use, tensors, old_KF, scale_F, shift_F, _sums(use, values, old_KF))

    @property
    def system(self) -> tuple[Tensor, Tensor]:
        return self.sums.system(self.old_KF)

    def inputs_of(self, site: Site) -> Tensor:
        """The inputs of each channel of a site: the columns of the flattened weight (G x S)."""
        n = self.tensors[self.use.weight][0, 0].numel()  # entries of a kernel
        offsets = numerics.integers(0, n)
        return (site.columns_GC[..., None] * n + offsets).flatten(1).to(self.old_KF.device)

    def solution(self, new_KF: Tensor, *, refits: bool) -> Tensors:
        """The tensors that change: the weight, and what takes the intercept.

        An output that the norm ignores keeps its weights, except those of inputs that are gone.
        """
        use, tensors = self.use, self.tensors
        old = tensors[use.weight]
        is_used = self.scale_F.abs() > LEAST_SCALE * self.scale_F.abs().max()
        kept_KF = old.flatten(1).to(numerics.BOUND_DTYPE).T * (new_KF != 0).any(1, keepdim=True)
        own_KF = torch.where(is_used, new_KF / self.scale_F, kept_KF)
        found = {use.weight: own_KF.T.reshape(old.shape).to(old.dtype)}
        if not (refits and self.sums.has_intercept):
            return found
        intercept_F = self.sums.intercept(new_KF)
        bias_F = torch.zeros_like(self.scale_F) if use.bias is None else tensors[use.bias].to(numerics.BOUND_DTYPE)
        moved_F = torch.where(is_used, intercept_F - self.scale_F * bias_F - self.shift_F, 0.0)
        _, bias, mean, _ = use.norm_names or (None, use.bias, None, None)
        if bias is not None:
            found[bias] = (tensors[bias] + moved_F).to(tensors[bias].dtype)
        elif mean is not None:
            lowered_F = torch.where(is_used, moved_F / self.scale_F, 0.0)
            found[mean] = (tensors[mean] - lowered_F).to(tensors[mean].dtype)
        return found


def _norm(use: Use, tensors: Tensors) -> tuple[Tensor, Tensor]:
    """The norm behind a product as a factor and a summand of each output; 1 and 0 without one."""
    weight = tensors[use.weight]
    if use.norm is None:
        one_F = torch.ones(len(weight), dtype=numerics.BOUND_DTYPE, device=weight.device)
        return one_F, torch.zeros_like(one_F)
    gain, bias, mean, variance = (
        None if name is None else tensors[name].to(numerics.BOUND_DTYPE) for name in use.norm_names
    )
    assert mean is not None and variance is not None
    scale_F = (variance + named_arguments(use.norm)["eps"]).rsqrt() * (1.0 if gain is None else gain)
    return scale_F, (0.0 if bias is None else bias) - mean * scale_F


def _sums(use: Use, values: Values, old_KF: Tensor) -> Sums:
    """The sums over the patches of all batches, or over as many at random places as are enough for so many inputs."""
    fan_in = len(old_KF)
    has_intercept = use.norm is not None or use.bias is not None
    sums = Sums.zeros(fan_in, old_KF.shape[1], old_KF.device, has_intercept=has_intercept)
    generator = torch.Generator("cpu").manual_seed(0)
    most = -(-PATCHES_PER_INPUT * fan_in // values.n_batches)
    at_once = max(1, PATCH_BYTES // (fan_in * old_KF.element_size()))
    for batch in range(values.n_batches):
        target = values.computed(use.node, batch, is_small=False)
        if use.norm is not None:
            target = values.computed(use.norm, batch, is_small=False, given={use.node: target})
        if use.stream is not None and values.is_changed(use.stream):
            dense, small = (values.of(use.stream, batch, is_small=which) for which in (False, True))
            target = target + (dense - small)
        x = values.of(use.inputs, batch, is_small=True)
        if operation_name(use.node) != "linear":
            x, target = _windows(x, use), target.movedim(1, -1)
        n_places = target[..., 0].numel()
        places = torch.randperm(n_places, generator=generator, dtype=torch.int64, device="cpu")[:most]
        for some in places.sort().values.to(x.device).split(at_once):
            index = torch.unravel_index(some, target.shape[:-1])
            sums.add(x[index].flatten(1), target[index])
    return sums


def _windows(x: Tensor, use: Use) -> Tensor:
    """The windows of a convolution: points and positions, then channels and kernel (a view)."""
    arguments = named_arguments(use.node)
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
