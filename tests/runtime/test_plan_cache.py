"""Which plans are kept, how much memory they take, and who owns the results."""

import gc
import math
import threading
import warnings
import weakref

import pytest
import torch
from runtime.nets import is_close, kernels, thin
from torch import nn

import sipp
from sipp.errors import DataError
from sipp.runtime import cpu_network, plan_cache, steps


@pytest.fixture
def n_compiled(monkeypatch):
    """How many times something was compiled, by the number of traces."""
    calls = []
    real = cpu_network.trace
    monkeypatch.setattr(cpu_network, "trace", lambda *given: calls.append(given) or real(*given))
    return calls


def net(keep=0.3):
    torch.manual_seed(0)
    return thin(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), keep)


class Gives(nn.Module):
    """Returns what is its own: a parameter, a buffer, a tensor it holds, a view, its input."""

    def __init__(self):
        super().__init__()
        self.a, self.own = nn.Linear(8, 6), nn.Parameter(torch.ones(3))
        self.register_buffer("also", torch.full((2, 2), 3.0))
        self.table = torch.full((4,), 2.0)

    def forward(self, x):
        return {"a": self.a(x), "own": [self.own, self.own[1:], self.also.T], "table": self.table, "x": x, "n": 3}


@pytest.mark.parametrize("race", ["never_dense", "always_dense"])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_results_are_the_callers_own(request, race, mode):
    request.getfixturevalue(race)
    model, x = thin(Gives(), 0.4), torch.randn(3, 8)
    fast = sipp.sparse(model, x)
    with mode():
        found = fast(x)
        before = {name: torch.utils._pytree.tree_map(_copied, value) for name, value in found.items()}
        for value in torch.utils._pytree.tree_leaves(found):
            if isinstance(value, torch.Tensor):
                value.fill_(7.0)
        again = fast(x)
    assert not torch.equal(x, torch.full_like(x, 7.0)) and again["n"] == 3
    pairs = zip(*(torch.utils._pytree.tree_leaves(each) for each in (again, before)))
    assert all(torch.equal(one, other) for one, other in pairs if isinstance(one, torch.Tensor))


def _copied(value):
    return value.clone() if isinstance(value, torch.Tensor) else value


def test_nine_shapes_in_turn_compile_eight_times(never_dense, n_compiled):
    model = net()
    fast = sipp.sparse(model, torch.randn(2, 8))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(plan_cache.PATIENCE + 2):
            for n in range(2, 11):
                x = torch.randn(n, 8)
                assert is_close(fast(x), model(x))
    assert len(n_compiled) == plan_cache.MOST_PLANS == 8
    assert len([each for each in said if "more than 8 kinds of input" in str(each.message)]) == 1


def test_a_shape_that_comes_often_takes_the_place_of_one_that_does_not(never_dense, n_compiled, monkeypatch):
    monkeypatch.setattr(plan_cache, "MOST_PLANS", 2)
    model = net()
    fast = sipp.sparse(model, torch.randn(2, 8))
    fast(torch.randn(3, 8))
    with pytest.warns(UserWarning, match="kinds of input"):
        fast(torch.randn(4, 8))
    for _ in range(plan_cache.PATIENCE - 2):
        fast(torch.randn(4, 8))
        fast(torch.randn(3, 8))
    assert len(n_compiled) == 2
    fast(torch.randn(4, 8))  # the sixteenth; the plan for 2 was not used meanwhile
    assert len(n_compiled) == 3 and len(fast._plans) == 2
    for n in (3, 4, 3, 4, 2):
        x = torch.randn(n, 8)
        assert is_close(fast(x), model(x))
    assert len(n_compiled) == 3


def test_the_number_of_remembered_signatures_is_bounded(monkeypatch):
    monkeypatch.setattr(plan_cache, "MOST_WAITING", 4)
    plans = plan_cache.PlanCache()
    for signature in range(plan_cache.MOST_PLANS):
        plans.put(signature, None)
    assert not any(plans.should_compile(100 + i) for i in range(1000))
    assert len(plans._waiting) <= 4


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 6)

    def forward(self, x, scale):
        return self.a(x) * math.copysign(2.0, scale) if scale == scale else self.a(x)


@pytest.mark.filterwarnings("ignore:more than 8 kinds")
def test_number_arguments_are_part_of_the_signature(never_dense, n_compiled):
    model, x = thin(Scaled(), 0.4), torch.randn(3, 8)
    fast = sipp.sparse(model, (x, 1.0))
    for scale in (0.0, -0.0, float("nan"), float("nan"), float("nan"), 0.0, -0.0, 1.0):
        assert is_close(fast(x, scale), model(x, scale))
    assert len(n_compiled) == 4
    for i in range(40):
        assert is_close(fast(x, 0.1 * i), model(x, 0.1 * i))
    assert len(n_compiled) == plan_cache.MOST_PLANS
    with pytest.raises(DataError, match="holds a ndarray"):
        fast(x, x.numpy())


def test_bytes_of_all_plans_are_counted_and_shared_ones_once(never_dense):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128, bias=False), nn.ReLU(), nn.Linear(128, 64, bias=False)).eval()
    thin(model[2], 0.1)
    fast = sipp.sparse(model, torch.randn(3, 64))
    first = fast.n_bytes
    fast(torch.randn(3, 64))
    assert fast.n_bytes == first
    fast(torch.randn(9, 64))
    packed = [plan.n_packed_bytes for plan in fast._plans.all()]
    assert fast.n_bytes == first + packed[1] and packed[0] > 0 and packed[1] > 0


def test_a_dense_layer_is_held_once_for_all_plans(always_dense, monkeypatch):
    monkeypatch.setattr(steps, "race", lambda fast, dense: ([1e-3], [math.inf]))  # a plan of dense layers
    model = net(0.5)
    fast = sipp.sparse(model, torch.randn(3, 8))
    assert fast.n_bytes == fast.n_dense_bytes
    for n in (5, 7):
        x = torch.randn(n, 8)
        assert is_close(fast(x), model(x))
    assert len(fast._plans) == 3 and set(kernels(fast)) == {"dense"}
    assert fast.n_bytes == fast.n_dense_bytes


def test_a_plan_that_lost_keeps_no_weights(always_dense, monkeypatch):
    arenas, real = [], cpu_network.make_plan

    def noted(*given, **named):
        made = real(*given, **named)
        arenas.append(weakref.ref(made.arena))
        return made

    monkeypatch.setattr(cpu_network, "make_plan", noted)
    fast = sipp.sparse(thin(nn.Linear(64, 64), 0.3), torch.randn(3, 64))
    fast(torch.randn(5, 64))
    assert fast.latest.is_dense and fast.n_bytes == fast.n_dense_bytes
    gc.collect()
    assert [arena() for arena in arenas] == [None, None]  # every step of a plan holds its arena


def test_a_shape_that_two_threads_meet_is_compiled_once(never_dense, n_compiled):
    model = net()
    fast, x, found = sipp.sparse(model, torch.randn(2, 8)), torch.randn(5, 8), []
    threads = [threading.Thread(target=lambda: found.append(fast(x))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(n_compiled) == 2 and all(is_close(each, model(x)) for each in found) and len(found) == 3
