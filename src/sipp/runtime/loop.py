"""What all generated kernels share: a loop over the tasks of a thread that watches for values that are not finite."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sipp.native import machine_code, vector

Watch = Callable[[Any], None]  # takes note of a vector


@contextmanager
def tasks(b: Any, args: machine_code.Arguments, n: Any, lanes: int) -> Iterator[tuple[Any, Watch]]:
    """A loop over the thread's share of n tasks; yields the task and a function that watches vectors of values.

    The first watched value that is not finite makes a sum NaN, which raises the flag in the end: one multiply-add each.
    """
    zero = vector.constant(0.0, lanes)
    bad = vector.variables(b, [zero])[0]

    def watch(value: Any) -> None:
        b.store(vector.fused(b, value, zero, b.load(bad)), bad)

    with vector.each(b, *args.share(n)) as task:
        yield task, watch
    total = each_lane = b.load(bad)
    if lanes > 1:
        total = b.extract_element(each_lane, vector.I64(0))
        for lane in range(1, lanes):
            total = b.fadd(total, b.extract_element(each_lane, vector.I64(lane)))
    with b.if_then(b.fcmp_unordered("uno", total, total)):
        raise_flag(b, args)


def raise_flag(b: Any, args: machine_code.Arguments) -> None:
    """Makes torch run the network (`Flag`)."""
    vector.store(b, vector.constant(1.0, 1), args.number("flag"))
