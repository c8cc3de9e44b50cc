"""What `writing.py` compiles means what it means in Python; what it does not know it refuses."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np
import pytest

from sipp.scoring.kernels.cpu import host
from sipp.scoring.kernels.cpu.llvm import double_at, float_at, long_at, put_double, put_float, put_long, reading

if not host.HAS_VECTOR_CODE:
    pytest.skip("compiled for x86 only", allow_module_level=True)

STEP, HALF = 3, 0.5
WHOLE = [-(2**40), -7, -1, 0, 1, 2, 5, 64, 2**33 + 1]
REALS = [-math.inf, -2.5, -0.0, 0.0, 1e-30, 0.1, 1.0, 3.0, math.inf, math.nan]


def in_python(function: Callable[..., None], arrays: dict[int, Any]) -> Callable[..., None]:
    """The function as Python runs it, on arrays in place of addresses."""

    def get(at: int, i: int) -> Any:
        return arrays[at][i]

    def put(at: int, i: int, value: Any) -> None:
        arrays[at][i] = value

    scope = dict(function.__globals__)  # type: ignore[attr-defined]
    scope |= dict.fromkeys(("long_at", "float_at", "double_at"), get)
    scope |= dict.fromkeys(("put_long", "put_float", "put_double"), put)
    for name, found in list(scope.items()):
        if isinstance(found, FunctionType) and found.__module__ == __name__ and not found.__closure__:
            scope[name] = FunctionType(found.__code__, scope)
    return FunctionType(function.__code__, scope)  # type: ignore[attr-defined]


native = functools.cache(host.Native)  # compiled once


def compare_with_python(function: Callable[..., None], given: np.ndarray, out: np.ndarray) -> None:
    expected = out.copy()
    with np.errstate(all="ignore"):
        in_python(function, {0: given, 1: expected})(0, 1)
    native(function)(given.ctypes.data, out.ctypes.data)
    assert out.tobytes() == expected.tobytes(), (given.tolist(), expected.tolist(), out.tolist())


def whole_numbers(at: int, out: int) -> None:
    x, y, z = long_at(at, 0), long_at(at, 1), long_at(at, 2)
    put_long(out, 0, x + y * z - STEP)
    put_long(out, 1, x // y if y != 0 else 0)
    put_long(out, 2, x % y if y != 0 else 0)
    put_long(out, 3, -(-x // 16))
    put_long(out, 4, (x & y) | (z << 2))
    put_long(out, 5, x >> 3)
    put_long(out, 6, min(x, y) - max(y, z))
    a, b = (x, y) if x < y else (y, x)
    put_long(out, 7, a - 2 * b)
    put_long(out, 8, 1 if not x else 2)
    put_long(out, 9, (1 if x <= y else 0) + (2 if x >= z else 0) + (4 if x == y else 0) + (8 if y != z else 0))
    put_long(out, 10, 2**5 + STEP // 2)
    is_odd = x % 2 == 1
    is_odd &= y > 0
    put_long(out, 11, 1 if is_odd else 0)


@pytest.mark.parametrize("x", WHOLE)
def test_whole_numbers(x: int) -> None:
    for y in WHOLE:
        for z in (-3, 0, 17):
            given, found, expected = np.array([x, y, z]), np.zeros(12, np.int64), np.zeros(12, np.int64)
            with np.errstate(over="ignore"):
                in_python(whole_numbers, {0: given, 1: expected})(0, 1)
            native(whole_numbers)(given.ctypes.data, found.ctypes.data)
            assert found.tolist() == expected.tolist(), (x, y, z)


def real_numbers(at: int, out: int) -> None:
    for i in range(10):
        x = double_at(at, i)
        for j in range(10):
            y, to = double_at(at, j), (10 * i + j) * 8
            put_double(out, to, x * y + HALF)
            put_double(out, to + 1, x / y)
            put_double(out, to + 2, min(x, y))
            put_double(out, to + 3, max(x, y))
            put_double(out, to + 4, abs(x) - y)
            put_double(out, to + 5, (1 if x < y else 0) + (2 if x != y else 0) + (4 if not x > y else 0))
            put_double(out, to + 6, 1.5 if x == y or (x > 0.0 and y > 0.0) else x)
            put_double(out, to + 7, i * HALF)


def test_real_numbers() -> None:
    compare_with_python(real_numbers, np.array(REALS), np.zeros(800))


def single_numbers(at: int, out: int) -> None:
    for i in range(10):
        x, y = float_at(at, i), float_at(at, 9 - i)
        put_float(out, 4 * i, x * y + np.float32(0.1))
        put_float(out, 4 * i + 1, np.float32(1.0) / x)
        put_float(out, 4 * i + 2, np.float32(np.float64(x) * 0.1))  # in float64, rounded once more
        put_float(out, 4 * i + 3, abs(y))


def test_float32_is_rounded_after_each_operation() -> None:
    compare_with_python(single_numbers, np.array(REALS, np.float32), np.zeros(40, np.float32))


def bit_patterns(at: int, out: int) -> None:
    for i in range(4):
        wide = np.uint32(long_at(at, i))
        below = np.uint32(wide - np.uint32(1))  # wraps around
        put_long(out, 2 * i, below)
        put_long(out, 2 * i + 1, np.int32(long_at(at, i)))


def test_narrow_numbers_wrap_around_and_keep_their_sign() -> None:
    given, out = np.array([0, 1, 2**31 + 5, -1]), np.zeros(8, np.int64)
    host.Native(bit_patterns)(given.ctypes.data, out.ctypes.data)
    assert out.tolist() == [2**32 - 1, 0, 0, 1, 2**31 + 4, 5 - 2**31, 2**32 - 2, -1]


def _first_above(at: int, n: int, bar: int) -> int:
    for i in range(n):
        if long_at(at, i) > bar:
            return i
    return n


def _count_up(at: int) -> int:
    put_long(at, 0, long_at(at, 0) + 1)
    return 1


def ways_through(at: int, out: int) -> None:
    i = total = 0
    while i < 6 and long_at(at, i) < 100:
        i += 1
        if i % 2 == 0:
            continue
        total += long_at(at, i - 1)
    put_long(out, 1, total)
    put_long(out, 2, i)
    found = 0
    for k in range(20, 0, 5):
        found += k
    for k in range(2, 11, STEP):
        if k == 5:
            continue
        if k == 8:
            found += 100
        else:
            found += k
        k += 50  # the next round is not changed by it
    put_long(out, 3, found)
    put_long(out, 4, _first_above(at, 6, 3))
    put_long(out, 5, _first_above(at, 6, 1000))
    if i > 100 and _count_up(out) > 0:  # the second is not asked
        put_long(out, 6, 7)
    if i < 100 or _count_up(out) > 0:
        put_long(out, 7, 8)
    pair = i, total
    put_long(out, *pair)


@pytest.mark.parametrize("given", [[1, 2, 3, 4, 5, 6], [9, 200, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0]])
def test_loops_conditions_and_calls(given: list[int]) -> None:
    compare_with_python(ways_through, np.array(given), np.zeros(10, np.int64))


class Pair(NamedTuple):
    first: int
    second: int


read_pair = reading(Pair)


def _second(pair: Pair) -> int:
    return pair.second


def of_a_record(at: int, out: int) -> None:
    pair = read_pair(at)
    put_long(out, 0, pair.first - _second(pair))


def test_records_are_read() -> None:
    given, out = np.array([50, 8]), np.zeros(1, np.int64)
    host.Native(of_a_record)(given.ctypes.data, out.ctypes.data)
    assert out.tolist() == [42]


def divided_by_zero(at: int, out: int) -> None:
    put_long(out, 0, long_at(at, 0) // long_at(at, 1))
    put_long(out, 1, long_at(at, 0) % long_at(at, 1))


def test_a_division_by_zero_gives_zero() -> None:
    given, out = np.array([7, 0]), np.ones(2, np.int64)
    host.Native(divided_by_zero)(given.ctypes.data, out.ctypes.data)
    assert out.tolist() == [0, 0]


def _leaves_early(at: int) -> None:
    while True:
        break


def _changes_kind(at: int) -> None:
    x = 1
    x = 0.5  # noqa: F841


def _loses_digits(at: int) -> None:
    x = float_at(at, 0)
    x = double_at(at, 0)  # noqa: F841


def _sets_a_record_twice(at: int) -> None:
    pair = read_pair(at)
    pair = read_pair(at)  # noqa: F841


def _makes_a_list(at: int) -> None:
    put_long(at, 0, [1, 2][0])


def _asks_twice(at: int) -> None:
    put_long(at, 0, 1 if 0 < at < 5 else 0)


def _calls_what_is_not_known(at: int) -> None:
    put_long(at, 0, round(double_at(at, 0)))


def _names_an_argument(at: int) -> None:
    put_long(at, 0, value=1)


def _shifts_reals(at: int) -> None:
    put_double(at, 0, double_at(at, 0) << 1)


def _divides_whole_numbers(at: int) -> None:
    put_double(at, 0, at / 3)


def _makes_a_real_whole(at: int) -> None:
    put_long(at, 0, double_at(at, 0))


def _has_no_value(at: int) -> None:
    put_long(at, 0, unknown)  # type: ignore[name-defined]  # noqa: F821


def _counts_down(at: int) -> None:
    for i in range(4, 0, -1):
        put_long(at, i, i)


@pytest.mark.parametrize(
    "function",
    [
        _counts_down,
        _leaves_early,
        _changes_kind,
        _loses_digits,
        _sets_a_record_twice,
        _makes_a_list,
        _asks_twice,
        _calls_what_is_not_known,
        _names_an_argument,
        _shifts_reals,
        _divides_whole_numbers,
        _makes_a_real_whole,
        _has_no_value,
    ],
)
def test_what_is_not_known_is_refused(function: Callable[..., None]) -> None:
    with pytest.raises(Exception, match="cannot be"):
        host.Native(function)(0)
