"""Progress of long work, on stderr: a bar for a person who waits, a few lines for a log.

The one rule of all functions with a `progress` option: True, the default, draws a bar at a terminal, or in a notebook.
Elsewhere work that takes longer than `QUIET_S` writes a line, then one each time the time has doubled. How long the
rest may take is said once a tenth is done. False shows nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from math import prod
from time import monotonic

from rich.console import Console
from rich.errors import LiveError
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

Advance = Callable[[int], None]
QUIET_S = 10.0  # work that is done sooner writes no line into a log
KNOWN_SHARE = 0.1  # of the work: before so much is done, how long the rest takes is a guess
MINUTE = 60.0


def console_of_person() -> Console | None:
    """A console on stderr, if a person looks at it; in a notebook rich draws with ipywidgets, and badly without."""
    console = Console(stderr=True)
    if console.is_jupyter:
        return console if find_spec("ipywidgets") is not None else None
    is_terminal = sys.stderr is not None and sys.stderr.isatty()  # not rich's own test: FORCE_COLOR says yes to a log
    return console if is_terminal and not console.is_dumb_terminal else None


class _LateEstimate(TimeRemainingColumn):
    """The time that is left, once enough is done to know."""

    def render(self, task: Task) -> Text:
        return super().render(task) if task.percentage >= 100 * KNOWN_SHARE else Text("")


def fit_cost(shape: Sequence[int]) -> int:
    """The cost of fitting a weight of this shape, in units of a bar: what is solved of its fan-in, and of each row."""
    n_rows, fan_in = shape[0], prod(shape[1:])
    return n_rows * fan_in**2 + fan_in**3


@contextmanager
def progress_bar(title: str, total: int | None, *, shown: bool, in_percent: bool = False) -> Iterator[Advance]:
    """A function that advances the bar by a number of units; it does nothing where there is no bar.

    `in_percent`: the units are costs, which nobody wants to count.
    """
    console = console_of_person() if shown else None
    if console is None:
        yield _lines(title, total, in_percent) if shown and total else nothing
        return
    columns: tuple[ProgressColumn, ...] = (TextColumn("{task.description}"), BarColumn())
    if total is not None:  # of work without a known end there is nothing to count
        columns = (*columns, TaskProgressColumn() if in_percent else MofNCompleteColumn(), _LateEstimate())
    bar = Progress(*columns, TimeElapsedColumn(), console=console, transient=True)
    try:
        bar.start()
    except LiveError:  # a display of the caller's own is on, and may be the only one: the work goes on without
        yield nothing
        return
    try:
        task = bar.add_task(title, total=total)
        yield lambda n: bar.advance(task, n)
    finally:
        bar.stop()


def _lines(title: str, total: int, in_percent: bool) -> Advance:
    """A function that counts, and from time to time writes how far the work is and how long the rest may take.

    What came before the first unit was done, such as choosing how, is not counted as a part of the rate.
    """
    began, next_at = monotonic(), QUIET_S
    n_done, first_done, first_at = 0, 0, 0.0

    def advance(n: int) -> None:
        nonlocal n_done, next_at, first_done, first_at
        n_done += n
        passed = monotonic() - began
        if not first_done:
            first_done, first_at = n_done, passed
        if passed >= next_at and 0 < n_done < total:
            next_at = 2 * passed
            so_far = f"{n_done / total:.0%}" if in_percent else f"{n_done:,} of {total:,}"
            is_known = n_done >= KNOWN_SHARE * total and n_done > first_done
            left = (passed - first_at) * (total - n_done) / (n_done - first_done) if is_known else 0.0
            write_line(f"{title}: {so_far}" + (f", about {in_words(left)} left" if is_known else ""))

    return advance


def in_words(seconds: float) -> str:
    """A time that is only estimated: '40 s', '3 min'."""
    return f"{seconds:.0f} s" if seconds < 2 * MINUTE else f"{seconds / MINUTE:.0f} min"


def write_line(text: str) -> None:
    """Writes a line to stderr, if there is one."""
    with suppress(OSError, ValueError):  # closed
        if sys.stderr is not None:
            print(f"sipp: {text}", file=sys.stderr, flush=True)


def estimate_line(text: str, seconds: float, *, shown: bool) -> None:
    """Says before long work what it is and how long it may take, to a person and in a log; of short work nothing."""
    if shown and seconds >= QUIET_S:
        write_line(f"{text}: about {in_words(seconds)}")


def progress_line(text: str, *, shown: bool, seconds: float = 0.0) -> None:
    """Says on a line of its own how far the work is; in a log only of work that has taken `seconds` long, not few."""
    console = console_of_person() if shown else None
    if console is not None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    elif shown and seconds >= QUIET_S:
        write_line(text)


def nothing(n: int) -> None:
    """Stands for a bar that is not drawn."""
