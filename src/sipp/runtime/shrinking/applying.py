"""Removes channels from a network: slices its parameters and buffers, and folds constants into biases."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from sipp.runtime.shrinking.removing import ReadingLayer, ShrinkPlan, sorted_groups
from sipp.runtime.shrinking.rules import kernel_sums


def apply(model: nn.Module, plan: ShrinkPlan) -> None:
    """Shrinks the network in place; its modules get new parameters."""
    tensors = parameters_and_buffers(model)
    new = {name: tensors[name].detach() for name, _ in plan.stays}
    owners = _owners(model)
    grouped = {}
    for layer, is_needed, stays in zip(plan.layers, plan.is_needed, plan.read):
        _fold_constants(layer, is_needed, new)
        product = layer.product
        if product.groups > 1:
            weight = new[product.weight]
            out_stays = plan.stays[product.weight, 0]
            n_groups, columns = sorted_groups(layer, stays, out_stays)
            columns = columns.view(*columns.shape, *[1] * (weight.ndim - 2)).expand(-1, -1, *weight.shape[2:])
            grouped[product.weight] = n_groups, columns.to(weight.device)
    for (name, dim), stays in plan.stays.items():
        new[name] = new[name].index_select(dim, stays.to(new[name].device))
    for name, (n_groups, columns) in grouped.items():
        new[name] = new[name].gather(1, columns)
        for module, _ in owners[id(tensors[name])]:
            module.groups = n_groups  # type: ignore[assignment]
    changed = []
    for name, values in new.items():
        if values.shape != tensors[name].shape or not torch.equal(values, tensors[name]):
            changed += _reregister(owners[id(tensors[name])], tensors[name], values)
    for module in changed:
        _update_sizes(module)


def parameters_and_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by all of their names."""
    return dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)])


def _fold_constants(layer: ReadingLayer, is_needed: Tensor, new: dict[str, Tensor]) -> None:
    """Moves the contribution of removed constant channels into the layer's bias, or into its stand-in channel."""
    product = layer.product
    taken = layer.gives_way & (layer.constant != 0) & ~is_needed & layer.reads.any(0)
    if not bool(taken.any()):
        return
    weight, constant = new[product.weight], layer.constant
    values = weight.double()
    dim = 0 if product.is_transposed else 1
    if layer.stand_in is None:
        assert product.bias is not None
        sums = kernel_sums(weight.cpu(), product.groups, product.is_transposed)[:, taken] @ constant[taken]
        bias = new[product.bias]
        new[product.bias] = (bias.double() + sums.to(bias.device)).to(bias.dtype)
    elif taken[layer.stand_in]:
        return  # no needed row reads any of them
    else:
        shares = torch.where(taken, constant / constant[layer.stand_in], 0.0).to(weight.device)
        values.select(dim, layer.stand_in).add_(torch.tensordot(shares, values, ([0], [dim])))
    # Rows that stay without being needed now compute something else, so nothing may read these channels.
    of_rows = taken.view(product.groups, -1).repeat_interleave(weight.shape[1 - dim] // product.groups, 0)
    of_rows = of_rows.T if product.is_transposed else of_rows
    values[of_rows.to(weight.device)] = 0.0
    new[product.weight] = values.to(weight.dtype)


Owners = list[tuple[nn.Module, str]]


def _owners(model: nn.Module) -> dict[int, Owners]:
    """The modules and attribute names under which each tensor is registered, by its id."""
    owners: dict[int, Owners] = {}
    for module in model.modules():
        for local, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                owners.setdefault(id(tensor), []).append((module, local))
    return owners


def _reregister(owners: Owners, old: Tensor, values: Tensor) -> list[nn.Module]:
    """Replaces the tensor wherever it is registered; returns the modules."""
    is_parameter = isinstance(old, nn.Parameter)
    values = values.contiguous()
    new = nn.Parameter(values, requires_grad=old.requires_grad) if is_parameter else values
    for module, local in owners:
        if is_parameter:
            module._parameters[local] = new  # type: ignore[assignment]
        else:
            module._buffers[local] = new
    return [module for module, _ in owners]


def _update_sizes(module: nn.Module) -> None:
    """Updates the module's size attributes (in_features and the like) to its tensors."""
    if isinstance(module, nn.Linear):
        module.out_features, module.in_features = module.weight.shape
    elif isinstance(module, _ConvNd):
        n_first, n_second = module.weight.shape[0], module.weight.shape[1] * module.groups
        transposed = module.transposed
        module.in_channels, module.out_channels = (n_first, n_second) if transposed else (n_second, n_first)
    elif isinstance(module, _NormBase):
        held = module.running_mean if module.weight is None else module.weight
        module.num_features = len(held) if held is not None else module.num_features
    elif isinstance(module, nn.Embedding):
        module.embedding_dim = module.weight.shape[1]
    elif isinstance(module, nn.PReLU):
        module.num_parameters = len(module.weight)
