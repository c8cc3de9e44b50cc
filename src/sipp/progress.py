"""Progress of long work, for a person who waits: on stderr, where that is a terminal, or in a notebook.

The one rule of all functions with a `progress` option: True, the default, shows it to a person and nothing to a file, a
pipe or a log; False shows nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec

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
        yield nothing
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


def progress_line(text: str, *, shown: bool) -> None:
    """Says on a line of its own how far the work is, under the same rule."""
    console = console_of_person() if shown else None
    if console is not None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)


def nothing(n: int) -> None:
    """Stands for a bar that is not drawn."""
