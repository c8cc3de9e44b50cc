"""Chooses channels of a network, takes them out and refits what is left (T23): zeros that `shrink` then removes.

checked_plan      what belongs together (dependencies.py), checked; structure_of: which channels can go (sites.py)
a first walk      for every site, the error of each number of channels, on the dense network's values, times what it
                  does to the output (halving each site by itself); with uniform=True nobody asks for them
cheapest_widths   how many stay, by the cheapest next removal
a second walk     removes and refits, layer by layer, on what the smaller network makes
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor, nn
from torch.fx import Node

from sipp.errors import DataError, ModelError, OptionError
from sipp.inputs import (
    ONE_AT_A_TIME,
    AnyData,
    Batch,
    copy_of,
    data_of,
    find_prunable_layers,
    outputs,
    unscored_layers,
)
from sipp.progress import progress_bar
from sipp.repairing import (
    DataSplit,
    eliminate,
    polish,
    split_data,
)
from sipp.results import ChannelsLeft, Chosen, Selector, check, numerics, words
from sipp.runtime.counting import multiply_adds
from sipp.runtime.examples import Call
from sipp.runtime.shrinking.configuration import accepts_widths
from sipp.runtime.shrinking.dependencies import Channels
from sipp.runtime.shrinking.fitting import Problem, RefittedLayer, layers_in
from sipp.runtime.shrinking.removing import checked_plan
from sipp.runtime.shrinking.sites import Site, Structure, cheapest_widths, least_share, structure_of, uniform_widths
from sipp.runtime.shrinking.traced import BothRuns, Tensors, Traced, run_both

N_REASONS = 3  # named in an error
N_EXAMPLES = 2  # inputs on which both networks are compared
N_EFFECT_POINTS = 256  # on which the effect of halving each site is measured

Visit = Callable[[RefittedLayer, BothRuns], None]  # before a layer runs in both networks


@dataclass(frozen=True)
class ChannelOptions:
    """What the smaller network may cost, as a share of the whole one, and how its channels are chosen."""

    multiply_adds: float | None = None
    weights: float | None = None
    uniform: bool = False
    multiple_of: int = 1
    repair: bool = True
    steps: int = 0
    exclude: Selector | None = None
    seed: int = 0
    progress: bool = True

    def __post_init__(self) -> None:
        if self.multiply_adds is not None and self.weights is not None:
            raise OptionError("multiply_adds= and weights= cannot be combined", fix="give one of them")
        for name in ("uniform", "repair", "progress"):
            check.flag(name, getattr(self, name))
        check.whole("multiple_of", self.multiple_of, least=1)
        check.whole("steps", self.steps, least=0)
        check.seed("seed", self.seed)
        if self.has_budget:
            check.share(self.budget, self.share)
        else:
            for option in fields(self):
                value = getattr(self, option.name)
                is_given = value is not None if option.default is None else value != option.default
                if is_given and option.name not in ("seed", "progress"):
                    raise OptionError(
                        f"{option.name}= needs a budget: without one, only dead channels are removed",
                        option=option.name,
                        fix="give multiply_adds= or weights=",
                    )

    @property
    def has_budget(self) -> bool:
        return self.multiply_adds is not None or self.weights is not None

    @property
    def budget(self) -> str:
        """The name of the option that was given."""
        return "weights" if self.multiply_adds is None else "multiply_adds"

    @property
    def share(self) -> float:
        share = self.weights if self.multiply_adds is None else self.multiply_adds
        assert share is not None
        return share

    @property
    def of(self) -> str:
        return "parameters" if self.multiply_adds is None else "multiply-adds"


@dataclass(frozen=True)
class Smaller:
    """A network with zeros where channels were taken out, an example of its inputs, and what was done."""

    model: nn.Module
    call: Call
    chosen: Chosen
    split: DataSplit


def choose_channels(dense: nn.Module, data: AnyData, options: ChannelOptions) -> Smaller:
    """A copy of the network without the channels that the budget asks for; the rest is refitted and polished."""
    split = split_data(data_of(data, device=numerics.device_of(dense)))
    model = copy_of(dense)
    example = split.fit[0].at(slice(N_EXAMPLES))
    call = example.args, example.kwargs
    channels, _, _ = checked_plan(model, call, _without_one_each)
    structure = structure_of(channels, _excluded(model, options.exclude))
    if not structure.sites:
        raise ModelError(
            f"no channels can be removed: {_why_none(structure)}",
            where=type(model).__name__,
            fix="leave out the budget to remove dead channels only",
        )
    sites, fitted = _remove(model, structure, split.fit, options)
    polished = None
    if options.steps:
        masks = {name: torch.ones_like(model.get_parameter(name), dtype=torch.bool) for name in fitted}
        for site in sites:
            masks[site.reader][:, list(site.removed)] = False
        polished, _ = polish(
            dense, model, masks, split, steps=options.steps, seed=options.seed, progress=options.progress
        )
    chosen = Chosen(
        share=options.share,
        of=options.of,
        sites=sites,
        stays=tuple(f"{weight}: {why}" for weight, why in structure.refused.items()),
        is_refitted=options.repair,
        polish=polished,
        n_fit=sum(batch.n_points for batch in split.fit),
        n_test=sum(batch.n_points for batch in split.test),
        output_error=split.test_error(dense, model),
    )
    return Smaller(model, call, chosen, split)


def _without_one_each(channels: Channels, trial: nn.Module) -> None:
    """Takes a channel from every site, on trial: a number of channels in the code would not allow it."""
    with torch.no_grad():
        for site in structure_of(channels).sites:
            trial.get_parameter(site.reader)[:, site.columns_GC[0]] = 0.0


def _remove(
    model: nn.Module, structure: Structure, batches: Sequence[Batch], options: ChannelOptions
) -> tuple[tuple[ChannelsLeft, ...], list[str]]:
    """Takes channels out of the model in place, so that nothing reads them any more, and refits what is left.

    Returns what is gone, and the weights that could be refitted.
    """
    dense = {name: tensor.detach().clone() for name, tensor in numerics.parameters_and_buffers(model).items()}
    with ONE_AT_A_TIME:
        traced = Traced.of(model, _even_calls(batches))
    if options.of == "parameters":
        costs = {name: parameter.numel() for name, parameter in model.named_parameters()}
    else:
        costs = multiply_adds(traced.program, {name: tuple(tensor.shape) for name, tensor in dense.items()})
    sizes, sites = structure.sizes(costs), structure.sites
    full = [site.width for site in sites]
    if (least := least_share(full, sizes, options.multiple_of)) > options.share:
        raise OptionError(
            f"{least:.4g} of the {options.of} cannot be removed, more than {options.share:.4g}",
            option=options.budget,
            fix=f"give at least {math.ceil(1e4 * least) / 1e4:g}",
        )
    layers = layers_in(traced, _used_once(structure.channels))
    readers = [layer for layer in layers if layer.weight in {site.reader for site in sites}]

    def walk(title: str, past: Sequence[RefittedLayer], small: Tensors, visit: Visit) -> None:
        by_node = {layer.node: layer for layer in past}
        with torch.no_grad(), progress_bar(title, len(past), shown=options.progress) as advance:

            def visited(node: Node, values: BothRuns) -> None:
                visit(by_node[node], values)
                advance(1)

            run_both(traced, dense, small, {layer.node: layer.stream for layer in past}, visited)

    if options.uniform:
        widths = uniform_widths(
            full, sizes, options.share, options.multiple_of, lambda widths: accepts_widths(model, zip(full, widths))
        )
    else:
        look = Look(sites)
        walk("comparing channels", readers, dict(dense), look.visit)
        widths = cheapest_widths(full, _errors(model, batches, look), sizes, options.share, options.multiple_of)
    small = dict(dense)
    removal = Removal(sites, widths, options.repair, small)
    seen, past = (small, layers) if options.repair else (dict(dense), readers)
    walk("removing channels", past, seen, removal.visit)
    set_tensors(model, small)
    left = []
    for i, site in enumerate(sites):
        gone = site.columns_GC[removal.orders[i].cpu()].flatten().sort().values
        left.append(ChannelsLeft(site.makers, site.reader, site.width, widths[i], tuple(gone.tolist())))
    return tuple(left), [layer.weight for layer in layers]


def _even_calls(batches: Sequence[Batch]) -> list[Call]:
    """The calls of batches of equal size with these inputs."""
    whole = batches[0]
    for other in batches[1:]:
        both = whole.joined(other)
        if both is None:
            raise DataError(
                "the batches have different shapes", where=other.where, fix="cut or pad texts to one length"
            )
        whole = both
    n_batches = -(-whole.n_points // max(batch.n_points for batch in batches))
    each = whole.n_points // n_batches
    parts = [whole.at(slice(i * each, (i + 1) * each)) for i in range(n_batches)]
    return [(part.args, part.kwargs) for part in parts]


def _used_once(channels: Channels) -> dict[str, str | None]:
    """The weights, with their biases, that nothing else reads: those that can be refitted."""
    n_uses = Counter(product.weight for product in channels.products)
    return {
        product.weight: product.bias
        for product in channels.products
        if n_uses[product.weight] == channels.n_reads[product.weight] == 1
        and (product.bias is None or channels.n_reads[product.bias] == 1)
    }


@dataclass
class Look:
    """The error of removing each number of channels at each site of a dense network, which stays as it is."""

    sites: Sequence[Site]
    errors: dict[int, Tensor] = field(default_factory=dict)  # squared, after the first 0, 1, 2, ... channels are gone
    halved: dict[int, Tensors] = field(default_factory=dict)  # the tensors that change if every second one goes

    def visit(self, layer: RefittedLayer, values: BothRuns) -> None:
        """Looks at one layer: every number of channels at each of its sites, the others left whole."""
        problem = Problem.of(layer, values)
        for i, site in enumerate(self.sites):
            if site.reader == layer.weight:
                groups_GS = problem.inputs_of(site)
                self.errors[i] = eliminate(*problem.system, [groups_GS], [site.width]).errors
                half = eliminate(*problem.system, [groups_GS], [site.width // 2])
                self.halved[i] = problem.solution(half.weight_KF, refits=True)


@dataclass
class Removal:
    """Takes channels out of the inputs of layers, so that a site has `widths` of them, and refits all layers."""

    sites: Sequence[Site]
    widths: Sequence[int]
    refits: bool
    small: Tensors  # the smaller network: filled in by a walk over it, or without a refit over the dense one
    orders: dict[int, Tensor] = field(default_factory=dict)  # channels of each site that are gone

    def visit(self, layer: RefittedLayer, values: BothRuns) -> None:
        """Fits one layer, if it loses inputs or if its inputs or its stream are not the dense network's."""
        own = [i for i, site in enumerate(self.sites) if site.reader == layer.weight]
        reads = [layer.inputs, *([] if layer.stream is None else [layer.stream])]
        n_removed = [self.sites[i].width - self.widths[i] for i in own]
        self.orders |= dict.fromkeys(own, numerics.integers(0, 0))
        if not any(n_removed) and not any(map(values.is_changed, reads)):
            return
        problem = Problem.of(layer, values)
        if own:
            found = eliminate(*problem.system, [problem.inputs_of(self.sites[i]) for i in own], n_removed)
            self.orders |= dict(zip(own, found.orders))
            new_KF = found.weight_KF
        else:
            new_KF = torch.linalg.solve(*problem.system)
        if not self.refits:
            new_KF = problem.old_KF * (new_KF != 0).any(1, keepdim=True)
        self.small.update(problem.solution(new_KF, refits=self.refits))


def _errors(model: nn.Module, batches: Sequence[Batch], look: Look) -> list[Tensor]:
    """The squared error of the output for each number of channels that a site loses.

    It is that of the layer times its effect on the output, from halving the site by itself; where halving costs
    nothing, times the mean effect of the other sites.
    """
    n_before = itertools.accumulate((batch.n_points for batch in batches), initial=0)
    some = [batch for batch, n in zip(batches, n_before) if n < N_EFFECT_POINTS]
    wanted, changed = outputs.dense_outputs(model, some), copy_of(model)
    effects: list[float] = []
    for i, site in enumerate(look.sites):
        own = float(look.errors[i][site.width // 2])
        held = numerics.parameters_and_buffers(changed)
        before = {name: held[name].clone() for name in look.halved[i]}
        set_tensors(changed, look.halved[i])
        error = outputs.error_of(changed, some, wanted)
        set_tensors(changed, before)
        effects.append(error**2 / own if error is not None and math.isfinite(error) and own > 0 else math.nan)
    known = [effect for effect in effects if not math.isnan(effect)]
    typical = sum(known) / len(known) if known else 1.0
    return [look.errors[i] * (typical if math.isnan(effect) else effect) for i, effect in enumerate(effects)]


def set_tensors(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copies values into parameters and buffers by name."""
    held = numerics.parameters_and_buffers(model)
    with torch.no_grad():
        for name, tensor in tensors.items():
            if name in held and held[name] is not tensor:
                held[name].copy_(tensor)


def _excluded(model: nn.Module, exclude: Selector | None) -> set[str]:
    """The weights that keep all their inputs."""
    if exclude is None:
        return set()
    unscored = unscored_layers(model)  # their channels stay anyway
    more = [exclude] if isinstance(exclude, str | type) else exclude
    every, others = (find_prunable_layers(model, include="*", exclude=[*unscored, *one]) for one in ((), more))
    names = [{weight.name for layer in layers for weight in layer.weights.values()} for layers in (every, others)]
    return names[0] - names[1]


def _why_none(structure: Structure) -> str:
    if structure.refused:
        return "; ".join(f"{weight}: {why}" for weight, why in list(structure.refused.items())[:N_REASONS])
    if alone := structure.channels.left_alone:
        return f"these keep all that they read: {words.listed(list(alone))}"
    return "it has no two layers in a row"
