"""Masks of torch.nn.utils.prune: where a model has them, and how they become zeros of its weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.utils.prune import BasePruningMethod


def masked_by_torch(model: nn.Module) -> list[str]:
    """The names of the parameters that torch.nn.utils.prune has replaced by NAME_orig and NAME_mask."""
    return [f"{path}.{local}" if path else local for path, _, _, local in _masked(model)]


def masked_values(original: Tensor, mask: Tensor) -> Tensor:
    """What torch computes from NAME_orig and NAME_mask, whose numbers may be any, with plain zeros.

    Its product leaves -0.0 for a negative weight, which no file stores for free, and NaN for one that is not finite.
    """
    return (mask.to(original.dtype) * original.detach() + 0.0).masked_fill(mask == 0, 0)


def fold_torch_masks(model: nn.Module) -> None:
    """Gives masked parameters their names, objects and places back, with zeros where the masks are.

    Modules that share a parameter and a mask go on sharing it. Where masks differ, or one module has none, each gets a
    tensor of its own, and one of them the parameter that was shared; torch's `remove` would mix them up.
    """
    n_owners = Counter(one for module in model.modules() for one in module._parameters.values())
    users: dict[Parameter, list[tuple[nn.Module, int, str]]] = {}
    for _, module, key, local in _masked(model):
        users.setdefault(getattr(module, f"{local}_orig"), []).append((module, key, local))
    for original, masked in users.items():
        given: list[tuple[Parameter, Tensor]] = []  # with the mask that it is for
        for module, key, local in masked:
            mask = getattr(module, f"{local}_mask").to(original.dtype)
            parameter = next((one for one, other in given if torch.equal(other, mask)), None)
            if parameter is None:
                is_free = not given and n_owners[original] == len(masked)
                parameter = original if is_free else Parameter(masked_values(original, mask), original.requires_grad)
                given.append((parameter, mask))
            del module._forward_pre_hooks[key], module._parameters[f"{local}_orig"], module._buffers[f"{local}_mask"]
            vars(module).pop(local, None)
            setattr(module, local, parameter)
        first, mask = given[0]
        if first is original:  # written last, since all others are computed from it
            original.data.copy_(masked_values(original, mask))
    for module in {module for masked in users.values() for module, _, _ in masked}:
        _put_in_order(module)


def _put_in_order(module: nn.Module) -> None:
    """Weights before biases, or as a recurrent layer lists them: torch had put what it masked at the end."""
    place = {local: i for i, local in enumerate(getattr(module, "_flat_weights_names", ()))}
    found = sorted(module._parameters.items(), key=lambda one: (place.get(one[0], len(place)), "bias" in one[0]))
    module._parameters.clear()
    module._parameters.update(found)


def _masked(model: nn.Module) -> Iterator[tuple[str, nn.Module, int, str]]:
    """Path, module, key of the hook and local name of every parameter that is masked."""
    for path, module in model.named_modules():
        for key, hook in module._forward_pre_hooks.items():
            if isinstance(hook, BasePruningMethod):
                yield path, module, key, hook._tensor_name
