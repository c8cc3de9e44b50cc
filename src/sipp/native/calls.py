"""Calls of one compiled function with several rows of numbers, on torch's threads.

Threads draw the rows in compiled code. With a function of Python's on each thread they would wait for its lock, and to
change hands it takes longer than a small layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from sipp.native.compiling import WHOLE, Native
from sipp.native.instructions import I64, at, call_at, load
from sipp.native.machine_code import Arguments, MachineCode, argument_list, generate, run
from sipp.native.threads import run_parallel, torch_openmp


class _Calls(NamedTuple):
    function: int  # address
    rows: int  # address of the numbers of the first call; those of the others follow


def call_each(function: Native, rows: Sequence[tuple[int, ...]]) -> None:
    """Calls function(*row) for all rows, a thread each; on plain threads without torch's OpenMP library.

    What the threads write is allocated before, by the caller: memory that a thread has had is slow to return.
    """
    if len(rows) == 1:
        function(*rows[0])
    elif torch_openmp() is None:
        run_parallel(lambda i: function(*rows[i]), len(rows))
    else:
        numbers = np.array(rows, np.int64)
        code = _caller(len(function.parameters))
        run(code, argument_list(code, _Calls(function.address, numbers.ctypes.data)), len(rows), len(rows))


def _caller(n_numbers: int) -> MachineCode:
    """Code that draws rows of so many numbers, and calls a function with each."""

    def emit(b: Any, arguments: Arguments) -> None:
        row = at(b, arguments.number("rows"), arguments.drawn, n_numbers * WHOLE)
        call_at(b, arguments.number("function"), [load(b, row, I64, i * WHOLE) for i in range(n_numbers)])

    return generate(("calls", n_numbers), _Calls, emit)
