"""Masks of torch.nn.utils.prune: where a model has them, and how they become zeros of its weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

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
    """Gives masked parameters their names back, with zeros where the masks are.

    Not by torch's `remove`: it writes into a tensor that another module, with another mask, may hold too.
    """
    n_owners = Counter(id(one) for module in model.modules() for one in module._parameters.values())
    for _, module, key, local in [*_masked(model)]:
        original, mask = getattr(module, f"{local}_orig"), getattr(module, f"{local}_mask")
        if n_owners[id(original)] > 1:
            original = Parameter(original.detach().clone(), requires_grad=original.requires_grad)
        original.data.copy_(masked_values(original, mask))
        del module._forward_pre_hooks[key], module._parameters[f"{local}_orig"], module._buffers[f"{local}_mask"]
        vars(module).pop(local, None)
        setattr(module, local, original)


def _masked(model: nn.Module) -> Iterator[tuple[str, nn.Module, int, str]]:
    """Path, module, key of the hook and local name of every parameter that is masked."""
    for path, module in model.named_modules():
        for key, hook in module._forward_pre_hooks.items():
            if isinstance(hook, BasePruningMethod):
                yield path, module, key, hook._tensor_name
