"""Work on torch's own threads: every part done once, exceptions brought back, the same without torch's OpenMP."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sipp
from sipp.inputs.patches import WeightUse
from sipp.native import compiling, memory, threads
from sipp.native.compiling import CompiledLoop, call_each, long_at, put_long
from sipp.results.options import Reduce
from sipp.scoring.kernels.cpu import Ratios


@pytest.fixture(params=["torch's threads", "plain threads"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "plain threads":
        monkeypatch.setattr(threads, "torch_openmp", lambda: None)
    elif threads.torch_openmp() is None:
        pytest.skip("no OpenMP library of torch takes our work here")
    return str(request.param)


@pytest.mark.parametrize("n", [1, 2, 3, 7])
def test_every_part_is_done_once(n: int) -> None:
    lock, seen = threading.Lock(), []

    def work(i: int) -> None:
        with lock:
            seen.append(i)

    threads.run_parallel(work, n)
    assert sorted(seen) == list(range(n))


@CompiledLoop
def _mark(out: int, i: int, value: int) -> None:
    put_long(out, i, long_at(out, i) + value)


@pytest.mark.parametrize("n", [1, 2, 3, 7])
def test_every_call_is_made_once(way: str, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "torch_openmp", threads.torch_openmp)
    found = torch.zeros(n, dtype=torch.int64)
    call_each(_mark, [(memory.address(found, torch.int64), i, i + 10) for i in range(n)])
    assert found.tolist() == [i + 10 for i in range(n)]


@pytest.mark.parametrize("reduce", ["max", "mean"])
def test_the_kernels_enter_no_python_on_torchs_threads(reduce: Reduce, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each thread would wait for Python's lock: up to 20 ms a layer on a busy machine, where the layer takes 0.2 ms."""
    if threads.torch_openmp() is None:
        pytest.skip("no OpenMP library of torch takes our work here")
    entered: list[int] = []
    real = threads.run_parallel
    monkeypatch.setattr(compiling, "run_parallel", lambda work, n: entered.append(n) or real(work, n))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 40, 3), nn.ReLU(), nn.Conv2d(40, 400, 3), nn.ReLU(), nn.Conv2d(400, 4, 3))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        sipp.sensitivity(model, torch.randn(2, 3, 20, 20), reduce=reduce)
    finally:
        torch.set_num_threads(before)
    assert not entered


@pytest.mark.parametrize("at", [0, 1])
def test_what_a_thread_raises_reaches_the_caller(at: int) -> None:
    def work(i: int) -> None:
        if i == at:
            raise MemoryError(f"part {i}")

    with pytest.raises(MemoryError, match=f"part {at}"):
        threads.run_parallel(work, 2)


class Alone:
    """An OpenMP that gives one thread, whatever was asked for."""

    def GOMP_parallel(self, body: Any, data: Any, n: int, flags: int) -> None:
        body(data)


@pytest.mark.parametrize(("rows", "openmp"), [(9, None), (9, Alone()), (60, None)])  # few weights, or many
def test_results_are_the_same_bits_on_any_threads(
    rows: int, openmp: Alone | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    windows, weight = torch.rand(1, 1, 300, 20, generator=generator), torch.rand(1, rows, 20, generator=generator) - 0.5

    def ratios() -> torch.Tensor:
        found = Ratios(weight, torch.ones(1, rows).double())
        found.take_in(WeightUse("", windows), torch.tensor([[1.0], [0.0]]))
        return found.largest()

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        ours = ratios()
        monkeypatch.setattr(threads, "torch_openmp", lambda: openmp)
        monkeypatch.setattr(compiling, "torch_openmp", lambda: openmp)
        assert torch.equal(ratios(), ours)
    finally:
        torch.set_num_threads(before)


def test_the_openmp_library_is_looked_for_where_wheels_have_it(tmp_path: Path) -> None:
    """Linux on x86 and ARM, macOS; a library that this process has not loaded is left alone."""
    torch_folder = tmp_path / "torch"
    for path in ("torch/lib/libomp.dylib", "torch/lib/libtorch.so", "torch.libs/libgomp-98b21ff3.so.1.0.0"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(b"")
    names = [path.name for path in threads._openmp_files(torch_folder)]
    assert names == ["libomp.dylib", "libgomp-98b21ff3.so.1.0.0"]
    assert threads._already_loaded(torch_folder / "lib" / "libomp.dylib") is None
