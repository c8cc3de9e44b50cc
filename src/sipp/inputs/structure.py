"""What follows from a watched run about a network's structure: functions of a `Recording` and the prunable layers.

Nothing is run here. Blocks, what the output of a layer is added to, where its intercepts go, and whether the network
is a chain: four questions, one part each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sipp.inputs.layers import PrunableLayer
from sipp.inputs.recording import THE_MODEL, ModuleCall, Operation, Recording, Ref, Value, refs_in
from sipp.native import pytree

BATCH_NORMS = frozenset(
    (
        *("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "batch_norm"),
        *("_native_batch_norm_legit", "_native_batch_norm_legit_no_training", "_batch_norm_no_update"),
    )
)
# Operations that give the values they were given, in the same order
COPIES = frozenset(("view", "_unsafe_view", "reshape", "clone", "_to_copy", "contiguous", "detach", "alias", "copy"))
# Operations that keep ||difference|| from growing, coordinate by coordinate or by moving it around (T12)
ONE_LIPSCHITZ = frozenset(
    (
        *("relu", "tanh", "sigmoid", "hardtanh", "hardsigmoid", "_softmax"),
        *("view", "_unsafe_view", "clone", "detach", "alias"),
    )
)
SLOPED = {"leaky_relu": "negative_slope", "elu": "alpha"}

ADDS = frozenset((torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor))

_PACKED = ("q_proj_weight", "k_proj_weight", "v_proj_weight")  # of attention: one tensor holds their biases in order


def output_of(recording: Recording, layer: PrunableLayer) -> int | None:
    """The tensor that a layer gives, if it is called once."""
    calls = recording.calls_of.get(layer.module_name, ())
    return calls[0].makes[0] if len(calls) == 1 and calls[0].makes else None


def _output_weight(layer: PrunableLayer, products: Collection[str]) -> str:
    """The weight whose products, with a bias, are the layer's output; "" if that is none or several."""
    if isinstance(layer.module, nn.MultiheadAttention):
        return next((weight.name for local, weight in layer.weights.items() if local == "out_proj.weight"), "")
    names = [weight.name for weight in layer.weights.values()] if layer.module_name in products else []
    return names[0] if len(names) == 1 else ""


def only_reader(recording: Recording, tensor: int) -> int | None:
    """The one operation that reads a tensor, if it is one and the tensor is no output of the model."""
    readers = recording.readers.get(tensor, ())
    return readers[0] if len(readers) == 1 and tensor not in recording.outputs else None


# --- Blocks -----------------------------------------------------------------------------------------------------------

# The layers of a transformer, say: modules of one class that are called one after the other, each on the output of the
# last. Their other arguments (masks, positions) must not depend on what the blocks compute. Then a network can be run
# block by block, with only the states of all points between two blocks in memory.

FEWEST_BLOCKS = 2


@dataclass(frozen=True)
class Blocks:
    """The repeated modules of a network in call order, and which argument and output carry the state."""

    names: tuple[str, ...]
    at: int | str  # the argument that is the state: its position, or its name
    n_none: int | None  # the output is a tuple of the state and this many None; None: it is the state itself
    ends: tuple[str, ...]  # those after which nothing but their output is read of what they and earlier ones made

    def state_of(self, output: Any) -> Tensor:
        """The state in a block's output."""
        state: Tensor = output if self.n_none is None else output[0]
        return state

    def as_output(self, state: Tensor) -> Any:
        """A block's output with this state."""
        return state if self.n_none is None else (state, *[None] * self.n_none)


def find_blocks(model: nn.Module, recording: Recording) -> Blocks | None:
    """The longest such chain of modules in a watched run of the model, the outermost of equally long ones, or None."""
    could_be = [  # modules with others inside
        call
        for call in recording.calls
        if len(recording.calls_of[call.module]) == 1 and not issubclass(call.kind, nn.Sequential)
        if next(model.get_submodule(call.module).children(), None) is not None
    ]
    found = _longest(could_be)
    if found is None or not _run_by_themselves(recording, *found):
        return None
    calls, at = found
    output, names = calls[0].output, tuple(call.module for call in calls)
    ends = tuple(call.module for i, call in enumerate(calls) if _is_passed_once(recording, calls[: i + 1]))
    return Blocks(names, at, None if isinstance(output, Ref) else len(output) - 1, ends)


def _longest(calls: Sequence[ModuleCall]) -> tuple[list[ModuleCall], int | str] | None:
    """The longest chain of modules of one class, each given what the one before gives, always as the same argument."""
    chains: dict[tuple[int, type[nn.Module]], list[ModuleCall]] = {}  # by the state and the class of the last module
    best: list[ModuleCall] = []
    state_at: int | str = 0
    for call in calls:
        given = {at: (value, call.kind) for at, value in call.arguments.items() if isinstance(value, Ref)}
        at, key = next(((at, key) for at, key in given.items() if key in chains), (0, None))
        chain = [*(chains[key] if key is not None else ()), call]
        state = _state(call)
        if state is not None:
            chains[state, call.kind] = chain
        if len(chain) > len(best):
            best, state_at = chain, at
    is_one_place = all(isinstance(call.arguments.get(state_at), Ref) for call in best)
    return (best, state_at) if is_one_place and len(best) >= FEWEST_BLOCKS else None


def _made_in(recording: Recording, calls: Sequence[ModuleCall], stop: int) -> set[int]:
    """The tensors that these calls make, and those that are computed from them before operation `stop`."""
    made = {
        one for call in calls for operation in recording.operations[call.start : call.stop] for one in operation.makes
    }
    for operation in recording.operations[calls[0].start : stop]:
        if not made.isdisjoint(operation.reads):
            made.update(operation.makes)
    return made


def _is_passed_once(recording: Recording, calls: Sequence[ModuleCall]) -> bool:
    """Whether what follows these blocks reads nothing of what they made but the output of the last."""
    stop = calls[-1].stop
    made = _made_in(recording, calls, stop) - set(calls[-1].makes)
    return made.isdisjoint(recording.outputs) and all(made.isdisjoint(one.reads) for one in recording.operations[stop:])


def _run_by_themselves(recording: Recording, calls: Sequence[ModuleCall], state_at: int | str) -> bool:
    """Whether the blocks can be run one by one: they share nothing of what they compute but the state."""
    of_blocks = _made_in(recording, calls, len(recording.operations))
    for call in calls:
        others = {at: value for at, value in call.arguments.items() if at != state_at}
        if any(_is_opaque(leaf) for leaf in pytree.tree_leaves(others)):
            return False
        given = set(refs_in(others))
        if not given.isdisjoint(of_blocks):
            return False
        known = given | set(refs_in(call.arguments[state_at]))
        for operation in recording.operations[call.start : call.stop]:
            for read in operation.reads:
                is_constant = read not in recording.maker and not recording.values[read].of_inputs
                if read not in known and not is_constant:
                    return False
            known.update(operation.makes)
    return True


def _is_opaque(leaf: Any) -> bool:
    """Whether it stands for an object that was not looked into: the watch notes its type (see `Recorder`)."""
    return isinstance(leaf, type) and not issubclass(leaf, nn.Module)


def _state(call: ModuleCall) -> int | None:
    """The only tensor of an output: by itself, or first in a tuple whose other entries are None."""
    output = call.output
    if isinstance(output, tuple) and output and all(value is None for value in output[1:]):
        output = output[0]
    return output if isinstance(output, Ref) else None


# --- Residual connections ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Residual:
    """A residual connection: the output of a layer, which nothing else reads, is added to a stream (T21)."""

    module: str  # whose output it is
    nth: int  # of the sums that `is_residual` finds after the call of the layer
    at: int  # the place of the stream among the two
    norms: tuple[str, ...]  # BatchNorms that the output passes before, each of which scales its rows
    latest: str  # the latest weight that the stream depends on; "": the stream depends on no weight
    of_inputs: bool  # whether the stream depends on the inputs


def residuals_in(
    recording: Recording,
    layers: Sequence[PrunableLayer],
    order: Sequence[str],
    products: Collection[str],
    blocks: Blocks | None,
) -> dict[str, Residual]:
    """By weight, what its layer's output is added to before the block ends; `order` are all weights as they are used.

    `products` are the modules whose output is the products of one weight, with a bias.
    The stream depends on no later weight: of two layers that are added, the later one corrects the earlier.
    """
    place = {name: i for i, name in enumerate(order)}
    latest = _latest_weights(recording, place)
    ends = [recording.calls_of[name][0].stop for name in (blocks.names if blocks is not None else ())]
    found = {}
    for layer in layers:
        weight, tensor = _output_weight(layer, products), output_of(recording, layer)
        met = _adds(recording, tensor) if weight in place and tensor is not None else None
        if met is None:
            continue
        at, stream, norms = met
        begun = recording.calls_of[layer.module_name][0].stop
        is_later = latest.get(stream, -1) >= place[weight]
        if is_later or any(begun <= end <= at for end in ends):
            continue
        found[weight] = Residual(
            layer.module_name,
            nth=sum(_is_sum(recording, operation) for operation in recording.operations[begun : at + 1]),
            at=_operands(recording.operations[at]).index(stream),
            norms=norms,
            latest=order[latest[stream]] if stream in latest else "",
            of_inputs=recording.values[stream].of_inputs,
        )
    return found


def _adds(recording: Recording, tensor: int) -> tuple[int, int, tuple[str, ...]] | None:
    """The sum that alone reads a tensor, directly or behind copies and BatchNorms with running statistics.

    The operation, the stream, and the BatchNorms.
    """
    norms: tuple[str, ...] = ()
    while (at := only_reader(recording, tensor)) is not None:
        operation = recording.operations[at]
        if _is_sum(recording, operation) and operation.arguments.get("alpha", 1) == 1:
            others = [one for one in _operands(operation) if one != tensor]
            return (at, others[0], norms) if others else None
        if operation.name in BATCH_NORMS and _uses_running_statistics(operation, tensor):
            norms = (*norms, operation.module)
        elif operation.name not in COPIES or not _keeps_shape(recording, operation, tensor):
            return None
        tensor = operation.makes[0]
    return None


def _operands(operation: Operation) -> list[Any]:
    return [operation.arguments.get("self"), operation.arguments.get("other")]


def _is_sum(recording: Recording, operation: Operation) -> bool:
    """Whether a recorded operation may be a residual connection."""
    return is_residual(
        operation.function, [recording.values[one] if isinstance(one, Ref) else one for one in _operands(operation)]
    )


def is_residual(function: Any, arguments: Sequence[object]) -> bool:
    """Whether an operation may be a residual connection: it adds two tensors of one shape, in a run or a recording."""
    if function not in ADDS:
        return False
    first, second = arguments[:2]
    return isinstance(first, Tensor | Value) and isinstance(second, Tensor | Value) and first.shape == second.shape


def _keeps_shape(recording: Recording, operation: Operation, tensor: int) -> bool:
    given, made = recording.values[tensor], recording.values[operation.makes[0]]
    return (given.shape, given.dtype) == (made.shape, made.dtype)


def _uses_running_statistics(operation: Operation, tensor: int) -> bool:
    given = operation.arguments
    return (
        given.get("input") == tensor and isinstance(given.get("running_var"), Ref) and not given.get("training", False)
    )


def _latest_weights(recording: Recording, place: Mapping[str, int]) -> dict[int, int]:
    """By tensor, the place of the latest weight it depends on; none for those that depend on no weight."""
    found = {i: place[value.name] for i, value in enumerate(recording.values) if value.name in place}
    for operation in recording.operations:
        places = [found[read] for read in operation.reads if read in found]
        for made in operation.makes if places else ():
            found[made] = max(*places, found.get(made, -1))
    return found


# --- Where intercepts go ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """A tensor of the model that takes intercepts, from entry `start` on, added or subtracted."""

    kind: Literal["bias", "norm", "none"]  # a bias, a running mean, nowhere
    name: str
    start: int
    sign: int


NOWHERE = Place("none", "", 0, 0)


def places_in(
    model: nn.Module, recording: Recording, layers: Sequence[PrunableLayer], products: Collection[str]
) -> dict[str, Place]:
    """Where the intercepts of each weight go: the layer's own bias, or the running mean of the BatchNorm behind it.

    A BatchNorm subtracts its running mean, so a layer without a bias gets an intercept b if that mean is lowered by b.
    This is the same only if nothing but the norm reads the layer's output. A weight that several modules hold has none.
    """
    holders = Counter(weight.name for layer in layers for weight in layer.weights.values())
    found = {}
    for layer in layers:
        for local, weight in layer.weights.items():
            has_products = layer.module_name in products
            place = _bias(model, layer, local, weight.n_rows) if has_products or _has_own_biases(layer) else None
            place = place or (_running_mean(recording, layer, weight.n_rows) if has_products else NOWHERE)
            found[weight.name] = place if holders[weight.name] == 1 else NOWHERE
    return found


def _has_own_biases(layer: PrunableLayer) -> bool:
    """Whether it is one of torch's layers with a bias a weight, though its output is no product."""
    return isinstance(layer.module, nn.RNNBase | nn.RNNCellBase | nn.MultiheadAttention)


def _bias(model: nn.Module, layer: PrunableLayer, local: str, n_rows: int) -> Place | None:
    """The module's own bias of this weight, if it has one that no other module shares."""
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


def _running_mean(recording: Recording, layer: PrunableLayer, n_rows: int) -> Place:
    """That of the norm which alone reads the output of a layer without a bias."""
    tensor = output_of(recording, layer)
    if tensor is None or getattr(layer.module, "bias", None) is not None:
        return NOWHERE
    at = only_reader(recording, tensor)
    if at is None or recording.operations[at].name not in BATCH_NORMS:
        return NOWHERE
    operation = recording.operations[at]
    mean = operation.arguments.get("running_mean")
    if not _uses_running_statistics(operation, tensor) or not isinstance(mean, Ref):
        return NOWHERE
    value = recording.values[mean]
    n_reads = sum(len(at) for read, at in recording.readers.items() if recording.values[read].name == value.name)
    is_whole = value.name and value.shape == (n_rows,) and n_reads == 1
    return Place("norm", value.name, 0, -1) if is_whole else NOWHERE


# --- Is it a chain of fully-connected layers? (T12) -------------------------------------------------------------------


def why_no_chain(model: nn.Module, recording: Recording, weights: set[str]) -> str:
    """Why the network is not the chain of fully-connected layers of the paper's formula (T12); "" if it is one."""
    only = "it covers plain chains of fully-connected layers only: "
    if len(recording.inputs) != 1:
        return f"{only}it has {len(recording.inputs)} inputs"
    kinds = {name: type(module).__name__ for name, module in model.named_modules()}
    last, used = recording.inputs[0], set[str]()
    for operation in recording.operations:
        sources = [read for read in operation.reads if recording.values[read].of_inputs]
        if operation.is_in_place and any(recording.values[made].name for made in operation.makes):
            return f"{only}a forward pass writes to {recording.values[operation.makes[0]].name}"
        if not sources or not any(recording.values[made].of_inputs for made in operation.makes):
            continue
        why = None
        if sources != [last]:
            why = "it does not follow from the layer before it alone"
        elif recording.values[operation.makes[0]].dtype != recording.values[last].dtype:
            why = "it changes the data type"
        else:
            why = _why_no_step(recording, operation, weights, used)
        if why is not None:
            kind = kinds.get(operation.module, "")
            return f"{only}op {operation.name} in module {operation.module or THE_MODEL} ({kind}){why and f': {why}'}"
        last = operation.makes[0]
    if recording.depends_on_values:
        return f"{only}values decide what runs ({recording.depends_on_values})"
    return "" if recording.outputs == (last,) else f"{only}the output does not follow from the last layer alone"


def _why_no_step(recording: Recording, operation: Operation, weights: set[str], used: set[str]) -> str | None:
    """Why an operation on the value before it is no step of a chain; None if it is one."""
    given = operation.arguments
    if operation.name in ("addmm", "mm") and not recording.values[given["mat2"]].of_inputs:
        name = recording.values[given["mat2"]].name
        if name not in weights:
            return "it is fully connected, but its weight was not scored"
        if name in used:
            return f"{name} is used twice"
        if given.get("beta", 1) != 1 or given.get("alpha", 1) != 1:
            return "it scales its operands"
        if operation.name == "addmm" and not recording.values[given["self"]].name:
            return "its bias is not a parameter"
        used.add(name)
        return None
    if operation.name in SLOPED:
        slope = given[SLOPED[operation.name]] * given.get("input_scale", 1)
        is_within = 0 <= slope <= 1 and given.get("scale", 1) == 1 and given.get("input_scale", 1) > 0
        return None if is_within else "its slope is outside [0, 1]"
    if operation.name == "_softmax" and given["dim"] % len(recording.values[operation.reads[0]].shape) == 0:
        return "the output for one input depends on the others in its batch"
    return None if operation.name in ONE_LIPSCHITZ and len(operation.reads) == 1 else ""
