"""`hold` and `release`: keep pruned weights exactly zero while a network trains.

`masks` is {parameter name: bool tensor of the parameter's shape}, True = kept. Masks only zero: the values of the kept
weights (SiPP-rand changes them, T8) live in the parameters. A name is canonical: as in `model.named_parameters()`,
without the path parts that DDP, DataParallel and AveragedModel ("module") or torch.compile ("_orig_mod") put in.

Four mechanisms, each closing one way in which a pruned weight could become non-zero. All of them read the masks from
the module they are called with, so a deepcopy of a held model holds its own masks and is released on its own:

    cause                                           prevented by
    a gradient                                      a hook on the parameter
    momentum, Adam state or decay from before hold  clearing it, and a post-step hook on the optimizer given to `hold`
    load_state_dict, any other write                a pre-forward hook on the owner of the parameter and on the root
    a save between such a write and a forward       a pre-state_dict hook on the owner

What LoRA (peft) adds to a held weight is masked too, and merged into it by `release` (lora.py).

What is guaranteed, and from when:
- given the optimizer: exactly zero whenever `optimizer.step()` has returned, whatever state it had before;
- not given: the same for an optimizer made after `hold`; an older one may revive a weight until the next forward;
- an average (AveragedModel, with or without use_buffers) that was made before `hold` remembers the dense network: call
  `hold(average, pruned)` as well, and again whenever the masks shrink. One made after `hold` is a copy that holds the
  masks of that moment by itself;
- a deepcopy holds with any new optimizer; one that takes over old momentum must be given to `hold(copy, ...)`.

Limits: parameters that are renamed (torch.nn.utils.prune, parametrize) need `release` before and `hold` after. FSDP:
`hold` after fully_shard, with the optimizer and the same masks on every rank; FullyShardedDataParallel, which flattens
many parameters into one, is not supported.
DataParallel on several devices: hold the wrapper, since replicas are not masked. `hold` on a DDP wrapper is called on
every rank, and all take the masks of the first; inside of it, or before wrapping, give every rank the same masks.
"""

import functools
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import Parameter
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from sipp.errors import ModelError, OptionError
from sipp.inputs import check_can_be_written
from sipp.pruning.given_masks import WithMasks, fold_torch_masks, masks_in
from sipp.pruning.lora import HOLD_STATE as STATE, check_lora, mask_lora, merge_lora
from sipp.results import hashing

LORA_PART, PEFT_PREFIX = ".base_layer.", "base_model.model."  # what peft puts into a name


@dataclass(frozen=True)
class Hold:
    """Which parameters are held, how many weights they have, and how many are kept."""

    names: tuple[str, ...]
    n_weights: int
    n_kept: int


@dataclass(frozen=True)
class _Held:
    """One parameter (tied names count as one), and every module that owns it under a local name."""

    name: str
    param: Parameter
    owners: tuple[tuple[nn.Module, str], ...]

    @property
    def mask(self) -> Tensor | None:
        # A tie may cross the border of a part that was held alone: any owner may be the one that knows.
        return next((_mask_at(module, local) for module, local in self.owners if local in _masks_at(module)), None)


class _State:
    """The masks held at one module, and handles of hooks on tensors and optimizers, which a copy does not get.

    Masks are not buffers, which an AveragedModel would average, and torch would pair with those of other copies.
    """

    def __init__(self, masks: dict[str, Tensor] | None = None) -> None:
        self.masks = {} if masks is None else masks  # by local name; replaced, never changed in place
        # Weak, with the parameter itself: load_state_dict(assign=True) replaces a parameter and so loses its hook.
        self.grad_hooks: dict[str, tuple[weakref.ref[Parameter], RemovableHandle]] = {}
        self.step_hooks: weakref.WeakKeyDictionary[Optimizer, RemovableHandle] = weakref.WeakKeyDictionary()

    def __deepcopy__(self, memo: dict[int, Any]) -> "_State":
        return _State(dict(self.masks))

    def __reduce__(self) -> tuple[type["_State"], tuple[dict[str, Tensor]]]:
        return _State, (self.masks,)


@torch.inference_mode(False)
def hold(model: nn.Module, pruned: WithMasks, *, optimizer: Optimizer | Sequence[Optimizer] | None = None) -> Hold:
    """Sets the weights of `model` that are pruned in `pruned` to zero and keeps them there, until `release`.

    `pruned` is what `prune`, `prune_to`, `gradual`, `assess` or `inspect` returned, {parameter name: bool tensor} with
    True for kept weights, or a network whose zeros are the pruned weights, such as `model` itself.

    If you call it again, masks can only shrink, parameters that you do not name keep their masks, and optimizers passed
    earlier are still watched; to bring a weight back, call `release` first. If anything is refused, nothing changes.

    Example:
        >>> import sipp, torch
        >>> _ = torch.manual_seed(0)
        >>> net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
        >>> pruned = sipp.prune(net, None, keep=0.25, method="magnitude")
        >>> optimizer = torch.optim.SGD(pruned.model.parameters(), lr=0.1, momentum=0.9)
        >>> held = sipp.hold(pruned.model, pruned, optimizer=optimizer)
        >>> held.n_kept, held.n_weights
        (48, 192)
    """
    _check_module(model)
    masks = masks_in(pruned)
    check_can_be_written(model)
    checked = [(entry, _checked_mask(name, entry, masks[name])) for name, entry in _resolve(model, masks).items()]
    optimizers = _checked_optimizers(model, optimizer)
    check_lora(model)
    checked = _of_first_rank(model, checked)
    for entry, mask in checked:
        for module, local in entry.owners:
            # Through __dict__: nn.RNNBase and torch.compile's wrapper override setattr.
            module.__dict__.setdefault(STATE, _State()).masks[local] = mask.clone()
            _add_hook(module._forward_pre_hooks, module.register_forward_pre_hook, _apply_own_masks)
            _add_hook(module._state_dict_pre_hooks, module.register_state_dict_pre_hook, _apply_own_masks)
        if entry.param.grad is not None:
            entry.param.grad = torch.where(mask, entry.param.grad, 0)
    for root in _roots(model):
        _add_hook(root._forward_pre_hooks, root.register_forward_pre_hook, _apply_all_masks)
    watched = model.__dict__.setdefault(STATE, _State()).step_hooks
    for new in optimizers:
        if new not in watched:
            watched[new] = new.register_step_post_hook(functools.partial(_apply_all_masks, model))
    for one in watched:  # momentum and moments of weights outside the masks
        for entry, mask in checked:
            for value in one.state.get(entry.param, {}).values():
                if isinstance(value, Tensor) and value.shape == entry.param.shape:
                    value.masked_fill_(~mask.to(value.device), 0)
    _apply_all_masks(model)
    mask_lora(model)
    held = masks_of(model)
    return Hold(tuple(held), sum(m.numel() for m in held.values()), sum(int(m.sum()) for m in held.values()))


def release(model: nn.Module) -> None:
    """Makes `model` a plain module again, with its zeros in place, no hooks, and the same keys.

    It ends what `hold` began, and does the same for masks of torch.nn.utils.prune (instead of its `remove`).
    What LoRA added to held weights is merged into them with the mask; without it, pruned weights would come back.

    Example:
        >>> import sipp, torch
        >>> _ = torch.manual_seed(0)
        >>> net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
        >>> pruned = sipp.prune(net, None, keep=0.25, method="magnitude")
        >>> _ = sipp.hold(pruned.model, pruned)
        >>> sipp.release(pruned.model)
        >>> list(pruned.model.state_dict()) == list(net.state_dict())
        True
    """
    _check_module(model)
    fold_torch_masks(model)
    merge_lora(model)
    for module in model.modules():
        _drop_hooks(module._forward_pre_hooks)
        _drop_hooks(module._state_dict_pre_hooks)
        state = module.__dict__.get(STATE, _State())
        for local in state.masks:
            if module._parameters.get(local) is not None:
                _apply_mask(module, local)
        for handle in [handle for _, handle in state.grad_hooks.values()] + list(state.step_hooks.values()):
            handle.remove()
        module.__dict__.pop(STATE, None)


def masks_of(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the held masks, by canonical name; empty if none is held."""
    held = ((entry, entry.mask) for entry in _parameters(model))
    return {entry.name: _gathered(mask).clone() for entry, mask in held if mask is not None}


# --- names ----------------------------------------------------------------------------------------------------------


def _parameters(model: nn.Module) -> list[_Held]:
    """Every distinct parameter, under the canonical form of the first of its names."""
    first: dict[Parameter, str] = {}
    owners: dict[Parameter, dict[tuple[nn.Module, str], None]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for local, param in module.named_parameters(recurse=False, remove_duplicate=False):
            first.setdefault(param, f"{path}.{local}" if path else local)
            owners.setdefault(param, {})[module, local] = None
    return [_Held(hashing.canonical(name), param, tuple(owners[param])) for param, name in first.items()]


def _resolve(model: nn.Module, names: Iterable[str]) -> dict[str, _Held]:
    """{given name: parameter}; a given name may be canonical, as in named_parameters(), or any name of a tied one."""
    entries = _parameters(model)
    known = {entry.name: entry for entry in entries}
    by_param = {entry.param: entry for entry in entries}
    for full, param in model.named_parameters(remove_duplicate=False):
        before = full.removeprefix(PEFT_PREFIX).replace(LORA_PART, ".")  # by the name that it had before peft
        for name in (full, hashing.canonical(full), before):
            known.setdefault(name, by_param[param])
    resolved = {}
    for name in names:
        entry = known.get(name) or known.get(hashing.canonical(name))
        if entry is None:
            fix = "use names from model.named_parameters()"
            if f"{name}_orig" in known:
                fix = "call sipp.release(model) first: torch.nn.utils.prune has renamed its parameters"
            raise OptionError(f"the model has no parameter {name!r:.60}", fix=fix)
        resolved[name] = entry
    return resolved


def _roots(model: nn.Module) -> list[nn.Module]:
    """The model and, where it only wraps another one (DDP, torch.compile, AveragedModel), that one too."""
    roots = [model]
    while len(children := dict(roots[-1].named_children())) == 1 and children.keys() <= hashing.WRAPPERS:
        roots.extend(children.values())
    return roots


# --- checks, all of them before anything is changed -----------------------------------------------------------------


def _check_module(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"the model is a {type(model).__name__} {model!r:.60}, not an nn.Module", fix="give a model, not its class"
        )


def _checked_mask(name: str, entry: _Held, mask: Tensor) -> Tensor:
    """The mask on the parameter's device; raises if it cannot be held."""
    param: Any = entry.param
    if mask.shape != param.shape:
        raise OptionError(f"the mask of {name!r} has shape {tuple(mask.shape)}, the parameter {tuple(param.shape)}")
    if not bool(_gathered(torch.isfinite(param.detach())).all()):
        raise ModelError(
            f"parameter {name!r} contains NaN or infinite values", fix="load a checkpoint without such values"
        )
    mask = mask.detach().to(param.device)
    if hasattr(param, "placements"):  # FSDP (fully_shard) has sharded it
        from torch.distributed.tensor import distribute_tensor  # which is slow to import

        mask = distribute_tensor(mask, param.device_mesh, param.placements)
    old = entry.mask
    n_revived = 0 if old is None else int(_gathered(mask & ~old).sum())
    if n_revived:
        raise OptionError(
            f"the new mask of {name!r} would bring back {n_revived} pruned weights", fix="call release() first"
        )
    return mask


def _of_first_rank(model: nn.Module, checked: list[tuple[_Held, Tensor]]) -> list[tuple[_Held, Tensor]]:
    """The masks; in a DDP wrapper those of the first rank, because with others the weights of the ranks would part."""
    wrapper = next((root for root in _roots(model) if isinstance(root, nn.parallel.DistributedDataParallel)), None)
    if wrapper is None:
        return checked
    group, shared = wrapper.process_group, []
    for entry, mask in checked:
        numbers = mask.to(torch.uint8)
        torch.distributed.broadcast(numbers, src=torch.distributed.get_global_rank(group, 0), group=group)
        shared.append((entry, numbers.bool()))
    return shared


def _gathered(tensor: Tensor) -> Tensor:
    """The full tensor, gathered from its shards if it is sharded."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _checked_optimizers(model: nn.Module, optimizer: Optimizer | Sequence[Optimizer] | None) -> list[Optimizer]:
    """The given optimizers as a list; raises if one holds no parameter of the model."""
    if not isinstance(optimizer, Optimizer | list | tuple | None):
        raise OptionError(
            f"optimizer must be a torch.optim.Optimizer, not a {type(optimizer).__name__}",
            fix="give the one that trains the model, or a list of several",
        )
    optimizers = [] if optimizer is None else [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    own = set(model.parameters())
    for each in optimizers:
        if not isinstance(each, Optimizer):
            raise OptionError(
                f"optimizer must be a torch.optim.Optimizer, not a {type(each).__name__}",
                fix="give the one inside it",
            )
        if not any(param in own for group in each.param_groups for param in group["params"]):
            raise OptionError(
                f"the {type(each).__name__} optimizes no parameter of the model", fix="make it from this model"
            )
    return optimizers


# --- masks in their modules -----------------------------------------------------------------------------------------


def _masks_at(module: nn.Module) -> dict[str, Tensor]:
    """The masks held at a module, by local name."""
    state = module.__dict__.get(STATE)
    return {} if state is None else state.masks


def _mask_at(module: nn.Module, local: str) -> Tensor:
    """A held mask, on the device of its parameter: `Module.to` does not move it."""
    masks, param = _masks_at(module), module._parameters.get(local)
    if param is not None and masks[local].device != param.device:
        masks[local] = masks[local].to(param.device)
    return masks[local]


def _apply_mask(module: nn.Module, local: str) -> None:
    """Sets the held parameter to zero outside its mask, and hooks its gradient to do the same."""
    if getattr(module, "_is_replica", False):  # DataParallel on several devices: only the original is masked
        return
    if module._parameters.get(local) is None:
        kind = type(module).__name__
        raise ModelError(
            f"{local!r} of {kind} was renamed or removed while its mask was held",
            fix="call sipp.release(model), then sipp.hold again",
        )
    param = module._parameters[local]
    if not isinstance(param, Parameter):  # torch.func.functional_call runs the module on the caller's own tensors
        return
    mask = _mask_at(module, local)
    if hasattr(mask, "placements") != hasattr(param, "placements"):  # gathered by FSDP from shards that are masked
        return
    # .data: zeros written over zeros must not count as a change of a weight that backward still needs, as when a
    # module is called twice. masked_fill: 0 * NaN would stay NaN.
    param.data.masked_fill_(mask.logical_not(), 0)
    if param.requires_grad and not torch.compiler.is_compiling():
        _watch_gradient(module, local, param)


def _apply_own_masks(module: nn.Module, *_: Any) -> None:
    """Applies the masks held at one module: a hook before its forward and its state_dict."""
    for local in tuple(_masks_at(module)):
        _apply_mask(module, local)


def _apply_all_masks(root: nn.Module, *_: Any) -> None:
    """Applies all masks in a model: a hook before its forward and after an optimizer's step.

    Attention reads out_proj.weight without calling out_proj, so hooks on the owners of weights are not enough.
    """
    for module in root.modules():
        _apply_own_masks(module)


# --- hooks: top-level functions that know only what they are called with, so copies and pickles keep them -----------


def _watch_gradient(module: nn.Module, local: str, param: Parameter) -> None:
    hooks = module.__dict__[STATE].grad_hooks
    known = hooks.get(local)
    if known is None or known[0]() is not param:
        hook = functools.partial(_on_gradient, weakref.ref(module), local)
        hooks[local] = (weakref.ref(param), param.register_hook(hook))


def _on_gradient(owner: "weakref.ref[nn.Module]", local: str, grad: Tensor) -> Tensor | None:
    module = owner()
    if module is None or local not in _masks_at(module):
        return None
    return torch.where(_mask_at(module, local), grad, 0)  # not a product: a masked place may hold inf or NaN


def _add_hook(hooks: Mapping[int, Any], register: Any, hook: Any) -> None:
    if not any(present is hook for present in hooks.values()):
        register(hook)


def _drop_hooks(hooks: dict[int, Any]) -> None:
    for key in [key for key, hook in hooks.items() if hook in (_apply_all_masks, _apply_own_masks)]:
        del hooks[key]
