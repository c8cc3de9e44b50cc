"""Copies a model with plain weights: masks from `hold` or torch.nn.utils.prune become zeros in the weights."""

from __future__ import annotations

import copy

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from sipp.errors import ModelError
from sipp.pruning import release


def plain_copy(model: nn.Module) -> nn.Module:
    """A copy of the model in eval mode, without the hooks that mask its weights; its outputs are the same."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise ModelError("has no values yet (lazy module)", where=name, fix="run the model on an input first")
    try:
        copied = copy.deepcopy(model, _values_with_a_history(model))
    except Exception as error:  # their classes, their __deepcopy__: anything may be raised
        raise ModelError(
            f"cannot be copied ({type(error).__name__}: {error})",
            where=type(model).__name__,
            fix="remove attributes that cannot be copied (locks, files), or give it a __deepcopy__",
        ) from error
    release(copied)
    for module in copied.modules():
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False  # not recorded by torch.export; would set padded tokens to 0
    return copied.eval()


def turn_off_fused_attention(model: nn.Module) -> None:
    """Lets torch compute attention as it does where gradients are recorded; outputs are the same but for rounding.

    Without gradients, torch runs encoder and attention layers by fused kernels, which give NaN where all tokens of a
    sequence are padded. The modules' own attributes are set, because torch's switch is for all threads and models. In
    an attention layer, training mode means dropout, here with a probability of 0, and no fused kernel.
    """
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0  # as if it had an activation that the fused kernel does not know
        elif isinstance(module, nn.MultiheadAttention) and type(module).forward is nn.MultiheadAttention.forward:
            module.training, module.dropout = True, 0.0


def _values_with_a_history(model: nn.Module) -> dict[int, object]:
    """A memo for deepcopy with copies of non-leaf tensors (such as weight = weight_orig * mask), which it refuses."""
    values = (value for module in model.modules() for value in vars(module).values())
    return {id(value): value.detach().clone() for value in values if isinstance(value, Tensor) and not value.is_leaf}
