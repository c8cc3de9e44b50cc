"""Work on torch's own threads: every part done once, exceptions brought back, the same without torch's OpenMP."""

from __future__ import annotations

import gc
import threading
from typing import Any

import numba
import numpy as np
import pytest
import torch
from numba.core import event

from sipp.scoring.kernels.cpu import host
from sipp.scoring.kernels.cpu import kernel as cpu
from sipp.scoring.kernels.cpu.llvm import long_at, put_long


@pytest.fixture(params=["torch's threads", "plain threads"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "plain threads":
        monkeypatch.setattr(host, "torch_openmp", lambda: None)
    elif host.torch_openmp() is None:
        pytest.skip("no OpenMP library of torch takes our work here")
    return str(request.param)


@pytest.mark.parametrize("n", [1, 2, 3, 7])
def test_every_part_is_done_once(way: str, n: int) -> None:
    lock, seen = threading.Lock(), []

    def work(i: int) -> None:
        with lock:
            seen.append(i)

    host.run_parallel(work, n)
    assert sorted(seen) == list(range(n))


@pytest.mark.parametrize("at", [0, 1])
def test_what_a_thread_raises_reaches_the_caller(way: str, at: int) -> None:
    def work(i: int) -> None:
        if i == at:
            raise MemoryError(f"part {i}")

    with pytest.raises(MemoryError, match=f"part {at}"):
        host.run_parallel(work, 2)


def test_parts_are_done_when_fewer_threads_come(monkeypatch: pytest.MonkeyPatch) -> None:
    class Alone:
        """An OpenMP that gives one thread, whatever was asked for."""

        def omp_get_thread_num(self) -> int:
            return 0

        def omp_get_num_threads(self) -> int:
            return 1

        def GOMP_parallel(self, body: Any, data: None, n: int, flags: int) -> None:
            body(None)

    monkeypatch.setattr(host, "torch_openmp", Alone)
    seen: list[int] = []
    host.run_parallel(seen.append, 3)
    assert seen == [0, 1, 2]


class OneThread:
    """An OpenMP that gives one thread for a job, whatever was asked for."""

    def GOMP_parallel(self, function: Any, job: Any, n: int, flags: int) -> None:
        function(job)


@pytest.mark.parametrize(("rows", "openmp"), [(9, None), (9, OneThread()), (60, None)])  # few weights, or many
def test_results_are_the_same_bits_on_any_threads(
    rows: int, openmp: OneThread | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    patches, inverse = torch.rand(1, 20, 300, generator=generator), torch.rand(2, 1, rows, 300, generator=generator)
    positive = torch.rand(1, rows, 20, generator=generator) > 0.5
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        ours = cpu.max_times(patches, inverse, positive)
        monkeypatch.setattr(host, "torch_openmp", lambda: openmp)
        assert torch.equal(cpu.max_times(patches, inverse, positive), ours)
    finally:
        torch.set_num_threads(before)


def test_a_cache_that_cannot_be_written_does_not_stop_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("numba.core.caching._Cache.save_overload", full, raising=False)
    monkeypatch.setattr("numba.core.caching.Cache.save_overload", full)
    monkeypatch.setattr(host, "_is_kept", True)

    def twice(x: int) -> int:
        return 2 * x

    assert host.compiled(twice)(21) == 42 and not host._is_kept


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("no locator available")])
def test_a_job_is_compiled_without_a_cache(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = numba.cfunc

    def no_cache(*given: Any, cache: bool = False, **options: Any) -> Any:
        if cache:
            raise error
        return real(*given, **options)

    def double_first(at: int) -> None:
        put_long(at, 0, 2 * long_at(at, 0) + long_at(at, 1))

    monkeypatch.setattr(numba, "cfunc", no_cache)
    monkeypatch.setattr(host, "_is_kept", True)
    monkeypatch.setattr(host, "_spent", 0.0)
    numbers = np.array([20, 2])
    host.Native(double_first)(numbers.ctypes.data)
    assert numbers.tolist() == [42, 2]
    host._tell(5.0)
    assert "in each process: set NUMBA_CACHE_DIR" in caplog.text and "once after an install" not in caplog.text


def test_a_line_says_once_that_compiling_takes_long(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(host, "_spent", 0.0)
    monkeypatch.setattr(host, "_is_kept", True)
    for seconds in (0.4, 0.4):
        host._tell(seconds)
    assert not caplog.records  # not worth a word
    for seconds in (0.4, 5.0):
        host._tell(seconds)
    assert [record.getMessage() for record in caplog.records] == [
        "compiling for this processor: a few seconds, once after an install"
    ]


@pytest.mark.parametrize("collects", [True, False])
def test_the_collector_rests_only_while_something_is_compiled(collects: bool) -> None:
    seen = []

    class Look(event.Listener):
        def on_start(self, event: object) -> None:
            seen.append(gc.isenabled())

        def on_end(self, event: object) -> None:
            pass

    @numba.njit
    def more(x: int) -> int:
        return x + 1

    before = gc.isenabled()
    try:
        (gc.enable if collects else gc.disable)()
        with event.install_listener("numba:compile", Look()):
            assert more(1) == 2
        assert seen == [False] and gc.isenabled() is collects
    finally:
        (gc.enable if before else gc.disable)()
