"""Progress bars for long work, drawn only when asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

Advance = Callable[[int], None]


@contextmanager
def progress_bar(title: str, total: int | None, *, shown: bool) -> Iterator[Advance]:
    """A function that advances the bar by a number of units; it does nothing when the bar is not shown."""
    if not shown:
        yield lambda n: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), transient=True) as progress:
        task = progress.add_task(title, total=total)
        yield lambda n: progress.advance(task, n)
