"""Progress of long work, on stderr: a bar for a person who waits, a few lines for a log.

The one rule of all functions with a `progress` option: True, the default, draws a bar at a terminal, or in a notebook.
Elsewhere work that takes longer than `QUIET_S` writes a line with an estimate, then one each time the time has doubled.
False shows nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from time import monotonic

from rich.console import Console
from rich.errors import LiveError
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

Advance = Callable[[int], None]
QUIET_S = 10.0  # work that is done sooner writes no line into a log
MINUTE = 60.0


def console_of_person() -> Console | None:
    """A console on stderr, if a person looks at it; in a notebook rich draws with ipywidgets, and badly without."""
    console = Console(stderr=True)
    if console.is_jupyter:
        return console if find_spec("ipywidgets") is not None else None
    is_terminal = sys.stderr is not None and sys.stderr.isatty()  # not rich's own test: FORCE_COLOR says yes to a log
    return console if is_terminal and not console.is_dumb_terminal else None


@contextmanager
def progress_bar(title: str, total: int | None, *, shown: bool) -> Iterator[Advance]:
    """A function that advances the bar by a number of units; it does nothing where there is no bar."""
    console = console_of_person() if shown else None
    if console is None:
        yield _lines(title, total) if shown and total else nothing
        return
    columns: tuple[ProgressColumn, ...] = (TextColumn("{task.description}"), BarColumn())
    if total is not None:  # of work without a known end there is nothing to count
        columns = (*columns, MofNCompleteColumn(), TimeRemainingColumn())
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


def _lines(title: str, total: int) -> Advance:
    """A function that counts, and from time to time writes how far the work is and how long the rest may take."""
    began, n_done, next_at = monotonic(), 0, QUIET_S

    def advance(n: int) -> None:
        nonlocal n_done, next_at
        n_done += n
        passed = monotonic() - began
        if passed >= next_at and 0 < n_done < total:
            next_at = 2 * passed
            write_line(f"{title}: {n_done:,} of {total:,}, about {in_words(passed * (total - n_done) / n_done)} left")

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
