"""What Numba compiles: with and without a cache, and how it says that it takes long."""

from __future__ import annotations

import gc
from typing import Any

import numba
import numpy as np
import pytest

from sipp.native import compiling


def double_first(at: int) -> None:
    compiling.put_long(at, 0, 2 * compiling.long_at(at, 0) + compiling.long_at(at, 1))


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("no locator available"), None])
def test_a_loop_is_compiled_without_a_cache(
    error: Exception | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real, collects = numba.cfunc, list[bool]()

    def cfunc(*given: Any, cache: bool = False, **options: Any) -> Any:
        collects.append(gc.isenabled())
        if cache and error is not None:
            raise error
        return real(*given, **options)

    monkeypatch.setattr(numba, "cfunc", cfunc)
    monkeypatch.setattr(compiling, "_spent", 0.0)
    monkeypatch.setattr(compiling, "_REPORTED_AFTER", 1e-9)
    numbers, before = np.array([20, 2]), gc.isenabled()
    compiling.CompiledLoop(double_first)(numbers.ctypes.data)
    assert numbers.tolist() == [42, 2]
    assert not any(collects) and gc.isenabled() is before
    said = "the first time" if error is None else "in each process: set NUMBA_CACHE_DIR"
    assert said in caplog.text


def test_a_line_says_once_that_compiling_takes_long(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiling, "_spent", 0.0)
    for seconds in (0.4, 0.4):
        compiling._add_seconds(seconds, is_kept=True)
    assert not caplog.records  # not worth a word
    for seconds in (0.4, 5.0):
        compiling._add_seconds(seconds, is_kept=True)
    assert [record.getMessage() for record in caplog.records] == [
        "compiling for this processor: a few seconds, the first time this part is used"
    ]
