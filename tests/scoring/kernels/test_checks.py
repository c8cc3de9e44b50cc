"""Whatever is passed, compiled code sees no wrong address: every kernel refuses operands that do not fit."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from fresh_process import run_python
from scoring.kernels import block_products
from torch import Tensor

from sipp.errors import DataError
from sipp.scoring.kernels import checks, reference
from sipp.scoring.kernels.cpu import kernel as cpu, plain_loops

Operands = dict[str, Any]


def rand(*shape: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(0)) + 0.1


def sums_operands() -> Operands:
    return {"weight_GRK": rand(2, 3, 4) - 0.5, "patches_GKP": rand(2, 4, 70)}


def product_operands() -> Operands:
    return {"patches_GKP": rand(2, 4, 70), "inverse_SGRP": rand(2, 2, 3, 70), "positive_GRK": rand(2, 3, 4) > 0.5}


def point_operands() -> Operands:
    patches, inverse, positive = product_operands().values()
    by_point = (x.unflatten(-1, (7, 10)) for x in (patches, inverse))
    return dict(zip(("patches_GKBN", "inverse_SGRBN"), by_point)) | {"positive_GRK": positive}


def ratio_operands(*, has_counts: bool) -> Operands:
    weight = rand(2, 3, 4) - 0.5
    factors = torch.tensor([[1.0], [-1.0]]).repeat(1, 5)
    extra = {"counts_B": torch.full((5,), 9)} if has_counts else {}
    windows = rand(5, 2, 9, 2, 2)
    others = {"factors_TB": factors, "row_factors_GR": torch.ones(2, 3, dtype=torch.float64)} | extra
    return {"windows": windows, "n_position_dims": 1, "weight_GRK": weight} | others


ENTRIES: dict[str, Callable[[], Operands]] = {
    "quadrant_sums": sums_operands,
    "max_times": product_operands,
    "sum_times": point_operands,
    "max_ratios": lambda: ratio_operands(has_counts=False),
    "mean_ratios": lambda: ratio_operands(has_counts=True),
    "extremes": lambda: {"values_BN": rand(5, 9)},
}
CASES = [(cpu, name) for name in ENTRIES if name != "max_times"] + [
    (kernel, name) for kernel in (plain_loops, reference) for name in ("quadrant_sums", "max_times", "sum_times")
]


def call(kernel: ModuleType, entry: str, operands: Operands) -> None:
    getattr(block_products if entry.endswith("_ratios") else kernel, entry)(**operands)


@pytest.mark.parametrize(("kernel", "entry"), CASES)
def test_operands_that_fit_are_taken(kernel: ModuleType, entry: str) -> None:
    call(kernel, entry, ENTRIES[entry]())


def spoiled(tensor: Tensor, how: str, dim: int, by: int) -> Tensor:
    """The tensor with another size, rank, dtype, place or layout."""
    dim = dim % tensor.ndim
    if how == "longer":
        return torch.cat((tensor, *[tensor.narrow(dim, 0, 1)] * by), dim)
    if how == "shorter":
        return tensor.narrow(dim, 0, max(0, tensor.shape[dim] - by))
    if how == "rank":
        return tensor[None] if by % 2 else tensor.select(dim, 0)
    if how == "swapped":
        return tensor.transpose(dim, dim - 1)
    if how == "dtype":
        wrong = (torch.complex64, torch.float64, torch.int32, torch.bool, torch.uint8)
        return tensor.to(wrong[by % 5]) if by % 5 or not tensor.is_floating_point() else tensor.to(torch.complex64)
    if how == "meta":
        return tensor.to("meta")
    return tensor.to_sparse()


HOW = ["longer", "shorter", "rank", "swapped", "dtype", "meta", "sparse"]


N_MIXED = 400  # cases with several changes at once, for each entry of a kernel; those with one are all tried


def changes(operands: Operands) -> Iterator[Operands]:
    """Operands that are spoiled: each alone in every way, then some of them together."""
    tensors = {name: value for name, value in operands.items() if isinstance(value, Tensor)}
    numbers = [{"n_position_dims": n} for n in (1, 1, 1, 0, 2, 3, 4, -1)] if "n_position_dims" in operands else [{}]
    for name, tensor in tensors.items():
        for how, dim, by in itertools.product(HOW, range(tensor.ndim), (1, 2, 3, 4, 5, 40)):
            yield {name: spoiled(tensor, how, dim, by)}
    yield from numbers
    choice = random.Random(0)
    for _ in range(N_MIXED):
        some = choice.sample(sorted(tensors), choice.randint(1, len(tensors)))
        changed = {
            name: spoiled(tensors[name], choice.choice(HOW), choice.randrange(5), choice.randint(1, 40))
            for name in some
        }
        yield changed | choice.choice(numbers)


@pytest.mark.parametrize(("kernel", "entry"), CASES)
def test_operands_that_do_not_fit_are_refused(kernel: ModuleType, entry: str) -> None:
    for changed in changes(ENTRIES[entry]()):
        operands = ENTRIES[entry]() | changed
        try:
            call(kernel, entry, operands)
        except DataError:
            continue
        shown = {name: getattr(value, "shape", value) for name, value in changed.items()}
        assert fits(entry, operands), shown  # changes may happen to fit each other


def fits(entry: str, x: Operands) -> bool:
    """Whether these sizes belong together: a second opinion, in other words than those of `checks.py`."""
    if entry == "extremes":
        return x["values_BN"].ndim == 2 and x["values_BN"].numel() > 0
    if entry == "quadrant_sums":
        return torch.einsum("grk,gkp->grp", *(v.double() for v in x.values())).numel() > 0
    if entry in ("max_times", "sum_times"):
        a, u, positive = x.values()
        rest = "p" if entry == "max_times" else "bn"
        sizes = torch.einsum(f"gk{rest},sgr{rest}->sgrk", a.double(), u.double()).shape
        return sizes == (2, *positive.shape) and positive.numel() > 0
    windows, n, weight, factors, rows, *beside = x.values()
    fan_in = windows.shape[2 + n :].numel()
    right = (len(weight), weight.shape[1], fan_in) == weight.shape and windows.shape[1] == len(weight)
    counts_fit = all(counts.shape == windows.shape[:1] for counts in beside)
    return right and counts_fit and (factors.shape, rows.shape) == ((2, len(windows)), weight.shape[:2])


@pytest.mark.parametrize("entry", ["max_ratios", "mean_ratios"])
def test_a_view_beyond_its_memory_is_refused(entry: str) -> None:
    operands = ENTRIES[entry]()
    operands["windows"].untyped_storage().resize_(64)
    with pytest.raises(DataError, match="memory"):
        call(cpu, entry, operands)


def test_both_shapes_are_named() -> None:
    operands = ENTRIES["max_ratios"]() | {"weight_GRK": rand(2, 3, 5)}
    with pytest.raises(DataError, match=r"\(5, 2, 9, 2, 2\).*fan-in 5"):
        call(cpu, "max_ratios", operands)
    with pytest.raises(DataError, match=r"\(2, 4, 70\).*\(2, 5, 70\)"):
        cpu.quadrant_sums(rand(2, 3, 5), rand(2, 4, 70))
    with pytest.raises(DataError, match="complex64"):
        checks.check_lines("here", rand(2, 2).to(torch.complex64))


IN_A_PROCESS = """
import sipp, torch
torch.set_num_threads(2)
from torch.nn import *
from sipp.errors import DataError
for model, data in [
    (Sequential(Linear(8, 16), ReLU(), Linear(16, 4)), torch.rand(200, 9)),
    (Sequential(Linear(8, 16), ReLU(), Linear(16, 4)), torch.rand(200, 3, 7)),
]:
    try:
        sipp.prune(model, data, keep=0.5)
    except (DataError, sipp.errors.ModelError) as error:
        print("refused:", error)
"""


def test_wrong_operands_are_refused_without_a_crash() -> None:
    done = run_python(IN_A_PROCESS)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("refused:") == 2
