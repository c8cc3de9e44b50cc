"""Finds the prunable weights of a model: the registry of layer types, and which weights are chosen, tied or refused.

The adapter of fully-connected layers, the simplest one, is here. Those of other layers have files beside this one, each
imported with the first such layer.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils import parametrize

from sipp.errors import DataError, ModelError, OptionError, warn_caller
from sipp.inputs import layers as adapters
from sipp.inputs.data import is_finite
from sipp.inputs.patches import Weight, WeightUse, vectors
from sipp.results import Selector, words

# (module, args, kwargs, number of points): yields the uses of one call. It returns nothing if the output is one use of
# all rows: their products with the patches, plus the module's `bias` where it has one. Otherwise it returns all that
# the module's forward gives, which it then takes the place of.
Uses = Callable[[Any, tuple[Any, ...], dict[str, Any], int], Iterator[WeightUse] | Generator[WeightUse, None, Any]]


@dataclass(frozen=True)
class Adapter:
    """How a layer type is scored: the local names of its weights, and the uses that one call makes of them."""

    weights: Callable[[Any], tuple[str, ...]]
    uses: Uses
    rows_last: bool = False  # the weight is stored K x F
    row_dims: int = 1  # of its dimensions, the first so many count rows


@dataclass(frozen=True)
class PrunableLayer:
    """A module to read: its adapter, and the weight behind each of its local parameter names."""

    module_name: str
    module: nn.Module
    adapter: Adapter
    weights: dict[str, Weight]
    known_as: str  # the registered type whose map it is taken for

    @property
    def label(self) -> str:
        return _where(self.module_name, self.module)


# --- Fully-connected layers -------------------------------------------------------------------------------------------


def one_weight(module: nn.Module) -> tuple[str, ...]:
    """The local name of the only weight."""
    return ("weight",)


def one_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The input of a layer that takes one tensor."""
    given = (*args, *kwargs.values())
    if len(given) != 1:
        raise ModelError(
            f"is called with {len(given)} arguments, not one: sipp cannot reproduce its output",
            fix="exclude it, or register an adapter (sipp.inputs.layers.register)",
        )
    if not isinstance(given[0], Tensor):
        raise DataError(f"takes a tensor, not a {type(given[0]).__name__}")
    return given[0]


def linear_uses(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], n_points: int) -> Iterator[WeightUse]:
    """One use: every input vector is a patch, whatever the leading dimensions."""
    inputs = one_input(args, kwargs)
    if inputs.ndim == 0:
        raise DataError("takes vectors of features, not a single number")
    yield vectors("weight", inputs, n_points)


# --- The registry -----------------------------------------------------------------------------------------------------

LINEAR = Adapter(one_weight, linear_uses)
LINEAR_TRANSPOSED = replace(LINEAR, rows_last=True)
_REGISTRY: dict[type[nn.Module] | str, Callable[[], Adapter]] = {
    nn.Linear: lambda: LINEAR,
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), lambda: adapters.CONV),
    **dict.fromkeys((nn.RNN, nn.LSTM, nn.GRU), lambda: adapters.RECURRENT),
    **dict.fromkeys((nn.RNNCell, nn.LSTMCell, nn.GRUCell), lambda: adapters.CELL),
    nn.MultiheadAttention: lambda: adapters.ATTENTION,
    "transformers.pytorch_utils.Conv1D": lambda: LINEAR_TRANSPOSED,
}
UP, DOWN = "gate_up_proj", "down_proj"  # of experts, which are known by their parameters

_UNSUPPORTED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d, nn.Bilinear)
_QUANTISED = ("torch.ao.nn.quantized", "torch.ao.nn.intrinsic", "torch.ao.nn.qat")


def register(layer_type: type[nn.Module] | str, adapter: Adapter) -> None:
    """Makes `layer_type` (a class, or its dotted name) and its subclasses prunable from now on."""
    _REGISTRY[layer_type] = lambda: adapter


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside DataParallel, DistributedDataParallel and torch.compile wrappers: its names are canonical."""
    while True:
        if not isinstance(model, nn.Module):
            raise ModelError(
                f"the model must be an nn.Module, not {model!r:.60}",
                fix="give a model, not its class",
            )
        if isinstance(model, torch.jit.ScriptModule):
            raise ModelError(
                f"{type(model).__name__} is a TorchScript module, whose layers cannot be seen",
                fix="give the nn.Module that it was made from, and script the pruned one",
            )
        inner = model._modules.get("_orig_mod")
        if inner is None and isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            inner = model.module
        if inner is None:
            return model
        model = inner


GLOB = frozenset("*?[")


def _or_exclude(fix: str, name: str) -> str:
    """The fix, and the alternative if there is one: a model that is a single layer has nothing else to prune."""
    return f"{fix}, or leave it as it is with exclude={name!r}" if name else fix


def find_prunable_layers(
    model: nn.Module, *, include: Selector | None = None, exclude: Selector | None = None, warns: bool = True
) -> tuple[PrunableLayer, ...]:
    """The modules of `model` that hold prunable weights, in the order of the model's definition.

    A parameter used by several modules is one Weight (under its first chosen name) with a layer for each use, also
    in modules that were not chosen: all uses are scored. Norms, embeddings, weights tied to an embedding, and
    parameters outside known layers are left alone, and so is the head of a language model unless `include` names it,
    with a warning if `warns`.
    """
    modules = {name: module for name, module in model.named_modules() if _is_layer(module)}
    chosen = _chosen(model, modules, include, exclude, warns)
    layers = _known_layers(modules, chosen)
    weights = _chosen_weights(model, layers, chosen)
    if not weights:
        types = sorted(key.rpartition(".")[2] if isinstance(key, str) else key.__name__ for key in _REGISTRY)
        raise ModelError(
            f"{type(model).__name__} has no prunable weight (after include and exclude). Prunable are the weights "
            f"of {', '.join(types)}, and of types added with sipp.inputs.layers.register"
        )
    with_weights = (
        replace(layer, weights={local: weights[id(p)] for local, p in _parameters(layer).items() if id(p) in weights})
        for layer in layers
    )
    return tuple(layer for layer in with_weights if layer.weights)


def unscored_layers(model: nn.Module) -> list[str]:
    """The names of the layers with weights, but no adapter: `find_prunable_layers` raises if one is not excluded."""
    return [name for name, module in model.named_modules() if _is_layer(module) and _registered(module) is None]


def _known_layers(modules: Mapping[str, nn.Module], chosen: set[str]) -> list[PrunableLayer]:
    """The modules of a registered type, without weights yet; raises for a chosen one of another type.

    A module whose weight the adapter of its parent handles is left out.
    """
    layers: list[PrunableLayer] = []
    of_parents: set[str] = set()
    for name, module in modules.items():
        if name in of_parents:
            continue
        registered = _registered(module)
        if registered is not None:
            adapter, known_as = registered
            layers.append(PrunableLayer(name, module, adapter, {}, known_as))
            of_parents |= {_join(name, local.rpartition(".")[0]) for local in adapter.weights(module) if "." in local}
        elif name in chosen:
            raise ModelError(
                "this layer type cannot be scored",
                where=_where(name, module),
                fix=_or_exclude("register an adapter with sipp.inputs.layers.register", name),
                option="exclude",
            )
    return layers


def _chosen_weights(model: nn.Module, layers: Sequence[PrunableLayer], chosen: set[str]) -> dict[int, Weight]:
    """The weights to prune, checked, by the id of their parameter; names in other modules are aliases."""
    embedded = _embedded(model)
    found: dict[int, Weight] = {}
    checked: dict[str, nn.Parameter] = {}
    for layer in (layer for layer in layers if layer.module_name in chosen):
        for local in layer.adapter.weights(layer.module):
            name, parameter = _join(layer.module_name, local), _plain_parameter(layer, local)
            if parameter.numel() == 0:
                continue  # Linear(5, 0): there is nothing to prune
            checked[name] = parameter
            bias = layer.module._parameters.get("bias")
            if bias is not None and not bias.is_meta:
                checked[_join(layer.module_name, "bias")] = bias
            if id(parameter) in embedded:
                warn_caller(f"{name} is tied to an embedding and left as it is")
            else:
                _add_name(found, name, parameter, layer)
    _refuse_non_finite(checked)
    for layer in (layer for layer in layers if layer.module_name not in chosen):
        for local, parameter in _parameters(layer).items():
            if id(parameter) in found:
                _add_name(found, _join(layer.module_name, local), parameter, layer)
    return found


def lora_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The modules that LoRA (peft) wraps, with their names: they add B A to the weight of a `base_layer`."""
    for name, module in model.named_modules():
        is_lora = all(isinstance(getattr(module, part, None), nn.ModuleDict) for part in ("lora_A", "lora_B"))
        if (
            is_lora
            and isinstance(getattr(module, "base_layer", None), nn.Module)
            and hasattr(module, "get_delta_weight")
        ):
            yield name, module


def _lora_matrices(model: nn.Module) -> set[int]:
    """The ids of the modules that hold LoRA's low-rank matrices, which are not pruned."""
    parts = (part for _, layer in lora_layers(model) for part in (layer.lora_A, layer.lora_B))
    return {id(module) for part in parts for module in part.modules()}


def _embedded(model: nn.Module) -> set[int]:
    """The ids of the weights of embeddings."""
    return {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)}


def _heads(model: nn.Module) -> set[int]:
    """The ids of the modules that turn states into logits over a vocabulary, as transformers models name them."""
    found = set[int]()
    for module in model.modules():
        getter = getattr(module, "get_output_embeddings", None)
        head = getter() if callable(getter) and callable(getattr(module, "get_input_embeddings", None)) else None
        found |= {id(head)} if isinstance(head, nn.Module) else set()
    return found


def _parameters(layer: PrunableLayer) -> dict[str, nn.Parameter]:
    """The weights of the layer that are plain parameters, by local name."""
    everything = dict(layer.module.named_parameters(remove_duplicate=False))
    return {local: everything[local] for local in layer.adapter.weights(layer.module) if local in everything}


def _add_name(found: dict[int, Weight], name: str, parameter: nn.Parameter, layer: PrunableLayer) -> None:
    """Adds the parameter as a new Weight, or this name as an alias of the Weight it already is."""
    adapter, earlier = layer.adapter, found.get(id(parameter))
    if earlier is not None:
        if earlier.rows_last != adapter.rows_last:
            raise ModelError(f"{name} is tied to {earlier.name}, which stores it transposed", fix="exclude both")
        found[id(parameter)] = replace(earlier, aliases=(*earlier.aliases, name))
        return
    n_rows = parameter.shape[-1] if adapter.rows_last else parameter.shape[: adapter.row_dims].numel()
    found[id(parameter)] = Weight(
        name=name,
        aliases=(),
        layer_type=type(layer.module).__name__,
        n_rows=n_rows,
        fan_in=parameter.numel() // max(n_rows, 1),
        rows_last=adapter.rows_last,
    )


def _registered(module: nn.Module) -> tuple[Adapter, str] | None:
    """The adapter of the registered type that is nearest among the module's class and its ancestors, and its name."""
    for base in type(module).__mro__:
        adapter = _REGISTRY.get(base) or _REGISTRY.get(f"{base.__module__}.{base.__qualname__}")
        if adapter is not None:
            return adapter(), base.__name__
    return (adapters.EXPERTS, "experts") if _is_experts(module) else None


def _is_experts(module: nn.Module) -> bool:
    """Whether it is a mixture of experts (`experts.py`), by its parameters."""
    own = {name: one for name, one in module._parameters.items() if one is not None}
    up, down = own.get(UP), own.get(DOWN)
    if up is None or down is None or up.ndim != 3 or len(own) != 2:
        return False
    n_experts, n_inner, n_hidden = up.shape
    fits = down.shape == (n_experts, n_hidden, n_inner // 2) and n_inner % 2 == 0
    return fits and callable(getattr(module, "act_fn", None))


def _is_layer(module: nn.Module) -> bool:
    """Whether it holds a weight like those that are pruned, whether or not its type is known."""
    is_quantised = type(module).__module__.startswith(_QUANTISED) and hasattr(module, "weight")
    return _registered(module) is not None or isinstance(module, _UNSUPPORTED) or is_quantised


def _plain_parameter(layer: PrunableLayer, local: str) -> nn.Parameter:
    """The parameter itself, after checking that it is one: plain, real, dense, with values."""
    owner_name, _, attribute = local.rpartition(".")
    owner = layer.module.get_submodule(owner_name)
    why_fix = _why_not_plain(owner, attribute)
    if why_fix is not None:
        why, fix = why_fix
        raise ModelError(
            f"its {attribute} {why}",
            where=layer.label,
            fix=_or_exclude(fix, layer.module_name),
            option="exclude",
        )
    return owner._parameters[attribute]  # type: ignore[return-value]


def _why_not_plain(owner: nn.Module, attribute: str) -> tuple[str, str] | None:
    """What is wrong with a parameter, and how to mend it; None if nothing is."""
    parameter = owner._parameters.get(attribute)
    if isinstance(parameter, UninitializedParameter):
        return "has no shape yet", "run the model once on a batch first"
    if parametrize.is_parametrized(owner, attribute):
        call = f"torch.nn.utils.parametrize.remove_parametrizations(module, {attribute!r})"
        return "is parametrised", f"call {call} first"
    if f"{attribute}_orig" in owner._parameters:
        return "is masked by torch.nn.utils.prune", "call sipp.release(model) first, which makes its masks permanent"
    if parameter is None or parameter.layout != torch.strided or not parameter.is_floating_point():
        kinds = "quantised, weight-normed or complex"
        return f"is not a plain dense floating-point parameter ({kinds})", "convert the module back"
    if parameter.is_meta:
        return "is on the meta device, it has a shape and no values", "load the weights first"
    return None


def _refuse_non_finite(parameters: Mapping[str, nn.Parameter]) -> None:
    """Raises ModelError if a weight is NaN or infinite."""
    for name, parameter in parameters.items():
        if not is_finite(parameter):
            n_bad = int((~parameter.detach().isfinite()).sum())
            raise ModelError(
                f"{n_bad} of {parameter.numel()} values are NaN or infinite",
                where=name,
                fix="repair or retrain the model",
            )


def _chosen(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    include: Selector | None,
    exclude: Selector | None,
    warns: bool,
) -> set[str]:
    """The names of the layers that are chosen, after checking that every pattern matches something.

    The head of a language model is left out, with a warning, unless `include` is given. The matrices that LoRA adds are
    never chosen.
    """
    wanted = set(layers) if include is None else _matching("include", include, layers)
    wanted -= set() if exclude is None else _matching("exclude", exclude, layers)
    heads = _heads(model) if include is None else set[int]()
    lora = _lora_matrices(model)
    embedded = _embedded(model)
    for name, module in layers.items():
        if warns and name in wanted and id(module) in heads:
            is_tied = id(module._parameters.get("weight")) in embedded
            stays = (
                "is tied to the embedding, and stays dense"
                if is_tied
                else "stays as it is; include=['*'] prunes it too"
            )
            warn_caller(f"{name}, the head, {stays}")
    return {name for name in wanted if id(layers[name]) not in heads | lora}


def _matching(option: str, selector: Selector, layers: Mapping[str, nn.Module]) -> set[str]:
    """The names of the layers that are selected: a type by isinstance, a glob by the module's name or the full name of
    one of its parameters.
    """
    patterns = (selector,) if isinstance(selector, str | type) else selector
    if not isinstance(patterns, Sequence) or not all(isinstance(pattern, str | type) for pattern in patterns):
        raise OptionError(f"include and exclude take a name glob, a layer type or a list of these, not {selector!r}")
    names = {
        name: {name, *(_join(name, local) for local, _ in module.named_parameters())} for name, module in layers.items()
    }
    found = set[str]()
    for pattern in patterns:
        if isinstance(pattern, type):
            matched = {name for name, module in layers.items() if isinstance(module, pattern)}
        else:
            is_glob = not GLOB.isdisjoint(pattern)  # a name without wildcards means itself
            matched = {
                name
                for name, some in names.items()
                if pattern in some or (is_glob and any(fnmatchcase(one, pattern) for one in some))
            }
        if not matched:
            names_of_all = words.listed([name or "the model itself" for name in layers])
            raise OptionError(f"{option}={pattern!r} matches no layer; the layers are: {names_of_all}", option=option)
        found |= matched
    return found


def _join(module_name: str, local: str) -> str:
    return f"{module_name}.{local}" if module_name else local


def _where(name: str, module: nn.Module) -> str:
    return f"{name or 'the model itself'} ({type(module).__name__})"
