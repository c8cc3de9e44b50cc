"""`shrink`: removes dead rows and channels from a network without changing its output."""

from __future__ import annotations

import copy
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from sipp.errors import DataError, ModelError, SippError
from sipp.inputs.capture import run_batch, scoring_mode
from sipp.inputs.data import as_given
from sipp.inputs.restore import ONE_AT_A_TIME
from sipp.native import pytree
from sipp.results.batches import Batch
from sipp.results.network_hash import tensors_hash
from sipp.results.numerics import device_of
from sipp.results.pruned_to import NetworkLike, PrunedTo, network_of, points_seen
from sipp.results.shrunk import Shrunk, ShrunkLayer
from sipp.runtime.examples import (
    Call,
    call_of,
    cloned,
    guess_call,
    output_difference,
    rounding_tolerance,
    without_aliases,
)
from sipp.runtime.graph import program_of
from sipp.runtime.multiply_adds import multiply_adds as count_multiply_adds
from sipp.runtime.plain_copy import plain_copy
from sipp.runtime.shrinking.applying import apply, parameters_and_buffers
from sipp.runtime.shrinking.channels import Channels, channels_in
from sipp.runtime.shrinking.choosing import channel_options, choose_channels
from sipp.runtime.shrinking.removing import ShrinkPlan, plan_shrinking
from sipp.runtime.shrinking.rules import rule_of, without_either, without_numbers, without_views
from sipp.verbs.assess import assess

SAME = 1e-9  # of the largest output, in float64


@torch.inference_mode(False)
def shrink(
    model: NetworkLike,
    data: Any = None,
    *,
    multiply_adds: float | None = None,
    weights: float | None = None,
    uniform: bool = False,
    multiple_of: int = 1,
    repair: bool = True,
    steps: int = 0,
    seed: int = 0,
    progress: bool = True,
) -> Shrunk:
    """Makes a smaller dense network: without its dead channels, or with as few channels as a budget asks for.

    `model` is a network, or what `prune` or `prune_to` returned; it is left as it was. Without a budget, channels go
    that are dead or that no layer reads, and the outputs stay the same. `data` is then an example as for `sparse`, or
    None: noise in the shape of the first layer. Channels that cannot be removed safely stay, and the record names them.
    Outputs are compared before anything is returned: on the example, and at other sizes.

    With `multiply_adds=0.5` (or `weights=0.5`: of all parameters) the network keeps half of them, and `data` are
    calibration inputs as for `prune`; labels are not used. Channels go that only one layer reads, those first that this
    layer can do without, and every layer gets new weights by least squares, so that it gives what the dense network
    has there; `repair=False` leaves that out. `steps` of Adam then bring the outputs closer to the dense ones.
    `uniform=True` takes the same share of every layer, `multiple_of=8` leaves multiples of eight channels. One input in
    ten is held back, to stop Adam and to measure the error. All inputs are held in memory.

    Example:
        >>> import sipp, torch
        >>> _ = torch.manual_seed(0)
        >>> net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
        >>> small = sipp.shrink(net, torch.rand(500, 64), multiply_adds=0.5)
        >>> small.model[0].weight.shape
        torch.Size([128, 64])
        >>> pruned = sipp.prune(net, None, keep=0.02, method="magnitude")
        >>> small = sipp.shrink(pruned, torch.rand(4, 64))  # no budget: the same outputs
        >>> torch.allclose(small.model(torch.ones(1, 64)), pruned.model(torch.ones(1, 64)), atol=1e-5)
        True
    """
    options = channel_options(
        multiply_adds=multiply_adds, weights=weights, uniform=uniform, multiple_of=multiple_of, repair=repair,
        steps=steps, seed=seed, progress=progress,
    )  # fmt: skip
    network = network_of(model)
    with ONE_AT_A_TIME:  # no other thread changes the model while it is copied
        own = plain_copy(network)
        was_training = {name: module.training for name, module in network.named_modules()}
    chosen, used = None, frozenset[str]()
    if options is None:
        call = guess_call(own) if data is None else _on_device(own, without_aliases(*call_of(data)))
    else:
        smaller = choose_channels(own, data, options)
        bounds = assess(own, smaller.model, [as_given(batch) for batch in smaller.split.fit], progress=progress)
        chosen = replace(smaller.chosen, layers=bounds.layers, guarantee=bounds.guarantee)
        own, call, used = smaller.model, smaller.call, smaller.split.keys
    expected = _outputs(own, call)
    if not any(isinstance(output, Tensor) for output in expected):
        raise ModelError("returns no tensor to compare", where=type(own).__name__, fix="let forward return one")
    with ONE_AT_A_TIME:  # torch.export, which replaces functions of Python while it works
        program = program_of(own, *call, is_plain=False)
    channels, plan = _checked_plan(own, call, program)
    small = copy.deepcopy(own)
    apply(small, plan)
    moved = output_difference(_outputs(small, call), expected)
    if not moved <= rounding_tolerance(expected):
        raise _differs(moved)
    for name, module in small.named_modules():
        module.training = was_training.get(name, module.training)
    before = tensors_hash(network)
    chosen_by = points_seen(model)
    certificate = model.certificate if isinstance(model, PrunedTo) and chosen is None else None
    shapes, smaller_shapes = (
        {name: tuple(tensor.shape) for name, tensor in parameters_and_buffers(net).items()} for net in (own, small)
    )
    counts, smaller_counts = count_multiply_adds(program, shapes), count_multiply_adds(program, smaller_shapes)
    layers = [
        ShrunkLayer(name, shapes[name], smaller_shapes[name], count, smaller_counts[name])
        for name, count in counts.items()
        if name in shapes  # others are products without a weight
    ]
    return Shrunk(
        model=small,
        layers=tuple(layers),
        n_parameters_before=sum(parameter.numel() for parameter in own.parameters()),
        n_parameters=sum(parameter.numel() for parameter in small.parameters()),
        multiply_adds_before=sum(counts.values()),
        multiply_adds=sum(smaller_counts.values()),
        example=_described(call),
        off_by=moved,
        left_alone=tuple(channels.left_alone),
        hash_before=before,
        described_hash=tensors_hash(small),
        certificate=certificate if certificate is not None and certificate.pruned_hash == before else None,
        seen=chosen_by.hashes | used,
        seen_all=chosen_by.is_all or (chosen is not None and isinstance(model, nn.Module)),
        chosen=chosen,
    )


def _checked_plan(own: nn.Module, call: Call, program: torch.export.ExportedProgram) -> tuple[Channels, ShrinkPlan]:
    """Which channels stay, checked on the example in float64, where rounding hides nothing, and at other sizes.

    A forward pass may contain channel counts (`x.view(-1, 512)`) or compute with sizes (`x / x.shape[1]`), which no
    trace shows. If outputs differ with fewer channels, or at another batch, image or sequence size, more are kept.
    """
    precise = _float64_copy(own, call)
    net, points, expected = (own, call, _outputs(own, call)) if precise is None else precise
    trials = [(points, expected), *_other_sizes(net, points)]
    most = rounding_tolerance(expected) if precise is None else SAME
    moved = torch.inf
    for rules in (rule_of, without_views, without_numbers, without_either):
        channels = channels_in(own, program, rules)
        plan = plan_shrinking(channels)
        small = copy.deepcopy(net)
        apply(small, plan)
        try:
            moved = max(output_difference(_outputs(small, inputs), outputs) for inputs, outputs in trials)
        except SippError:  # it does not run
            continue
        if moved <= most:
            return channels, plan
    raise _differs(moved)


def _outputs(model: nn.Module, call: Call) -> list[Any]:
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
        return precise, wide, _outputs(precise, wide)
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
            found.append((inputs, _outputs(model, inputs)))
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


def _differs(moved: float) -> ModelError:
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


def _on_device(model: nn.Module, call: Call) -> Call:
    device = device_of(model) if any(True for _ in model.parameters()) else torch.device("cpu")
    for value in pytree.tree_leaves(call):
        if isinstance(value, Tensor) and (value.layout is not torch.strided or value.is_meta):
            raise DataError("the example holds a tensor that is sparse or without values", fix="give a dense one")
    moved: Call = pytree.tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, call)
    return moved


def _described(call: Call) -> str:
    tensors = [value for value in pytree.tree_leaves(call) if isinstance(value, Tensor)]
    return "an input of " + " and ".join(" x ".join(map(str, tensor.shape)) for tensor in tensors)
