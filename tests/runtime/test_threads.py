"""Several threads at once: tracing and compiling take turns, and nothing of Python or torch stays replaced."""

import builtins
import math
import sys
import threading

import pytest
import torch
from runtime.nets import is_close, thin
from torch import nn

import sipp

REPLACED = {  # by tracers, while they work
    "max": (builtins, "max"),
    "min": (builtins, "min"),
    "pow": (math, "pow"),
    "call": (nn.Module, "__call__"),
    "getattr": (nn.Module, "__getattr__"),
    "exporting": (torch.compiler, "_is_exporting_flag"),
}


@pytest.fixture(autouse=True)
def _many_switches():
    """Switches threads every few instructions, so that race conditions show."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(usual)


def state():
    return {name: getattr(*place) for name, place in REPLACED.items()}


def net(seed):
    torch.manual_seed(seed)
    return thin(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), 0.5)


def in_threads(*tasks):
    """What went wrong in tasks that start at the same time."""
    wrong, start = [], threading.Barrier(len(tasks))

    def run(task):
        start.wait()
        try:
            task()
        except BaseException as error:
            wrong.append(repr(error))

    threads = [threading.Thread(target=run, args=(task,)) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return wrong


def test_threads_can_compile_networks_at_the_same_time(never_dense):
    before = state()

    def compile_four(first):
        for seed in range(first, first + 4):
            model, x = net(seed), torch.randn(3, 8)
            assert is_close(sipp.sparse(model, x)(x), model(x))

    assert in_threads(*[lambda first=first: compile_four(first) for first in (0, 4, 8)]) == []
    assert state() == before
    assert sipp.prune(net(0), torch.rand(40, 8), keep=0.5, progress=False).bound is not None


def test_two_networks_meet_new_shapes_at_once(never_dense):
    before = state()
    models = [net(0), net(1)]
    fast = [sipp.sparse(model, torch.randn(2, 8)) for model in models]

    def meet(i):
        for n in range(3, 6):
            x = torch.randn(n, 8)
            assert is_close(fast[i](x), models[i](x))

    assert in_threads(*[lambda i=i: meet(i) for i in (0, 1, 0, 1)]) == []
    assert state() == before
    assert [len(each._plans) for each in fast] == [4, 4]  # a shape is compiled once, however many meet it


def test_bounds_exports_and_plans_at_once(never_dense, tmp_path):
    from sipp import export

    before, x = state(), torch.randn(4, 8)

    def bound():
        for seed in range(3):
            sipp.assess(net(seed), net(seed), x, bound="sound", holdout=x)

    def exported():
        for seed in range(2):
            export(net(seed), tmp_path / f"{seed}.onnx", x)

    def compiled():
        for seed in range(3):
            sipp.sparse(net(seed), x)

    assert in_threads(bound, exported, compiled) == []
    assert state() == before
