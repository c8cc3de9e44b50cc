"""Plans which channels a network can do without, and compares the smaller network's outputs before it is used."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node

from sipp.errors import ModelError, SippError
from sipp.inputs import Batch, run_batch, scoring_mode
from sipp.native import pytree
from sipp.runtime.examples import Call, cloned, output_difference, rounding_tolerance
from sipp.runtime.shrinking.applying import apply
from sipp.runtime.shrinking.channels import Channels, Rule, channels_in
from sipp.runtime.shrinking.removing import ShrinkPlan, plan_shrinking
from sipp.runtime.shrinking.rules import rule_of, without_either, without_numbers, without_views
from sipp.runtime.shrinking.sites import structure_of

SAME = 1e-9  # of the largest output, in float64
Rules = Callable[[Node], Rule | None]


@dataclass(frozen=True)
class CheckedPlan:
    """A plan after which the outputs are the same, and the rules that it follows from."""

    channels: Channels
    plan: ShrinkPlan
    rules: Rules


def checked_plan(own: nn.Module, call: Call, program: torch.export.ExportedProgram) -> CheckedPlan:
    """Which channels stay, checked on the example in float64, where rounding hides nothing, and at other sizes.

    A forward pass may contain channel counts (`x.view(-1, 512)`) or compute with sizes (`x / x.shape[1]`), which no
    trace shows. If outputs differ with fewer channels, or at another batch, image or sequence size, more are kept.
    """
    precise = _float64_copy(own, call)
    net, points, expected = (own, call, outputs_of(own, call)) if precise is None else precise
    trials = [(points, expected), *_other_sizes(net, points)]
    most = rounding_tolerance(expected) if precise is None else SAME
    moved = torch.inf
    for rules in (rule_of, without_views, without_numbers, without_either):
        channels = channels_in(own, program, rules)
        plan = plan_shrinking(channels)
        small = copy.deepcopy(net)
        apply(small, plan)
        try:
            moved = max(output_difference(outputs_of(small, inputs), outputs) for inputs, outputs in trials)
        except SippError:  # it does not run
            continue
        if moved <= most:
            return CheckedPlan(channels, plan, rules)
    raise differs(moved)


def outputs_of(model: nn.Module, call: Call) -> list[Any]:
    """All outputs for the example, in eval mode and with a fixed seed; buffers that the pass changes are restored."""
    args, kwargs = cloned(*call)
    batch = Batch(index=0, where="the example", args=args, kwargs=kwargs, labels=None, n_points=1)
    with torch.random.fork_rng(), scoring_mode(model, "running"):
        torch.manual_seed(0)
        return list(pytree.tree_leaves(run_batch(model, batch)))


def _float64_copy(model: nn.Module, call: Call) -> tuple[nn.Module, Call, list[Any]] | None:
    """A float64 copy of the network, with example and outputs; None if it does not run in float64."""
    try:
        precise = copy.deepcopy(model).double()
        wide = pytree.tree_map(lambda x: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x, call)
        return precise, wide, outputs_of(precise, wide)
    except (SippError, RuntimeError, TypeError):
        return None


def _other_sizes(model: nn.Module, call: Call) -> list[tuple[Call, list[Any]]]:
    """The example in other sizes that the network accepts, and its outputs there.

    The batch is doubled. Every other dimension, and all dimensions of one size together (height and width; a sequence
    and its mask), are halved, or else doubled. On a GPU they are not doubled: an index beyond a table of positions
    would leave it unusable.
    """
    leaves, spec = pytree.tree_flatten(call)
    shapes = {i: leaf.shape for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
    sizes = {(i, dim): size for i, shape in shapes.items() for dim, size in enumerate(shape)}
    by_dim = [[place for place in sizes if place[1] == dim] for dim in sorted({dim for _, dim in sizes})]
    by_size = [[place for place in sizes if sizes[place] == size] for size in sorted(set(sizes.values()))]
    can_grow = not any(leaves[i].is_cuda for i in shapes)

    def accepted(places: list[tuple[int, int]], grows: bool) -> bool:
        """Whether the network runs with these dimensions doubled or halved; if so, its outputs are noted."""
        new = list(leaves)
        for i, dim in places:
            new[i] = torch.cat((new[i], new[i]), dim) if grows else new[i].narrow(dim, 0, (sizes[i, dim] + 1) // 2)
        inputs: Call = pytree.tree_unflatten(new, spec)
        with suppress(SippError):  # it does not run
            found.append((inputs, outputs_of(model, inputs)))
            return True
        return False

    found: list[tuple[Call, list[Any]]] = []
    for places in by_dim[:1]:
        accepted(places, grows=True)
    for places in (*by_dim[1:], *(one for one in by_size if one not in by_dim)):
        is_halved = max(sizes[place] for place in places) > 1 and accepted(places, grows=False)
        if not is_halved and can_grow:
            accepted(places, grows=True)
    return found


def differs(moved: float) -> ModelError:
    how = (
        "does not run, or returns other shapes or other plain numbers,"
        if moved == torch.inf
        else f"differs by {moved:.1e}"
    )
    return ModelError(
        f"the smaller network {how} on the example or at other sizes of it, so it is not returned",
        fix="make sure that forward uses no fixed channel counts and nothing random, returns finite numbers, and takes "
        "the same layers at every size",
    )


def rules_for_sites(model: nn.Module, call: Call, program: torch.export.ExportedProgram) -> Rules:
    """The rules under which a channel can be taken from every site: a number of channels in the code needs others."""
    trial = copy.deepcopy(model)
    structure = structure_of(channels_in(trial, program, rule_of))
    with torch.no_grad():
        for site in structure.sites:
            trial.get_parameter(site.reader)[:, site.columns_GC[0]] = 0.0
    return checked_plan(trial, call, program).rules
