"""Random networks through `sipp.sparse`, against torch in float64; run as a script with a number: so many of them.

What is compared: every output of every call, whether it is finite where torch's is, and how far it is from the same
network in float64, of its largest number. More than 1e-4 is a mismatch, unless torch's own float32 is off by a tenth of
that or more. Kernels are forced at random, points go a few at a time, sums in rounds; calls come in all autograd modes
on one to three threads.
"""

from __future__ import annotations

import copy
import math
import random
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

sys.path.insert(0, str(Path(__file__).parent.parent))

from runtime.random_networks import Trial, trial

import sipp
from sipp.runtime import chunks, examples, kernel, products, strip_kernel, timing

TOLERANCE = 1e-4
OWN_LOSS = 10  # times what torch's own float32 loses
NEAR_OVERFLOW = 1e38  # from this scale on, whether a sum overflows depends on its order, in torch as well
MODES = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}


@contextmanager
def forced(rng: random.Random) -> Iterator[str]:
    """Chooses kernels by lot instead of by the clock, cuts points and channels into small parts; gives its name."""
    choice = rng.choice(["sparse"] * 5 + ["mixed"] * 3 + ["dense"])
    lost = {"sparse": lambda: math.inf, "dense": lambda: 0.0, "mixed": lambda: rng.choice([0.0, math.inf])}[choice]
    n_rounds = rng.choice([1, 1, 2, 3])
    with ExitStack() as stack:

        def put(module: Any, name: str, value: Any) -> None:
            stack.enter_context(mock.patch.object(module, name, value))

        put(timing, "dense_time", lambda function, trials=1: lost())
        put(
            timing, "race", lambda fast, dense: (fast(), dense(), ([1e-3], [0.0 if choice == "dense" else math.inf]))[2]
        )
        put(examples, "rounding_tolerance", lambda expected: math.inf)  # a plan that is off is to be seen
        put(chunks, "NEAR_CACHE", rng.choice([500, 500, 1_300_000]))
        put(products, "_rounds", lambda layer, *given: sorted({1, min(n_rounds, layer.weight.shape[1])}))
        put(strip_kernel, "MOST_VECTORS", rng.choice([16, 10, 8, 5]))
        put(
            kernel.PreparedKernel,
            "time_and_set_threads",
            lambda kernel, limit=math.inf: (kernel.alone(), rng.random())[1],
        )
        yield choice


def mismatches(found: Any, wanted: Any, truth: Any) -> list[str]:
    """What is wrong with an output, in words; nothing where it is right."""
    given = [pytree.tree_flatten(one) for one in (found, wanted, truth)]
    if given[0][1] != given[1][1]:
        return [f"other structure: {given[0][1]}"]
    wrong = []
    for ours, theirs, exact in zip(*(leaves for leaves, _ in given)):
        wrong += (
            _wrong(ours, theirs, exact) if isinstance(theirs, Tensor) else [] if ours == theirs else ["other number"]
        )
    return wrong


def _wrong(ours: Tensor, theirs: Tensor, exact: Tensor) -> list[str]:
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return [f"{ours.shape} {ours.dtype} instead of {theirs.shape} {theirs.dtype}"]
    if not torch.equal(ours.isfinite(), theirs.isfinite()):
        n = int((ours.isfinite() != theirs.isfinite()).sum())
        return [f"{n} of {ours.numel()} finite where torch is not, or not where it is"]
    is_known = theirs.isfinite() & exact.isfinite()
    if not is_known.any():
        return []
    ours, theirs, exact = (t[is_known].double() for t in (ours, theirs, exact))
    size = float(exact.abs().max())
    off, own = float((ours - exact).abs().max()), float((theirs - exact).abs().max())
    most = max(TOLERANCE * size, OWN_LOSS * own, 1e-37)
    return (
        []
        if off <= most
        else [f"off by {off / (size or 1):.1e} of {size:.1e}, torch's float32 by {own / (size or 1):.1e}"]
    )


def check(seed: int, *, most_parts: int = 5) -> list[str]:
    """What is wrong with the network of this seed."""
    rng, given = random.Random(-1 - seed), trial(seed, most_parts=most_parts)
    inputs = [x for x in given.inputs if _runs(given, x)]
    exact, n_threads = copy.deepcopy(given.net).double(), torch.get_num_threads()
    with forced(rng) as choice, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.set_num_threads(rng.choice([1, 1, 2, 3]))
        try:
            with MODES[rng.choice(list(MODES))]():
                fast = sipp.sparse(given.net, inputs[0]) if inputs else None
            wrong = [fault for x in inputs for fault in _call(fast, given, exact, x, rng.choice(list(MODES)))]
        except Exception as error:
            wrong = [repr(error)[:300]]
        finally:
            torch.set_num_threads(n_threads)
    return [f"{choice}: {fault}" for fault in wrong]


def _runs(given: Trial, x: Tensor) -> bool:
    """Whether torch takes this input: an image may be too small for what is done to it."""
    try:
        with torch.no_grad():
            given.net(x)
    except (RuntimeError, ValueError, IndexError):
        return False
    return True


def _call(fast: Any, given: Trial, exact: Any, x: Tensor, mode: str) -> list[str]:
    before = x.clone()
    with MODES[mode]():
        found = fast(x)
    with torch.no_grad():
        wrong = mismatches(found, given.net(x), exact(x.double()))
        if wrong and given.scale >= NEAR_OVERFLOW and x.dim() == 4:  # torch's sums in another order may not overflow
            last = torch.channels_last
            other = copy.deepcopy(given.net).to(memory_format=last)(x.contiguous(memory_format=last))
            wrong = mismatches(found, other, exact(x.double()))
        for leaf in pytree.tree_leaves(found):
            if isinstance(leaf, Tensor) and not leaf.is_inference():
                leaf.zero_()  # the caller's own: the next call must not see it
    return [f"{tuple(x.shape)} in {mode}: {fault}" for fault in wrong] + (
        [] if torch.equal(x, before) else ["input changed"]
    )


@pytest.mark.parametrize("first", [0, 8])
def test_random_networks_equal_torch(first):
    wrong = {seed: check(seed, most_parts=2) for seed in range(first, first + 8)}
    assert {seed: faults for seed, faults in wrong.items() if faults} == {}


if __name__ == "__main__":
    for seed in range(int(sys.argv[1])):
        for fault in check(seed):
            print(f"seed {seed}: {fault}", flush=True)
