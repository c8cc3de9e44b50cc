"""What Numba compiles: with and without a cache, and how it says that it takes long."""

from __future__ import annotations

import gc
from typing import Any

import numba
import numpy as np
import pytest
from numba.core import event

from sipp.native import compiling
from sipp.native.compiling import long_at, put_long


def test_a_cache_that_cannot_be_written_does_not_stop_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("numba.core.caching._Cache.save_overload", full, raising=False)
    monkeypatch.setattr("numba.core.caching.Cache.save_overload", full)
    monkeypatch.setattr(compiling, "_is_kept", True)

    def twice(x: int) -> int:
        return 2 * x

    assert compiling.compiled(twice)(21) == 42 and not compiling._is_kept


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
    monkeypatch.setattr(compiling, "_is_kept", True)
    monkeypatch.setattr(compiling, "_spent", 0.0)
    numbers = np.array([20, 2])
    compiling.CompiledLoop(double_first)(numbers.ctypes.data)
    assert numbers.tolist() == [42, 2]
    compiling._add_seconds(5.0)
    assert "in each process: set NUMBA_CACHE_DIR" in caplog.text and "the first time" not in caplog.text


def test_a_line_says_once_that_compiling_takes_long(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiling, "_spent", 0.0)
    monkeypatch.setattr(compiling, "_is_kept", True)
    for seconds in (0.4, 0.4):
        compiling._add_seconds(seconds)
    assert not caplog.records  # not worth a word
    for seconds in (0.4, 5.0):
        compiling._add_seconds(seconds)
    assert [record.getMessage() for record in caplog.records] == [
        "compiling for this processor: a few seconds, the first time this part is used"
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
