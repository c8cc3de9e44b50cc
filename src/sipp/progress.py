"""Shows the progress of long work on stderr: a bar for a person, a few lines in a log.

With `progress=True`, the default everywhere, a terminal or a notebook shows a bar. Elsewhere, work that takes longer
than `QUIET_S` writes a line, and another each time the elapsed time has doubled. The time left is estimated once a
tenth is done. With `progress=False` nothing is shown.
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
    Task,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

Advance = Callable[[int], None]
QUIET_S = 10.0  # shorter work writes nothing to a log
KNOWN_SHARE = 0.1  # of the work that must be done before the time left is estimated
MINUTE = 60.0


def console_of_person() -> Console | None:
    """A console on stderr if it is a terminal, or a notebook with ipywidgets (without them rich draws badly)."""
    console = Console(stderr=True)
    if console.is_jupyter:
        return console if find_spec("ipywidgets") is not None else None
    is_terminal = sys.stderr is not None and sys.stderr.isatty()  # rich would say yes to a log if FORCE_COLOR is set
    return console if is_terminal and not console.is_dumb_terminal else None


class _LateEstimate(TimeRemainingColumn):
    """The estimated time left, once enough is done to estimate it."""

    def render(self, task: Task) -> Text:
        return super().render(task) if task.percentage >= 100 * KNOWN_SHARE else Text("")


@contextmanager
def progress_bar(title: str, total: int | None, *, shown: bool, in_percent: bool = False) -> Iterator[Advance]:
    """Gives a function that advances the bar by a number of units; without a bar it does nothing.

    With `in_percent`, the bar shows a percentage instead of the number of units.
    """
    console = console_of_person() if shown else None
    if console is None:
        yield _lines(title, total, in_percent) if shown and total else nothing
        return
    columns: tuple[ProgressColumn, ...] = (TextColumn("{task.description}"), BarColumn())
    if total is not None:
        columns = (*columns, TaskProgressColumn() if in_percent else MofNCompleteColumn(), _LateEstimate())
    bar = Progress(*columns, TimeElapsedColumn(), console=console, transient=True)
    try:
        bar.start()
    except LiveError:  # the caller has a live display, and rich allows only one: work without a bar
        yield nothing
        return
    try:
        task = bar.add_task(title, total=total)
        yield lambda n: bar.advance(task, n)
    finally:
        bar.stop()


def _lines(title: str, total: int, in_percent: bool) -> Advance:
    """Gives a function that counts units, and now and then writes how much is done and how long the rest may take.

    The rate is measured from the first unit on, without any preparation before it.
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
    """A rough time in words: '40 s', '3 min'."""
    return f"{seconds:.0f} s" if seconds < 2 * MINUTE else f"{seconds / MINUTE:.0f} min"


def write_line(text: str) -> None:
    """Writes a line to stderr, if it is open."""
    with suppress(OSError, ValueError):
        if sys.stderr is not None:
            print(f"sipp: {text}", file=sys.stderr, flush=True)


def progress_line(text: str, *, shown: bool, seconds: float = 0.0) -> None:
    """Prints a line about the progress; in a log only if the work has already taken `seconds` >= `QUIET_S`."""
    console = console_of_person() if shown else None
    if console is not None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    elif shown and seconds >= QUIET_S:
        write_line(text)


def nothing(n: int) -> None:
    """Takes the place of a progress bar where none is shown."""
