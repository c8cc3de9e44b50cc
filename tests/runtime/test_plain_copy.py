"""Masks that are held, or of torch.nn.utils.prune, are zeros of the weights in what `sparse` compiles."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn
from torch.nn.utils import prune as torch_prune

import sipp
from sipp.errors import ModelError
from sipp.runtime.copying import plain_copy


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


X = torch.rand(16, 64, generator=torch.Generator().manual_seed(1))


def masked_by_torch() -> nn.Module:
    model = net()
    torch_prune.l1_unstructured(model[0], "weight", 0.9)
    torch_prune.random_unstructured(model[0], "bias", 0.5)
    torch_prune.l1_unstructured(model[2], "weight", 0.5)
    torch_prune.l1_unstructured(model[2], "weight", 0.5)  # twice: torch keeps both in a container
    return model


def held() -> nn.Module:
    pruned = sipp.prune(net(), None, keep=0.1, method="magnitude")
    sipp.hold(pruned.model, pruned)
    return pruned.model


@pytest.mark.parametrize("make", [masked_by_torch, held])
@pytest.mark.parametrize("is_trained", [False, True])
def test_masks_become_zeros_and_the_model_is_left_as_it_was(make: object, is_trained: bool) -> None:
    model: nn.Module = make()  # type: ignore[operator]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if is_trained:  # what torch computed from the mask before is out of date now
        model(X).square().sum().backward()
        optimizer.step()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    fast = sipp.sparse(model, X)
    wanted = model(X)
    assert torch.allclose(fast(X), wanted, rtol=1e-4, atol=1e-5)
    plain = plain_copy(model)
    assert set(plain.state_dict()) == set(net().state_dict())
    assert not any(module._forward_pre_hooks for module in plain.modules())
    assert int((plain.get_parameter("0.weight") == 0).sum()) >= 0.8 * 64 * 128
    assert fast.n_dense_bytes == sum(t.nbytes for t in net().parameters())
    after = model.state_dict()
    assert list(after) == list(before) and all(torch.equal(after[name], value) for name, value in before.items())
    model(X).sum().backward()  # still trains, with its masks
    optimizer.step()
    model(X)
    assert int((model.get_submodule("0").weight == 0).sum()) >= 0.8 * 64 * 128  # type: ignore[union-attr,arg-type,operator]


def test_a_model_that_cannot_be_copied_is_named() -> None:
    model = net()
    model.lock = threading.Lock()  # type: ignore[assignment]
    with pytest.raises(ModelError, match=r"Sequential: cannot be copied .*__deepcopy__"):
        sipp.sparse(model, X)


def test_a_lazy_model_is_named_and_not_made_up() -> None:
    model = nn.Sequential(nn.LazyLinear(4))
    with pytest.raises(ModelError, match=r"0\.weight: has no values yet"):
        sipp.sparse(model, X)
    assert isinstance(model[0], nn.LazyLinear)  # nor was it filled by us
    model(X)
    assert torch.allclose(sipp.sparse(model, X)(X), model(X), rtol=1e-4, atol=1e-5)
