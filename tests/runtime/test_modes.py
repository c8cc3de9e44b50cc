"""`sparse` made in one mode of autograd and called in others, with layers that are left dense."""

import pytest
import torch
from runtime.nets import is_close, kernels, thin
from torch import nn

import sipp

MODES = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}


def images(n):
    return torch.randn(n, 3, 8, 8)


def net(keep, stem=1.0):
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 5))
    thin(layers[0], stem)
    return thin(layers[1:], keep) and layers.eval()


def check(fast, model, x):
    with torch.no_grad():
        wanted = model(x)
    found = fast(x)
    assert is_close(found, wanted)
    assert found.is_inference() == torch.is_inference_mode_enabled() and not found.requires_grad


@pytest.mark.parametrize("made", MODES)
def test_made_and_called_in_any_mode(never_dense, made):
    model = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4)).eval()
    thin(model[2], 0.3)  # the first layer keeps all of its weights, and is not packed for the next compilation
    with MODES[made]():
        fast = sipp.sparse(model, torch.randn(4, 8))
        x = torch.randn(4, 8)
    for n, met in enumerate(MODES, 1):  # new shapes
        with MODES[met]():
            check(fast, model, x)
            y = torch.randn(n, 8)
            check(fast, model, y)
        for mode in MODES.values():
            with mode():
                check(fast, model, x)
                check(fast, model, y)


@pytest.mark.parametrize("made", MODES)
def test_dense_networks_too(always_dense, made):
    model = net(0.3)
    with MODES[made]():
        fast = sipp.sparse(model, images(4))
    for n, met in ((3, "grad"), (2, "inference")):
        with MODES[met]():
            y = images(n)
            check(fast, model, y)
        for mode in MODES.values():
            with mode():
                check(fast, model, y)


@pytest.mark.parametrize("keep", [1.0, 0.5, 0.02])
def test_every_pair_of_shapes(never_dense, keep):
    model = net(keep)
    for first, second in ((2, 16), (16, 3)):
        fast = sipp.sparse(model, images(first))
        for n in (second, first, second):
            check(fast, model, images(n))


def test_a_stem_that_is_left_out_of_pruning():
    torch.manual_seed(0)
    model = sipp.prune(net(1.0), images(40), keep=0.1, exclude="0", progress=False).model.eval()
    fast = sipp.sparse(model, images(16))  # as it is raced, with no clock in the way of what is tested
    for n in (8, 16, 8):
        check(fast, model, images(n))


def test_a_network_made_in_inference_mode(never_dense):
    with torch.inference_mode():
        model = net(0.3)
        assert all(parameter.is_inference() for parameter in model.parameters())
    fast = sipp.sparse(model, images(4))
    check(fast, model, images(4))
    check(fast, model, images(3))
    assert any(kernel.startswith("sparse") for kernel in kernels(fast))
