"""Calls that once failed or gave other outputs than the model."""

import threading

import pytest
import torch
from runtime.nets import Net, is_close, kernels, thin
from torch import nn

import sipp
from sipp.runtime import strip_kernel


def shifted(shape, product, last):
    """A product plus something of another shape."""
    return thin(
        Net(lambda p, q, shift, x: q((p(x) + shift).relu()), product, last, nn.Parameter(torch.randn(shape))), 0.4
    )


@pytest.mark.parametrize("shape", [(), (6,), (1, 6), (5, 6), (1, 5, 6), (3, 1, 6), (3, 5, 1), (2, 3, 5, 6)])
def test_a_broadcast_sum_equals_torch(shape, never_dense):
    net, x = shifted(shape, nn.Linear(8, 6), nn.Linear(6, 6)), torch.randn(3, 5, 8)
    fast = sipp.sparse(net, x)
    assert is_close(fast(x), net(x)) and fast(x).shape == net(x).shape
    assert any(kernel.startswith("sparse") for kernel in kernels(fast))


@pytest.mark.parametrize("shape", [(), (6, 1, 1), (1, 6, 1, 1), (6, 7, 7), (1, 1, 7, 7), (1, 6, 7, 1)])
def test_a_broadcast_sum_of_images_equals_torch(shape, never_dense):
    net = shifted(shape, nn.Conv2d(4, 6, 3, padding=1), nn.Conv2d(6, 6, 1))
    x = torch.randn(3, 4, 7, 7)
    fast = sipp.sparse(net, x)
    assert is_close(fast(x), net(x)) and any(kernel.startswith("sparse") for kernel in kernels(fast))


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 6), nn.Linear(8, 6)

    def forward(self, left=None, right=None, scale=1):
        parts = [layer(x) for layer, x in ((self.a, left), (self.b, right)) if x is not None]
        return (parts[0] if len(parts) == 1 else parts[0] + parts[1].neg()) * scale


def test_a_broadcast_product_equals_torch(never_dense):
    net, x, y = thin(Two(), 0.4), torch.randn(1, 8), torch.randn(5, 8)
    for left, right in ((x, y), (y, x)):
        assert is_close(sipp.sparse(net, (left, right))(left, right), net(left, right))


def test_named_arguments_come_in_any_order(never_dense):
    net, left, right = thin(Two(), 0.4), torch.randn(3, 8), torch.randn(3, 8)
    fast = sipp.sparse(net, {"right": right, "left": left})
    wanted = net(left, right)
    for given in (fast(right=right, left=left), fast(left=left, right=right), fast(left, right=right)):
        assert is_close(given, wanted)
    assert is_close(fast(left=left), net(left=left)) and is_close(fast(right=left), net(right=left))
    assert is_close(fast(left=left, scale=2), net(left=left, scale=2))
    assert is_close(fast(left=left, scale=True), net(left=left, scale=True))  # 1 == True == 1.0


@pytest.mark.parametrize("is_fixed", [False, True])
def test_a_batch_is_not_split_if_its_points_are_mixed(is_fixed, never_dense):
    def meeting(layer, x):
        h = layer(x)
        return h.view(64, -1).relu() if is_fixed else nn.functional.linear(h, h)

    net, x = thin(Net(meeting, nn.Linear(16, 20000)), 0.1), torch.randn(64, 16)
    assert is_close(sipp.sparse(net, x)(x), net(x))


def test_what_is_not_finite_is_seen_through_views_and_means(never_dense):
    net = thin(Net(lambda layer, x: layer(x.log().flatten(1)), nn.Linear(64, 6)), 0.1)
    with torch.no_grad():
        net.inner[0].weight[:, 0] = 0
    x = torch.rand(4, 8, 8) + 0.1
    fast = sipp.sparse(net, x)
    x[0, 0, 0] = 0
    assert torch.equal(fast(x).isnan(), net(x).isnan()) and bool(net(x).isnan().any())

    pooled = thin(nn.Sequential(nn.AvgPool2d(2), nn.Conv2d(2, 3, 3)), 0.1)
    with torch.no_grad():
        pooled[1].weight[:, 0] = 0
    images = torch.rand(2, 2, 8, 8)
    fast = sipp.sparse(pooled, images)
    images[:, 0] = 3e38  # the sum of a window is more than float32 holds
    assert torch.equal(fast(images).isfinite(), pooled(images).isfinite())


def test_outputs_share_no_memory_with_the_network(never_dense):
    gives = Net(lambda a, c, x: (a(x), x.clone(), c * 2), nn.Linear(8, 6), nn.Parameter(torch.ones(3)))
    net, x = thin(gives, 0.4), torch.randn(3, 8)
    constant = net.tensors[0].detach() * 2
    fast = sipp.sparse(net, x)
    before = x.clone()
    for value in fast(x):
        value.zero_()
    assert torch.equal(x, before) and torch.equal(fast(x)[2], constant)


def test_dense_results_can_be_changed_and_trained_on(always_dense):
    net, x = nn.Linear(8, 6), torch.randn(3, 8)
    found = sipp.sparse(net, x)(x)
    found.add_(1)
    head = nn.Linear(6, 1)
    head(found).sum().backward()
    assert head.weight.grad is not None


def test_calls_of_many_threads_meet_no_compilation(always_dense):
    net, x = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval(), torch.randn(3, 8)
    fast, wrong, done = sipp.sparse(net, x), [], threading.Event()
    wanted = net(x)

    def serve():
        while not done.is_set():
            try:
                if not torch.equal(fast(x), wanted):
                    wrong.append("other")
            except Exception as error:
                wrong.append(repr(error))

    threads = [threading.Thread(target=serve) for _ in range(2)]
    for thread in threads:
        thread.start()
    for n in range(4, 8):
        assert fast(torch.randn(n, 8)).shape == (n, 4)
    done.set()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_no_two_threads_add_to_the_same_sums():
    """Strips that overlap are written twice, which is harmless for results and not for sums of several rounds."""
    n_rounds = []
    for height, width, n in ((1, 1, 592), (7, 7, 16), (5, 9, 8), (1, 3, 400), (8, 8, 16)):
        plane = strip_kernel.Plane(0, width * n, n)
        for way in strip_kernel.tilings(
            height, width, n, plane, plane, None, "none", False, lambda rows, floats: [1, 3]
        ):
            n_rounds.append(way.n_rounds)
            if way.n_rounds > 1:
                assert len(way.strips) * len(way.tile.in_out) * way.tile.lanes == height * width * n
    assert set(n_rounds) == {1, 3}


def test_layer_norm_with_strided_parameters_equals_torch(never_dense):
    def strided(a, g, x):
        return nn.functional.layer_norm(a(x), (16,), g[:, 0], g[:, 1])

    net = thin(Net(strided, nn.Linear(8, 16), nn.Parameter(torch.randn(16, 2))), 0.4)
    x = torch.randn(32, 8)
    assert is_close(sipp.sparse(net, x)(x), net(x))
