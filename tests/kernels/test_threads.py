"""Work on torch's own threads: every part done once, exceptions brought back, the same without torch's OpenMP."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from sipp.kernels import compiling, cpu, threads


@pytest.fixture(params=["torch's threads", "plain threads"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "plain threads":
        monkeypatch.setattr(threads, "_torch_openmp", lambda: None)
    elif threads._torch_openmp() is None:
        pytest.skip("torch is not built on libgomp here")
    return str(request.param)


@pytest.mark.parametrize("n", [1, 2, 3, 7])
def test_every_part_is_done_once(way: str, n: int) -> None:
    lock, seen = threading.Lock(), []

    def work(i: int) -> None:
        with lock:
            seen.append(i)

    threads.run_parallel(work, n)
    assert sorted(seen) == list(range(n))


@pytest.mark.parametrize("at", [0, 1])
def test_what_a_thread_raises_reaches_the_caller(way: str, at: int) -> None:
    def work(i: int) -> None:
        if i == at:
            raise MemoryError(f"part {i}")

    with pytest.raises(MemoryError, match=f"part {at}"):
        threads.run_parallel(work, 2)


def test_parts_are_done_when_fewer_threads_come(monkeypatch: pytest.MonkeyPatch) -> None:
    class Alone:
        """An OpenMP that gives one thread, whatever was asked for."""

        def omp_get_thread_num(self) -> int:
            return 0

        def omp_get_num_threads(self) -> int:
            return 1

        def GOMP_parallel(self, body: Any, data: None, n: int, flags: int) -> None:
            body(None)

    monkeypatch.setattr(threads, "_torch_openmp", Alone)
    seen: list[int] = []
    threads.run_parallel(seen.append, 3)
    assert seen == [0, 1, 2]


def test_scores_are_the_same_bits_on_both_kinds_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    patches, inverse = torch.rand(1, 20, 300, generator=generator), torch.rand(2, 1, 9, 300, generator=generator)
    positive = torch.rand(1, 9, 20, generator=generator) > 0.5
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        ours = cpu.max_times(patches, inverse, positive)
        monkeypatch.setattr(threads, "_torch_openmp", lambda: None)
        assert torch.equal(cpu.max_times(patches, inverse, positive), ours)
    finally:
        torch.set_num_threads(before)


def test_a_cache_that_cannot_be_written_does_not_stop_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("numba.core.caching._Cache.save_overload", full, raising=False)
    monkeypatch.setattr("numba.core.caching.Cache.save_overload", full)

    def twice(x: int) -> int:
        return 2 * x

    assert compiling.compiled(twice)(21) == 42
