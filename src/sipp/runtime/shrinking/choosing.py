"""Chooses channels of a network, takes them out and refits what is left (T23): zeros that `shrink` then removes.

trace_batches     the network, traced for the calibration inputs; structure_of: which channels can go
a first walk      for every site, the error of each number of channels, on the dense network's values
effects           what each site's error does to the output, from halving each site by itself
budgets           widths, by the cheapest next removal
a second walk     removes and refits, layer by layer, on what the smaller network makes
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor, nn

from sipp.errors import ModelError, OptionError
from sipp.inputs import ONE_AT_A_TIME, AnyData, Batch, copy_of, dense_outputs, error_of, find_prunable_layers
from sipp.progress import progress_bar
from sipp.repairing import (
    LEARNING_RATE,
    MOST_STEPS,
    DataSplit,
    merged_batches,
    polish,
    split_data,
)
from sipp.results import ChannelsLeft, Chosen, Counted, Selector, check, words
from sipp.runtime.counting import multiply_adds
from sipp.runtime.examples import Call
from sipp.runtime.graph import program_of
from sipp.runtime.shrinking.applying import parameters_and_buffers
from sipp.runtime.shrinking.budgets import cheapest_widths, least_share, uniform_widths
from sipp.runtime.shrinking.channels import Channels, channels_in
from sipp.runtime.shrinking.checking import Rules, rules_for_sites
from sipp.runtime.shrinking.fitting import Cut, Look
from sipp.runtime.shrinking.running import Tensors, Traced, Use, Values, run_both, trace_batches, uses_in
from sipp.runtime.shrinking.sites import Structure, rows_left, sizes_of, structure_of

TITLES = ("comparing channels", "removing channels")
COUNTED = get_args(Counted)
N_REASONS = 3  # named in an error
N_EXAMPLES = 2  # inputs on which both networks are compared
SMALLEST = 1e-300  # a divisor
N_EFFECT_POINTS = 256  # on which the effect of halving each site is measured


@dataclass(frozen=True)
class ChannelOptions:
    """What the smaller network may cost, as a share of the whole one, and how its channels are chosen."""

    share: float
    of: Counted
    uniform: bool
    multiple_of: int
    repair: bool
    steps: int
    exclude: Selector | None
    seed: int
    progress: bool


def channel_options(
    *,
    multiply_adds: float | None,
    weights: float | None,
    uniform: bool,
    multiple_of: int,
    repair: bool,
    steps: int,
    exclude: Selector | None,
    seed: int,
    progress: bool,
) -> ChannelOptions | None:
    """The options, checked; None without a budget, which the others need."""
    if multiply_adds is not None and weights is not None:
        raise OptionError("multiply_adds= and weights= are two budgets", fix="give one of them")
    name, of, share = "multiply_adds", COUNTED[0], multiply_adds
    if multiply_adds is None:
        name, of, share = "weights", COUNTED[1], weights
    options = ChannelOptions(
        share=1.0 if share is None else check.share(name, share),
        of=of,
        uniform=check.flag("uniform", uniform),
        multiple_of=check.whole("multiple_of", multiple_of, least=1),
        repair=check.flag("repair", repair),
        steps=check.whole("steps", steps, least=0, most=MOST_STEPS),
        exclude=exclude,
        seed=check.seed("seed", seed),
        progress=check.flag("progress", progress),
    )
    if share is not None:
        return options
    given = {"uniform": uniform, "multiple_of": multiple_of != 1, "repair": not repair, "steps": steps != 0}
    given["exclude"] = exclude is not None
    if odd := [name for name, is_given in given.items() if is_given]:
        raise OptionError(
            f"{odd[0]}= needs a budget: without one, only dead channels go",
            option=odd[0],
            fix="give multiply_adds= or weights=",
        )
    return None


@dataclass(frozen=True)
class Smaller:
    """A network with zeros where channels were taken out, an example of its inputs, and what was done."""

    model: nn.Module
    call: Call
    chosen: Chosen
    split: DataSplit


def choose_channels(dense: nn.Module, data: AnyData, options: ChannelOptions) -> Smaller:
    """A copy of the network without the channels that the budget asks for; the rest is refitted and polished."""
    split = split_data(dense, data)
    model = copy_of(dense)
    example = split.fit[0].at(slice(N_EXAMPLES))
    call = example.args, example.kwargs
    with ONE_AT_A_TIME:  # torch.export, which replaces functions of Python while it works
        rules = rules_for_sites(model, call, program_of(model, *call, is_plain=False))
        traced = trace_batches(model, merged_batches(split.fit, max(batch.n_points for batch in split.fit)))
    removal = without_channels(model, traced, split.fit, rules, options)
    polished = None
    if options.steps:
        polished, _ = polish(
            dense, model, _masks(model, removal), split, steps=options.steps, learning_rate=LEARNING_RATE,
            seed=options.seed, progress=options.progress,
        )  # fmt: skip
    chosen = Chosen(
        share=options.share,
        of=options.of,
        sites=removal.sites,
        stays=tuple(f"{weight}: {why}" for weight, why in removal.refused.items()),
        is_refitted=options.repair,
        polish=polished,
        n_fit=sum(batch.n_points for batch in split.fit),
        n_test=sum(batch.n_points for batch in split.test),
        output_error=split.test_error(dense, model),
    )
    return Smaller(model, call, chosen, split)


@dataclass(frozen=True)
class Removal:
    """The channels between layers that were taken out, what stays and why, and the weights that could be refitted."""

    sites: tuple[ChannelsLeft, ...]
    refused: dict[str, str]
    weights: tuple[str, ...]


def _masks(model: nn.Module, removal: Removal) -> dict[str, Tensor]:
    """The masks of the weights that a polish moves: False where an input was taken out."""
    masks = {name: torch.ones_like(model.get_parameter(name), dtype=torch.bool) for name in removal.weights}
    for site in removal.sites:
        masks[site.reader][:, list(site.removed)] = False
    return masks


def without_channels(
    model: nn.Module, traced: Traced, batches: Sequence[Batch], rules: Rules, budget: ChannelOptions
) -> Removal:
    """Takes channels out of the model in place, so that nothing reads them any more, and refits what is left."""
    channels = channels_in(model, traced.programs[0], rules)
    structure = structure_of(channels, _excluded(model, budget.exclude))
    if not structure.sites:
        raise ModelError(
            f"no channels can go: {_why_none(channels, structure)}",
            where=type(model).__name__,
            fix="leave out the budget to remove dead channels only",
        )
    dense = {name: tensor.detach().clone() for name, tensor in parameters_and_buffers(model).items()}
    if budget.of == "parameters":
        full = {name: parameter.numel() for name, parameter in model.named_parameters()}
    else:
        full = multiply_adds(traced.programs[0], {name: tuple(tensor.shape) for name, tensor in dense.items()})
    sizes = sizes_of(channels, structure, full)
    n_uses = Counter(product.weight for product in channels.products)
    fitted = {
        product.weight: product.bias
        for product in channels.products
        if product.groups == 1 and n_uses[product.weight] == channels.n_reads[product.weight] == 1
        and (product.bias is None or channels.n_reads[product.bias] == 1)
    }  # fmt: skip
    uses = uses_in(traced, fitted, channels.leaves)
    full_widths = [site.width for site in structure.sites]
    if (least := least_share(full_widths, sizes, budget.multiple_of)) > budget.share:
        raise OptionError(
            f"the channels that can go leave {least:.4g} of the {budget.of}, more than {budget.share:.4g}",
            option="multiply_adds" if budget.of == COUNTED[0] else "weights",
            fix=f"give at least {math.ceil(1e4 * least) / 1e4:g}",
        )
    readers = [use for use in uses if use.weight in {site.reader for site in structure.sites}]
    look, titles = Look(structure.sites), TITLES if budget.progress else (None, None)
    looked = [use for use in readers if not budget.uniform or _reads_what_others_make(use, readers, structure)]
    _walk(traced, dense, dict(dense), looked, look, titles[0])
    if budget.uniform:
        widths = uniform_widths(full_widths, sizes, budget.share, budget.multiple_of)
    else:
        errors = [effect * look.errors[i] for i, effect in enumerate(_effects(model, batches, look))]
        widths = cheapest_widths(full_widths, errors, sizes, budget.share, budget.multiple_of)
    left = [torch.ones(width, dtype=torch.bool, device="cpu") for width in full_widths]
    for i, order in look.orders.items():
        left[i][order[: full_widths[i] - widths[i]].cpu()] = False
    counts = {use.weight: rows_left(channels, structure, use.weight, left) for use in readers}
    small: Tensors = dict(dense)
    cut = Cut(structure.sites, widths, counts, budget.repair, small)
    _walk(traced, dense, small if budget.repair else dict(dense), uses if budget.repair else readers, cut, titles[1])
    set_tensors(model, small)
    sites = []
    for i, site in enumerate(structure.sites):
        gone = site.columns_GC[cut.orders[i].cpu()].flatten().sort().values
        sites.append(ChannelsLeft(site.makers, site.reader, site.width, widths[i], tuple(gone.tolist())))
    return Removal(tuple(sites), structure.refused, tuple(use.weight for use in uses))


def _reads_what_others_make(use: Use, readers: Sequence[Use], structure: Structure) -> bool:
    """Whether channels that this layer reads are outputs of another one that loses inputs.

    Those that go need not be right there, so a layer is looked at before the others are chosen.
    """
    makers = {maker for site in structure.sites if site.reader == use.weight for maker in site.makers}
    return any(other.weight in makers for other in readers)


def _walk(
    traced: Traced,
    dense: Mapping[str, Tensor],
    small: Tensors,
    uses: Sequence[Use],
    at: Look | Cut,
    title: str | None,
) -> None:
    """One walk over the network; None: without a progress bar."""
    with torch.no_grad(), progress_bar(title or "", len(uses), shown=title is not None) as advance:

        def visit(use: Use, values: Values) -> None:
            at.visit(use, values)
            advance(1)

        run_both(traced, dense, small, uses, visit)


def _effects(model: nn.Module, batches: Sequence[Batch], look: Look) -> list[float]:
    """The squared error of the output for each unit of error of a site, from halving each site by itself.

    Where the output has no real numbers, or halving a site costs nothing, the error counts as a share of the variance
    of the layer's outputs.
    """
    n_before = itertools.accumulate((batch.n_points for batch in batches), initial=0)
    some = [batch for batch, n in zip(batches, n_before) if n < N_EFFECT_POINTS]
    wanted, changed = dense_outputs(model, some), copy_of(model)
    found: list[float] = []
    for i, site in enumerate(look.sites):
        own = float(look.errors[i][site.width // 2])
        held = parameters_and_buffers(changed)
        before = {name: held[name].clone() for name in look.halved[i]}
        set_tensors(changed, look.halved[i])
        error = error_of(changed, some, wanted)
        set_tensors(changed, before)
        found.append(error**2 / own if error is not None and math.isfinite(error) and own > 0 else math.nan)
    shares = [effect * look.variances[i] for i, effect in enumerate(found) if not math.isnan(effect)]
    typical = sum(shares) / len(shares) if shares else 1.0
    return [
        typical / max(look.variances[i], SMALLEST) if math.isnan(effect) else effect for i, effect in enumerate(found)
    ]


def set_tensors(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copies values into parameters and buffers by name."""
    held = parameters_and_buffers(model)
    with torch.no_grad():
        for name, tensor in tensors.items():
            if name in held and held[name] is not tensor:
                held[name].copy_(tensor)


def _excluded(model: nn.Module, exclude: Selector | None) -> set[str]:
    """The weights that keep all their inputs."""
    if exclude is None:
        return set()
    every, others = (find_prunable_layers(model, include="*", exclude=one) for one in (None, exclude))
    names = [{weight.name for layer in layers for weight in layer.weights.values()} for layers in (every, others)]
    return names[0] - names[1]


def _why_none(channels: Channels, structure: Structure) -> str:
    if structure.refused:
        return "; ".join(f"{weight}: {why}" for weight, why in list(structure.refused.items())[:N_REASONS])
    if channels.left_alone:
        return f"these keep all that they read: {words.listed(list(channels.left_alone))}"
    return "it has no two layers in a row"
